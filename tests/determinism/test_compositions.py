"""Every cell of the table of families and objectives as a run: ZeRO 2 on two ranks, a rank killed, resumed, and equal
to the run that nobody disturbed, bit for bit; its losses fall. Some cells at ZeRO 3, too. Half a minute a cell. Refused
cells are refused at `init`."""

import json
from itertools import product
from pathlib import Path

import pytest
import yaml

from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions, PairFields
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import TokenizerOptions, train_tokenizer
from launcher.app.cli.demo_path import write_documentation
from launcher.errors import RecipeError
from tests.support.data.translated import LANGUAGES as LANGUAGES_OF_OURS
from tests.support.models.compositions import FAMILIES, LANGUAGES, OBJECTIVES, SHAPE, TEACHER, Row, refused
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS, KILL = 24, 13
AT_3 = {("BART", "denoise"), ("ALBERT", "mlm + retromae"), ("DeBERTa v2", "mlm + condenser")}
CELLS = [
    *((family, row, 2) for family, row in product(FAMILIES, OBJECTIVES)),
    *((family, row, 3) for family, row in product(FAMILIES, OBJECTIVES) if (family, row.name) in AT_3),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's documentation, some of it, with a tokenizer that every family can use."""
    folder = tmp_path_factory.mktemp("text")
    write_documentation(folder / "all.jsonl")
    lines = (folder / "all.jsonl").read_text("utf-8").splitlines(keepends=True)[:60]
    (folder / "text.jsonl").write_text("".join(lines), "utf-8")
    documents = [yaml.safe_load(line)["text"][:20_000] for line in lines]
    tokenizer = train_tokenizer("wordpiece", documents, 600, TokenizerOptions(specials="bert"))
    save_tokenizer(tokenizer, f"{folder}/tokenizer")
    options = BuildOptions(heldout_fraction=0.1, block_tokens=4096)
    build_corpus(
        [str(folder / "text.jsonl")],
        f"{folder}/corpus",
        f"{folder}/tokenizer",
        options,
        lambda progress: None,
    )
    _translated(folder, documents, options)
    return folder


def _translated(folder: Path, documents: list[str], options: BuildOptions) -> None:
    """`folder`/translations: lines of the text, each with its words backwards."""
    lines = [line.strip() for document in documents for line in document.splitlines() if len(line.split()) > 3]
    pairs = ({"query": line, "positive": LANGUAGES_OF_OURS["re"](line)} for line in dict.fromkeys(lines))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), "utf-8")
    build_corpus(
        [str(folder / "pairs.jsonl")],
        f"{folder}/translations",
        f"{folder}/tokenizer",
        options.model_copy(update={"pairs": PairFields()}),
        lambda progress: None,
    )


@pytest.fixture(scope="module")
def taught(texts: Path) -> Path:
    """The same, with a teacher in it."""
    plain = next(row for row in OBJECTIVES if row.name == "mlm")
    finish(small_runs.new_run(texts, TEACHER, *settings("BERT", plain, 2)), 1)
    return texts


def settings(family: str, row: Row, stage: int) -> tuple[str, ...]:
    model = SHAPE | FAMILIES[family] | {"dropout": 0.1, "initializer_range": 0.1}
    if family == "XLNet":
        model |= {"memory_refresh": 4}
    values: dict[str, object] = {
        "model": model,
        "objective": row.objective,
        "input": row.input.model_dump(mode="json"),
        "phases": [
            {"steps": STEPS // len(row.phases), "length": 32, "batch": {"sequences": 16}} | own for own in row.phases
        ],
        "schedule": {"warmup": 2, "decay": "constant"},
        "optimizer": {"adamw": {"lr": 3.0e-3}},
        "checkpoint": {"every": {"steps": 4}, "keep_last": 3},
        "evaluation": {"every": {"steps": STEPS}, "samples": 16},
        "shuffle": "uniform",
        "zero": stage,
    }
    if family == "XLM" or row.packing == "translations":
        both = row.packing == "translations"
        values["corpus.sources.text.languages"] = [*LANGUAGES[: 2 if both else 1]]
    return tuple(f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in values.items())


@pytest.mark.parametrize(
    ("family", "row", "stage"),
    CELLS,
    ids=[f"{family}-{row.name}-{row.packing}-zero{stage}" for family, row, stage in CELLS],
)
def test_a_cell_is_trained_killed_and_resumed_bit_for_bit_or_refused(
    family: str, row: Row, stage: int, texts: Path, request: pytest.FixtureRequest
) -> None:
    name, wanted = f"{CELLS.index((family, row, stage)):03d}", settings(family, row, stage)
    if refused(family, row):
        with pytest.raises(RecipeError):
            small_runs.new_run(texts, name, *wanted)
        return
    if row.packing == "translations":
        wanted += (f"corpus.sources.text.uri={texts}/translations",)
    if row.terms.distil is not None:
        folder = request.getfixturevalue("taught")
        wanted += (f"objective.distil.teachers.0.uri={folder}/{TEACHER}",)
    undisturbed = finish(small_runs.new_run(texts, f"{name}-whole", *wanted), 2)
    run = small_runs.new_run(texts, name, *wanted)
    assert KILLED in run_group(run, 2, kill={1: KILL}).codes
    finish(run, 2)
    small_runs.ensure_same(run, undisturbed, STEPS)
    records = small_runs.history(run).steps
    terms = dict.fromkeys(name for record in records for name in record if name.endswith("_loss"))
    for term in terms:
        values = [record[term] for record in records if term in record]
        first, last = sum(values[:4]) / 4, sum(values[-4:]) / 4
        print(f"{family}, {row.name}: {term} {first:.3f} to {last:.3f}")
    if row.terms.diffusion is not None:  # a batch's rates, over which its losses are divided, decide more than 24 steps
        whole = [record["loss"] for record in small_runs.history(run).evaluations]
        print(f"{family}, {row.name}: held out {whole}")
        assert whole[-1] < whole[0]
        return
    each = STEPS // len(row.phases)
    for start in range(0, STEPS, each):
        whole = small_runs.losses(run)[start : start + each]
        assert sum(whole[-4:]) < sum(whole[:4])
