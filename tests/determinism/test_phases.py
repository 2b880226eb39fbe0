"""A run whose phases change everything that they can (sources and rotary positions too), killed in each of them and
where one ends, and resumed on other numbers of ranks: the data is the same to the byte, and so is what comes of it, up
to rounding. The batch begins with one microbatch, so that of three ranks two have nothing to do."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from checkpoints.listing import list_committed
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.samples.masking import MlmMasking
from data_service.samples.replacement import Replacement
from data_service.samples.spec import Annealing
from data_service.stream.stream import Stream
from launcher.after.export.export import export_run
from launcher.runtime.recipe.timeline import learning_rate
from launcher.runtime.run.record import open_run
from launcher.runtime.run.step_table import Record
from launcher.runtime.run.streams import stream_spec
from tests.support.data.made_up import write_text
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EXACT = 1e-5  # nats
PHASES = (
    "phases=["
    "{steps: 4, length: 32, batch: {sequences: 12, warmup: {start: 4, steps: 3}}, "
    "mlm: {rate: {start: 0.6, end: 0.2}}, "
    "rope_base: 50, mixture: {weights: {text: 1}}}, "
    "{steps: 4, length: 64, batch: {tokens: 600, warmup: {start: 200, steps: 2}}, lr: 5.0e-4, "
    "weights: {mlm: {start: 0.5, end: 2, steps: 3}}, mixture: {weights: {text: 1, better: 3}}, microbatch: 3},"
    "{steps: 4, length: 48, batch: {sequences: 8}, schedule: {warmup: 1, decay: cosine, restarts: 1}, microbatch: 2, "
    "weights: {mlm: 3}, mlm: {replace: {mask: 1, random: 0, keep: 0}}, rope_base: 9000, "
    "local_rope_base: 70, mixture: {weights: {better: 1}, most_readings: 3}},"
    "{steps: 4, length: 32, batch: {sequences: 16}, schedule: {decay: one_minus_sqrt}, mlm: {rate: 0.05}, "
    "mixture: {temperature: 3}}]"
)
STEPS, EDGES = 16, (4, 8, 12)
MODEL = (
    "model={family: modernbert, layers: 3, hidden: 32, heads: 2, feed_forward: 48, max_length: 64, "
    "local_attention: 16, dropout: 0.1, attention_dropout: 0.1, attention_output_dropout: 0.1, initializer_range: 0.2}"
)
SETTINGS = (
    *(PHASES, MODEL, "schedule={warmup: 2, decay: constant}", "checkpoint={every: {steps: 2}, keep_last: 3}"),
    "weight_check={every: 1}",
)


def new_run(folder: Path, name: str, *settings: str) -> str:
    """On two corpora."""
    second = f"corpus.sources.better={{uri: {folder}/better, weight: auto}}"
    return small_runs.new_run(folder, name, second, *SETTINGS, *settings)


@pytest.fixture(scope="module")
def two_corpora(folder: Path) -> Path:
    """A folder with corpus, `better` and the tokenizer of both."""
    text = folder / "better.jsonl"
    write_text(text, 80, seed=4)
    options = BuildOptions(heldout_fraction=0.1, block_tokens=256)
    build_corpus([str(text)], f"{folder}/better", f"{folder}/tokenizer", options, lambda progress: None)
    return folder


@pytest.fixture(scope="module")
def undisturbed(two_corpora: Path) -> str:
    return finish(new_run(two_corpora, "undisturbed"), 2)


def ensure_equal(run: str, undisturbed: str) -> None:
    assert small_runs.ledger(run) == small_runs.ledger(undisturbed)
    assert small_runs.digests(run) == small_runs.digests(undisturbed)
    assert all(record["loss"] == pytest.approx(weight_in(record) * record["mlm_loss"]) for record in steps_of(run))
    rates = [[record["lr"] for record in small_runs.history(uri).steps] for uri in (run, undisturbed)]
    assert rates[0] == rates[1]
    assert np.abs(np.subtract(small_runs.losses(run), small_runs.losses(undisturbed))).max() <= EXACT


def steps_of(run: str) -> list[Record]:
    return small_runs.history(run).steps[:]


def weight_in(record: Record) -> float:
    """Of mlm, in the step of a record."""
    return {4: 0.5, 5: 1.0, 6: 1.5, 7: 2.0, 8: 3.0, 9: 3.0, 10: 3.0, 11: 3.0}.get(record["step"], 1.0)


@pytest.mark.long
def test_each_phase_is_what_it_says(undisturbed: str) -> None:
    run = open_run(undisturbed)
    steps = small_runs.history(undisturbed).steps
    assert [record["lr"] for record in steps] == [learning_rate(run.recipe, step) for step in range(STEPS)]
    assert [record["lr"] for record in steps][8:12] == pytest.approx([1.5e-3, 1.5e-3, 7.5e-4, 1.5e-3], rel=0.7)
    rows = [sum(stop - start for _, start, stop in record["samples"]) for record in steps]
    assert rows[:4] == [4, 6, 9, 12]
    assert rows[8:] == [8] * 4 + [16] * 4
    assert sum(rows[4:5]) < sum(rows[6:7])
    base = run.recipe.objective.masking
    masks = [stream_spec(run, run.tokenizer(), phase).masking for phase in range(4)]
    assert isinstance(base, MlmMasking)
    assert masks == [
        base.model_copy(update={"rate": 0.6}),
        base,
        base.model_copy(update={"replace": Replacement(mask=1, random=0, keep=0)}),
        MlmMasking(**base.model_dump() | {"rate": 0.05}),
    ]


def test_the_share_of_masked_tokens_falls_within_a_phase(undisturbed: str) -> None:
    run = open_run(undisturbed)
    assert stream_spec(run, run.tokenizer(), 0).annealing == Annealing(end=0.2, samples=4 + 6 + 9 + 12)
    shares = [record["targets"] / record["tokens"] for record in steps_of(undisturbed)[:4]]
    assert shares == sorted(shares, reverse=True)
    middle = [0.6 - 0.4 * rows / 31 for rows in (2, 7, 14.5, 25)]
    assert shares == pytest.approx([rate * 30 / 32 for rate in middle], abs=0.06)


def test_sources_are_read_on_in_the_shares_of_each_phase(undisturbed: str) -> None:
    run = open_run(undisturbed)
    steps = small_runs.history(undisturbed).steps[:]
    shares, places = [], list[list[tuple[int, int]]]()
    for phase in range(4):
        plan = Stream(stream_spec(run, run.tokenizer(), phase)).plan
        taken = [
            plan.origin_of_sample(epoch, sample)
            for record in steps[4 * phase : 4 * phase + 4]
            for epoch, start, stop in record["samples"]
            for sample in range(start, stop)
        ]
        shares.append(sum(origin.source == 1 for origin in taken) / len(taken))
        places.append([(origin.epoch, origin.source) for origin in taken])
    assert shares == pytest.approx([0, 0.75, 1, 0.58], abs=0.06)  # by size 0.72, 2.6 times the other
    for source in (0, 1):
        readings = [[epoch for epoch, its in phase if its == source] for phase in places]
        assert all(max(a) <= min(b) for a, b in pairwise([found for found in readings if found]))


def test_an_export_has_the_base_of_its_step(undisturbed: str, tmp_path: Path) -> None:
    run = open_run(undisturbed)
    for step in [mark.step for mark in list_committed(run.store)]:
        export_run(run, step, str(tmp_path / str(step)))
        found = json.loads((tmp_path / str(step) / "config.json").read_text())
        number = (step - 1) // 4
        assert found["global_rope_theta"] == (50, 160_000, 9000, 160_000)[number], step
        assert found["local_rope_theta"] == (10_000, 10_000, 70, 10_000)[number], step


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_killed_in_every_phase_and_at_every_edge(two_corpora: Path, undisturbed: str, seed: int) -> None:
    """One start after another: within phase 0, at the first step of phase 1, within phase 1, and so on."""
    draw = random.Random(seed)
    run = new_run(two_corpora, f"hunted-{seed}", f"zero={draw.choice((0, 1, 2, 3))}")
    kills = sorted([*EDGES, *(draw.randrange(first + 2, first + 4) for first in (0, *EDGES))])
    for step in kills:
        world = draw.randint(1, 3)
        assert KILLED in run_group(run, world, kill={world - 1: step}).codes
    ensure_equal(finish(run, world), undisturbed)


@pytest.mark.long
def test_the_base_of_a_phase_is_trained_with(two_corpora: Path, undisturbed: str) -> None:
    plain = new_run(two_corpora, "one-base", PHASES.replace("rope_base: 50, ", ""))
    finish(plain, 2, stop_at=3)
    assert small_runs.digests(plain) == small_runs.digests(undisturbed)[:3]
    assert abs(small_runs.losses(plain)[0] - small_runs.losses(undisturbed)[0]) > 1e-4
