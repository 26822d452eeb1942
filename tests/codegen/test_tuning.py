"""Tuning: what is tried, what is refused and why, what is kept, what serves which shape."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzers.backends import load_backend
from analyzers.documents import read_document, to_json
from analyzers.errors import InputError, ProofError
from codegen.build import generate
from codegen.family import SHORT, Launch, Tile, template_sha256
from codegen.members import load_specs
from codegen.render import _environment, render
from codegen.schema import Gate, KernelSet, OperatorMap
from codegen.tuning.__main__ import main
from codegen.tuning.bench import Bench, Worker, Workload
from codegen.tuning.records import (
    Class,
    Record,
    cache_folder,
    content_of,
    file_name,
    known_records,
    launch_rows,
    launch_table,
    nearest,
    nearest_class,
    recall,
    record_sha256,
    save,
    shipped_folder,
)
from codegen.tuning.search import search
from codegen.tuning.space import Space, describe
from codegen.tuning.timing import Recorded, median, sample
from codegen.tuning.tune import device_here, summary, tune
from tests.codegen.kernel_samples import generated

KERNELS = ("_prepare", "_recur", "_reverse", "_pairs", "_gradients")
H200 = load_backend("h200")
LONG = Workload(batch=1, tokens=8192, heads=32, value_heads=32)
BATCH = Workload(batch=4, tokens=4096, heads=32, value_heads=32)


def space(operator="kda", key_dim=128, value_dim=128, dtype="bfloat16", triton="3.6.0") -> Space:
    return Space(
        spec=load_specs()[operator],
        backend=H200,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        triton=triton,
    )


def launch(block=64, num_warps=2, num_stages=1) -> Launch:
    return Launch(block=block, num_warps=num_warps, num_stages=num_stages)


def record(programs=(32,), key_dim=128, value_dim=128, dtype="bfloat16", tokens=8192, **other):
    classes = [
        Class(
            programs=n,
            tokens=tokens,
            launches={k: launch(block=16 << (i % 3)) for k in KERNELS},
            milliseconds={"step": 1.0},
            default_milliseconds={"step": 2.0},
        )
        for i, n in enumerate(programs)
    ]
    facts = {
        "operator": "kda",
        "backend": "h200",
        "device": "NVIDIA H200",
        "triton": "3.6.0",
        "content": content_of(load_specs()["kda"], H200, "3.6.0", "NVIDIA H200"),
        "chunk": 64,
        "strategy": "split",
        "tried": 1,
    }
    widths = {"key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}
    return Record(**(facts | widths | {"classes": classes} | other))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- What is tried ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "kernel", "tried", "chunk", "faulty", "sound"),
    [
        # triton#11366: several dots on blocks of 32 key channels with eight warps
        ("kda", "_prepare", launch(32, 8), 64, "3.6.0", "3.8.0"),
        # fla#640: blocks of 64 in the gradients under a decay per head
        ("simple_gla", "_gradients", launch(64, 2), 64, "3.6.0", "3.7.1"),
    ],
)
def test_what_a_triton_version_gets_wrong_is_not_tried(
    operator, kernel, tried, chunk, faulty, sound
):
    assert "triton" in str(space(operator, triton=faulty).refusal(kernel, tried, chunk))
    assert space(operator, triton=sound).refusal(kernel, tried, chunk) is None


def test_a_fault_of_one_kernel_leaves_the_others_alone():
    # triton#11366 was seen with eight warps in the preparation only.
    hopper = space()
    assert hopper.refusal("_prepare", launch(32, 4), 64) is None
    assert hopper.refusal("_gradients", launch(32, 8), 64) is None
    # fla#640: a decay per key channel has other gradients, and fewer channels are right.
    assert hopper.refusal("_gradients", launch(64, 4), 64) is None
    assert space("simple_gla").refusal("_gradients", launch(32, 4), 64) is None


@pytest.mark.parametrize(
    ("kernel", "tried", "why"),
    [
        ("_prepare", launch(256), "wider"),  # fla#989: prefetched beyond the tensor
        ("_recur", launch(64, 3), "3 warps"),
        ("_recur", launch(64, 4, 9), "9 stages"),
        ("_recur", launch(128, 1), "512 registers"),  # [128, 128] float32 on 32 threads
        ("_pairs", launch(128, 4, 2), "nothing to pipeline"),
        ("_prepare", launch(64, 4, 2), "none of its loops"),
        ("_recur", launch(8), "narrow"),
    ],
)
def test_what_the_backend_cannot_hold_is_not_tried(kernel, tried, why):
    assert why in str(space().refusal(kernel, tried, 64))


def test_shared_memory_bounds_the_stages():
    # Two [64, 256] float32 matrices a stage are 128 KiB; the device has 227.
    wide = space("gla", key_dim=256, value_dim=64, dtype="float32")
    assert "shared memory" in str(wide.refusal("_recur", launch(16, 4, 2), 64))
    assert wide.refusal("_recur", launch(16, 4, 1), 64) is None
    half = space("gla", key_dim=256, value_dim=64)
    assert half.refusal("_recur", launch(16, 4, 3), 64) is None
    # The delta rule loads a third one and the inverse.
    delta = space("kda", key_dim=256, value_dim=64)
    assert "shared memory" in str(delta.refusal("_recur", launch(16, 4, 3), 64))


@pytest.mark.parametrize("widths", [(16, 16), (64, 128), (128, 128), (256, 64), (256, 512)])
@pytest.mark.parametrize("backend", ["a100", "h100", "h200", "b200", "gb300", "mi300x"])
@pytest.mark.parametrize("member", load_specs())
def test_the_familys_own_launches_fit_in_every_dtype(member, backend, widths):
    spec, device = load_specs()[member], load_backend(backend)
    tile = spec.tile(device, widths[0])
    assert spec.tile(device, widths[0], "float32").chunk == tile.chunk
    table = launch_table(spec, device, *widths, tile, None)
    assert table.keys() == set(spec.dtypes)
    for dtype, kernels in table.items():
        room = replace(space(member, *widths, dtype), backend=device)
        assert kernels.keys() == tile.launches.keys()
        for kernel, ((_, x),) in kernels.items():
            assert room.refusal(kernel, x, tile.chunk) is None
            assert x.num_stages <= tile.launches[kernel].num_stages


def test_stages_are_given_up_one_by_one_where_shared_memory_ends():
    # A step of the delta rule's walk loads 3 [64, K], 2 [64, 64] and one [64, 32].
    spec = load_specs()["gated_delta_rule"]
    stages = {
        (dtype, width): launch_table(spec, H200, width, 128, spec.tile(H200, width), None)[dtype][
            "_recur"
        ][0][1].num_stages
        for dtype in ("float32", "bfloat16")
        for width in (64, 128, 256)
    }
    assert stages == {
        ("float32", 64): 1,  # given so: no tensor cores to be fed
        ("float32", 128): 1,
        ("float32", 256): 1,
        ("bfloat16", 64): 3,
        ("bfloat16", 128): 3,  # 69 632 bytes
        ("bfloat16", 256): 3,  # 55 296 in chunks of 32
    }
    pipelined = Launch(block=32, num_warps=4, num_stages=3)
    wide = space("gated_delta_rule", dtype="float32")
    assert wide.fitted("_recur", pipelined, 64).num_stages == 1  # 139 264
    narrow = space("gated_delta_rule", key_dim=64, dtype="float32")
    assert narrow.fitted("_recur", pipelined, 64).num_stages == 2  # 90 112


@pytest.mark.parametrize("member", ["kda", "gated_delta_rule", "delta_rule"])
def test_walks_that_are_not_pipelined_on_hopper_are_not_tried(member):
    # triton#11366: in blocks of 32 they read invalid memory, with four warps and with eight.
    wide = Space(
        spec=load_specs()[member], backend=H200, key_dim=256, value_dim=128, dtype="bfloat16"
    )
    for kernel in ("_recur", "_reverse"):
        for warps in (4, 8):
            assert "not pipelined" in str(wide.refusal(kernel, launch(32, warps, 1), 64))
        assert wide.fitted(kernel, launch(32, 4, 2), 32) == launch(32, 4, 2)


def test_wider_keys_have_shorter_chunks():
    # [64, 128] at most, so that walks along wide keys are pipelined and fit in float32.
    for member in load_specs().values():
        chunks = {k: member.tile(H200, k).chunk for k in (16, 100, 128, 130, 256)}
        assert chunks == {16: 64, 100: 64, 128: 64, 130: 32, 256: 32}
        assert member.tile(H200, 256, "float32").chunk == 32
        assert member.tile(load_backend("mi300x"), 256).chunk == 32


def test_candidates_are_tens_and_nearest_first():
    (own, *_) = space().bases()
    candidates = list(space().candidates(own))
    assert 10 < len(candidates) < 100
    first = candidates[0].launches["_recur"]
    assert abs(math.log2(first.block / own.launches["_recur"].block)) <= 1
    for tile in candidates:
        for kernel, x in tile.launches.items():
            assert space().refusal(kernel, x, tile.chunk) is None


def test_every_chunk_length_of_the_family_is_a_base():
    bases = space().bases()
    assert {tile.chunk for tile in bases} == set(space().spec.chunks) | {bases[0].chunk}
    assert {tile.strategy for tile in bases} == {"split", "short", "fused"}
    assert len({describe(tile) for tile in bases}) == len(bases)


def test_a_fused_tile_has_one_kernel_more_and_keeps_nothing():
    split, fused = (space().spec.tile(H200, 128, strategy=s) for s in ("split", "fused"))
    assert set(split.launches) == set(KERNELS)
    assert set(fused.launches) == {*KERNELS, "_fused"}
    assert split.keep
    assert not fused.keep
    assert fused.chunk < split.chunk


# --- The search, on a device whose times are known ---------------------------------------------


TWICE = {"split": ("_prepare", "_recur"), "short": (), "fused": ("_fused",)}
"""What a training step and a forward alone both launch."""


class Device:
    """Times follow a formula, so that the fastest launches are known; `wrong` are launches
    (kernel, launch) that fail their proof, `odd` change what is timed."""

    jobs = 4

    def __init__(self, space, workloads=(LONG,), wrong=(), odd=None):
        self.space, self.workloads = space, list(workloads)
        self.wrong, self.odd = set(wrong), odd or (lambda tile, result: result)
        self.proved, self.timed = [], []

    def cost(self, kernel, x, workload):
        best = {"_prepare": 64, "_recur": 32 if workload is LONG else 64}.get(kernel, 64)
        return (
            1.0
            + abs(math.log2(x.block / best))
            + 0.1 * abs(math.log2(x.num_warps / 2))
            + 0.1 * abs(x.num_stages - 2)
        )

    def prove(self, tiles):
        self.proved += tiles
        bad = [next((k for k, x in t.launches.items() if (k, x) in self.wrong), "") for t in tiles]
        return [f"accuracy, bfloat16: usual (0.5): {k} is wrong" if k else "" for k in bad]

    def time(self, tiles):
        self.timed += tiles
        return [self.odd(tile, self.result(tile)) for tile in tiles]

    def result(self, tile):
        workloads = []
        for w in self.workloads:
            kernels = {k: self.cost(k, x, w) for k, x in tile.launches.items()}
            again = sum(kernels[k] for k in TWICE[tile.strategy])
            workloads.append(
                {
                    "kernels": kernels,
                    "step": again + sum(kernels.values()) + (0.5 if tile.chunk == 32 else 0.0),
                    "bytes": dict.fromkeys(kernels, 10**6),
                    "outputs": {"o": torch.arange(8.0).double()},
                    "unequal": [],
                }
            )
        return {"workloads": workloads, "cache_bytes": 0}


def fastest(device, workload, chunk=64):
    found = {}
    for kernel in (*KERNELS, *SHORT):
        every, _ = device.space.launches(kernel, launch(), chunk)
        sound = [x for x in every if (kernel, x) not in device.wrong]
        found[kernel] = min(device.cost(kernel, x, workload) for x in sound)
    return found


def test_each_kernel_gets_its_own_fastest_launch_for_each_class():
    device = Device(space(), (LONG, BATCH))
    made = search(device, "a device", limit=100)
    assert made.chunk == 64
    for found, workload in zip(made.classes, (LONG, BATCH), strict=True):
        assert found.programs == workload.programs
        for kernel, x in found.launches.items():
            assert device.cost(kernel, x, workload) == fastest(device, workload)[kernel]
    assert made.classes[0].launches["_recur"] != made.classes[1].launches["_recur"]
    assert made.classes[0].milliseconds["step"] < made.classes[0].default_milliseconds["step"]
    every = [len(space().launches(k, launch(), 64)[0]) for k in KERNELS]
    bases = space().bases()
    assert made.tried < 1.5 * max(every) * len(bases) < sum(every) * len(bases) < math.prod(every)


def test_nothing_is_timed_before_it_is_proved():
    device = Device(space(), wrong=[("_recur", launch(32, 2, 2))])
    search(device, "a device", limit=100)
    proved = [describe(t) for t in device.proved]
    assert all(describe(t) in proved for t in device.timed)
    assert not any(t.launches["_recur"] == launch(32, 2, 2) for t in device.timed)


def test_a_fast_wrong_launch_is_refused_with_its_reason_and_its_neighbours_are_kept():
    wrong = ("_recur", launch(32, 2, 2))  # would be the fastest
    device = Device(space(), wrong=[wrong])
    made = search(device, "a device", limit=100)
    assert any("recur 32/2/2" in r.tile and "_recur is wrong" in r.reason for r in made.refused)
    found = made.classes[0].launches
    assert (("_recur", found["_recur"])) != wrong
    for kernel, x in found.items():  # also those that were first seen beside the wrong one
        assert device.cost(kernel, x, LONG) == fastest(device, LONG)[kernel]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unequal": ["dq"]}, "two runs differ in dq"),
        ({"outputs": {"o": torch.arange(8.0).double() * 1.1}}, "off the family's own tile"),
        ({"outputs": {"o": torch.full((8,), math.nan).double()}}, "not finite"),
        # 100 GB in a few milliseconds is beyond any memory.
        ({"bytes": dict.fromkeys(KERNELS, 10**11)}, "take"),
    ],
)
def test_what_cannot_be_right_at_full_size_is_refused_although_it_was_proved(change, reason):
    odd = launch(32, 2, 2)

    def broken(tile, result):
        if tile.launches["_recur"] == odd:
            result["workloads"][0] |= change
        return result

    made = search(Device(space(), odd=broken), "a device", limit=100)
    assert made.classes[0].launches["_recur"] != odd
    assert any(reason in r.reason for r in made.refused)


def test_a_candidate_that_crashes_or_hangs_while_it_is_timed_is_recorded():
    said = {launch(32, 2, 2): "killed by SIGSEGV", launch(32, 2, 3): "no answer after 60 s"}

    def dies(tile, result):
        return said.get(tile.launches["_recur"], result)

    made = search(Device(space(), odd=dies), "a device", limit=100)
    assert set(said.values()) <= {r.reason for r in made.refused}


def test_a_slower_or_hardly_faster_winner_leaves_the_familys_own_tile():
    device = Device(space())
    device.cost = lambda kernel, x, workload: 1.0 - 1e-3 * x.num_stages
    made = search(device, "a device", limit=20)
    own = next(t for t in space().bases() if t.chunk == made.chunk)
    assert made.classes[0].launches == own.launches


def test_where_the_familys_own_tile_fails_the_nearest_that_passes_takes_its_place():
    (own, *_) = space().bases()
    bad = ("_recur", own.launches["_recur"])
    device = Device(space(), wrong=[bad])
    made = search(device, "a device", limit=100)
    assert made.classes[0].launches["_recur"] != bad[1]
    for kernel, x in made.classes[0].launches.items():
        assert device.cost(kernel, x, LONG) == fastest(device, LONG)[kernel]
    assert made.classes[0].default_milliseconds["step"] > made.classes[0].milliseconds["step"]


def test_a_search_out_of_time_keeps_what_it_has():
    device = Device(space())
    made = search(device, "a device", deadline=time.monotonic())
    assert made.tried == 1
    assert made.classes[0].launches == space().bases()[0].launches


def test_when_nothing_passes_the_first_reason_is_told():
    device = Device(space())
    device.prove = lambda tiles: ["accuracy: off by 1" for _ in tiles]
    with pytest.raises(ProofError, match="off by 1"):
        search(device, "a device")


# --- Records ------------------------------------------------------------------------------------

widths = st.sampled_from([16, 32, 64, 100, 128, 192, 256])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(widths, widths), min_size=1, max_size=6, unique=True), widths, widths)
def test_the_nearest_record_serves_a_shape_never_seen(shapes, key_dim, value_dim):
    records = [record(key_dim=k, value_dim=v) for k, v in shapes]
    found = nearest(records, load_specs()["kda"], H200, key_dim, value_dim, "bfloat16", "3.6.0")
    assert found is not None
    # These launches fit every width, so the nearest in K decides, then the nearest in V.
    far = [(abs(math.log2(k / key_dim)), abs(math.log2(v / value_dim))) for k, v in shapes]
    mine = (found.key_dim, found.value_dim)
    assert far[shapes.index(mine)] == min(far)


def test_a_record_serves_no_shape_on_which_its_launches_cannot_be():
    staged = record(key_dim=64)
    for c in staged.classes:
        c.launches["_recur"] = launch(64, 1)  # [64, 64] on 32 threads; [256, 64] is too much
    spec = load_specs()["kda"]
    assert nearest([staged], spec, H200, 64, 128, "bfloat16", "3.6.0") is staged
    assert nearest([staged], spec, H200, 256, 128, "bfloat16", "3.6.0") is None


def test_a_record_serves_no_compiler_that_gets_it_wrong():
    older = record()
    for c in older.classes:
        c.launches["_prepare"] = launch(32, 8)  # triton#11366
    spec = load_specs()["kda"]
    assert nearest([older], spec, H200, 128, 128, "bfloat16", "3.5.0") is older
    assert nearest([older], spec, H200, 128, 128, "bfloat16", "3.6.0") is None


def test_records_of_other_operators_backends_and_narrower_types_serve_nothing():
    spec = load_specs()["kda"]
    for other in (record(operator="gla"), record(backend="h100")):
        assert nearest([other], spec, H200, 128, 128, "bfloat16", "3.6.0") is None
    assert nearest([record()], spec, H200, 128, 128, "float32", "3.6.0") is None


def test_a_record_of_the_present_templates_goes_before_an_older_one():
    old, new = record(content="of another template"), record(tried=7)
    spec = load_specs()["kda"]
    assert nearest([old, new], spec, H200, 128, 128, "bfloat16", "3.6.0") is new
    assert nearest([old], spec, H200, 128, 128, "bfloat16", "3.6.0") is old


programs = st.integers(1, 2**16)


@settings(deadline=None)
@given(st.lists(programs, min_size=1, max_size=4, unique=True), programs)
def test_a_rendered_table_has_one_launch_for_every_number_of_programs(measured, asked):
    made = record(programs=sorted(measured))
    for kernel, rows in launch_rows(made).items():
        assert rows[-1][0] is None
        limits = [most for most, _ in rows[:-1]]
        assert limits == sorted(set(limits))
        for c in made.classes:  # what was measured gets what was fastest
            row = next(x for most, x in rows if most is None or c.programs <= most)
            assert row == c.launches[kernel]
        assert next(x for most, x in rows if most is None or asked <= most)


def test_equal_launches_share_a_row():
    one = record(programs=(8, 32))
    one.classes[1].launches.update(one.classes[0].launches)
    assert launch_rows(one)["_recur"] == [(None, one.classes[0].launches["_recur"])]
    assert launch_rows(record(programs=(8, 32)))["_recur"][0][0] == 16


def test_of_two_lengths_the_longer_one_is_rendered():
    both = record(programs=(32,), tokens=1024)
    both.classes.extend(record(programs=(8, 32), tokens=65536).classes[1:])
    (row,) = launch_rows(both)["_recur"]
    assert row == (None, both.classes[1].launches["_recur"])
    assert row[1] != both.classes[0].launches["_recur"]


def test_the_widest_table_is_formatted(tmp_path):
    wide = record(programs=(512, 1024, 2048, 4096))
    for n, c in enumerate(wide.classes):
        c.launches.update({k: launch(128, 8, 1 + n) for k in KERNELS})
    table = {"bfloat16": launch_rows(wide)}
    text = (
        _environment()
        .get_template("linear_attention/launches.j2")
        .render(launches=table, target="cuda")
    )
    file = tmp_path / "launches.py"
    file.write_text(f"import torch\n\n{text}\n", encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "100", file]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_more_classes_than_the_table_holds_are_refused():
    many = [Workload(batch=1, tokens=8, heads=n, value_heads=n) for n in (1, 2, 4, 8, 16)]
    with pytest.raises(InputError, match="more than 4"):
        tune(load_specs()["kda"], H200, 128, 128, many)


def test_the_nearest_class_is_nearest_in_parallelism_then_in_length():
    both = record(programs=(8, 128), tokens=1024)
    longer = record(programs=(128,), tokens=65536)
    both.classes.extend(longer.classes)
    assert nearest_class(both, 6, 65536).programs == 8
    assert nearest_class(both, 100, 50000).tokens == 65536
    assert nearest_class(both, 100, 2000).tokens == 1024


def test_a_record_is_kept_by_content_in_the_users_cache(tmp_path):
    path = save(record())
    assert path.parent == cache_folder() == tmp_path / "cache" / "adapter-agent" / "tuned"
    assert record().content[:12] in path.name
    other = record(content="f" * 64)
    assert save(other) != path
    assert {r.content for r in known_records()} >= {record().content, other.content}
    (cache_folder() / "broken.json").write_text("{", encoding="utf-8")
    assert len(known_records()) >= 2  # a damaged file of the cache is passed over
    assert save(record(), tmp_path).name == "h200-kda-128x128-bfloat16.json"


def test_the_content_changes_with_everything_that_the_result_depends_on():
    spec = load_specs()["kda"]
    one = content_of(spec, H200, "3.6.0", "NVIDIA H200")
    others = [
        content_of(load_specs()["gla"], H200, "3.6.0", "NVIDIA H200"),
        content_of(spec, load_backend("h100"), "3.6.0", "NVIDIA H200"),
        content_of(spec, H200, "3.7.1", "NVIDIA H200"),
        content_of(spec, H200, "3.6.0", "NVIDIA H100"),
    ]
    assert len({one, *others}) == 5


def test_another_length_is_not_tuned_again_another_parallelism_is():
    # fla PR#663: every new length of a packed batch was tuned again.
    known = [record(programs=(32, 128))]
    asked = known[0].content, 128, 128, "bfloat16"
    assert recall(known, *asked, [32]) is known[0]
    assert recall(known, *asked, [32, 4096]) is None
    assert recall(known, "another template", 128, 128, "bfloat16", [32]) is None


def test_shipped_records_are_sound():
    for path in sorted(shipped_folder().glob("*.json")):
        shipped = read_document(Record, path)
        assert path.name == file_name(shipped, shipped=True)
        spec, backend = load_specs()[shipped.operator], load_backend(shipped.backend)
        found = nearest(
            [shipped],
            spec,
            backend,
            shipped.key_dim,
            shipped.value_dim,
            shipped.dtype,
            shipped.triton,
        )
        assert found is shipped, path.name


# --- What is rendered -----------------------------------------------------------------------------


def test_the_same_record_gives_the_same_bytes_and_its_hash_stands_in_the_header():
    spec, sizes = load_specs()["kda"], {"key_dim": 128, "value_dim": 128, "heads": 32}
    template = template_sha256(spec)
    plain, tuned = render(spec, H200, sizes), render(spec, H200, sizes, record=record())
    again = render(spec, H200, sizes, record=record())
    assert tuned.files == again.files
    assert plain.tuning_sha256 is None
    assert tuned.tuning_sha256 == record_sha256(record()) != record_sha256(record(tried=2))
    assert f"tuning     {tuned.tuning_sha256}" in tuned.files["kda.py"]
    assert tuned.files["tuning_kda.json"] == to_json(record())
    assert tuned.template_sha256 == plain.template_sha256 == template_sha256(spec) == template
    assert tuned.tile.chunk == 64


def test_the_table_of_launches_picks_by_the_number_of_programs():
    many = record(programs=(8, 128))
    rows = {"float32": {"_recur": [(None, launch(16))]}, "bfloat16": launch_rows(many)}
    text = (
        _environment()
        .get_template("linear_attention/launches.j2")
        .render(launches=rows, target="cuda")
    )
    scope: dict = {"torch": torch}
    exec(text, scope)
    few, wide = (c.launches["_recur"] for c in many.classes)
    pick = scope["_launch"]
    for n, x in ((1, few), (8, few), (32, few), (33, wide), (10**6, wide)):
        options = {"num_warps": x.num_warps, "num_stages": x.num_stages}
        assert pick("_recur", torch.bfloat16, n) == (x.block, options)
    assert pick("_recur", torch.float32, 33)[0] == 16


# --- What happens in the processes ----------------------------------------------------------------


def test_the_median_time_comes_from_the_clock_that_is_given():
    asked = []

    def clock(call, repeats):
        asked.append(repeats)
        call()
        return [5.0] * (repeats - 1) + [1000.0]

    assert median(lambda: None, clock, budget=100.0) == 5.0
    assert asked == [3, 20]


def test_a_recorded_kernel_is_replayed_with_the_same_arguments():
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((grid, args, options))

    recorded = Recorded(Kernel())
    x = torch.zeros(3, 5)
    recorded[(1,)](x)
    assert recorded.launches == []  # a hundred timed steps must not stay in memory
    recorded.remembers = True
    recorded[(7,)](x, x, 2, BT=16)
    recorded.replay()
    assert len(calls) == 3
    assert calls[1] == calls[2] == ((7,), (x, x, 2), {"BT": 16})
    assert recorded.bytes() == 60  # a tensor that is given twice is read once


def test_a_sample_sees_every_channel():
    x = torch.zeros(1, 8192, 4, 128)
    x[..., 77] = 1.0
    assert sample(x).sum() > 0


class Tampered(Bench):
    """A bench whose candidates' modules are edited after they are rendered."""

    change = staticmethod(lambda text: text)

    def write(self, tile):
        subject = super().write(tile)
        text = subject.module.read_text(encoding="utf-8")
        subject.module.write_text(self.change(text), encoding="utf-8")
        return subject


