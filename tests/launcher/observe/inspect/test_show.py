"""`maskfleet show`: the sample it prints is the one that training reads."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_service.stream.positions import StepSampleRanges
from data_service.stream.stream import Stream
from data_service.tokenizers.load import load_tokenizer
from launcher.errors import RunError
from launcher.observe.inspect.show import find_sample, marked_text, render_lines
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import sample_positions, stream_spec
from tests.support.runs.small_runs import new_run


@pytest.fixture
def run(fresh_run: str) -> Run:
    return open_run(fresh_run)


@pytest.mark.long
def test_every_row_of_a_step_is_what_training_reads(run: Run) -> None:
    tokenizer = load_tokenizer(run.recipe.tokenizer.uri)
    streams = [Stream(stream_spec(run, tokenizer, phase)) for phase in range(2)]
    where: StepSampleRanges = sample_positions(run, list(streams), ())
    for step in (0, 7, 8, 13):
        row = 0
        for span in where.ranges_of_step(step):
            for sample in range(span.start, span.stop):
                shown = find_sample(run, step, row)
                expected = streams[span.phase].read(span.epoch, sample, sample + 1)
                assert (shown.phase, shown.epoch, shown.sample) == (span.phase, span.epoch, sample)
                np.testing.assert_array_equal(shown.samples.tokens, expected.tokens)
                np.testing.assert_array_equal(shown.samples.target_ids, expected.target_ids)
                row += 1
        assert shown.rows == row


def test_the_text_is_the_source_with_its_targets_marked(run: Run) -> None:
    shown = find_sample(run, 3, 1)
    original = shown.samples.tokens.copy()
    original[shown.samples.target_positions] = shown.samples.target_ids
    text = original[~np.isin(original, np.flatnonzero(shown.tokenizer.special_mask))]
    np.testing.assert_array_equal(text, shown.source.tokens)
    marks = marked_text(shown.samples, shown.tokenizer).count(" -> ")
    assert marks == len(shown.samples.target_ids)


def test_it_prints_place_and_a_line_for_each_target(run: Run) -> None:
    shown = find_sample(run, 13, 0)
    lines = list(render_lines(shown))
    assert "step 13, row 0[/] of 8: phase 1" in lines[0]
    assert " text" in lines[1]
    assert len(lines) == 7 + len(shown.samples.target_ids)
    assert all(any(kind in line for kind in ("masked", "kept", "random")) for line in lines[7:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("packing", "labels"),
    [
        (
            "segment_pair",
            {"pair label 1: B is from elsewhere"},
        ),  # the documents have one sentence: nothing follows
        ("ordered_pair", {"pair label 0: B follows A", "pair label 1: B is not what follows A"}),
        ("two_segments", set()),
    ],
)
def test_the_segments_of_a_pair_and_its_label(inputs: Path, tmp_path: Path, packing: str, labels: set[str]) -> None:
    run = open_run(new_run(inputs, str(tmp_path / "run"), f"input={{packing: {packing}}}"))
    found = set()
    for step, row in itertools.product((8, 9), range(8)):
        shown = find_sample(run, step, row)
        lines = list(render_lines(shown))
        assert shown.samples.segment_starts is not None
        middle = int(shown.samples.segment_starts[0])
        texts = {line[:10]: line for line in lines if line.startswith(("[bold]A", "[bold]B"))}
        assert texts["[bold]A[/]"].count(" -> ") == (shown.samples.target_positions < middle).sum()
        assert ("[bold]B[/]" in texts) == (middle < len(shown.samples.tokens))
        found |= {line for line in lines if line.startswith("pair label")}
        stretches = [f"text tokens {part.start} to {part.stop}" for part in shown.source.stretches]
        assert " and ".join(stretches) in lines[1]
        assert sum(map(len, shown.source.stretches)) == len(shown.source.tokens)
    assert found == labels


@pytest.mark.parametrize(
    ("step", "row", "problem"),
    [(14, 0, "no step 14"), (-1, 0, "no step -1"), (0, 12, "step 0 has no row 12"), (5, -1, "step 5 has no row -1")],
)
def test_beyond_the_run_there_is_nothing(run: Run, step: int, row: int, problem: str) -> None:
    with pytest.raises(RunError, match=problem):
        find_sample(run, step, row)


def test_control_characters_are_shown_not_sent(run: Run) -> None:
    shown = find_sample(run, 3, 1)
    tokenizer = shown.tokenizer
    hostile = tokenizer.encode("\x1b[2J \x07 \x9b31m")
    spoilt = replace(shown.samples, tokens=np.concatenate([hostile, shown.samples.tokens[len(hostile) :]]))
    lines = "\n".join(render_lines(replace(shown, samples=spoilt)))
    assert r"\x1b" in lines
    assert not any(character in lines for character in "\x1b\x07\x9b")


def test_a_causal_row_is_shown_as_it_is(inputs: Path, tmp_path: Path) -> None:
    """Nothing is hidden, so nothing is marked, and no line lists nearly every token."""
    settings = ("objective={clm: {}}", "phases=[{steps: 4, length: 32, batch: {sequences: 12}}]")
    shown = find_sample(open_run(new_run(inputs, str(tmp_path / "run"), *settings)), 1, 2)
    lines = list(render_lines(shown))
    assert str(len(shown.samples.target_ids)) in lines[2]
    assert not any(" -> " in line for line in lines)
    assert len(lines) == 5
