"""The counts of "Contributing" hold: each addition is made in a scratch copy, in so many files, and works."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.checks.scratch import PAGE, Scratch, copied, counted

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data_service(tmp_path: Path) -> Scratch:
    return copied(tmp_path, "data_service")


@pytest.fixture
def packages(tmp_path: Path) -> Scratch:
    return copied(tmp_path, "data_service", "encoder_core", "checkpoints", "launcher")


RULE = '''
"""Words turned around: the tokens of a word stand in reverse order."""

import numpy as np
from numpy.typing import NDArray

from data_service.samples.replacement import Replacement
from data_service.types import Tokens


def turned_words(
    target_ids: Tokens, sizes: NDArray[np.int64], draws: NDArray[np.uint64], replace: Replacement
) -> Tokens:
    ends = np.cumsum(sizes)
    starts = ends - sizes
    last = np.repeat(starts + ends - 1, sizes)
    turned = np.repeat((draws[starts] >> np.uint64(32)) < round(replace.turned * 2**32), sizes)
    places = np.arange(len(target_ids))
    return target_ids[np.where(turned, last - places, places)]
'''


def test_a_replacement_of_masked_words(data_service: Scratch) -> None:
    data_service.create("data_service/samples/turned_words.py", RULE)
    replacement = "data_service/samples/replacement.py"
    data_service.replace(replacement, '("similar",)', '("similar", "turned")')
    share = "    similar: Share = 0.0\n"
    data_service.replace(replacement, share, f"{share}    turned: Share = 0.0\n")
    masking = "data_service/samples/masking.py"
    branch = "    if masking.replace.similar:\n"
    data_service.replace(
        masking,
        branch,
        "    if masking.replace.turned:\n"
        "        assert sizes is not None\n"
        "        rows.tokens[positions] = turned_words(target_ids, sizes[chosen], draws, masking.replace)\n"
        f"    el{branch.strip()}\n",
    )
    imported, rule = "from data_service.types import Level\n", "turned_words"
    data_service.replace(
        masking, imported, f"from data_service.samples.{rule} import turned_words\n{imported}"
    )
    said = data_service.run(
        "import numpy as np\n"
        "from data_service.rng import stream_key\n"
        "from data_service.samples.make import make_rows\n"
        "from data_service.samples.masking import MaskingTables, MlmMasking\n"
        "from data_service.samples.packing import pack\n"
        "from data_service.samples.spec import SourceSpec, StreamSpec\n"
        "from data_service.tokenizers.specials import SpecialIds\n"
        "from data_service.types import Block\n"
        "replace = {'mask': 0, 'random': 0, 'keep': 0, 'turned': 1}\n"
        "masking = MlmMasking(rate=0.5, unit='whole_word', replace=replace)\n"
        "source = SourceSpec(name='s', uri='', manifest_fingerprint='')\n"
        "special = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3)\n"
        "spec = StreamSpec(sources=(source,), length=32, masking=masking, special=special,\n"
        "    never_masked=(0, 1, 2, 3, 4), vocab_size=60, seed=1)\n"
        "block = Block(np.arange(10, 40, dtype=np.uint16), np.array([0, 30]), np.array([0, 1]))\n"
        "words = MaskingTables(np.arange(60) % 3 == 1)\n"
        "samples = make_rows(block, pack(block, 'contiguous', 32), 0, 1, spec, stream_key('x'), words)\n"
        "turned = samples.tokens[samples.target_positions].reshape(-1, 3)\n"
        "assert (turned[:, ::-1] == samples.target_ids.reshape(-1, 3)).all()\n"
        "print(len(turned), masking.model_dump()['replace'])"
    )
    assert said.startswith("5 ")
    assert "'turned': 1.0" in said
    assert "similar" not in said
    assert len(data_service.touched) == counted("Add a replacement of masked words")


def test_a_replacement_with_a_table() -> None:
    """That of similar words, without what learns the table."""
    learning = (":!data_service/stream/similar_words.py", ":!launcher/app/cli/corpus.py")
    naming = subprocess.run(
        [
            "git",
            "grep",
            "-lE",
            r"similar_words|Similar(Source|Words)|\.similar\b",
            "--",
            "*.py",
            ":!tests",
            *learning,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"named in {len(naming.stdout.split())} files of code" in PAGE.read_text("utf-8"), naming.stdout


STORE = '''
"""Objects in the memory that processes of one machine share."""

from pathlib import Path

from data_service.store.local import LocalStore


class SharedMemoryStore(LocalStore):
    @property
    def uri(self) -> str:
        return f"memory:/{self.root}"
'''


def test_a_store(data_service: Scratch) -> None:
    data_service.create("data_service/store/shared_memory.py", STORE)
    case = '        case "s3":\n'
    data_service.replace(
        "data_service/store/open.py",
        case,
        '        case "memory":\n'
        "            from data_service.store.shared_memory import SharedMemoryStore\n\n"
        f"            return SharedMemoryStore(Path(rest))\n{case}",
    )
    said = data_service.run(
        "from data_service.store.open import open_store\n"
        f"store = open_store('memory://{data_service.root}/objects')\n"
        "store.put('a/b', b'held')\n"
        "print(store.uri.split(':')[0], store.get('a/b'), store.put_if_absent('a/b', b'other'))"
    )
    assert said.split() == ["memory", "b'held'", "False"]
    assert len(data_service.touched) == counted("Add a store")


READER = '''
"""Documents of .lines files: every line is one."""

from collections.abc import Iterator

from data_service.ingest.files import open_text
from data_service.ingest.formats import LinePlace, read_lines
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import BadRecord, Text, accept, decode
from data_service.ingest.tasks import FilePiece


def read_one_a_line(piece: FilePiece, options: BuildOptions) -> Iterator[Text | BadRecord]:
    with open_text(piece.file) as stream:
        for line in read_lines(stream, 0, options.max_document_bytes):
            yield accept(options, decode, line.data.rstrip(), options, LinePlace(piece.file, line.offset))
'''


def test_an_input_format(data_service: Scratch) -> None:
    data_service.create("data_service/ingest/one_a_line.py", READER)
    inputs = "data_service/ingest/inputs.py"
    data_service.replace(inputs, 'Literal["txt", ', 'Literal["lines", "txt", ')
    data_service.replace(inputs, '    ".txt": "txt",\n', '    ".txt": "txt",\n    ".lines": "lines",\n')
    data_service.replace("data_service/ingest/tasks.py", "_UNCUT = (", '_UNCUT = ("lines", ')
    documents = "data_service/ingest/documents.py"
    branch = '        case "jsonl":\n'
    data_service.replace(
        documents,
        branch,
        f'        case "lines":\n            return read_one_a_line(piece, options)\n{branch}',
    )
    imported = "from data_service.ingest.options import BuildOptions\n"
    reader = "one_a_line"
    data_service.replace(
        documents, imported, f"from data_service.ingest.{reader} import read_one_a_line\n{imported}"
    )
    (data_service.root / "poems.lines").write_text("first\nsecond\n")
    said = data_service.run(
        "from data_service.ingest.documents import read_documents\n"
        "from data_service.ingest.inputs import list_inputs\n"
        "from data_service.ingest.options import BuildOptions\n"
        "from data_service.ingest.tasks import plan_splits\n"
        "options = BuildOptions()\n"
        "(split,) = plan_splits(list_inputs(['poems.lines']).files, options)\n"
        "print(*(document.text for document in read_documents(split, options)))"
    )
    assert said.split() == ["first", "second"]
    assert len(data_service.touched) == counted("Add an input format")


SETTER = """

