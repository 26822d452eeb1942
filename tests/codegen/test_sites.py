"""Every model of transformers that uses linear attention, tiny: without kernels and with them."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
from pathlib import Path

import pytest
import torch

from analyzers.backends import load_backend
from analyzers.costs import block_calls
from analyzers.mixers import recognise
from analyzers.mixers.sites import CONVOLUTION, SITES, MixerSite
from analyzers.models import load_config
from analyzers.schema import FORWARD, Site
from analyzers.structure import kinds
from analyzers.tiny import tiny_config
from codegen import LoadedKernel, bind
from codegen.install import compare
from codegen.members import find_spec
from codegen.render import render
from codegen.sites.packing import document_limits
from tests.codegen.kernel_samples import load
from tests.codegen.test_install import loaded

MEMBERS = [s for s in SITES if s.operator in ("kda", "gated_delta_rule", "mamba2", "lightning")]
LENGTHS = [9, 1, 22, 7]

# Models of which every layer, given what tells documents apart, keeps them apart: the heads or the
# softmax layers of the others do not read it.
PACKING = {s.model_type for s in MEMBERS} - {"mamba2", "granitemoehybrid", "glm5_next_text"}


@functools.cache
def config_of(model_type: str):
    if model_type == "kimi_k3":
        return load_config(Path("examples/models/tiny-kimi-k3"))
    config = tiny_config(model_type)
    if model_type == "falcon_h1":
        config.mamba_rms_norm = True  # a variant; the norm is left out by default
    return config


@functools.cache
def model_of(model_type: str):
    """With decays of a usual size: the float32 code of transformers takes differences of running
    sums, and what is left of the gradients of strong ones is rounding."""
    from transformers import AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    config = config_of(model_type)
    causal = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -3.0, 0.0)
    return model.eval()


@functools.cache
def function_of(operator: str, attributes: tuple[tuple[str, int], ...], folder: Path):
    spec = find_spec(operator)
    assert spec is not None
    rendered = render(spec, load_backend("cpu"), dict(attributes))
    path = folder / f"{operator}_{'x'.join(str(v) for _, v in attributes)}" / rendered.module
    path.parent.mkdir()
    path.write_text(rendered.files[rendered.module], encoding="utf-8")
    return getattr(load(path), spec.function)


@pytest.fixture(scope="module")
def kernels_of(tmp_path_factory):
    """The kernels of a model, one for each of its sites, optionally without those around the
    linear attention."""
    folder = tmp_path_factory.mktemp("sites")

    def kernel(operator: str, site: Site, **attributes: int) -> LoadedKernel:
        function = function_of(operator, tuple(attributes.items()), folder)
        one = loaded(function, site)
        return LoadedKernel(kernel=_named(one.kernel, operator, attributes), function=one.function)

    def kernels(at: MixerSite, *, around: bool = True) -> list[LoadedKernel]:
        mixer = next(m for m in mixers_of(at) if m.site is not None)
        shape = {n: int(mixer.attributes[n]) for n in ("key_dim", "value_dim")}
        made = [kernel(at.operator, mixer.site, **shape)]
        if around and at.convolution:
            taps = int(mixer.attributes["conv_kernel_size"])
            site = Site(module_class=at.module_class, function=at.convolution)
            made.append(kernel("short_convolution", site, kernel_size=taps))
        if around and at.norm:
            made.append(kernel("gated_rms_norm", Site(module_class=at.norm, function=FORWARD)))
        return made

    return kernels


def _named(kernel, operator: str, attributes: dict):
    import dataclasses

    return dataclasses.replace(kernel, operator=operator, attributes=attributes)


def modules_of(at: MixerSite):
    named = model_of(at.model_type).named_modules()
    return [(n, m) for n, m in named if type(m).__name__ == at.module_class]


def mixers_of(at: MixerSite):
    text = config_of(at.model_type).get_text_config(decoder=True)
    return [recognise(m, text) for _, m in modules_of(at)]


def each(sites: list[MixerSite]):
    return pytest.mark.parametrize("at", sites, ids=[s.model_type for s in sites])


members = each(MEMBERS)


def close(one: torch.Tensor, two: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert float((one - two).abs().max()) <= tolerance * float(two.abs().max())


# ----------------------------------------------------------------------------------- the inventory


def test_the_inventory_names_every_caller_in_transformers():
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    functions = {s.function for s in SITES} - {FORWARD} | {CONVOLUTION}
    found = set()
    for file in Path(spec.origin).parent.glob("models/*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in functions):
            continue
        for owner in ast.parse(text).body:
            if isinstance(owner, ast.ClassDef):
                called = {n.func.id for n in ast.walk(owner) if _calls_a_name(n)}
                found |= {(owner.name, f) for f in called & functions}
    listed = {(s.module_class, f) for s in SITES for f in (s.function, s.convolution) if f}
    own = {("KimiK3DeltaAttention", f) for f in ("chunk_kimi_delta_attention", CONVOLUTION)}
    spelt_out = {("MiniMaxLightningAttention", FORWARD)}
    assert found == listed - own - spelt_out


def _calls_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


@members
def test_the_analysis_finds_the_sites_of_the_inventory(at):
    assert modules_of(at)
    for mixer in mixers_of(at):
        assert mixer.operator == at.operator
        assert mixer.site == Site(module_class=at.module_class, function=at.function)
        assert {"heads", "key_dim", "value_dim", "gate"} <= mixer.attributes.keys()
        assert mixer.attributes.get("value_heads", 0) % mixer.attributes["heads"] == 0


@members
def test_the_family_covers_what_the_analysis_tells(at):
    spec = find_spec(at.operator)
    for backend in ("cpu", "h200"):
        for mixer in mixers_of(at):
            assert spec.refusal(mixer.attributes, load_backend(backend)) is None


@each(list(SITES))
def test_the_analysis_finds_what_stands_around_them(at):
    model = model_of(at.model_type)
    text = model.config.get_text_config(decoder=True)
    calls = [call for kind in kinds(model) for call in block_calls(kind, text)]
    sites = {(call.operator, call.site) for call in calls}
    if at.convolution:
        site = Site(module_class=at.module_class, function=at.convolution)
        assert ("short_convolution", site) in sites
    if at.norm:
        assert ("gated_rms_norm", Site(module_class=at.norm, function=FORWARD)) in sites


# -------------------------------------------------------------------------------- before and after


@members
def test_a_mixer_gives_the_same_outputs_and_gradients(at, kernels_of):
    differences = compare(model_of(at.model_type), kernels_of(at))
    assert [d.module for d in differences] == [name for name, _ in modules_of(at)]
    for difference in differences:
        assert difference.relative < 1e-4, difference


def test_a_broken_kernel_is_told(kernels_of):
    at = MEMBERS[0]
    right = kernels_of(at, around=False)[0]

    def wrong(*args, **kwargs):
        o, state = right.function(*args, **kwargs)
        return o * torch.where(torch.arange(o.shape[1]) == 5, 1.01, 1.0)[:, None, None], state

    broken = LoadedKernel(kernel=right.kernel, function=wrong)
    assert max(d.relative for d in compare(model_of(at.model_type), [broken])) > 1e-3


@each([s for s in MEMBERS if s.operator == "kda"])
def test_the_kernel_computes_the_decay_itself(at, kernels_of):
    (right,) = kernels_of(at, around=False)
    given = {}

    def watched(*args, **kwargs):
        given.update(kwargs)
        return right.function(*args, **kwargs)

    one = LoadedKernel(kernel=right.kernel, function=watched)
    mixer = modules_of(at)[0][1]
    with bind(model_of(at.model_type), [one]):
        mixer(
            hidden_states=torch.randn(1, 5, config_of(at.model_type).get_text_config().hidden_size)
        )
    assert given["use_gate_in_kernel"]
    assert given["A_log"].shape == (mixer.num_heads,)
    assert given["lower_bound"] == mixers_of(at)[0].attributes.get("gate_lower_bound")


@members
def test_undo_restores_every_bit(at, kernels_of):
    model = model_of(at.model_type)
    ids = torch.arange(2 * 21).view(2, 21)
    with torch.no_grad():
        before = model(ids, use_cache=False)[0]
        with bind(model, kernels_of(at)):
            during = model(ids, use_cache=False)[0]
        after = model(ids, use_cache=False)[0]
    close(during, before)
    assert torch.equal(after, before)
    assert not any(FORWARD in m.__dict__ for m in model.modules())


@members
def test_a_copy_of_a_bound_model_has_its_own_weights(at, kernels_of):
    model = model_of(at.model_type)
    ids = torch.arange(2 * 21).view(2, 21)
    plain = copy.deepcopy(model)
    with bind(model, kernels_of(at)):
        bound = copy.deepcopy(model)
    assert any(FORWARD in m.__dict__ for m in bound.modules())
    with torch.no_grad():
        for one, two in zip(plain.parameters(), bound.parameters(), strict=True):
            one.mul_(1.25)
            two.mul_(1.25)
        close(bound(ids, use_cache=False)[0], plain(ids, use_cache=False)[0])


@members
def test_gradient_checkpointing_gives_the_same_gradients(at, kernels_of):
    model = model_of(at.model_type)
    ids = torch.arange(2 * 21).view(2, 21)
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradients():
        out = model(ids, use_cache=False)[0]
        weights = torch.arange(out.numel()).view(out.shape).cos()
        return torch.autograd.grad((out * weights).sum(), trained, allow_unused=True)

    plain = gradients()
    model.gradient_checkpointing_enable()
    model.train()
    try:
        with bind(model, kernels_of(at)):
            recomputed = gradients()
    finally:
        model.eval()
        model.gradient_checkpointing_disable()
    for one, two in zip(recomputed, plain, strict=True):
        if two is not None and two.abs().max() > 0:
            close(one, two, 1e-4)


@members
def test_padding_on_the_left_is_as_without_kernels(at, kernels_of):
    model = model_of(at.model_type)
    ids = torch.arange(2 * 21).view(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask, use_cache=False)[0]
        with bind(model, kernels_of(at)):
            after = model(ids, attention_mask=mask, use_cache=False)[0]
    close(after[mask.bool()], before[mask.bool()])


@members
def test_a_cache_is_filled_and_continued_as_without_kernels(at, kernels_of):
    model = model_of(at.model_type)
    ids = torch.arange(2 * 21).view(2, 21)

    def run():
        first = model(ids[:, :15], use_cache=True)
        cache = first.cache
        steps = [first[0]]
        for piece in ids[:, 15:].split([1, 1, 4], dim=1):
            steps.append(model(piece, cache=cache, use_cache=True)[0])
        return torch.cat(steps, dim=1)

    with torch.no_grad():
        before = run()
        with bind(model, kernels_of(at)):
            after = run()
    close(after, before)


# ---------------------------------------------------------------------------------------- packing


def packed() -> tuple[torch.Tensor, dict]:
    """Tokens [1, T] of documents, and their positions and limits as transformers' collator gives
    them."""
    ids = torch.arange(sum(LENGTHS))[None] * 7 % 200
    limits = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    longest = max(LENGTHS)
    told = {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits}
    return ids, {
        "position_ids": positions,
        **told,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def numbered() -> torch.Tensor:
    """The document of each token [1, T]."""
    return torch.repeat_interleave(torch.tensor(LENGTHS))[None].int()


@members
@pytest.mark.parametrize("around", [True, False], ids=["all", "attention"])
def test_packed_documents_do_not_meet_in_a_mixer(at, around, kernels_of):
    # Where only the linear attention has a kernel, transformers' convolution alone would let a
    # document see the last tokens of the one before.
    model = model_of(at.model_type)
    _, mixer = modules_of(at)[0]
    x = torch.randn(1, sum(LENGTHS), model.config.get_text_config().hidden_size)
    arguments = dict.fromkeys(("position_embeddings",) if at.function == FORWARD else ())

    def run(x, **told):
        out = mixer(hidden_states=x, attention_mask=None, **arguments, **told)
        return out[0] if isinstance(out, tuple) else out

    def outcome(run_all):
        leaf = x.clone().requires_grad_()
        out = run_all(leaf)
        weights = torch.arange(out.numel()).view(out.shape).cos()
        return out.detach(), torch.autograd.grad((out * weights).sum(), leaf)[0]

    alone = outcome(lambda x: torch.cat([run(d) for d in x.split(LENGTHS, 1)], 1))
    limits = packed()[1]["cu_seq_lens_q"]
    with bind(model, kernels_of(at, around=around)):
        for told in ({"cu_seq_lens_q": limits}, {"seq_idx": numbered()}):
            for one, two in zip(outcome(lambda x, t=told: run(x, **t)), alone, strict=True):
                close(one, two)


@each([s for s in MEMBERS if s.model_type in PACKING])
def test_packed_documents_do_not_meet_in_a_model(at, kernels_of):
    model = model_of(at.model_type)
    ids, told = packed()
    with torch.no_grad():
        alone = torch.cat([model(d, use_cache=False)[0] for d in ids.split(LENGTHS, 1)], 1)
        with bind(model, kernels_of(at)):
            together = model(ids, use_cache=False, **told)[0]
    close(together, alone)


def test_documents_are_told_apart_in_the_words_of_every_library():
    limits = packed()[1]["cu_seq_lens_q"]
    for given in ({"cu_seqlens": limits}, {"cu_seq_lens_q": limits}, {"seq_idx": numbered()}):
        arguments = given | {"other": 1}
        assert document_limits(arguments).tolist() == limits.tolist()
        assert arguments == {"other": 1}
    assert document_limits({"cu_seqlens": None, "seq_idx": None}) is None
    with pytest.raises(ValueError, match=r"seq_idx must be \[1, T\]"):
        document_limits({"seq_idx": numbered().expand(2, -1)})
