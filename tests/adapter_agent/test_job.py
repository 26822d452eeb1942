"""Fields of a job by `--set`."""

import pytest

from adapter_agent.job import with_settings
from analyzers.errors import InputError
from strategies.schema import Job

JOB = Job(model="/m", cluster="/c.yaml", backend="cpu")


def test_fields_of_any_depth_are_set():
    job = with_settings(
        JOB,
        [
            "lora.dropout=0.05",
            "lora.targets=[attention, dense]",
            "lora.ranks.attention=32",
            "optimizer.betas=[0.9, 0.99]",
            "packing=false",
            "evaluation.every=5",
        ],
    )
    assert (job.lora.dropout, job.lora.targets) == (0.05, ["attention", "dense"])
    assert job.lora.ranks == {"attention": 32}
    assert job.optimizer.betas == (0.9, 0.99)
    assert (job.packing, job.evaluation.every) == (False, 5)
    assert (job.lora.rank, job.seed) == (JOB.lora.rank, JOB.seed)
    assert with_settings(JOB, []) == JOB


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("lora.dropout", "'lora.dropout' is not KEY=VALUE"),
        ("lora.droput=0.1", "lora.droput: there is no such field.*dropout"),
        ("speed=1", "speed: there is no such field"),
        ("steps=5", "steps: has an option of its own.*--steps"),
        ("seed.a=5", "seed: has no fields of its own"),
        ("lora.dropout=a lot", "lora.dropout: Input should be a valid number"),
        ("lora.targets=[router]", "lora.targets.0: Input should be"),
        ("lora.targets=[attention", "'\\[attention' is not YAML"),
    ],
)
def test_what_cannot_be_set_is_named(setting, said):
    with pytest.raises(InputError, match=rf"--set: .*{said}"):
        with_settings(JOB, [setting])
