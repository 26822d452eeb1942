"""Structure without a class: against the models that classes build from the same tensors."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analyzers import analyze, costs, models
from analyzers.checkpoint import TensorInfo, open_checkpoint
from analyzers.errors import InputError
from analyzers.headers import GenericConfig, infer_model
from analyzers.structure import kinds
from analyzers.tiny import tiny_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "models"
CONFIGS = ROOT / "tests" / "data" / "configs"

# Of every family that is here; deepseek-v4 has attention that no other model has.
STORED = [
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-4.5-air",
    "glm-5.3",
    "gpt-oss-20b",
    "kimi-k3",
    "kimi-linear-48b-a3b",
    "llama-4-scout",
    "longcat-flash",
    "minimax-m2.5",
    "mixtral-8x7b",
    "nemotron-3-super-120b-a12b-fp8",
    "qwen3-30b-a3b",
    "qwen3-next-80b-a3b",
]
# Not here: what llama-4 and longcat-flash have in every layer, a shared expert and a second
# attention and feed-forward, is named by no key of their configs.
CONFIGURED = [name for name in STORED if name not in ("llama-4-scout", "longcat-flash")]
EXPERTS = (
    "count",
    "top_k",
    "shared",
    "hidden_size",
    "intermediate_size",
    "router_input_size",
    "gated",
    "zero_experts",
    "shared_intermediate_size",
    "activation",
)


def folder_of(name: str, tmp_path: Path) -> Path:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    return tmp_path


def generic(folder: Path) -> GenericConfig:
    return GenericConfig(json.loads((folder / "config.json").read_text()), str(folder), "no class")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The model of a released config, made once."""
    made = {}

    def of(name: str):
        if name not in made:
            folder = folder_of(name, tmp_path_factory.mktemp(name))
            made[name] = models.build_on_meta(models.load_config(folder))
        return made[name]

    return of


def headers(shapes: dict[str, tuple[int, ...]]):
    """A checkpoint of bfloat16 tensors of these shapes."""
    shard = Path("model.safetensors")
    return SimpleNamespace(
        tensors={n: TensorInfo(n, "BF16", tuple(s), shard, 0, 0) for n, s in shapes.items()}
    )


def layers(found) -> dict[int, tuple[str, str]]:
    return {i: (kind.mixer, kind.feed_forward) for kind in found for i in kind.layers}


def parameters(model) -> int:
    return sum(p.numel() for p in model.parameters())


def work(model) -> dict[str, float]:
    """FLOPs, bytes and saved bytes of all layers at 4096 tokens, by operator."""
    found = Counter()
    for kind in kinds(model):
        for call in costs.block_calls(kind, model.config.get_text_config()):
            quantities = (call.forward.flops, call.forward.bytes, call.saved)
            found[call.operator] += len(kind.layers) * sum(q.at(4096) for q in quantities)
    return found


def assert_same_experts(found, expected):
    ours, theirs = (next((k.moe for k in ks if k.moe), None) for ks in (found, expected))
    assert ours is not None
    assert theirs is not None
    for field in EXPERTS:
        assert getattr(ours, field) == getattr(theirs, field), field
    for field in ("groups", "top_k_groups", "scaling", "input_size"):
        assert getattr(ours.routing, field) == getattr(theirs.routing, field), field


def assert_same_mixers(found, expected):
    """Every attribute that both name; positions of a rotation are in no tensor."""
    theirs = {kind.layers[0]: kind.mixers for kind in expected}
    for kind in found:
        first = theirs.get(kind.layers[0])
        for ours, other in zip(kind.mixers, first or kind.mixers, strict=True):
            assert ours.operator == other.operator
            common = ours.attributes.keys() & other.attributes.keys()
            assert {k: ours.attributes[k] for k in common} == {
                k: other.attributes[k] for k in common
            }
            assert other.attributes.keys() - common <= {"rope", "rope_dim"}


# ------------------------------------------------------------------------------- from tensor names


@pytest.mark.parametrize("name", STORED)
def test_tensor_names_give_what_the_class_builds(name, built, tmp_path):
    model = built(name)
    stored = headers({n: tuple(t.shape) for n, t in model.state_dict().items()})
    skeleton = infer_model(generic(folder_of(name, tmp_path)), stored)
    assert parameters(skeleton) == parameters(model)
    found, expected = kinds(skeleton), kinds(model)
    assert_same_experts(found, expected)
    if name == "llama-4-scout":  # which layers see all tokens is known to its class alone
        assert len(layers(found)) == len(layers(expected))
        return
    assert layers(found) == layers(expected)
    assert_same_mixers(found, expected)
    assert work(skeleton) == {n: w for n, w in work(model).items() if n != "attention_residual"}