def bench(tmp_path, change=lambda text: text) -> Bench:
    tiny = space("gated_delta_rule", 16, 16, "float32")
    one = Workload(batch=1, tokens=20, heads=1, value_heads=1)
    made = Tampered(space=tiny, workloads=[one], folder=tmp_path, device="interpreter", jobs=2)
    made.change = change
    return made


def small(bench: Bench) -> Tile:
    """Chunks of 16, which the interpreter walks sooner."""
    return replace(bench.space.bases()[0], chunk=16)


def test_a_candidate_is_proved_and_timed_in_processes_of_their_own(tmp_path):
    sound = bench(tmp_path)
    tile = small(sound)
    assert sound.prove([tile]) == [""]
    (result,) = sound.time([tile])
    (measured,) = result["workloads"]
    assert measured["step"] > 0
    assert measured["unequal"] == []
    assert {"o", "dq", "dk", "dv", "dg", "dbeta"} <= set(measured["outputs"])
    assert all(ms > 0 for ms in measured["kernels"].values())
    assert all(count > 0 for count in measured["bytes"].values())


@pytest.mark.parametrize(
    "o",
    ["o * 1.01", "o + 0.1 * (o - o.detach())"],  # the second is right forward, wrong backward
    ids=["forward", "backward"],
)
def test_a_wrong_candidate_is_refused_however_fast(tmp_path, monkeypatch, o):
    monkeypatch.setattr("codegen.tuning.bench.CASES", ("usual",))
    wrapper = f"""
_right = chunk_gated_delta_rule


def chunk_gated_delta_rule(*args, **options):
    o, state = _right(*args, **options)
    return {o}, state
"""
    wrong = bench(tmp_path, lambda text: text + wrapper)
    (reason,) = wrong.prove([small(wrong)])
    assert "accuracy" in reason


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "killed by SIGSEGV"),
        ("raise MemoryError('out of resource: shared memory')\n", "out of resource"),
    ],
    ids=["crash", "error"],
)
def test_a_candidate_that_crashes_or_fails_is_a_refusal(tmp_path, fault, reason):
    broken = bench(tmp_path, lambda text: text + "\n" + fault)
    (result,) = broken.time([small(broken)])
    assert isinstance(result, str)
    assert reason in result


