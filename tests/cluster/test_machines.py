"""Three machines with links between them: training across them, one that dies, a link cut and healed, a slow link."""

import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run
from tests.support.clusters import netns
from tests.support.clusters.netns import Machine
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.observer import kill_quietly, title
from tests.support.runs.train_command import committed, done, output, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 400
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    f"evaluation={{every: {{steps: {STEPS}}}, samples: 20}}",
    "trainers={min: 2, max: 2}",  # which reserve so much that no machine holds two
    "watchdog={step: 20.0, other: 120.0, silence: 20.0}",
)


SELDOM = (
    "checkpoint={every: {steps: 300}, keep_last: 3}",
    "recovery={spares: 0, memory_every: 1}",
    "logging.flush_seconds=0.2",
)
RANK, KEEPER, RAYLET, ALL = "ray::RankProcess as rank", "ray::MemoryKeeper", "raylet", "the machine"


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Machine]]:
    """A rank fits on each."""
    reason = netns.why_not()
    if reason is not None:
        pytest.skip(reason)
    with netns.machines([1, 1, 1]) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(small_runs.new_run(folder, "undisturbed", *SETTINGS), 2)


def training_on(head: Machine, uri: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    """`maskfleet train` on the head."""
    return training(uri, prefix=head.command(), environment=head.environment)


def ranks_on(machine: Machine) -> int:
    return sum(title(process).startswith("ray::RankProcess as rank") for process in machine.processes())


def test_ranks_on_several_machines_and_one_that_dies(cluster: list[Machine], folder: Path, undisturbed: str) -> None:
    uri = small_runs.new_run(folder, "crashed", *SETTINGS)
    head, *others = cluster
    with training_on(head, uri) as process:
        wait_for(process, lambda: committed(uri) >= 40)
        used = [machine for machine in others if ranks_on(machine)]
        assert len(used) >= 1, "ranks run beside the head"
        used[0].crash()
        used[0].boot()
        assert process.wait(400) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_at_whatever_moment_on_whichever_machine(
    cluster: list[Machine], folder: Path, undisturbed: str, seed: int
) -> None:
    """Machines, ranks, keepers and Ray's own processes die one after another, some while the ranks are rebuilt. After
    the death of one alone the state comes from memory."""
    draws = random.Random(f"machines {seed}")
    uri = small_runs.new_run(folder, f"random-{seed}", *SETTINGS, *SELDOM)
    with training_on(cluster[0], uri) as process:
        while not ended(uri):
            at = done(uri) + draws.randint(4, 60)
            wait_for(process, lambda: len(copies(uri, at)) > 1 or ended(uri))  # noqa: B023
            begun, copied, struck = len(beginnings(uri)), copies(uri), [strike(cluster, draws)]
            if struck == [KEEPER] or draws.random() < 0.3:
                threading.Event().wait(draws.uniform(0, 8))
                struck.append(strike(cluster, draws, but=KEEPER))
            wait_for(process, lambda: len(beginnings(uri)) > begun or ended(uri))  # noqa: B023
            resume = beginnings(uri)[-1]
            print(seed, "at", copied[-1], struck, "from", resume["step"], resume.get("memory"), flush=True)
            if len(struck) == 1 and not ended(uri):
                assert resume["memory"] is True
                assert resume["step"] >= copied[-2]
        assert process.wait(400) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)


def test_a_link_that_is_cut_and_healed(cluster: list[Machine], folder: Path, undisturbed: str) -> None:
    uri = small_runs.new_run(folder, "cut", *SETTINGS)
    head, *others = cluster
    with training_on(head, uri) as process:
        wait_for(process, lambda: committed(uri) >= 40)
        cut = next(machine for machine in others if ranks_on(machine))
        cut.cut()
        begins = len(beginnings(uri))
        wait_for(process, lambda: interrupted(uri, begins))
        cut.heal()
        if not ray_lives(cut):  # Ray ends a node that was declared dead, as an operator's service would see
            cut.crash()
            cut.boot()
        assert process.wait(400) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)


def test_a_slow_link_only_costs_time(cluster: list[Machine], folder: Path, undisturbed: str) -> None:
    uri = small_runs.new_run(folder, "slow", *SETTINGS)
    head, *others = cluster
    others[0].slow("20mbit")
    with training_on(head, uri) as process:
        assert process.wait(600) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)
    assert len(beginnings(uri)) == 1


def test_the_head_dies_and_the_same_command_goes_on(cluster: list[Machine], folder: Path, undisturbed: str) -> None:
    """And the driver with it. Nodes without a head are of no use: all of them start again."""
    uri = small_runs.new_run(folder, "beheaded", *SETTINGS)
    head = cluster[0]
    with training_on(head, uri) as process:
        wait_for(process, lambda: committed(uri) >= 40)
        head.crash()
        assert process.wait(60) < 0
    # All before any boots: Ray looks for another head in the process table, which they share.
    for machine in cluster:
        machine.crash()
    for machine in cluster:
        machine.boot()
    with training_on(head, uri) as process:
        assert process.wait(400) == 0, output(process)
    small_runs.ensure_same(uri, undisturbed, STEPS)


def copies(uri: str, after: int = 0) -> list[int]:
    """The steps after which the state is on record as copied to memory."""
    steps = read_history(open_run(uri).store).steps
    made = zip(steps.numbers.tolist(), steps.column("copy_bytes").tolist(), strict=True)
    return [step - 1 for step, size in made if size > 0 and step > after]


def ended(uri: str) -> bool:
    return committed(uri) >= STEPS


def strike(cluster: list[Machine], draws: random.Random, but: str | None = None) -> str:
    """Kill something on a machine with a rank, not `but`; return what. The head and the command on it stay, and a
    machine whose Ray has died boots."""
    machine = draws.choice([one for one in cluster if ranks_on(one)] or cluster)
    kinds = [RANK, KEEPER] if machine is cluster[0] else [RANK, KEEPER, RAYLET, ALL, ALL]
    what = draws.choice([kind for kind in kinds if kind != but])
    if what == ALL:
        machine.crash()
    for process in machine.processes():
        if what in title(process).split(" --")[0]:
            kill_quietly(process)
    if what in (ALL, RAYLET):
        machine.crash()
        machine.boot()
    return what


def beginnings(uri: str) -> list[dict[str, Any]]:
    return [event for event in read_history(open_run(uri).store).events if event["kind"] in ("start", "resume")]


def interrupted(uri: str, begins: int) -> bool:
    """The supervisor has given up on the ranks."""
    kinds = [event["kind"] for event in read_history(open_run(uri).store).events]
    return any(kind in kinds for kind in ("death", "failed", "hang")) or len(beginnings(uri)) > begins


def ray_lives(machine: Machine) -> bool:
    return any("raylet" in title(process) for process in machine.processes())
