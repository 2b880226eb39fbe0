"""Any fault, any process, any moment: the run ends as if nobody had touched it. Random faults on the real command.

The long form: `infra/test -m long tests/faults/test_anything.py -rP --seed 1 --cycles 200 --log-faults FOLDER`.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.anything import Disturbed, write_log
from tests.support.faults.draws import Draws
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server
from tests.support.stores.shared import answers, free_port, wait

pytestmark = pytest.mark.cluster

STEPS, EVERY = 300, 30
SETTINGS = (
    "checkpoint={every: {steps: 12}, keep_last: 2}",
    f"evaluation={{every: {{steps: {EVERY}}}, samples: 400}}",
    "logging={flush_seconds: 0.001, tensorboard: false}",  # every step is seen at once
    "watchdog={silence: 20, step: 60, other: 120}",
    "spikes.threshold=null",
    "trainers=2",
    "recovery={spares: 1, memory_every: 1}",
    "average.ema=0.99",
)
_PAIR = "layers: 2, hidden: 32, heads: 2, feed_forward: 64, max_length: 64"
FAMILIES = {
    "roberta": (),
    "xlnet": (
        "model={family: xlnet, layers: 2, hidden: 32, heads: 2, feed_forward: 64, max_length: 64, reuse: 8, memory: 16,"
        " memory_refresh: 4}",
        "input={packing: lanes, reuse: 8}",
        "shuffle=uniform",
        "objective={plm: {predict: 4}}",
    ),
    "electra": (
        f"model={{family: electra, {_PAIR}, embedding: 16, generator_divisor: 2}}",
        "input={packing: two_segments}",
        "objective.rtd={weight: 50.0, embeddings: shared}",
    ),
    "deberta-v3": (
        f"model={{family: deberta_v2, {_PAIR}, buckets: 8, generator_layers: 1}}",
        "input={packing: contiguous}",
        "objective.rtd={weight: 50.0, embeddings: gradient_disentangled}",
    ),
}
MOST = 8  # faults for one run
DOCUMENTS = 2000
CORPUS = {"documents": DOCUMENTS, "block_tokens": 1024}


@pytest.fixture
def struck(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """What struck, for the table of a test's end and the log that was asked for."""
    entries: list[dict[str, Any]] = []
    yield entries
    for field in ("phase", "kind", "deed", "then"):
        print(f"{field}: {dict(Counter(entry[field] for entry in entries).most_common())}")
    if (path := request.config.getoption("--log-faults")) is not None:
        path.mkdir(parents=True, exist_ok=True)
        write_log(path / "faults.jsonl", entries)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultProxy]]:
    """A folder on S3, and a proxy before it for the commands. The server is a process of its own."""
    port = free_port()
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait(lambda: answers(port), moto, "moto", seconds=90)
        server = S3Server(f"http://127.0.0.1:{port}", "test", "test").use(monkeypatch)
        with FaultProxy(server.endpoint) as proxy:
            yield f"s3://{server.new_bucket()}", proxy
    finally:
        moto.kill()
        moto.wait()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fault(request: pytest.FixtureRequest, folder: Path, struck: list[dict[str, Any]]) -> None:
    survive(request, folder, struck, family="roberta", zero=2, count=1, steps=60)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_faults(
    request: pytest.FixtureRequest, folder: Path, struck: list[dict[str, Any]], family: str, zero: int
) -> None:
    """One of the stages on S3, which fails too."""
    count = -(-request.config.getoption("--cycles") // (4 * len(FAMILIES)))
    root, proxy = request.getfixturevalue("failing") if zero == 1 else (str(folder), None)
    if proxy is not None:
        small_runs.prepare_corpus(folder, root, documents=DOCUMENTS, block_tokens=1024)
    survive(request, folder, struck, family=family, zero=zero, count=count, root=root, proxy=proxy)


def restarts(uri: str) -> dict[str, int]:
    """How many groups of ranks began where processes stayed or all were new, and from memory or from the store."""
    events = small_runs.history(uri).events
    stayed = ["stayed" in event["processes"] for event in events if event["kind"] == "underway"]
    memory = ["memory" in event for event in events if event["kind"] == "resume"]
    return {
        "others stayed": sum(stayed),
        "all new": len(stayed) - sum(stayed),
        "from memory": sum(memory),
        "from the store": len(memory) - sum(memory),
    }


def survive(
    request: pytest.FixtureRequest,
    folder: Path,
    struck: list[dict[str, Any]],
    *,
    family: str,
    zero: int,
    count: int,
    steps: int = STEPS,
    root: str | None = None,
    proxy: FaultProxy | None = None,
) -> None:
    """`count` faults, on as many runs as it takes; every one must end like the one that nobody disturbed."""
    seed, scale = request.config.getoption("--seed"), request.config.getoption("--outage-scale")
    draws = Draws(f"{seed} {family} {zero}", scale, store=proxy is not None)
    phases = f"phases=[{{steps: {steps}, length: 32, batch: {{sequences: 12}}}}]"
    settings = (*SETTINGS, *FAMILIES[family], phases, f"zero={zero}")
    name = f"{family}-{zero}-{steps}"
    calm = small_runs.new_run(folder, f"calm-{name}", *settings)
    finish(calm, 2, timeout=600)
    for number in range(1, count + 1):
        if len(struck) >= count:
            break
        uri = small_runs.new_run(root or folder, f"{name}-{number}", *settings)
        faults = draws.faults(min(count - len(struck), MOST), steps)
        run = Disturbed(uri, f"{name}-{number} with --seed {seed}", steps, EVERY, faults, proxy)
        try:
            run.run()
        finally:
            struck += run.log
        assert not run.problems, run.story()
        print(run.story())  # with the seed, beside what may differ
        print(f"restarts: {restarts(uri)}")
        small_runs.ensure_same(uri, calm, steps)
        small_runs.ensure_whole(uri)
