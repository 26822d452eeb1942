"""Costs of operators: how they grow with documents, and formulas against torch and pencil."""

import json
import shutil
from pathlib import Path

import pytest

from analyzers import analyze
from analyzers.schema import ModelAnalysis, Operator, Work

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "configs"
LINEAR_MIXERS = ("kda", "gated_delta_rule", "mamba2", "lightning")


@pytest.fixture(scope="module")
def analyses(tmp_path_factory):
    """Analyses of released configs by name."""
    known: dict[str, ModelAnalysis] = {}

    def of(name: str) -> ModelAnalysis:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            shutil.copy(config_of(name), folder / "config.json")
            known[name] = without_graphs(folder)
        return known[name]

    return of


def config_of(name: str) -> Path:
    own = ROOT / "examples" / "models" / name / "config.json"
    return own if own.is_file() else CONFIGS / f"{name}.json"


def without_graphs(folder: Path) -> ModelAnalysis:
    """The graphs say nothing about what operators cost, and take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analyzers.analysis._traced", untraced)
        return analyze(folder)


def untraced(model, kinds, calls):
    return [None] * len(kinds), "structural", ""


def operators(a: ModelAnalysis, *names: str) -> list[Operator]:
    found = [o for o in a.operators if o.name in names]
    assert found, f"{a.model_type} has no {names}"
    return found


def quantities(o: Operator) -> list[Work]:
    found = [o.flops, o.bytes, o.bytes_written, o.saved_bytes]
    return [*found, o.backward.flops, o.backward.bytes, o.backward.bytes_written]


# ------------------------------------------------------------------------ growth with documents


@pytest.mark.parametrize(
    ("name", "mixers"),
    [
        ("kimi-k3", ("kda",)),
        ("qwen3-next-80b-a3b", ("gated_delta_rule",)),
        ("nemotron-3-super-120b-a12b-fp8", ("mamba2",)),
    ],
)
def test_twice_the_sequence_is_twice_the_work_of_linear_mixers(analyses, name, mixers):
    for o in operators(analyses(name), *mixers):
        for work in quantities(o):
            assert work.at(8192) == 2 * work.at(4096) > 0


@pytest.mark.parametrize("name", ["kimi-k3", "qwen3-next-80b-a3b", "deepseek-v3"])
def test_twice_the_sequence_is_four_times_the_work_of_full_attention(analyses, name):
    for o in operators(analyses(name), "scaled_dot_product_attention"):
        for work in (o.flops, o.backward.flops):
            assert work.at(8192) == 4 * work.at(4096) > 0
        # A fused kernel never writes the square.
        assert o.bytes.at(8192) == 2 * o.bytes.at(4096)
        assert o.saved_bytes.at(8192) == 2 * o.saved_bytes.at(4096)


def test_batch_of_four_is_four_documents(analyses):
    for o in analyses("kimi-k3").operators:
        for work in quantities(o):
            assert work.over([4096] * 4) == 4 * work.at(4096)


def test_packed_documents_do_not_meet(analyses):
    a, lengths = analyses("kimi-k3"), [700, 1300, 2096]
    (attention,) = operators(a, "scaled_dot_product_attention")
    squares = sum(length**2 for length in lengths)
    assert attention.flops.over(lengths) == attention.flops.per_pair * squares
    assert attention.flops.over(lengths) < 0.4 * attention.flops.at(sum(lengths))
    for o in operators(a, "kda", "linear", "experts"):
        assert o.flops.over(lengths) == o.flops.at(sum(lengths))


def test_attention_over_selected_keys_is_linear_beyond_them(analyses):
    a = analyses("glm-5.1")
    (attention,) = operators(a, "sparse_attention")
    k = attention.attributes["top_k"]
    for work in (attention.flops, attention.backward.flops):
        assert work.at(k) == 4 * work.at(k // 2)  # below k all keys are selected
        assert work.at(8 * k) == 8 * work.at(k)
    (indexer,) = operators(a, "indexer")
    assert indexer.flops.at(8 * k) == 64 * indexer.flops.at(k)  # it scores all pairs
    assert indexer.backward.flops == Work()  # under no_grad


def test_sliding_attention_is_linear_beyond_its_window(analyses):
    found = operators(analyses("gpt-oss-20b"), "scaled_dot_product_attention")
    (sliding,) = [o for o in found if "window" in o.attributes]
    w = sliding.attributes["window"]
    assert w == 128
    for work in (sliding.flops, sliding.backward.flops):
        assert work.at(w) == 4 * work.at(w // 2)
        assert work.at(64 * w) == 64 * work.at(w)


# -------------------------------------------------------------------------------- single figures


@pytest.mark.parametrize(
    ("name", "latent", "hidden", "inner", "matrices"),
    [
        ("kimi-k3", 3584, 7168, 3072, 3),
        ("nemotron-3-super-120b-a12b-fp8", 1024, 4096, 2688, 2),  # relu2 without a gate
        ("deepseek-v3", 7168, 7168, 2048, 3),
    ],
)
def test_experts_are_priced_at_their_own_width(analyses, name, latent, hidden, inner, matrices):
    # Three shipped planners price latent experts on the hidden width: twice to four times too much.
    a = analyses(name)
    (experts,) = operators(a, "experts")
    visits = experts.count * experts.attributes["top_k"]
    assert experts.flops == Work(per_token=visits * matrices * 2 * latent * inner)
    assert experts.backward.flops == experts.flops
    assert experts.adapter.width == visits * ((latent + (matrices - 1) * inner) + (inner + latent))
    assert experts.adapter.matrices == visits * 2  # gate and up are one matrix
    assert experts.saved_bytes == Work(per_token=visits * 2 * (matrices - 1) * inner)
    assert experts.adapter.saved_bytes == Work(per_token=visits * 2 * (latent + inner))
    (router,) = operators(a, "router")
    assert router.flops == Work(per_token=router.count * 2 * hidden * a.experts.count)
    assert router.backward.flops == router.flops
    assert router.adapter is None


def test_choices_of_experts_that_compute_nothing_are_not_priced(analyses):
    (experts,) = operators(analyses("longcat-flash"), "experts")
    a = experts.attributes
    matrices = 3 * 2 * a["hidden_size"] * a["intermediate_size"]
    # 512 of the 768 choices are experts; the rest hands its input on.
    assert experts.flops.per_token == pytest.approx(experts.count * 12 * 512 / 768 * matrices)


def test_frozen_linear_keeps_nothing_and_an_adapted_one_its_input(analyses):
    a = analyses("qwen3-next-80b-a3b")
    # Neither head nor what weighs the shared expert takes an adapter.
    none = [o.attributes["out_features"] for o in operators(a, "linear") if not o.adapter]
    assert sorted(none) == [1, a.vocab_size]
    for o in (o for o in operators(a, "linear") if o.adapter):
        i, out = o.attributes["in_features"], o.attributes["out_features"]
        assert o.flops == o.backward.flops == Work(per_token=o.count * 2 * i * out)
        assert o.saved_bytes == Work()
        assert o.adapter.width == o.count * (i + out)
        assert o.backward.bytes_written == Work(per_token=o.count * 2 * i)


@pytest.mark.parametrize(
    ("name", "part", "kept"),
    [
        # Input of the block, of q_b, of kv_b; gated output of o: 7168, 1536, 512, 96 * 128.
        ("kimi-k3", "mla", 2 * (7168 + 1536 + 512 + 12288)),
        # Input of the block, of f_b and the normalised, gated output.
        ("kimi-k3", "kda", 2 * (7168 + 128 + 12288)),
        # q, k and v read one tensor; the output of attention is kept by attention itself.
        ("gpt-oss-20b", "full_attention", 2 * 2880),
        # The gate after attention makes a new tensor.
        ("qwen3-next-80b-a3b", "full_attention", 2 * (2048 + 16 * 256)),
    ],
)
def test_adapted_projections_that_read_one_tensor_keep_it_once(analyses, name, part, kept):
    block = next(b for b in analyses(name).blocks if b.mixer == part)
    mixer = next(p for p in block.parts if p.name == "mixer")
    assert mixer.adapted_saved_bytes == Work(per_token=kept)


@pytest.mark.parametrize("name", ["tiny-qwen3-next", "gpt-oss-20b"])
def test_inputs_that_adapters_keep_are_those_of_the_traced_lora_backward(name, tmp_path):
    shutil.copy(config_of(name), tmp_path / "config.json")
    traced, priced = analyze(tmp_path), without_graphs(tmp_path)
    for measured, formula in zip(traced.blocks, priced.blocks, strict=True):
        assert (measured.saved_from, formula.saved_from) == ("graph", "formula")
        # Of a whole block: parts that read one tensor may differ in which of them keeps it.
        kept = [sum((p.adapted_saved_bytes for p in b.parts), Work()) for b in (measured, formula)]
        assert kept[0] == kept[1] != Work()


def test_linears_of_the_indexer_are_forward_alone(analyses):
    (block, *_) = [b for b in analyses("glm-5.1").blocks if b.mixer == "sparse_topk"]
    mixer = next(p for p in block.parts if p.name == "mixer")
    config = json.loads((CONFIGS / "glm-5.1.json").read_text())
    hidden, heads, dim = (config[k] for k in ("hidden_size", "index_n_heads", "index_head_dim"))
    indexer = 2 * (config["q_lora_rank"] * heads * dim + hidden * dim + hidden * heads)
    assert mixer.flops.per_token - mixer.backward.flops.per_token == indexer


def test_attention_residuals_read_as_many_block_starts_as_the_config_makes(tmp_path):
    data = json.loads((ROOT / "examples/models/tiny-kimi-k3/config.json").read_text())
    layers, hidden = 8, 128
    for block in (2, 4, 8):
        data["text_config"]["attn_res_block_size"] = block
        (tmp_path / "config.json").write_text(json.dumps(data))
        found = operators(without_graphs(tmp_path), "attention_residual")
        # Before the mixer: the starts so far and, but in the first layer of a block, the sum.
        read = sum(i // block + 1 + (i % block > 0) for i in range(layers))
        read += sum(i // block + 2 for i in range(layers))  # before the feed-forward
        read += layers // block + 1  # after the last layer
        assert sum(o.count for o in found) == 2 * layers + 1
        moved = sum(o.bytes.at(1) - o.bytes_written.at(1) for o in found)
        assert moved == pytest.approx(2 * hidden * read)


def test_written_bytes_are_a_share_of_all_bytes(analyses):
    for name in ("kimi-k3", "glm-5.1", "nemotron-3-super-120b-a12b-fp8", "deepseek-v4-flash"):
        for o in analyses(name).operators:
            assert 0 < o.bytes_written.at(512) < o.bytes.at(512)
            assert o.backward.bytes_written.at(512) <= o.backward.bytes.at(512)
            if o.backward.flops.at(512):
                assert 0 < o.backward.bytes_written.at(512) < o.backward.bytes.at(512)


def test_elementwise_operators_have_bytes_and_no_flops(analyses):
    a = analyses("kimi-k3")
    for o in operators(a, "rms_norm", "gated_rms_norm", "gated_activation", "attention_residual"):
        assert o.flops == o.backward.flops == Work()
        assert o.saved_bytes.at(1) > 0
    convolutions = operators(a, "short_convolution")
    assert sum(o.flops.at(1) for o in convolutions) == 69 * 2 * 4 * 3 * 12288


# --------------------------------------------------------------------------------- the documents


def tables(path: Path) -> list[list[list[str]]]:
    """The cells of every table of a markdown file, without head and rule."""
    found: list[list[list[str]]] = []
    before = ""
    for line in path.read_text().splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append([cell.strip(" *`") for cell in line.strip("|").split("|")])
        before = line
    return [rows[2:] for rows in found]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_table_of_kimi_k3_is_what_the_analysis_says(analyses):
    a = analyses("kimi-k3")
    _, matrices, mixing, totals = tables(ROOT / "docs" / "costs.md")

    # Each row by itself, then all rows of a shape against the linears of that shape.
    *rows, total = matrices
    flops: dict[tuple[int, int], float] = {}
    adapters: dict[tuple[int, int], float] = {}
    for _, _, shape, times, cost, adapter in rows:
        i, o = (int(side) for side in shape.split(" x "))
        assert number(cost) == 2 * i * o * int(times)
        if adapter != "-":
            assert number(adapter) == (i + o) * int(times)
            adapters[i, o] = adapters.get((i, o), 0) + number(adapter)
        flops[i, o] = flops.get((i, o), 0) + number(cost)
    assert number(total[4]) == sum(flops.values())
    assert number(total[5]) == sum(adapters.values())
    for linear in operators(a, "linear"):
        shape = linear.attributes["in_features"], linear.attributes["out_features"]
        assert linear.flops == Work(per_token=flops.pop(shape))
        if shape == (7168, 163840):
            assert linear.adapter is None
        else:
            assert linear.adapter.width == adapters.pop(shape)
    (router,), (experts,) = operators(a, "router"), operators(a, "experts")
    assert router.flops == Work(per_token=flops.pop((7168, 896)))
    assert experts.flops == Work(per_token=flops.pop((3584, 6144)) + flops.pop((3072, 3584)))
    assert experts.adapter.width == adapters.pop((3584, 6144)) + adapters.pop((3072, 3584))
    assert not flops
    assert not adapters

    for cells in mixing:
        name, _, unit = cells[0].partition("`, a ")
        (operator,) = operators(a, name)
        forward, backward = map(number, cells[2:])
        kind = {"per_pair": forward} if unit else {"per_token": forward}
        assert operator.flops == Work(**kind)
        assert operator.backward.flops == Work(**dict.fromkeys(kind, backward))

    lengths = (4096, 131_072, 1_048_576)
    passes = [sum((o.flops for o in a.operators), Work())]
    passes += [sum((o.backward.flops for o in a.operators), Work())]
    width = number(total[5])
    passes += [Work(per_token=2 * 16 * width), Work(per_token=4 * 16 * width)]
    for cells, work in zip(totals, passes, strict=True):
        assert work == Work(per_token=number(cells[1]), per_pair=number(cells[2]))
        assert [f"{work.at(t) / t / 1e9:.3f}" for t in lengths] == cells[3:]
