"""Ranks, keepers and spare processes die at random moments, alone, together and while others rebuild. The run ends as
if nobody had touched it, in one command.

The long form: `infra/test -m long tests/faults/test_quick_restarts.py -rP --seed 1 --cycles 200`.
"""

import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.test_anything import FAMILIES, restarts
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.observer import kill_quietly, title
from tests.support.runs.train_command import done, output, titled, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(7200)]

STEPS = 400
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    "checkpoint={every: {steps: 120}, keep_last: 2}",
    f"evaluation={{every: {{steps: {STEPS}}}, samples: 100}}",
    "logging={flush_seconds: 0.2, tensorboard: false}",
    "spikes.threshold=null",
    "recovery={spares: 1, memory_every: 1}",
    "compile=false",
)
RANK, KEEPER, SPARE = "ray::RankProcess as rank", "ray::MemoryKeeper", "ray::RankProcess"
Command = subprocess.Popen[str]


def one_rank(process: Command, draws: random.Random) -> None:
    _kill(draws.sample(titled(process, RANK), 1))


def two_ranks(process: Command, draws: random.Random) -> None:
    _kill(titled(process, RANK))


def one_while_others_rebuild(process: Command, draws: random.Random) -> None:
    one_rank(process, draws)
    threading.Event().wait(draws.uniform(0, 2))
    _kill(titled(process, SPARE)[:1])


def a_rank_and_the_keeper(process: Command, draws: random.Random) -> None:
    _kill([*titled(process, KEEPER), *draws.sample(titled(process, RANK), 1)])


def a_rank_and_the_spare(process: Command, draws: random.Random) -> None:
    _kill([one for one in titled(process, SPARE) if RANK not in title(one)])
    one_rank(process, draws)


FAULTS: tuple[Callable[[Command, random.Random], None], ...] = (
    one_rank,
    one_rank,
    two_ranks,
    one_while_others_rebuild,
    a_rank_and_the_keeper,
    a_rank_and_the_spare,
)


def _kill(found: list[psutil.Process]) -> None:
    for one in found:
        kill_quietly(one)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_dying_ranks_change_nothing(request: pytest.FixtureRequest, folder: Path, family: str, zero: int) -> None:
    faults = max(1, request.config.getoption("--cycles") // (4 * len(FAMILIES)))
    draws = random.Random(f"{request.config.getoption('--seed')} {family} {zero}")
    settings = (*SETTINGS, *FAMILIES[family], f"zero={zero}")
    calm, uri = (small_runs.new_run(folder, f"{name}-{family}-{zero}", *settings) for name in ("calm", "struck"))
    finish(calm, 2, timeout=600)
    struck: Counter[str] = Counter()
    with training(uri) as process:
        for number in range(faults):
            moment = STEPS * (number + draws.random()) / (faults + 1)
            wait_for(process, lambda: done(uri) >= moment and len(titled(process, RANK)) == 2, 600)  # noqa: B023
            fault = draws.choice(FAULTS)
            fault(process, draws)
            struck[fault.__name__] += 1
        assert process.wait(600) == 0, output(process)
    print(f"{family}, zero {zero}: {dict(struck)}; {restarts(uri)}")
    small_runs.ensure_same(uri, calm, STEPS)
    small_runs.ensure_whole(uri)
