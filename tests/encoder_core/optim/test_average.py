"""The average of weights against its definition in NumPy, on tensors of any size, cut anywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.optim.average import AVERAGE, WeightAverage

DECAYS = st.floats(1e-3, 0.99999)


def follow(weights: list[np.ndarray], decay: float, cuts: list[int]) -> np.ndarray:
    """The average after all weights but the first, which begin it; tensors are cut at these places."""
    flats = [torch.from_numpy(part.copy()) for part in np.split(weights[0], sorted(cuts))]
    state: dict[Tensor, dict[str, Tensor]] = {flat: {} for flat in flats}
    average = WeightAverage(decay, {"all": flats, "other": []}, state)
    for after in weights[1:]:
        for flat, part in zip(flats, np.split(after, sorted(cuts)), strict=True):
            flat.copy_(torch.from_numpy(part))
        average.update_average("other")  # whose weights are elsewhere
        average.update_average("all")
    return np.concatenate([state[flat][AVERAGE].numpy() for flat in flats])


def by_numpy(weights: list[np.ndarray], decay: float) -> np.ndarray:
    d, average = np.float32(decay), weights[0]
    for after in weights[1:]:
        average = d * average + (np.float32(1) - d) * after
    return average


@given(st.integers(0, 300), DECAYS, st.integers(0, 2**32 - 1), st.data())
def test_it_is_numpys_formula_bit_for_bit(size: int, decay: float, seed: int, data: st.DataObject) -> None:
    draw = np.random.default_rng(seed)
    weights = [(draw.standard_normal(size) * 10.0 ** draw.integers(-9, 3)).astype(np.float32) for _ in range(4)]
    cuts = data.draw(st.lists(st.integers(0, size), max_size=3))
    found = follow(weights, decay, cuts)
    assert found.dtype == np.float32
    assert found.tobytes() == by_numpy(weights, decay).tobytes()


def test_a_tensor_larger_than_a_piece() -> None:
    weights = list(np.random.default_rng(1).standard_normal((3, (1 << 22) + 13)).astype(np.float32))
    assert follow(weights, 0.999, []).tobytes() == by_numpy(weights, 0.999).tobytes()


@pytest.mark.parametrize("size", [0, 1, (1 << 22) + 13])
def test_weights_and_average_change_places(size: int) -> None:
    weight = torch.randn(size)
    state: dict[Tensor, dict[str, Tensor]] = {weight: {}}
    average = WeightAverage(0.9, {"all": [weight]}, state)
    before = weight.clone()
    weight.mul_(-2)
    average.swap_with_weights()
    assert torch.equal(weight, before)
    assert torch.equal(state[weight][AVERAGE], -2 * before)


def test_weights_that_stay_are_their_own_average() -> None:
    """However many updates: no drift by rounding from where it began."""
    weight = torch.randn(1000)
    state: dict[Tensor, dict[str, Tensor]] = {weight: {}}
    average = WeightAverage(0.9999, {"all": [weight]}, state)
    for _ in range(500):
        average.update_average("all")
    assert torch.allclose(state[weight][AVERAGE], weight, rtol=2e-7, atol=0)
