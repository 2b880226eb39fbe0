"""The mean of checkpoints is NumPy's in float64, however many they are and however ranks cut them."""

import random
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints.attempt import claim
from checkpoints.gather import SingleRank
from checkpoints.listing import list_committed, read_manifest
from checkpoints.load import CheckpointReader, MeanReader
from checkpoints.save import Saver
from data_service.store.open import open_store
from encoder_core.train.zero_state import Fragment

SHAPES = {"large": ((1 << 19) + 3, 2), "small": (7,), "scalar": (), "none": (0, 5)}


@pytest.mark.parametrize("count", [2, 3, 7])
def test_it_is_numpys_over_ranges_and_pieces(tmp_path: Path, count: int) -> None:
    store, draw = open_store(tmp_path), random.Random(count)
    saver, weights = Saver(store, claim(store), SingleRank()), []
    for step in range(1, count + 1):
        generator = torch.Generator().manual_seed(step)
        state = {name: torch.randn(shape, generator=generator) * 10 ** (step - 3) for name, shape in SHAPES.items()}
        fragments = []
        for name, tensor in state.items():
            cut = draw.randint(0, tensor.numel())
            for start, part in ((0, tensor.flatten()[:cut]), (cut, tensor.flatten()[cut:])):
                fragments.append(Fragment(name, start, {"master": part, "average": -part}))
        saver.begin(step, fragments, SHAPES, {})
        saver.commit()
        weights.append({name: tensor.numpy() for name, tensor in state.items()})
    saver.close()
    with ExitStack() as reading:
        manifests = [read_manifest(store, mark) for mark in reversed(list_committed(store))]
        mean = MeanReader([reading.enter_context(CheckpointReader(store, manifest)) for manifest in manifests])
        for name, shape in SHAPES.items():
            total = sum((each[name].astype(np.float64) for each in weights), np.zeros(shape))
            found = mean.read_full(name)
            assert found.shape == shape
            assert found.numpy().tobytes() == (total / count).astype(np.float32).tobytes()
