"""A run whose second phase reads the grown corpus: told when it is made or while it is under way, undisturbed or
killed, it comes to the same bits; and the steps of the first phase are those of a run on the old corpus."""

import random
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_service.corpus.corpus import locate_document_tokens, open_corpus
from data_service.corpus.remove import documents_by_number as documents_in
from data_service.corpus.remove import remove_documents
from data_service.errors import CorpusError
from data_service.ingest.append import APPENDED_PART_FOLDER, append_documents, options_from_corpus
from data_service.stream.stream import Stream
from launcher.errors import RecipeError, RunChanged
from launcher.observe.inspect.document_selection import DocumentName, documents_by_number, removed_documents
from launcher.observe.inspect.exposure import find_exposures
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.run.fork import fork
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import sample_positions, stream_spec
from tests.support.data.made_up import write_text
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs
from tests.support.runs.small_runs import reconciled

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NOW = datetime(2026, 5, 1, tzinfo=UTC)
PHASE_1 = 8  # its first step
STOPPED = 5
FORKED = (6, 12)


@pytest.fixture(scope="module")
def grown(folder: Path) -> str:
    """The setting by which the second phase reads the corpus with new text."""
    write_text(folder / "more.jsonl", 30, seed=4)
    options = options_from_corpus(open_corpus(f"{folder}/corpus"), workers=1, on_bad_records="error", word_files={})
    append_documents(
        f"{folder}/corpus",
        [f"{folder}/more.jsonl"],
        f"{folder}/grown",
        options,
        removed_by="x",
        removed_at=1,
        progress=lambda progress: None,
    )
    return f"phases.1.corpora={{text: {folder}/grown}}"


def tell(uri: str, setting: str, *, accept: bool) -> Run:
    run = open_run(uri)
    return reconciled(run, recipe=with_assignments(run.recipe, (setting,)), accept_changes=accept, now=NOW)


@pytest.mark.long
def test_a_phase_that_reads_the_grown_corpus(folder: Path, grown: str) -> None:
    plain = small_runs.new_run(folder, "plain")
    for step in FORKED:  # saves there; else a save may still be under way
        finish(plain, 1, stop_at=step)
    finish(plain, 1)
    told = finish(small_runs.new_run(folder, "told", grown), 1)
    before, after = small_runs.digests(plain), small_runs.digests(told)
    assert before[:PHASE_1] == after[:PHASE_1]
    assert before[PHASE_1:] != after[PHASE_1:]

    under_way = finish(small_runs.new_run(folder, "under-way"), 1, stop_at=STOPPED)
    with pytest.raises(RunChanged) as refused:
        tell(under_way, grown, accept=False)
    assert "phases.1.corpora.text" in refused.value.problem
    tell(under_way, grown, accept=True)
    for step in sorted(random.Random(1).sample(range(STOPPED + 1, small_runs.STEPS), 2)):
        assert run_group(under_way, 1, kill={0: step}).codes == [KILLED]
        small_runs.operate(under_way)  # is told once
    finish(under_way, 1)
    small_runs.ensure_same(under_way, told, small_runs.STEPS)

    with pytest.raises(RunChanged) as refused:  # the phase has begun
        tell(plain, grown, accept=True)
    assert "fork" in refused.value.remedy
    forked = fork(open_run(plain), f"{folder}/early", FORKED[0], (grown,), keep_position=False, now=NOW)
    assert forked.restarted == ()
    assert small_runs.digests(finish(f"{folder}/early", 1)) == after[FORKED[0] :]
    assert small_runs.final_state(f"{folder}/early") == small_runs.final_state(told)
    late = fork(open_run(plain), f"{folder}/late", FORKED[1], (grown,), keep_position=False, now=NOW)
    assert late.restarted == ("phases.1.corpora.text (content)",)
    ensure_exposures(open_run(told), folder)


def ensure_exposures(run: Run, folder: Path) -> None:
    """Of documents of both parts: what a look at every row finds."""
    old = int(open_corpus(f"{folder}/corpus").manifest.train.documents.sum())
    total = int(open_corpus(f"{folder}/grown").manifest.train.documents.sum())
    draw = random.Random(7)
    numbers = [*draw.sample(range(old), 3), *draw.sample(range(old, total), 3)]
    report = find_exposures(run, documents_by_number(run, [DocumentName("text", number) for number in numbers]))
    streams = [Stream(stream_spec(run, run.tokenizer(), phase)) for phase in (0, 1)]
    positions, expected = sample_positions(run, streams, ()), set()
    places = {number: locate_document_tokens(open_corpus(f"{folder}/grown"), "train", number) for number in numbers}
    for step in range(run.recipe.total_steps):
        rows = [(span, sample) for span in positions.ranges_of_step(step) for sample in range(span.start, span.stop)]
        for row, (span, sample) in enumerate(rows):
            text = streams[span.phase].sample_text(span.epoch, sample)
            for number, (block, start, stop) in places.items():
                if text.block == block and any(part.start < stop and start < part.stop for part in text.stretches):
                    expected.add((number, step, row))
    assert {(each.document.number, each.step, each.row) for each in report.found} == expected
    assert {number for number, _, _ in expected} > set(numbers[:3])
    assert all(step >= PHASE_1 for number, step, _ in expected if number >= old)


@pytest.mark.long
def test_a_document_that_is_removed_from_the_grown_corpus(folder: Path, grown: str) -> None:
    """Also from its part: neither is read by a run that is made afterwards."""
    shutil.copytree(folder / "grown", folder / "copy")
    own = grown.replace("/grown}", "/copy}")
    corpus = open_corpus(f"{folder}/copy")
    total = int(corpus.manifest.train.documents.sum())
    under_way = small_runs.new_run(folder, "before-removal", own)
    remove_documents(corpus, documents_in(corpus, ["0", str(total - 1)]), removed_by="x", removed_at=1, reason="asked")
    with pytest.raises(RunChanged) as refused:
        small_runs.operate(under_way)
    assert "phases.1.corpora.text: 2 " in refused.value.problem
    run = open_run(small_runs.new_run(folder, "after-removal", own))
    specs = [stream_spec(run, run.tokenizer(), phase).sources[0].removals for phase in (0, 1)]
    assert specs[0] == ""
    assert specs[1] != ""
    report = find_exposures(run, removed_documents(run))
    assert {each.phase for each in report.found} <= {0}  # of which the old corpus still has one
    assert set(report.left_out) == {DocumentName("text", 0), DocumentName("text", total - 1)}


def test_what_a_phase_cannot_read(folder: Path, grown: str) -> None:
    with pytest.raises(RecipeError, match=r"phases\.1\.corpora"):
        load(small_runs.SMALL, (*small_runs.SETTINGS, "phases.1.corpora={news: x}"))
    with pytest.raises(RecipeError, match=r"mixture"):
        load(small_runs.SMALL, (*small_runs.SETTINGS, grown, "phases.0.mixture={weights: {text: 1}}"))
    with pytest.raises(CorpusError) as refused:
        small_runs.new_run(folder, "other", grown.replace("/grown}", f"/grown/{APPENDED_PART_FOLDER}}}"))
    assert "append" in refused.value.remedy
