"""Which rank the launcher names when a job ends, read from the report of torchrun."""

import pytest

from runtime.launch import _failure, _first_failed


def block(rank, code, host="node-3"):
    return (
        f"  time      : 2026-11-30_12:00:00\n  host      : {host}\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 4{rank})\n"
        "  error_file: <N/A>\n  traceback : To enable traceback see: https://pytorch.org\n"
    )


def report(root, *others):
    failures = "".join(f"[{i}]:\n{b}" for i, b in enumerate(others, start=1))
    return (
        "=====\nruntime FAILED\n-----\nFailures:\n"
        f"{failures or '  <NO_OTHER_FAILURES>'}\n-----\n"
        f"Root Cause (first observed failure):\n[0]:\n{root}=====\n"
    )


@pytest.mark.parametrize(
    ("log", "rank", "cause"),
    [
        (report(block(2, 1)), 2, "failed (status 1)"),
        (report(block(2, 1), block(0, 1)), 2, "failed (status 1)"),
        # The peer of a rank that was killed fails as fast, and is reported as the cause.
        (report(block(0, 1), block(1, -9)), 1, "was killed by SIGKILL, as for want of memory"),
        (report(block(3, -11)), 3, "was killed by SIGSEGV"),
        # torchrun ends the ranks that are left with SIGTERM: that is no cause.
        (report(block(1, 1), block(0, -15)), 1, "failed (status 1)"),
        ("torchrun itself broke", 0, "failed (status 7)"),
    ],
    ids=["one", "first", "killed", "crashed", "ended", "unreported"],
)
def test_the_rank_that_ended_the_job(log, rank, cause):
    failed = _first_failed(log)
    assert failed.rank == rank
    assert failed.cause(7) == cause


def test_the_message_has_rank_host_cause_and_its_last_lines(tmp_path):
    (tmp_path / "attempt" / "1").mkdir(parents=True)
    (tmp_path / "attempt" / "1" / "stderr.log").write_text(
        "".join(f"line {i}\n" for i in range(50))
    )
    (tmp_path / "torchrun.log").write_text(report(block(0, 1), block(1, -9)))
    message = str(_failure("train", tmp_path, tmp_path / "torchrun.log", 1))
    first, *rest = message.splitlines()
    assert first.startswith("train: rank 1 on node-3 was killed by SIGKILL")
    assert str(tmp_path) in first
    assert rest[-1] == "line 49"
    assert len(rest) == 12
