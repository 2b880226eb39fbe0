"""Only what this user's own training wrote, unchanged, is ever loaded again."""

import random
from pathlib import Path

import pytest

from launcher.after.finetune.resume import Scratch, open_scratch, seal
from launcher.errors import RunError

TRAINING = {"weights": "a", "settings": {"lr": 1e-3}}


def opened(folder: Path, **changes: object) -> Scratch:
    with open_scratch(folder, {**TRAINING, **changes}) as scratch:
        return scratch


def checkpoint(folder: Path, step: int) -> Path:
    made = folder / f"checkpoint-{step}"
    (made / "1_Pooling").mkdir(parents=True)
    (made / "optimizer.pt").write_bytes(bytes(range(200)))
    (made / "1_Pooling/config.json").write_text("{}")
    seal(made)
    return made


@pytest.mark.parametrize("draw", range(12))
def test_a_checkpoint_that_changed_in_any_way_is_left_out(tmp_path: Path, draw: int) -> None:
    scratch, chance = opened(tmp_path / "s"), random.Random(draw)
    good, bad = checkpoint(scratch.folder, 9), checkpoint(scratch.folder, 100)
    assert scratch.newest() == bad
    victim = chance.choice(sorted(path for path in bad.rglob("*") if path.is_file()))
    match chance.randrange(4):
        case 0:
            victim.unlink()
        case 1:
            data = bytearray(victim.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            victim.write_bytes(data)
        case 2:
            victim.write_bytes(victim.read_bytes()[:-1])
        case _:
            (bad / "pytorch_model.bin").write_bytes(b"from somebody else")
    assert scratch.newest() == good


def test_a_folder_of_others_or_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(RunError, match=r"\bempty\b"):
        opened(tmp_path)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(RunError, match=r"\bothers\b"):
        opened(shared)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_a_scratch_that_is_done_leaves_nothing(tmp_path: Path) -> None:
    scratch = opened(tmp_path / "s")
    checkpoint(scratch.folder, 3)
    assert opened(tmp_path / "s").newest() is not None
    scratch.remove()
    assert not scratch.folder.exists()


def test_another_training_does_not_find_them(tmp_path: Path) -> None:
    checkpoint(opened(tmp_path / "s").folder, 3)
    assert opened(tmp_path / "s", weights="b").newest() is None


def test_two_trainings_do_not_share_it(tmp_path: Path) -> None:
    with open_scratch(tmp_path / "s", TRAINING), pytest.raises(RunError, match=r"\banother\b.*\busing\b"):
        opened(tmp_path / "s")
    assert opened(tmp_path / "s").newest() is None
