"""Figures of the evidence page outlive the folder that they were measured in."""

from pathlib import Path

import pytest
from evidence.figures import Basis, Figures, RunFigures, keep

from launcher.errors import OptionError

BASIS = Basis(digest="a", text={"technical": 10, "reviews": 1}, examples={}, sts=("sts-words",))


def run(loss: float) -> RunFigures:
    return RunFigures(tokens=100, losses={10: loss}, frozen={0: {"probe sst2 accuracy": 0.5}})


def test_runs_of_another_folder_stand_beside_those_of_this_one(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    first = Figures(basis=BASIS, runs={"bert": {2: run(4.0), 1: run(5.0)}, "albert": {1: run(7.0)}})
    assert keep(first, file).loss("bert", 10).values == {1: 5.0, 2: 4.0}
    found = keep(Figures(basis=BASIS, runs={"bert": {2: run(4.5), 3: run(6.0)}}), file)
    assert found.loss("bert", 10).values == {1: 5.0, 2: 4.5, 3: 6.0}
    assert found.loss("albert", 10).mean == 7.0
    assert found.frozen("bert", 0, "probe sst2 accuracy").n == 3
    assert keep(Figures(basis=BASIS, runs={}), file) == found, "the file has all of them"


@pytest.mark.parametrize("text", [b"{}", b"no JSON", None], ids=["empty", "noise", "another text"])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: bytes | None) -> None:
    file = tmp_path / "figures.json"
    if text is None:
        keep(Figures(basis=BASIS.model_copy(update={"digest": "b"}), runs={}), file)
    else:
        file.write_bytes(text)
    before = file.read_bytes()
    with pytest.raises(OptionError, match="--figures"):
        keep(Figures(basis=BASIS, runs={}), file)
    assert file.read_bytes() == before
