"""What a step gives a GPU to do, as the programs count it: on a CPU, and with fake tensors of a GPU."""

import json
import os
import subprocess
from pathlib import Path

import operations
import pytest
import torch
from dispatched import Dispatched

ROOT = Path(__file__).parents[2]
ENVIRONMENT = "MASKFLEET_CUDA_PYTHON"


def test_views_and_empty_tensors_are_no_kernels() -> None:
    x = torch.ones(3, 4)
    with Dispatched() as found:
        _ = [x.t().view(4, 3), x[1], torch.empty_like(x), x.detach(), x + x, torch.zeros(3)]
    assert dict(found.kernels) == {"add": 1, "zeros": 1}


def test_each_layer_adds_as_many_kernels_as_the_last() -> None:
    recipe = operations.small("roberta-base")
    one, two, three = (operations.counted(operations.with_layers(recipe, layers)) for layers in (1, 2, 3))
    assert two.forward - one.forward == three.forward - two.forward > 10
    assert two.backward - one.backward == three.backward - two.backward > 10
    assert one.optimizer == three.optimizer
    assert three.waits == []


@pytest.mark.long
@pytest.mark.parametrize("family", operations.RECIPES)
def test_no_step_waits(family: str) -> None:
    recipe = operations.with_layers(operations.small(operations.RECIPES[family]), 2)
    assert operations.counted(recipe).waits == []


@pytest.mark.long
def test_every_familys_forward_pass_on_a_gpu_that_is_not_there() -> None:
    """The tensors have no numbers: what depends on them raises."""
    python = os.environ.get(ENVIRONMENT)
    if python is None:
        pytest.skip(
            f"set {ENVIRONMENT} to the python that the head of tests/bench/fake_cuda.py says how to install"
        )
    ran = subprocess.run(
        [python, "tests/bench/fake_cuda.py", "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert {one["family"] for one in found} == set(operations.RECIPES)
    for one in found:
        assert one["waits"] == [], one
        assert one["losses"] == ["float32"], one
        assert one["products"] == ["bfloat16"], one
        relative = one["family"].startswith(("DeBERTa", "XLNet"))
        expected = "fused forward" if one["dropout"] or relative else "_flash_attention_forward"
        assert expected in one["attention"], one
        assert one["dropout"] is False or one["attention"][expected] >= 6
