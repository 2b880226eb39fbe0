"""A container whose memory suffices for training, but perhaps not for copies of the state and a spare process
beside it."""

import random
from pathlib import Path

import pytest

from data_service.store.open import open_store
from launcher.runtime.run.history import read_history
from tests.support.clusters.memory_limit import limited_group, peak
from tests.support.runs.small_runs import ensure_same, new_run, prepare_corpus
from tests.support.runs.train_command import output, training

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

PLENTY, STEPS = 8 << 30, 12
WIDE = (  # 20 million parameters, so that a copy is large beside what processes take
    "model.hidden=512",
    "model.vocab=30000",
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 4}}}}]",
    "checkpoint={every: {steps: 5}, keep_last: 3}",
    "evaluation={every: {steps: 12}, samples: 4}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("short")
    prepare_corpus(root)
    return root


def train(folder: Path, name: str, every: object, limit: int, *, spares: int = 0) -> tuple[str, int, int]:
    """A run with copies every so many steps, in a group with this limit: its URI, code and peak of memory."""
    uri = new_run(folder, name, *WIDE, f"recovery={{memory_every: {every}, spares: {spares}}}")
    with limited_group(limit) as group:
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        with training(uri, prefix=("sh", "-c", enter, "sh")) as process:
            print(output(process)[-2000:])
            return uri, process.wait(), peak(group)


@pytest.mark.parametrize("seed", range(3))
def test_copies_cost_no_run_that_trains_without_them(seed: int, folder: Path) -> None:
    """The peak counts file cache, too, which the kernel gives up: less than it may do."""
    _, code, most = train(folder, f"plenty-{seed}", "never", PLENTY)
    assert code == 0
    limit = int(most * random.Random(seed).uniform(0.8, 1.0))
    plain, code, _ = train(folder, f"plain-{seed}-0", "never", limit)
    while code != 0 and limit < most:
        limit = int(limit * 1.04)
        plain, code, _ = train(folder, f"plain-{seed}-{limit}", "never", limit)
    assert code == 0
    copied, code, _ = train(folder, f"copied-{seed}", 1, limit, spares=1)
    events = [event["kind"] for event in read_history(open_store(copied)).events]
    print(f"{limit >> 20} MiB of {most >> 20}: {events.count('death')} deaths, {events.count('memory_failed')} without")
    assert code == 0
    ensure_same(copied, plain, STEPS)
