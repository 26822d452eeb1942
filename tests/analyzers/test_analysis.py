"""The analysis of the shipped models and of released configs, against torch and published sizes."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from analyzers import analyze
from analyzers.documents import read_document, write_document
from analyzers.errors import InputError
from analyzers.models import build_on_meta, load_config
from analyzers.schema import BANKS, FORWARD, ModelAnalysis

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "models"
CONFIGS = ROOT / "tests" / "data" / "configs"
TINY = ["tiny-kimi-linear", "tiny-qwen3-next"]


@pytest.fixture(scope="module")
def analyses() -> dict[str, ModelAnalysis]:
    return {name: analyze(EXAMPLES / name) for name in (*TINY, "kimi-k3")}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Analyses of a released config by its file name."""

    def of(name: str) -> ModelAnalysis:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
        return analyze(folder)

    return of


def parameters_by_parts(a: ModelAnalysis) -> int:
    blocks = sum(len(b.layers) * part.parameters for b in a.blocks for part in b.parts)
    return blocks + sum(part.parameters for part in a.outer)


def work(a: ModelAnalysis, *names: str, tokens: int) -> float:
    return sum(o.flops.at(tokens) for o in a.operators if o.name in names)


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_the_loaded_model(analyses, name):
    a = analyses[name]
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / name)
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert a.parameters.total == total == parameters_by_parts(a)
    assert a.parameters.routed_experts == routed
    embedding = model.get_input_embeddings().weight.numel()
    assert a.parameters.embedding == embedding
    assert a.parameters.active == total - routed * 12 // 16 - embedding


@pytest.mark.parametrize("name", TINY)
def test_checkpoint_bytes_are_those_of_the_shards(analyses, name):
    checkpoint = analyses[name].checkpoint
    index = json.loads((EXAMPLES / name / "model.safetensors.index.json").read_text())
    assert checkpoint.bytes == index["metadata"]["total_size"]
    assert sum(checkpoint.formats.values()) == checkpoint.bytes
    assert set(checkpoint.formats) == {"BF16", "F32"}
    assert checkpoint.shards >= 2


def test_layers_of_the_tiny_models(analyses):
    kimi, qwen = (analyses[name] for name in TINY)
    assert [layer.mixer for layer in kimi.layers] == (["kda"] * 3 + ["mla"]) * 2
    assert [layer.feed_forward for layer in kimi.layers] == ["dense"] + ["moe"] * 7
    assert [layer.mixer for layer in qwen.layers] == (
        ["gated_delta_net"] * 3 + ["full_attention"]
    ) * 2
    for a in (kimi, qwen):
        assert sorted(i for b in a.blocks for i in b.layers) == list(range(8))
        assert (a.experts.count, a.experts.top_k, a.experts.shared) == (16, 4, 1)
        assert (a.experts.hidden_size, a.experts.intermediate_size) == (128, 48)


def test_linear_attention_carries_what_a_kernel_needs(analyses):
    kda = next(o for o in analyses["tiny-kimi-linear"].operators if o.name == "kda")
    assert kda.count == 6
    assert kda.attributes == {
        "heads": 4,
        "value_heads": 4,
        "key_dim": 32,
        "value_dim": 32,
        "gate": "per_channel",
        "qk_l2norm": True,
        "conv_kernel_size": 4,
    }
    assert kda.site.module_class == "KimiLinearDeltaAttention"
    gdn = next(o for o in analyses["tiny-qwen3-next"].operators if o.name == "gated_delta_rule")
    assert gdn.attributes["heads"] == 2
    assert gdn.attributes["value_heads"] == 4
    assert gdn.attributes["gate"] == "per_head"
    assert gdn.site.function == "torch_chunk_gated_delta_rule"


@pytest.mark.parametrize("name", [*TINY, "kimi-k3"])
def test_site_is_a_function_that_the_module_really_calls(analyses, name):
    import inspect

    model = build_on_meta(load_config(EXAMPLES / name))
    modules = {type(m).__name__: m for m in model.modules()}
    sites = [o.site for o in analyses[name].operators if o.site]
    assert sites
    for site in sites:
        if site.function == BANKS:  # of stacked experts, as transformers' decorator marks them
            assert hasattr(modules[site.module_class], "is_transposed")
            continue
        forward = inspect.unwrap(type(modules[site.module_class]).forward)
        if site.function == FORWARD:  # the module is the operator
            continue
        assert site.function in forward.__code__.co_names
        assert callable(forward.__globals__[site.function])


@pytest.mark.parametrize("name", [*TINY, "kimi-k3"])
def test_graph_and_modules_agree(analyses, name):
    a = analyses[name]
    assert a.fidelity == "traced"
    assert "its calls are those counted from the modules" in a.fidelity_reason
    assert all(b.graph and 0 < len(b.graph.nodes) < 300 for b in a.blocks)


def test_kimi_k3(analyses):
    a = analyses["kimi-k3"]
    assert a.parameters.total == pytest.approx(2.779e12, rel=0.01)
    assert a.parameters.active == pytest.approx(104.2e9, rel=0.01)
    assert a.parameters.routed_experts == pytest.approx(2.723e12, rel=0.01)
    assert (a.experts.count, a.experts.top_k, a.experts.shared) == (896, 16, 2)
    assert (a.experts.hidden_size, a.experts.router_input_size) == (3584, 7168)
    mixers = [layer.mixer for layer in a.layers]
    assert (mixers.count("kda"), mixers.count("mla")) == (69, 24)
    part = {p.name: p.parameters for p in a.blocks[1].parts}
    assert part["mixer"] == pytest.approx(443.7e6, rel=1e-3)
    assert part["latent_projection"] == 2 * 7168 * 3584 + 3584
    assert a.checkpoint is None


