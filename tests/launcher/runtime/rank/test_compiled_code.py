"""Compiled code on the machine: only in a folder that is the user's own."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints.gather import SingleRank
from encoder_core.trials.compile_trial import TriedCompilation
from launcher.runtime.rank import kernels as compilation
from launcher.runtime.rank.kernels import CompiledCode, agree_on_compilation
from launcher.runtime.recipe.load import with_assignments
from launcher.runtime.run.record import open_run
from tests.support.ranks.checkpointers import Silent

NAME = "0123456789abcdef"


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / ".cache/maskfleet/compiled"
    folder.mkdir(parents=True)
    os.chmod(folder, 0o777)
    assert folder not in CompiledCode(NAME, tmp_path).folder.parents
    os.chmod(folder, 0o700)
    assert folder in CompiledCode(NAME, tmp_path).folder.parents


@pytest.mark.parametrize(("error", "compiled"), [(1e-7, True), (1.1e-4, False)])
def test_the_process_that_tries_decides(
    fresh_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: float, compiled: bool
) -> None:
    """Its error and its bound count at a first start; the rank itself compares nothing."""
    tried = TriedCompilation(1.0, 3, error, 1e-4)
    monkeypatch.setattr(compilation, "try_in_process", lambda *_: tried)
    monkeypatch.setattr(compilation, "try_compilation", lambda *_, **__: TriedCompilation(1.0, 3))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = open_run(fresh_run)
    run = replace(run, recipe=with_assignments(run.recipe, ("compile=true",)))
    pieces, found = agree_on_compilation(run, run.tokenizer(), SingleRank(), Silent(), "here")
    assert found is not None
    assert (pieces is not None, found.compiled, found.error, found.bound) == (compiled, compiled, error, 1e-4)
