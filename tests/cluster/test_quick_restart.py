"""After the death of a rank the others stay, and the run goes on from memory. No step but the broken one is repeated,
and the end is that of an undisturbed run."""

import random
from pathlib import Path

import pytest

from checkpoints.listing import list_committed
from launcher.runtime.run.record import open_run
from tests.support.checks.command import exit_code
from tests.support.faults.ranks import damage
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import committed, done, kill, output, spare_waits, titled, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 120
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    "checkpoint={every: {steps: 250}, keep_last: 3}",
    "evaluation={every: {steps: 60}, samples: 20}",
    "logging={flush_seconds: 0.2, tensorboard: false}",
    "compile=false",
)
EVERY_STEP = "recovery={spares: 0, memory_every: 1}"
SPARE = "recovery={spares: 1, memory_every: 1}"
ENDLESS = "phases=[{steps: 1000000, length: 32, batch: {sequences: 12}}]"
AFTERWARDS = 20  # steps
RANK = "ray::RankProcess as rank"


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(small_runs.new_run(folder, "undisturbed", *SETTINGS, "zero=2"), 2)


@pytest.mark.long
def test_no_step_but_the_broken_one_is_repeated(folder: Path, undisturbed: str) -> None:
    uri = small_runs.new_run(folder, "killed", *SETTINGS, EVERY_STEP, "zero=2")
    with training(uri) as process:
        wait_for(process, lambda: done(uri) >= 20)
        kill(process, RANK)
        assert process.wait(300) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)
    (death,), (resume,) = small_runs.events(uri, "death"), small_runs.events(uri, "resume")
    assert resume["memory"]
    assert resume["step"] >= death["step"] - 1
    assert small_runs.events(uri, "underway")[1]["processes"] == {"stayed": 1, "new": 1}


@pytest.mark.long
def test_a_start_that_is_refused_and_an_edited_recipe_change_nothing_of_a_run_that_lives(
    folder: Path, undisturbed: str
) -> None:
    uri = small_runs.new_run(folder, "alive", *SETTINGS, EVERY_STEP, "zero=2")
    recipe, record = Path(uri, "recipe.yaml"), Path(uri, "run.json")
    before = recipe.read_bytes(), record.read_bytes()
    with training(uri) as process:
        wait_for(process, lambda: done(uri) >= 20)
        refused = exit_code("train", uri, "--set", "zero=3", "--set", "seed=7", "--accept-changes")
        assert refused == 2
        assert (recipe.read_bytes(), record.read_bytes()) == before
        recipe.write_bytes(before[0].replace(b"seed: 1", b"seed: 7"))
        kill(process, RANK)
        assert process.wait(300) == 0, output(process)
    assert recipe.read_bytes() != before[0]
    recipe.write_bytes(before[0])
    small_runs.ensure_same(uri, undisturbed, STEPS)
    assert not small_runs.events(uri, "recipe_changed")


@pytest.mark.long
def test_after_a_damaged_checkpoint_the_next_death_costs_no_more_than_others(folder: Path, undisturbed: str) -> None:
    """The state in memory is older, by its step, than the damaged checkpoint that was passed over."""
    often = "checkpoint={every: {steps: 25}, keep_last: 3}"
    uri = small_runs.new_run(folder, "damaged", *SETTINGS, often, EVERY_STEP, "zero=2")
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 50)
        process.kill()
    newest = list_committed(open_run(uri).store)[0]
    damage(open_run(uri).store, random.Random(1), set())
    with training(uri) as process:
        wait_for(process, lambda: len(small_runs.events(uri, "underway")) > 1 and done(uri) > newest.step - 20)
        kill(process, RANK)
        assert process.wait(300) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)
    assert small_runs.events(uri, "resume")[-1]["memory"]


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_spare_process_takes_the_place(folder: Path, tmp_path: Path, zero: int, compiled: str) -> None:
    """At every stage, compiled and not. The spare process is there some seconds after the first step, and has the
    layers that the ranks compiled before it."""
    names = (f"spare-{zero}-{compiled}", f"alone-{zero}-{compiled}")
    settings = (*SETTINGS, ENDLESS, f"zero={zero}", f"compile={compiled}")
    uri, alone = (small_runs.new_run(folder, name, *settings) for name in names)
    nothing_compiled = {"HOME": str(tmp_path)}
    with training(uri, "--set", SPARE, environment=nothing_compiled) as process:
        loading = set[int]()
        wait_for(process, lambda: spare_waits(process, loading), timeout=600)
        min(titled(process, RANK), key=lambda rank: rank.pid).kill()  # rank 0, which records what it compiled
        wait_for(process, lambda: len(small_runs.events(uri, "underway")) > 1)
        seen = done(uri)
        wait_for(process, lambda: done(uri) > seen + AFTERWARDS)
        process.terminate()
        assert process.wait(300) == 75, output(process)
    finish(alone, 2, stop_at=committed(uri), timeout=600)
    small_runs.ensure_same(uri, alone, committed(uri))
    assert small_runs.events(uri, "underway")[1]["processes"] == {"stayed": 1, "spare": 1}
    kept = [event["kept"] for event in small_runs.events(uri, "compilation") if event["compiled"]]
    assert kept == (["nowhere", "in this process"] if compiled == "true" else [])


DEATHS = 200
GROWTH_MB = 60  # what a process may grow over all deaths: the first ones still load things


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_deaths_cost_the_process_that_stays_nothing(folder: Path) -> None:
    """One rank stays through all of them, the other is killed again and again, as soon as it has trained."""
    uri = small_runs.new_run(folder, "leaks", *SETTINGS, EVERY_STEP, "zero=2", ENDLESS)
    sizes: list[tuple[float, int, int]] = []
    with training(uri) as process:
        wait_for(process, lambda: done(uri) > 5)
        stays, _ = titled(process, RANK)
        for number in range(1, DEATHS + 1):
            (other,) = (rank for rank in titled(process, RANK) if rank.pid != stays.pid)
            other.kill()
            wait_for(process, lambda: len(small_runs.events(uri, "underway")) > number)  # noqa: B023
            found = stays.memory_info().rss / 1e6, stays.num_fds(), stays.num_threads()
            sizes.append(found)
            print(number, *found, flush=True)
    assert sizes[-1][0] - sizes[len(sizes) // 10][0] < GROWTH_MB
    assert sizes[-1][1] <= sizes[len(sizes) // 10][1] + 4
    assert sizes[-1][2] <= sizes[len(sizes) // 10][2] + 4