def set_dropout(model: nn.Module, rate: float) -> None:
    for module in model.modules():
        if isinstance(module, Dropout):
            module.rate = rate
"""

KEY = """
    layer_key(
        "dropout",
        "dropout",
        lambda recipe: recipe.model.dropout,
        lambda recipe, own: recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"dropout": own})}
        ),
        lambda recipe: None if recipe.objective.mlm else ("only mlm has it", "leave it out"),
    ),
"""


@pytest.mark.long
@pytest.mark.heavy
def test_a_key_of_a_phase(packages: Scratch) -> None:
    """Old runs are the same runs. `use` trains one with the key."""
    plain = packages.run(IDENTITY)
    schema, field = (
        "launcher/runtime/recipe/schema.py",
        "    rope_base: Annotated[float, Field(gt=0)] | None = None\n",
    )
    packages.replace(
        schema, field, f"{field}    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None\n"
    )
    keys = "launcher/runtime/recipe/phases.py"
    entry = '    layer_key("rope_base", '
    packages.replace(keys, entry, KEY.removeprefix("\n") + entry)
    layer = "encoder_core/layers/dropout.py"
    packages.replace(layer, "\n\ndef dropout(\n", f"{SETTER}\n\ndef dropout(\n")
    loop = "encoder_core/train/loop.py"
    packages.replace(loop, '    "rope_base": ', '    "dropout": set_dropout,\n    "rope_base": ')
    imported, layers = "from encoder_core.train.engine import ", "dropout"
    packages.replace(loop, imported, f"from encoder_core.layers.{layers} import set_dropout\n{imported}")
    assert packages.run(IDENTITY) == plain
    packages.run("from tests.support.phase_key import use; use()")
    assert len(packages.touched) == counted("Add a key of a phase")


IDENTITY = """
from launcher.runtime.recipe import identity
from launcher.runtime.recipe.load import load