@pytest.mark.parametrize(
    "name", ["tiny-kimi-k3", "tiny-kimi-linear", "tiny-qwen3-next", "tiny-unseen-moe"]
)
def test_released_names_give_what_the_class_builds(name):
    """Experts one by one, convolutions apart, packed: as checkpoints have it and no class does."""
    folder = EXAMPLES / name
    model = models.build_on_meta(models.load_config(folder, trust_remote_code=True))
    skeleton = infer_model(generic(folder), open_checkpoint(folder))
    found, expected = kinds(skeleton), kinds(model)
    # tiny-kimi-k3 stores the decay rates of 6 layers of 4 heads padded to 128, as it is released.
    padding = 6 * (128 - 4) if name == "tiny-kimi-k3" else 0
    assert parameters(skeleton) == parameters(model) + padding
    assert layers(found) == layers(expected)
    assert_same_experts(found, expected)
    assert_same_mixers(found, expected)
    assert next(kind.moe for kind in found if kind.moe).layout == "module_list"


def test_half_a_million_expert_tensors_are_a_few_modules():
    shapes = {"model.embed_tokens.weight": (1000, 64), "lm_head.weight": (1000, 64)}
    for i in range(60):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}self_attn.{p}_proj.weight": (64, 64) for p in "qkvo"}
        shapes[f"{prefix}mlp.gate.weight"] = (896, 64)
        for e in range(896):
            for matrix, shape in (("w1", (32, 64)), ("w2", (64, 32)), ("w3", (32, 64))):
                shapes[f"{prefix}mlp.experts.{e}.{matrix}.weight"] = shape
    config = GenericConfig({"num_attention_heads": 4, "num_experts_per_tok": 2}, "m", "no class")
    skeleton = infer_model(config, headers(shapes))
    assert len(list(skeleton.modules())) < 1000
    (kind,) = kinds(skeleton)
    assert kind.layers == list(range(60))
    assert (kind.moe.count, kind.moe.top_k) == (896, 2)
    assert [bank.name for bank in kind.moe.banks][-1] == "mlp.experts.w2"


def test_layers_after_the_last_predict_further_tokens():
    """DeepSeek-V3 stores its multi-token prediction as layer 61 of 61."""
    layer = {f"self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"}
    shapes = {f"model.layers.{i}.{n}": s for i in range(3) for n, s in layer.items()}
    shapes |= {"model.layers.2.eh_proj.weight": (8, 16), "model.embed_tokens.weight": (20, 8)}
    config = GenericConfig({"num_hidden_layers": 2, "num_attention_heads": 2}, "m", "no class")
    skeleton = infer_model(config, headers(shapes))
    assert [k.layers for k in kinds(skeleton)] == [[0, 1]]
    later = sum(p.numel() for n, p in skeleton.named_parameters() if n.startswith("mtp."))
    assert later == 4 * 64 + 8 * 16


@pytest.mark.parametrize(("said", "tied"), [(True, True), (None, True), (False, False)])
def test_without_a_head_the_embedding_is_one(said, tied):
    shapes = {"model.embed_tokens.weight": (20, 8), "model.layers.0.mlp.up_proj.weight": (8, 8)}
    config = GenericConfig({"tie_word_embeddings": said}, "m", "no class")
    skeleton = infer_model(config, headers(shapes))
    head, table = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    assert (head is not None and head.weight is table.weight) == tied
    assert any("no output head" in note for note in skeleton.notes) != tied
    assert parameters(skeleton) == 20 * 8 + 64


def test_the_decoder_of_a_multimodal_checkpoint_is_found():
    layer = {f"attn.{p}_proj.weight": (8, 8) for p in "qkvo"} | {"mlp.up_proj.weight": (64, 8)}
    text = {f"language_model.model.layers.{i}.{n}": s for i in range(2) for n, s in layer.items()}
    tower = {f"vision_tower.blocks.{i}.qkv.weight": (24, 8) for i in range(3)}
    outer = {
        "language_model.model.embed_tokens.weight": (20, 8),
        "language_model.lm_head.weight": (20, 8),
        "vision_tower.patch_embed.proj.weight": (8, 3, 2, 2),
    }
    data = {"vision_config": {"hidden_size": 8}, "text_config": {"num_attention_heads": 2}}
    skeleton = infer_model(GenericConfig(data, "m", "no class"), headers(text | tower | outer))
    assert [(k.layers, k.mixer) for k in kinds(skeleton)] == [([0, 1], "full_attention")]
    assert (skeleton.config.hidden_size, skeleton.config.vocab_size) == (8, 20)
    assert not skeleton.config.tie_word_embeddings


