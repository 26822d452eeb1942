"""The top-k indexer of Kimi-K3.1-Pro against a loop over pairs of tokens, in float64."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from analyzers import analyze
from analyzers.models import build_on_meta, load_config
from tests.analyzers import kimi_k3_reference as reference
from tests.analyzers.kimi_k3_samples import FIXTURE, random_model, released, text_config, tiny

T, TOP_K = 21, 5
DSA = {
    "index_n_heads": 16,  # with few, no head may fire for a pair, and scores tie at zero
    "index_head_dim": 8,
    "index_topk": TOP_K,
    "index_rope": False,
    "dsa_layers": [3, 6],
}
RELEASED = FIXTURE.parents[2] / "examples" / "models" / "kimi-k3" / "config.json"


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 128, (2, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    return random_model(tiny(dsa_config=DSA))


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    return released(model, tmp_path_factory.mktemp("indexer"))


@pytest.fixture
def seen(model, ids):
    """What the first indexer was given and what it selected."""
    calls = []
    indexer = model.model.layers[2].self_attn.indexer
    hook = indexer.register_forward_hook(lambda m, args, out: calls.append((args, out)))
    with torch.no_grad():
        model(ids, use_cache=False)
    hook.remove()
    return indexer, *calls[0]


@pytest.fixture(scope="module")
def pro(tmp_path_factory):
    """The released config of Kimi-K3 with the indexer that Kimi-K3.1-Pro is documented to have."""
    data = json.loads(RELEASED.read_text())
    data["architectures"] = ["KimiK31ForConditionalGeneration"]
    layers = data["text_config"]["linear_attn_config"]["full_attn_layers"]
    data["text_config"]["dsa_config"] = {
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "dsa_layers": layers,
    }
    folder = tmp_path_factory.mktemp("kimi-k3.1-pro")
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_scores_and_selection_are_those_of_a_loop_over_pairs(seen, weights):
    indexer, (hidden, latent, _, _), selected = seen
    w = {name: tensor.double() for name, tensor in weights.items()}
    p = "language_model.model.layers.2.self_attn.indexer."
    config = text_config(dsa_config=DSA)
    with torch.no_grad():
        scores = indexer.scores(hidden, latent, None)
    assert selected.dtype == torch.int32
    assert selected.shape == (2, T, TOP_K)
    for b in range(2):
        for t in range(T):
            args = w, config, p, hidden[b].double(), latent[b].double(), t
            expected = reference.index_scores(*args)
            torch.testing.assert_close(scores[b, t, : t + 1].double(), expected, atol=1e-5, rtol=0)
            kept = {s for s in selected[b, t].tolist() if s <= t}
            assert kept == set(reference.selected(*args))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_is_over_the_selected_keys_alone(model, weights, ids, implementation):
    expected = reference.logits(weights, text_config(dsa_config=DSA), ids)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)


def dense_like(model):
    dense = random_model(tiny())
    own = dense.state_dict()
    dense.load_state_dict({n: t for n, t in model.state_dict().items() if n in own})
    dense.set_attn_implementation("eager")
    return dense


def test_with_as_many_keys_as_tokens_it_is_dense_attention_exactly(ids):
    sparse = random_model(tiny(dsa_config=DSA | {"index_topk": T}), attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(
            sparse(ids, use_cache=False).logits, dense_like(sparse)(ids, use_cache=False).logits
        )


def test_with_fewer_it_is_not(model, ids):
    with torch.no_grad():
        sparse, dense = (m(ids, use_cache=False).logits for m in (model, dense_like(model)))
    assert (sparse[:, :TOP_K] - dense[:, :TOP_K]).abs().max() < 1e-4
    assert (sparse[:, TOP_K:] - dense[:, TOP_K:]).abs().max() > 1e-2


def test_decoding_with_a_cache_equals_one_pass(model, ids):
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :12], use_cache=True)
        logits = [out.logits]
        for t in range(12, T):
            out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole, atol=1e-4, rtol=0)


def test_padding_on_the_left_is_never_selected(model, ids):
    padded = torch.nn.functional.pad(ids, (4, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (4, 0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        logits = model(padded, attention_mask=mask, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


def test_attention_that_ignores_the_selection_is_refused(model, ids):
    model.config._attn_implementation = "flex_attention"
    try:
        with pytest.raises(ValueError, match="flex_attention"):
            model(ids, attention_mask=dict.fromkeys(model.config.layer_types), use_cache=False)
    finally:
        model.set_attn_implementation("sdpa")


def test_the_indexer_gets_no_gradient_and_all_else_does(ids):
    model = random_model(tiny(dsa_config=DSA)).train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == {n for n, _ in model.named_parameters() if ".indexer." in n}
    assert len(without) == 2 * 5


def test_names_and_values_survive_saving(model, weights, tmp_path):
    p = "language_model.model.layers.2.self_attn.indexer."
    names = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}
    assert {n.removeprefix(p) for n in weights if n.startswith(p)} == names
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.layer_types == model.config.layer_types
    assert all(torch.equal(again.state_dict()[n], t) for n, t in model.state_dict().items())


def test_the_pro_model_has_178_5_million_parameters_more(pro):
    sizes = [
        sum(p.numel() for p in build_on_meta(load_config(folder)).parameters())
        for folder in (RELEASED.parent, pro)
    ]
    assert sizes[1] - sizes[0] == 24 * (1536 * 32 * 128 + 7168 * 128 + 7168 * 32 + 2 * 128)
    assert sizes[1] - sizes[0] == pytest.approx(178.5e6, rel=1e-3)


def test_the_analysis_says_which_layers_select_keys(tmp_path):
    data = json.loads((FIXTURE / "config.json").read_text())
    data["text_config"] = text_config(dsa_config=DSA)
    (tmp_path / "config.json").write_text(json.dumps(data))
    analysis = analyze(tmp_path)
    assert analysis.fidelity == "traced", analysis.fidelity_reason
    found = [layer.index + 1 for layer in analysis.layers if layer.mixer == "sparse_topk"]
    assert found == DSA["dsa_layers"]
    assert {layer.mixer for layer in analysis.layers} == {"kda", "sparse_topk"}
    block = next(b for b in analysis.blocks if b.mixer == "sparse_topk")
    attributes = {"top_k": TOP_K, "index_heads": 16, "index_dim": 8}
    assert attributes.items() <= block.mixer_attributes.items()
    assert [n.name for n in block.linears if n.name == "self_attn.q_b_proj"]
    assert not [n.name for n in block.linears if "indexer" in n.name]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"index_topk": 0}, "index_topk must be a positive integer"),
        ({"index_n_heads": None}, "index_n_heads must be a positive integer"),
        ({"index_rope": True}, "index_rope"),
        ({"dsa_layers": [3]}, r"dsa_layers must be the layers of full attention, \[3, 6\]"),
    ],
)
def test_an_indexer_that_is_not_this_one_is_refused(changes, fault):
    with pytest.raises(Exception, match=f"dsa_config: {fault}"):
        tiny(dsa_config=DSA | changes)


def test_an_indexer_without_query_latent_is_refused():
    with pytest.raises(Exception, match="q_lora_rank"):
        tiny(dsa_config=DSA, q_lora_rank=None)