def test_a_candidate_that_hangs_is_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr("codegen.tuning.bench.START_SECONDS", 6)
    broken = bench(tmp_path, lambda text: text + "\nimport time\ntime.sleep(3600)\n")
    (result,) = broken.time([small(broken)])
    assert isinstance(result, str)
    assert "no answer after 6 s" in result


def test_a_worker_is_gone_when_it_is_left(tmp_path):
    broken = bench(tmp_path, lambda text: text + "\nimport time\ntime.sleep(3600)\n")
    with Worker(broken._request(small(broken)), interpret=True) as worker:
        assert worker.process.poll() is None
    assert worker.process.poll() is not None


# --- Who asks for it ------------------------------------------------------------------------------


def test_without_the_device_the_error_says_what_to_do():
    if torch.accelerator.is_available():
        pytest.skip("an accelerator is here")
    with pytest.raises(InputError, match=r"no NVIDIA H200.*nearest shipped"):
        device_here(H200)
    with pytest.raises(InputError, match="nothing to tune"):
        device_here(load_backend("ascend-910c"))


def test_what_was_found_is_kept_and_serves_every_length(monkeypatch):
    monkeypatch.setattr("codegen.tuning.tune.device_here", lambda backend: ("interpreter", "a CPU"))
    monkeypatch.setattr("codegen.tuning.bench.CASES", ("usual",))
    monkeypatch.setattr("codegen.tuning.bench.MEASURE_MILLISECONDS", 1)
    spec = load_specs()["gated_delta_rule"]

    def asked(tokens, heads=1):
        one = Workload(batch=1, tokens=tokens, heads=heads, value_heads=heads)
        return tune(spec, H200, 16, 16, [one], dtype="float32", minutes=0)

    first = asked(tokens=17)
    assert first.path is not None
    assert read_document(Record, first.path) == first.record
    assert first.record.tried == 1
    assert "1 candidates, 0 refused" in summary(first)[-1]
    monkeypatch.setattr("codegen.tuning.search.search", lambda *_, **__: pytest.fail("searched"))
    again = asked(tokens=4096)
    assert again.path is None
    assert again.record == first.record
    assert "found before" in summary(again)[-1]
    with pytest.raises(pytest.fail.Exception):
        asked(tokens=17, heads=64)


