"""Parameters with other kinds of state than the rest: saved by name, read back, and refused to another optimizer."""

import re
from pathlib import Path

import pytest
import torch

from checkpoints.attempt import claim
from checkpoints.commit import CommittedSave, FailedSave
from checkpoints.errors import CheckpointError
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import list_committed, read_manifest
from checkpoints.load import CheckpointReader, ensure_same_optimizer
from checkpoints.save import Saver
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.train.zero_state import Fragment

SHAPES = {"matrix": (4, 3), "bias": (4,)}
OWN: dict[str, tuple[str, ...]] = {"matrix": ("master", "momentum")}
ADAM = ("exp_avg", "exp_avg_sq", "master")


def _fragments(kinds: dict[str, tuple[str, ...]]) -> list[Fragment]:
    torch.manual_seed(3)
    return [
        Fragment(name, 0, {kind: torch.randn(torch.Size(shape).numel()) for kind in kinds.get(name, ADAM)})
        for name, shape in SHAPES.items()
    ]


def _save(store: Store, fragments: list[Fragment]) -> CommittedSave | FailedSave:
    saver = Saver(store, claim(store), SingleRank())
    saver.begin(1, fragments, SHAPES, {}, own_kinds=OWN)
    return saver.commit()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


@pytest.fixture
def manifest(store: Store) -> CheckpointManifest:
    assert isinstance(_save(store, _fragments(OWN)), CommittedSave)
    [mark] = list_committed(store)
    return read_manifest(store, mark)


def test_each_parameter_has_its_own_kinds_back(store: Store, manifest: CheckpointManifest) -> None:
    assert (manifest.kinds, manifest.own_kinds) == (ADAM, OWN)
    with CheckpointReader(store, manifest) as reader:
        for fragment in _fragments(OWN):
            for kind, tensor in fragment.tensors.items():
                assert torch.equal(reader.read_full(fragment.name, kind).flatten(), tensor)
        with pytest.raises(CheckpointError, match=r"exp_avg\b.*matrix"):
            reader.read_full("matrix", "exp_avg")


def test_a_missing_kind_is_no_checkpoint(store: Store) -> None:
    outcome = _save(store, _fragments({}))
    assert isinstance(outcome, FailedSave)
    kinds = r"\bmatrix\b.*\['exp_avg', 'exp_avg_sq', 'master'\].*\['master', 'momentum'\]"
    assert re.search(kinds, outcome.reason)


def test_another_optimizers_state_is_refused_and_says_what_to_do(manifest: CheckpointManifest) -> None:
    ensure_same_optimizer(manifest, OWN, "runs/one")
    with pytest.raises(CheckpointError) as to_adamw:
        ensure_same_optimizer(manifest, {}, "runs/one")
    kinds = r"\bmatrix\b.* master, momentum\b.* exp_avg, exp_avg_sq, master\b"
    assert re.search(kinds, to_adamw.value.problem)
    assert "--set start=runs/one" in to_adamw.value.remedy
    plain = manifest.model_copy(update={"own_kinds": {}})
    with pytest.raises(CheckpointError, match=r"matrix.* exp_avg, exp_avg_sq, master\b.* master, momentum"):
        ensure_same_optimizer(plain, OWN, "runs/one")
