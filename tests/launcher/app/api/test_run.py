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
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import maskfleet
from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.neobert import NeoBertConfig
from launcher.errors import MissingPackage, RunError
from launcher.runtime.rank.data import checksum
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import finish
from tests.support.runs.small_runs import STEPS, history, new_run, prepare_corpus
from tests.support.runs.starts import Setting, trained
from tests.support.runs.untrained import Attempt

Item = dict[str, torch.Tensor]


Made = tuple[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of two phases with a checkpoint of step 4, those weights, and records of the steps after it."""
    folder = tmp_path_factory.mktemp("api")
    prepare_corpus(folder)
    run = open_run(new_run(folder, "run"))
    setting = Setting(run, load_tokenizer(run.recipe.tokenizer.uri))
    weights = trained(setting, run.uri, run.recipe.model, run.recipe.objective)
    attempt = Attempt(run.store).train(STEPS)
    attempt.journal.flush()
    return run.uri, weights


@pytest.fixture(scope="module")
def uri(made: Made) -> str:
    return made[0]


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
    with pytest.raises(maskfleet.UserError, match=r"\bmaskfleet init\b") as found:
        maskfleet.open_run(str(tmp_path / "nowhere"))
    assert "maskfleet init" in found.value.remedy


def test_its_metrics_are_a_frame(run: maskfleet.Run, uri: str) -> None:
    frame, records = run.metrics(), history(uri).steps
    assert frame.index.name == "step"
    assert frame.index.tolist() == [record["step"] for record in records] == list(range(4, STEPS))
    assert frame["tokens"].tolist() == [record["tokens"] for record in records]
    assert frame["loss"].isna().tolist() == [record["loss"] is None for record in records]
    assert frame["mlm_loss"].tolist() == [record["mlm_loss"] for record in records]
    assert run.evaluations().index.tolist() == [8, 12]
    assert run.evaluations()["loss"].tolist() == [27.0, 31.0]


def test_its_events_are_a_frame(run: maskfleet.Run) -> None:
    events = run.events()
    assert events["kind"].tolist() == ["resume"]
    assert str(events.index.tz) == "UTC"


def test_a_run_that_never_trained_has_empty_frames(fresh_run: str) -> None:
    fresh = maskfleet.open_run(fresh_run)
    assert [len(frame) for frame in (fresh.metrics(), fresh.evaluations(), fresh.events())] == [0, 0, 0]


def test_without_pandas_the_remedy_is_named(run: maskfleet.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="pandas") as found:
        run.metrics()
    assert found.value.remedy == "pip install pandas"


def test_it_says_how_it_stands(run: maskfleet.Run) -> None:
    assert run.total_steps == STEPS
    assert run.status().step == STEPS
    assert [row.step for row in run.checkpoints()] == [4]
    assert run.name in repr(run)


def test_a_sample_prints_as_the_command_shows_it(run: maskfleet.Run) -> None:
    sample = run.sample(9, 3)
    assert str(sample).startswith("step 9, row 3 of 8: phase 1")
    assert "->" in str(sample)
    with pytest.raises(RunError, match="no row 99"):
        run.sample(9, 99)


@pytest.mark.long
@pytest.mark.cluster
def test_the_stream_is_what_a_run_trained_on(tmp_path: Path) -> None:
    """The records hold a checksum of the bytes that the run's ranks got."""
    prepare_corpus(tmp_path)
    uri = new_run(tmp_path, "run")
    finish(uri, 2)
    run = maskfleet.open_run(uri)
    assert run.metrics().index.tolist() == list(range(STEPS))
    for world in (1, 2, 3):
        ranks = [run.stream(rank, world) for rank in range(world)]
        for record in history(uri).steps:
            parts = [part for rank in ranks for part in rank.microbatches(record["step"])]
            assert sum(checksum(part) for part in parts) == record["digest"]
    ended_again = maskfleet.train(uri, {"logging.flush_seconds": 5})
    assert (ended_again.code, ended_again.how, ended_again.step) == (0, "finished", STEPS)
    assert f"step {STEPS} of {STEPS}" in ended_again.said
    assert maskfleet.open_run(uri).recipe.logging.flush_seconds == 5
    refused = maskfleet.train(uri, {"seed": 9}, show=False)
    assert (refused.code, refused.how) == (2, "mistake")
    assert "- seed: 1 -> 9" in refused.said


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


@pytest.mark.long
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


@pytest.mark.long
def test_a_loaders_workers_keep_the_order(run: maskfleet.Run, items: list[Item]) -> None:
    data = run.stream(0, 2)
    loaded = list(DataLoader(data, batch_size=None, num_workers=2))
    assert same(loaded, items)
    with pytest.raises(RunError, match="DataLoader"):
        data.state_dict()
    data.load_state_dict({"step": int(loaded[4]["step"]) + 1})
    assert same(list(DataLoader(data, batch_size=None, num_workers=2)), loaded[5:])


@pytest.mark.long
def test_a_stateful_loader_goes_on_where_it_was(run: maskfleet.Run, items: list[Item]) -> None:
    loader = StatefulDataLoader(run.stream(0, 2), batch_size=None, num_workers=2)
    read = iter(loader)
    seen = [next(read) for _ in range(5)]
    again = StatefulDataLoader(run.stream(0, 2), batch_size=None, num_workers=2)
    again.load_state_dict(loader.state_dict())
    assert same([*seen, *again], items)


def test_steps_and_ranks_that_are_not_there_are_refused(run: maskfleet.Run) -> None:
    with pytest.raises(RunError, match=r"\brank 2 of 2\b"):
        run.stream(2, 2)
    with pytest.raises(RunError, match=r"\bsteps 0 to 99\b"):
        run.stream(stop=99)
    with pytest.raises(RunError, match=r"\bstep -1\b"):
        run.stream().load_state_dict({"step": -1})


def test_a_module_leaves_the_seed_of_a_script_alone(run: maskfleet.Run) -> None:
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run.module(step=4)
        drawn.append(torch.rand(1))
    assert drawn[0] != drawn[1]


def test_a_checkpoint_is_a_torch_module(run: maskfleet.Run, made: Made) -> None:
    module, (_, weights) = run.module(step=4), made
    found = dict(module.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not module.training
    with pytest.raises(RunError, match=r"\bcheckpoint\b.*\bstep 9\b"):
        run.module(step=9)


def test_a_checkpoint_is_a_model_of_transformers(run: maskfleet.Run) -> None:
    model = run.transformers_model()
    assert type(model) is transformers.RobertaForMaskedLM
    item = next(iter(run.stream(start=13)))
    ours = {name: item[name] for name in ("input_ids", "attention_mask", "labels")}
    with torch.no_grad():
        assert torch.isfinite(model(**ours).loss)
    with pytest.raises(RunError, match=r"\bpart 'generator'"):
        run.transformers_model(part="generator")


def test_a_family_that_transformers_lacks_is_a_users_mistake(fresh_run: str) -> None:
    run = open_run(fresh_run)
    setting = Setting(run, load_tokenizer(run.recipe.tokenizer.uri))
    config = NeoBertConfig(layers=2, hidden=32, heads=4, feed_forward=48, max_length=64)
    trained(setting, run.uri, config, run.recipe.objective)
    opened = maskfleet.open_run(run.uri)
    with pytest.raises(maskfleet.ModelError) as caught:
        opened.transformers_model()
    assert "module()" in caught.value.remedy
    assert "encoder.final_norm.weight" in dict(opened.module().named_parameters())  # so the remedy helps


def test_train_returns_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = maskfleet.train(str(tmp_path / "nowhere"))
    assert (ended.code, ended.how, ended.step) == (2, "mistake", 0)
    assert " run " in ended.said
    assert ended.said == capsys.readouterr().out