for name in ("roberta-base", "modernbert-base"):
    recipe = load(name)
    print(identity.fingerprint(identity.identity(recipe)), recipe.to_yaml())
"""


DISPLAYS = """
import io
import json
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_service.store.local import LocalStore
from encoder_core.train.engine import Update
from encoder_core.train.exchange import Signals
from encoder_core.train.metrics import StepReport
from encoder_core.train.state import TrainState
from launcher.observe.inspect.report.page import ReportSubject, render
from launcher.observe.inspect.status import describe, status_by
from launcher.observe.sinks.publish import row_of
from launcher.observe.sinks.tensorboard import TensorBoardFiles
from launcher.runtime.cluster import gauges
from launcher.runtime.cluster.display import Watch
from launcher.runtime.run.history import History, StepHistory

signals = Signals(False, False, False, True, False, 0.1, 1000, 7, {"mlm": 150.0})
sums = {"mlm_weighted": 300.0, "mlm_loss": 300.0, "mlm_targets": 150.0}
record = StepReport(TrainState(), (), signals, sums, 1e-3, {"all": Update(True, 1.0)}, 0.5).record()

out = io.StringIO()
Watch(Console(file=out, width=200), 10).update(SimpleNamespace(record=record, evaluation=None))

gauged = {}


class Gauge:
    def __init__(self, name, *_):
        self.name = name

    def set(self, value, labels=None):
        gauged[" ".join((self.name, *(labels or {}).values()))] = value


gauges.gauge = Gauge
gauges.Gauges("run").record(record)

TensorBoardFiles(SimpleNamespace(folder=".")).log([row_of(record, 0)], None)
board = EventAccumulator("tensorboard")
board.Reload()

history = History(StepHistory.of([record]), (), (), 0, 0.0)
run = SimpleNamespace(
    uri="run", store=LocalStore(Path("run")), name="run", total_steps=10, flush_seconds=1.0, origins=()
)
found = status_by(run, history, time.time(), brief=True)
subject = ReportSubject("run", "run", "today", 10, "", {}, {})
print(
    json.dumps(
        {
            "progress": out.getvalue(),
            "status": "\\n".join(describe(found, time.time())),
            "json": found.figures,
            "report": render(subject, history, datetime.now()),
            "gauges": gauged,
            "TensorBoard": [event.value for event in board.Scalars("train/target_share")],
            "tracker": row_of(record, 0).figures,
        }
    )
)
"""


def test_a_metric(packages: Scratch) -> None:
    step = '            "skipped": not all(self.applied.values()),\n'
    packages.replace(
        "encoder_core/train/metrics.py",
        step,
        f'            "target_share": sum(self.signals.counts.values()) / self.signals.tokens,\n{step}',
    )
    row = '    Metric("mfu", '
    packages.replace(
        "launcher/runtime/run/metrics.py",
        row,
        f'    Metric("target_share", "Targets", "share of all tokens", _percent),\n{row}',
    )
    shown = json.loads(packages.run(DISPLAYS))
    assert "  targets 15%  " in shown["progress"]
    assert ", targets 15%" in shown["status"]
    assert shown["json"]["target_share"] == 0.15
    assert "<b>15%</b><span>targets, share of all tokens</span>" in shown["report"]
    assert "<b>Targets</b> <small>share of all tokens</small>" in shown["report"]
    assert shown["gauges"]["figure target_share"] == 0.15
    assert shown["TensorBoard"] == [pytest.approx(0.15)]
    assert shown["tracker"]["train/target_share"] == 0.15
    assert len(packages.touched) == counted("Add a metric")


def test_a_family() -> None:
    """NeoBERT's, which was added when families had moved into one place each. Pages may name it, too, and tests of
    models for which transformers has no class."""
    official = "tests/launcher/runtime/recipe/test_official.py"  # of what not every family does
    apart = (
        "*.md",
        "tests/architecture/test_habits.py",
        official,
        "tests/launcher/after",
        "tests/launcher/app",
    )
    naming = subprocess.run(
        ["git", "grep", "-il", "neobert", "--", ".", *(f":!{path}" for path in apart)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(naming.stdout.split()) == counted("Add a family"), naming.stdout
