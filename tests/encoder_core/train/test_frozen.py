"""Frozen parameters: saved once, restored at any stage and topology, never moved."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.ranks import frozen
from tests.support.ranks import small_training as small
from tests.support.ranks.forked import run_cases
from tests.support.ranks.frozen import Case
from tests.support.ranks.small_training import Setting

pytestmark = pytest.mark.cluster

CASES = [
    Case(1, Setting(1), Setting(3)),
    Case(2, Setting(2, "bf16"), Setting(1, "bf16")),
    Case(3, Setting(3), Setting(2)),
    Case(4, Setting(0), Setting(1)),
    Case(5, Setting(3, "bf16"), Setting(2, "bf16")),
    Case(6, Setting(1, "bf16"), Setting(3, "bf16")),
    Case(7, Setting(2), Setting(0)),
]


@pytest.mark.parametrize(("world", "cases"), [(1, CASES[:4]), pytest.param(3, CASES, marks=pytest.mark.long)])
def test_a_random_part_frozen_is_loaded_as_it_was_saved(world: int, cases: list[Case], tmp_path: Path) -> None:
    saved = run_cases(frozen.train_and_save, 2, cases, str(tmp_path))
    loaded = run_cases(frozen.load, world, cases, str(tmp_path))
    first = dict(small.fresh_model().named_parameters())
    for case, before, after in zip(cases, saved, loaded, strict=True):
        state = small.assemble(before)  # every element once
        assert small.identical(small.assemble(after), state), case
        dtype = torch.bfloat16 if case.saved.precision == "bf16" else torch.float32
        for name, kinds in state.items():
            unmoved = np.array_equal(kinds["master"], first[name].detach().to(dtype).float().flatten())
            assert unmoved == (name in case.frozen), (case, name)
            assert kinds["exp_avg"].any() == (name not in case.frozen), (case, name)
