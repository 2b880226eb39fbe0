"""What a step gives a GPU to do, as the programs count it on a CPU."""

import operations
import pytest
import torch
from dispatched import Dispatched


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
