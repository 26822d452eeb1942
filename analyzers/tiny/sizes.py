"""The sizes of tiny configs."""

HIDDEN = 128
HEADS = 4
HEAD_DIM = 32
ROPE_DIM = 16  # of the rotary part of latent attention
EXPERTS = 8
GROUPED_EXPERTS = 16  # so that two groups of eight can each give top k
TOP_K = 2
VOCABULARY = 256
WINDOW = 32
LAYERS = 2  # of a stack whose layers are alike