def test_names_of_the_original_deepseek_code():
    """`wq_b`, `wkv_a`, `wkv_b`, `wo`, `ffn`, `embed`: not those of any transformers class."""
    attention = {"wq_a": (6, 8), "wq_b": (20, 6), "wkv_a": (9, 8), "wkv_b": (16, 7), "wo": (8, 8)}
    layer = {f"attn.{name}.weight": shape for name, shape in attention.items()}
    layer |= {"ffn.gate.weight": (3, 8)}
    for e in range(3):
        layer |= {f"ffn.experts.{e}.w{i}.weight": (4, 8) for i in (1, 3)}
        layer |= {f"ffn.experts.{e}.w2.weight": (8, 4)}
    shapes = {f"layers.{i}.{n}": s for i in range(2) for n, s in layer.items()}
    shapes |= {"embed.weight": (20, 8), "head.weight": (20, 8), "norm.weight": (8,)}
    skeleton = infer_model(GenericConfig({"n_heads": 2}, "m", "no class"), headers(shapes))
    (kind,) = kinds(skeleton)
    assert (kind.mixer, kind.moe.count) == ("mla", 3)
    assert kind.mixers[0].attributes == {
        "heads": 2,
        "kv_heads": 2,
        "key_dim": 10,
        "value_dim": 4,
        "latent_dim": 7,
        "rope": True,
        "rope_dim": 2,
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_orientation_of_stacked_experts_is_what_fits(transposed):
    """gpt-oss and Llama-4 store [experts, in, out]; square down matrices tell nothing alone."""
    up, down = ((4, 8, 32), (4, 16, 8)) if transposed else ((4, 32, 8), (4, 8, 16))
    experts = "model.layers.0.mlp.experts"
    shapes = {f"{experts}.gate_up_proj": up, f"{experts}.down_proj": down}
    shapes |= {"model.layers.0.mlp.router.weight": (4, 8), "model.embed_tokens.weight": (20, 8)}
    (kind,) = kinds(infer_model(GenericConfig({}, "m", "no class"), headers(shapes)))
    assert (kind.moe.hidden_size, kind.moe.intermediate_size, kind.moe.gated) == (8, 16, True)


# ------------------------------------------------------------------------------- from config alone


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_config_alone_gives_what_the_class_builds(name, built, tmp_path):
    skeleton = infer_model(generic(folder_of(name, tmp_path)), None)
    assert parameters(skeleton) == pytest.approx(parameters(built(name)), rel=0.005)
    found, expected = kinds(skeleton), kinds(built(name))
    assert layers(found) == layers(expected)
    assert_same_experts(found, expected)


# ------------------------------------------------------------------------------------ the analysis


def test_a_folder_whose_code_is_not_trusted_is_analysed_without_it(tmp_path, monkeypatch):
    folder = Path(shutil.copytree(EXAMPLES / "tiny-unseen-moe", tmp_path / "model"))
    mark = tmp_path / "ran"
    for code in folder.glob("*.py"):
        code.write_text(f"open({str(mark)!r}, 'w')\n" + code.read_text())
    a = analyze(folder)
    assert not mark.exists()
    assert a.fidelity == "headers"
    assert "'unseen_moe'" in a.fidelity_reason
    assert "--trust-remote-code would build it" in a.fidelity_reason
    assert a.architecture == "UnseenMoeForCausalLM"
    assert [layer.mixer for layer in a.layers] == (["gla"] * 3 + ["full_attention"]) * 2
    assert [layer.feed_forward for layer in a.layers] == ["dense"] + ["moe"] * 7
    # 16 experts of three 48 x 128 matrices in 7 layers, of which a token visits 4
    assert a.parameters.routed_experts == 7 * 16 * 3 * 48 * 128
    unvisited = a.parameters.routed_experts * 12 // 16
    assert a.parameters.active == a.parameters.total - unvisited - 512 * 128
    assert a.blocks[0].graph is None
    work = {o.name for o in a.operators}
    assert work >= {"gla", "scaled_dot_product_attention", "experts", "router", "linear"}


def test_reason_when_there_is_nothing_to_trust(tmp_path):
    folder = folder_of("ring-mini-linear-2.0", tmp_path)
    a = analyze(folder, trust_remote_code=True)
    assert a.fidelity == "headers"
    assert "lacks the code that its config names" in a.fidelity_reason
    assert "read from the config alone" in a.fidelity_reason
    assert a.checkpoint is None


@pytest.mark.parametrize("reference", ["own/repository--own.OwnConfig", "../own.OwnConfig"])
def test_code_outside_of_the_folder_is_no_code(tmp_path, reference):
    (tmp_path / "own.py").write_text("raise RuntimeError('ran')")
    own = {"AutoConfig": reference, "AutoModelForCausalLM": reference}
    folder = tmp_path / "model"
    folder.mkdir()
    text = json.dumps({"model_type": "own_moe", "auto_map": own, "hidden_size": 8})
    (folder / "config.json").write_text(text)
    config = models.find_config(folder, trust_remote_code=True)
    assert isinstance(config, GenericConfig)
    assert "lacks the code" in config.reason


def test_a_broken_value_of_a_known_type_is_still_an_error(tmp_path):
    data = json.loads((CONFIGS / "mixtral-8x7b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"hidden_size": "wide"}))
    with pytest.raises(InputError, match="hidden_size"):
        analyze(tmp_path)


def test_device_of_every_parameter_is_meta():
    skeleton = infer_model(generic(EXAMPLES / "kimi-k3"), None)
    assert {p.device for p in skeleton.parameters()} == {torch.device("meta")}


FAMILIES = [
    *("bamba", "deepseek_v2", "falcon_mamba", "glm_moe_dsa", "granitemoehybrid"),
    *("jamba", "kimi_linear", "lfm2_moe", "mamba2", "minimax", "nemotron_h", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_vl_moe"),
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_of_a_family_give_what_its_class_builds(model_type, tmp_path):
    tiny_config(model_type).save_pretrained(tmp_path)
    model = models.build_on_meta(models.load_config(tmp_path))
    stored = headers({n: tuple(t.shape) for n, t in model.state_dict().items()})
    skeleton = infer_model(generic(tmp_path), stored)
    assert parameters(skeleton) == parameters(model)
    assert layers(kinds(skeleton)) == layers(kinds(model))
    if any(kind.moe for kind in kinds(model)):
        assert_same_experts(kinds(skeleton), kinds(model))


def stored_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in open_checkpoint(folder).tensors.items()}


def test_what_the_tensors_contradict_is_told_by_name():
    folder = EXAMPLES / "tiny-unseen-moe"
    stored = stored_of(folder)
    stored["model.layers.2.input_layernorm.weight"] = (7,)
    config = generic(folder)
    config.num_experts = 896
    notes = infer_model(config, headers(stored)).notes
    assert "the config says 896 experts, the tensors 16" in notes
    odd = "model.layers.2.input_layernorm.weight is [7], its 7 sisters [128]"
    assert odd in notes
    assert not infer_model(generic(folder), headers(stored_of(folder))).notes


def test_a_vision_tower_alone_is_no_language_model():
    tower = {f"vision_tower.blocks.{i}.attn.qkv.weight": (24, 8) for i in range(3)}
    with pytest.raises(InputError, match=r"'vision_tower\.blocks' alone, no language model"):
        infer_model(generic(EXAMPLES / "tiny-unseen-moe"), headers(tower))


def test_dtypes_that_weights_seldom_have_are_told():
    found = headers(stored_of(EXAMPLES / "tiny-unseen-moe"))
    norm = "model.layers.0.input_layernorm.weight"
    plain = infer_model(generic(EXAMPLES / "tiny-unseen-moe"), found)
    found.tensors[norm] = found.tensors[norm]._replace(dtype="F64")
    for name, shape in (("model.position_ids", (512,)), ("model.layers.0.index", (64, 64))):
        found.tensors[name] = TensorInfo(name, "I64", shape, Path("x"), 0, 0)
    odd = infer_model(generic(EXAMPLES / "tiny-unseen-moe"), found)
    assert parameters(odd) == parameters(plain)
    more = [note for note in odd.notes if note not in plain.notes]
    assert more == [
        "integers are no weights and are not counted: model.position_ids, model.layers.0.index",
        f"stored as float64: {norm}",
    ]