def test_the_plain_command_lists_records_and_names_its_faults(capsys):
    save(record(programs=(8, 32)))
    assert main(["--list"]) == 0
    assert "h200 kda 128x128 bfloat16: 8, 32 heads; chunk 64, split" in capsys.readouterr().out
    assert main(["no_such_operator"]) == 2
    assert "one of:" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["kda", "--workloads", "B1T8H3HV4"])


def test_a_set_is_made_with_the_nearest_record_and_falls_back_when_that_fails(
    tmp_path, monkeypatch
):
    proofs = []

    def verify(subject, backend, cache, progress):
        tuned = "tuning     none" not in subject.module.read_text(encoding="utf-8")
        proofs.append(tuned)
        return [Gate(name="fits", passed=not (tuned and len(proofs) > 1), ran_on="x", detail="")]

    monkeypatch.setattr("codegen.verify.harness.verify", verify)
    analysis = SimpleNamespace(model_type="kimi", operators=[])
    sizes = {"key_dim": 64, "value_dim": 64, "heads": 32}
    operators = OperatorMap(backend="h200", operators=[generated("kda", sizes)])
    folder = tmp_path / "set"

    made = generate(analysis, operators, H200, folder, records=[record()])
    assert made.kernels[0].tuning_sha256 == record_sha256(record())
    assert json.loads((folder / "tuning_kda.json").read_text("utf-8"))["chunk"] == 64

    said = []
    made = generate(analysis, operators, H200, folder, records=[record()], progress=said.append)
    assert proofs == [True, True, False]
    assert made.kernels[0].tuning_sha256 is None
    assert not (folder / "tuning_kda.json").exists()
    assert any("tuned launches fail" in line for line in said)
    assert read_document(KernelSet, folder / "manifest.json") == made
