"""The counts of "Contributing" hold: each addition is made in a scratch copy, in so many files, and works."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "infra/docs/contributing.md"


@dataclass
class Scratch:
    """A copy of packages that a test may change. `touched`: files that it changed or created."""

    root: Path
    touched: set[str] = field(default_factory=set)

    def create(self, name: str, text: str) -> None:
        path = self.root / name
        assert not path.exists()
        path.write_text(text, "utf-8")
        self.touched.add(name)

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text("utf-8")
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new), "utf-8")
        self.touched.add(name)

    def run(self, program: str) -> str:
        """What a program prints that imports the packages of the copy."""
        path = f"{self.root}{os.pathsep}{ROOT}"  # also of processes that it starts; tests are not copied
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def copied(folder: Path, *packages: str) -> Scratch:
    ignored = shutil.ignore_patterns("__pycache__")
    for package in packages:
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return Scratch(folder)


@pytest.fixture
def data_service(tmp_path: Path) -> Scratch:
    return copied(tmp_path, "data_service")


@pytest.fixture
def product(tmp_path: Path) -> Scratch:
    return copied(tmp_path, "data_service", "encoder_core", "checkpoints", "launcher")


def counted(heading: str) -> int:
    """The number in "That is N files" of a section of the page."""
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (number,) = re.findall(r"That is (\d+) files of code", section)
    return int(number)


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


@pytest.mark.heavy
def test_a_key_of_a_phase(product: Scratch) -> None:
    """Two runs: losses are the same up to the phase that sets the key. A fork may set it, too."""
    plain = product.run(IDENTITY)
    schema, field = (
        "launcher/runtime/recipe/schema.py",
        "    rope_base: Annotated[float, Field(gt=0)] | None = None\n",
    )
    product.replace(schema, field, f"{field}    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None\n")
    keys = "launcher/runtime/recipe/phases.py"
    entry = '    layer_key("rope_base", '
    product.replace(keys, entry, KEY.removeprefix("\n") + entry)
    layer = "encoder_core/layers/dropout.py"
    product.replace(layer, "\n\ndef dropout(\n", f"{SETTER}\n\ndef dropout(\n")
    loop = "encoder_core/train/loop.py"
    product.replace(loop, '{"rope_base": ', '{"dropout": set_dropout, "rope_base": ')
    imported = "from encoder_core.train.engine import "
    product.replace(loop, imported, f"from encoder_core.layers.dropout import set_dropout\n{imported}")
    assert product.run(IDENTITY) == plain  # old runs are the same runs
    said = product.run(RUNS)
    assert said.splitlines()[-1] == "done"
    assert len(product.touched) == counted("Add a key of a phase")


IDENTITY = """
from launcher.runtime.recipe import identity
from launcher.runtime.recipe.load import load

for name in ("roberta-base", "modernbert-base"):
    recipe = load(name)
    print(identity.fingerprint(identity.identity(recipe)), recipe.to_yaml())
"""

RUNS = """
from datetime import UTC, datetime
from pathlib import Path
import pytest
from checkpoints.listing import committed
from launcher.app.cli.recipe_timeline import print_timeline, timeline_records
from launcher.errors import RecipeError
from launcher.runtime.recipe.load import load
from launcher.runtime.run.fork import fork
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs

root = Path("inputs").absolute()
root.mkdir()
small_runs.prepare_corpus(root)
short = ("phases.0.steps=3", "phases.1.steps=2")
without = finish(small_runs.new_run(root, "without", *short), 1)
having = finish(small_runs.new_run(root, "having", *short, "phases.1.dropout=0"), 1)
first, second = small_runs.losses(without), small_runs.losses(having)
assert first[:3] == second[:3] and first[3] != second[3]

recipe = open_run(having).recipe
assert {(at["phase"], at["dropout"]) for at in timeline_records(recipe)} == {(0, 0.1), (1, 0.0)}
print_timeline(recipe)

step = committed(open_run(without).store)[0].step
forked = fork(
    open_run(without),
    str(root / "fork"),
    step,
    ("phases.1.dropout=0", "phases.1.steps=9"),
    now=datetime.now(UTC),
    keep_position=False,
)
assert "- phases.1.dropout: (absent) -> 0.0" in forked.changes and not forked.restarted
with pytest.raises(RecipeError, match="phases.0.dropout: only mlm has it"):
    load("xlnet-base", ("phases.0.dropout=0",))
print("done")
"""


def test_a_family() -> None:
    """NeoBERT's, which was added when families had moved into one place each. Pages may name it, too."""
    naming = subprocess.run(
        ["git", "grep", "-il", "neobert", "--", ".", ":!*.md", ":!tests/architecture/test_habits.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(naming.stdout.split()) == counted("Add a family"), naming.stdout
