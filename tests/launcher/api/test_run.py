"""`import maskfleet`: what notebooks and scripts see of a run that has trained."""

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import run_group
from small_runs import STEPS, final_state, history, new_run, prepare_corpus
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import maskfleet
from launcher.errors import MissingPackage, RunError
from launcher.rank_data import checksum

Item = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two phases that has trained."""
    folder = tmp_path_factory.mktemp("api")
    prepare_corpus(folder)
    uri = new_run(folder, "run")
    ended = run_group(uri, 1)
    assert ended.codes == [0], ended.output
    return uri


@pytest.fixture(scope="module")
def run(uri: str) -> maskfleet.Run:
    return maskfleet.open_run(uri)


@pytest.fixture(scope="module")
def items(run: maskfleet.Run) -> list[Item]:
    """All steps as rank 0 of 2 gets them."""
    return list(run.stream(0, 2))


def same(items: Sequence[Item], others: Sequence[Item]) -> bool:
    return len(items) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(items, others, strict=True)
    )


def test_a_run_that_is_not_there_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(maskfleet.UserError, match="there is no run") as found:
        maskfleet.open_run(str(tmp_path / "nowhere"))
    assert "maskfleet init" in found.value.remedy


def test_its_metrics_are_a_frame(run: maskfleet.Run, uri: str) -> None:
    frame = run.metrics()
    records = list(history(uri).steps)
    assert frame.index.name == "step"
    assert frame.index.tolist() == list(range(STEPS))
    assert frame["loss"].tolist() == [record["loss"] for record in records]
    assert frame["tokens"].tolist() == [record["tokens"] for record in records]
    assert run.evaluations().index.tolist() == [7, 14]
    assert run.evaluations()["loss"].notna().all()
    events = run.events()
    assert {"start", "commit"} <= set(events["kind"])
    assert events.index.is_monotonic_increasing
    assert str(events.index.tz) == "UTC"


def test_without_pandas_the_remedy_is_named(run: maskfleet.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="needs pandas") as found:
        run.metrics()
    assert found.value.remedy == "pip install pandas"


def test_it_says_how_it_stands(run: maskfleet.Run) -> None:
    assert run.total_steps == STEPS
    assert run.status().step == STEPS
    assert run.checkpoints()[0].step == STEPS
    assert run.name in repr(run)


def test_a_sample_prints_as_the_command_shows_it(run: maskfleet.Run) -> None:
    sample = run.sample(9, 3)
    assert str(sample).startswith("step 9, row 3 of 8: phase 1")
    assert "->" in str(sample)
    with pytest.raises(RunError, match="no row 99"):
        run.sample(9, 99)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_stream_is_what_the_run_trained_on(run: maskfleet.Run, uri: str, world: int) -> None:
    """The records hold a checksum of the bytes that the run's own ranks got from its feed."""
    ranks = [run.stream(rank, world) for rank in range(world)]
    for record in history(uri).steps:
        parts = [part for rank in ranks for part in rank.microbatches(record["step"])]
        assert sum(checksum(part) for part in parts) == record["digest"]


def test_items_hold_the_same_rows_padded(run: maskfleet.Run) -> None:
    data = run.stream(1, 2, start=7, stop=9)
    for step, item in zip((7, 8), data, strict=True):
        assert int(item["step"]) == step
        rows = [(part, row) for part in data.microbatches(step) for row in range(part.rows)]
        assert item["input_ids"].shape == item["labels"].shape == item["attention_mask"].shape
        assert len(item["input_ids"]) == len(rows)
        for index, (part, row) in enumerate(rows):
            begin, end = (int(part.offsets[row + n]) for n in (0, 1))
            length = int(item["attention_mask"][index].sum())
            assert length == end - begin
            assert item["input_ids"][index, :length].tolist() == part.tokens[begin:end].tolist()
            targets = {
                int(at) - begin: int(token)
                for at, token in zip(part.target_positions, part.target_ids, strict=True)
                if begin <= at < end
            }
            labels = item["labels"][index].tolist()
            assert {at: token for at, token in enumerate(labels) if token != -100} == targets