def test_indexer_that_appears_only_in_a_subgraph_is_counted(released):
    # Its forward is under no_grad, so export puts it into a subgraph of the layer's graph.
    a = released("glm-5.1")
    assert {layer.mixer for layer in a.layers} == {"sparse_topk"}
    assert next(o for o in a.operators if o.name == "indexer").attributes["top_k"] == 2048
    assert "its calls are those counted from the modules" in a.fidelity_reason


def test_window_bounds_the_work_of_sliding_attention(released):
    a = released("gpt-oss-20b")
    sliding = [o for o in a.operators if "window" in o.attributes]
    full = [o for o in a.operators if o.name.endswith("attention") and o not in sliding]
    assert [o.flops.per_pair for o in sliding] == [0]
    assert all(o.flops.per_pair > 0 for o in full)


def test_vision_and_text_layers_are_told_apart(released):
    a = released("qwen3.5-35b-a3b")
    assert len(a.layers) == 40
    vision = next(p.parameters for p in a.outer if p.name == "vision")
    assert 0.3e9 < vision < 0.6e9


def test_code_that_nothing_can_follow_is_still_counted(monkeypatch, analyses):
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    def decide(self, hidden_states, *args, **kwargs):
        return hidden_states if hidden_states.sum().item() > 0 else -hidden_states

    monkeypatch.setattr(code.Qwen3NextDecoderLayer, "forward", decide)
    a, traced = analyze(EXAMPLES / "tiny-qwen3-next"), analyses["tiny-qwen3-next"]
    assert a.fidelity == "structural"
    assert "torch.export failed" in a.fidelity_reason
    assert all(b.graph is None and b.saved_from == "formula" for b in a.blocks)
    assert (a.parameters, a.operators) == (traced.parameters, traced.operators)


def test_analysis_is_a_document(analyses, tmp_path):
    for a in analyses.values():
        path = write_document(a, tmp_path / "analysis.json")
        assert read_document(ModelAnalysis, path) == a


def test_progress_is_told_in_plain_lines():
    lines: list[str] = []
    analyze(EXAMPLES / "tiny-kimi-linear", progress=lines.append)
    assert lines
    assert all(line.isprintable() for line in lines)


def test_damaged_weights_stop_the_analysis(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLES / "tiny-kimi-linear", folder)
    shard = folder / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(InputError, match="model-00002"):
        analyze(folder)


def test_weights_of_another_model_are_refused(tmp_path):
    data = json.loads((EXAMPLES / "tiny-kimi-linear" / "config.json").read_text())
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLES / "tiny-kimi-linear", folder)
    (folder / "config.json").write_text(json.dumps(data | {"vocab_size": 640}))
    with pytest.raises(InputError, match=r"\[512, 128\], the model needs \[640, 128\]"):
        analyze(folder)
    (folder / "config.json").write_text((EXAMPLES / "tiny-qwen3-next" / "config.json").read_text())
    with pytest.raises(InputError, match="made by no tensor of the checkpoint"):
        analyze(folder)


@pytest.mark.parametrize(
    ("forgotten", "fault"),
    [
        ("layers.5.self_attn.q_proj.", r"layers\.5\.self_attn\.q_proj"),
        ("layers.5.block_sparse_moe.experts.7.", r"experts\.7\.w2\.weight: is not in the check"),
    ],
)
def test_tensor_that_the_index_forgot(tmp_path, forgotten, fault):
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLES / "tiny-kimi-linear", folder)
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    for name in [n for n in data["weight_map"] if forgotten in n]:
        del data["weight_map"][name]
    index.write_text(json.dumps(data))
    with pytest.raises(InputError, match=fault):
        analyze(folder)


@pytest.mark.parametrize(
    ("model_type", "mixers"),
    [
        ("bailing_hybrid", {"kda", "mla"}),
        ("minimax", {"lightning", "full_attention"}),
        ("granitemoehybrid", {"mamba2"}),
        ("mistral4", {"mla"}),
        ("dots3_note", {"sparse_topk", "sliding_attention"}),
        ("lara_mini", {"gated_delta_net", "sliding_attention", "full_attention"}),
        ("llama", {"full_attention"}),
    ],
)
def test_other_architectures_by_convention_alone(tmp_path, model_type, mixers):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    a = analyze(tmp_path)
    assert {layer.mixer for layer in a.layers} == mixers
    assert "its calls are those counted from the modules" in a.fidelity_reason
    assert parameters_by_parts(a) == a.parameters.total
    assert (a.experts is None) == (model_type == "llama")


def test_disagreement_of_graph_and_modules_is_told(monkeypatch):
    from analyzers import costs

    whole = costs.block_calls
    monkeypatch.setattr(
        costs, "block_calls", lambda *kind: [c for c in whole(*kind) if c.operator != "router"]
    )
    reason = analyze(EXAMPLES / "tiny-qwen3-next").fidelity_reason
    assert "calls router 1 times in the graph, 0 by modules" in reason


def test_encoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(InputError, match="not as a language model"):
        analyze(tmp_path)
