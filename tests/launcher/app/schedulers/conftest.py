"""Settings that every backend is given."""

import pytest

HOSTILE = 's3://bucket/runs/it\'s "a" run; $(touch /tmp/no) `x` $HOME & {{ x }} é'  # a legal key, all the same


@pytest.fixture
def gpus() -> dict[str, object]:
    """Two nodes with GPUs, a secret variable and assignments."""
    return {
        "run": HOSTILE,
        "name": "base",
        "nodes": 2,
        "gpus": 8,
        "cpus": 64,
        "memory": "900GiB",
        "shared_memory": "64GiB",
        "environment": ("HF_TOKEN", "WANDB_API_KEY"),
        "assignments": ("zero=2", "name=it's $(HOME)"),
    }


@pytest.fixture
def cpus() -> dict[str, object]:
    """One node without GPUs, and nothing that may be left out."""
    return {
        "run": "s3://bucket/runs/base",
        "name": "base",
        "nodes": 1,
        "gpus": 0,
        "cpus": 4,
        "memory": "8GiB",
        "shared_memory": "1GiB",
    }


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Values that are in the environment of whoever launches, and must stay there."""
    values = {
        "HF_TOKEN": "hf_value_1",
        "WANDB_API_KEY": "wandb_value_2",
        "RAY_AUTH_TOKEN": "ray_value_3",
        "AWS_SECRET_ACCESS_KEY": "aws_value_4",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return tuple(values.values())