def test_more_ranks_than_microbatches_get_items_without_rows(run: maskfleet.Run) -> None:
    (item,) = run.stream(rank=6, world=7, start=0, stop=1)
    assert item["input_ids"].shape == (0, 0)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_it_goes_on_at_any_step(run: maskfleet.Run, items: list[Item], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, STEPS - 1))
    stop = data.draw(st.integers(start, STEPS))
    cut = data.draw(st.integers(start, stop))
    whole = run.stream(0, 2, start, stop)
    seen = list(islice(whole, cut - start))
    assert whole.state_dict() == {"step": cut}
    rest = run.stream(0, 2, start, stop)
    rest.load_state_dict(whole.state_dict())
    assert same([*seen, *rest], items[start:stop])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loaders_workers_keep_the_order(run: maskfleet.Run, items: list[Item], workers: int) -> None:
    data = run.stream(0, 2)
    loaded = list(DataLoader(data, batch_size=None, num_workers=workers))
    assert same(loaded, items)
    with pytest.raises(RunError, match="ahead of the trainer"):
        data.state_dict()
    data.load_state_dict({"step": int(loaded[4]["step"]) + 1})
    assert same(list(DataLoader(data, batch_size=None, num_workers=workers)), loaded[5:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_where_it_was(run: maskfleet.Run, items: list[Item], workers: int) -> None:
    loader = StatefulDataLoader(run.stream(0, 2), batch_size=None, num_workers=workers)
    read = iter(loader)
    seen = [next(read) for _ in range(5)]
    again = StatefulDataLoader(run.stream(0, 2), batch_size=None, num_workers=workers)
    again.load_state_dict(loader.state_dict())
    assert same([*seen, *again], items)


def test_steps_and_ranks_that_are_not_there_are_refused(run: maskfleet.Run) -> None:
    with pytest.raises(RunError, match="no rank 2 of 2"):
        run.stream(2, 2)
    with pytest.raises(RunError, match="no data for steps 0 to 99"):
        run.stream(stop=99)
    with pytest.raises(RunError, match="no data for step -1"):
        run.stream().load_state_dict({"step": -1})


def test_a_checkpoint_is_a_torch_module(run: maskfleet.Run, uri: str) -> None:
    module = run.module()
    saved = final_state(uri)
    found = {name: parameter.detach().numpy().tobytes() for name, parameter in module.named_parameters()}
    assert found == {name: value for (name, kind), value in saved.items() if kind == "master"}
    assert not module.training


def test_a_checkpoint_is_a_model_of_transformers(run: maskfleet.Run) -> None:
    model = run.transformers_model()
    assert type(model) is transformers.RobertaForMaskedLM
    item = next(iter(run.stream(start=13)))
    ours = {name: item[name] for name in ("input_ids", "attention_mask", "labels")}
    with torch.no_grad():
        assert torch.isfinite(model(**ours).loss)
    with pytest.raises(RunError, match="no part 'generator'"):
        run.transformers_model(part="generator")


def test_train_returns_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = maskfleet.train(str(tmp_path / "nowhere"))
    assert (ended.code, ended.how, ended.step) == (2, "mistake", 0)
    assert "there is no run at" in ended.said
    assert ended.said == capsys.readouterr().out


@pytest.mark.long
def test_train_passes_settings_on(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = maskfleet.train(uri, {"logging.flush_seconds": 5})
    assert (ended.code, ended.how, ended.step) == (0, "finished", STEPS)
    assert f"step {STEPS} of {STEPS}" in ended.said
    assert maskfleet.open_run(uri).recipe.logging.flush_seconds == 5
    capsys.readouterr()
    refused = maskfleet.train(uri, {"seed": 9}, show=False)
    assert (refused.code, refused.how) == (2, "mistake")
    assert "- seed: 1 -> 9" in refused.said
    assert not capsys.readouterr().out
