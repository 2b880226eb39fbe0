"""Whatever a newer version has written, of every format: the command that reads it ends with 2, says so, and changes
nothing. Checkpoints and records of rewinds: `tests/checkpoints/test_newer.py`."""

import io
import json
import random
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from checkpoints.hf.folder import publish
from checkpoints.layout import CheckpointName, add_digest, strip_digest
from checkpoints.ownership import StopRequest, find_stop_request
from data_service.errors import CorpusError
from data_service.samples.similar_words import dump_similar_words, parse_similar_words
from data_service.store.base import digest
from data_service.store.local import LocalStore
from launcher.after.evaluate.cells import Cell, tabulate_results
from launcher.errors import RunError
from launcher.observe.inspect.kept_baselines import Baselines, baselines_fingerprint
from launcher.observe.inspect.report.task_table import store_rows
from launcher.observe.sinks.publish import Publisher
from launcher.runtime.cluster.operator_log import read_deaths
from launcher.runtime.recipe.parts import EvaluationTask, HeldOutSettings
from launcher.runtime.run.evaluations import DiagnosticCell, DiagnosticResult, write_commit_weights, write_result
from launcher.runtime.run.packing import pack_older, pack_once
from launcher.runtime.run.record import open_run
from launcher.runtime.run.sealed import sealed_bytes
from launcher.runtime.run.segments import METRICS, segment_key
from tests.support.checks.command import exit_code
from tests.support.runs.small_runs import new_run
from tests.support.runs.untrained import Attempt, Committing

Change = Callable[[bytes, random.Random], bytes]


def _more(draw: random.Random) -> dict[str, object]:
    """A number that this version does not know, and often fields that it does not know either."""
    fields: dict[str, object] = {
        f"new_{draw.randrange(99)}": draw.choice([None, 1, "x", [1.5], {"a": {}}]) for _ in range(draw.randrange(3))
    }
    return fields | {"format": draw.choice([3, 4, 1 << 40])}


def _object(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(json.loads(data) | _more(draw)).encode()


def _line(data: bytes, draw: random.Random) -> bytes:
    """One line of several."""
    lines = data.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = _object(lines[place], draw)
    return b"\n".join(lines) + b"\n"


def _sealed(data: bytes, draw: random.Random) -> bytes:
    content = json.dumps(json.loads(data)["content"] | _more(draw))
    return f'{{"digest": "{digest(content.encode())}", "content": {content}}}\n'.encode()


def _manifest(data: bytes, draw: random.Random) -> bytes:
    return re.sub(rb'"version":6', b'"version":%d' % draw.randint(7, 99), data, count=1)


def _archive(data: bytes, draw: random.Random) -> bytes:
    table, file = pq.read_table(io.BytesIO(data)), io.BytesIO()
    body = strip_digest("maskfleet", table.schema.metadata[b"maskfleet"])
    assert body is not None
    about = add_digest("maskfleet", _object(body, draw))
    pq.write_table(table.append_column("new", [[0.0] * len(table)]).replace_schema_metadata({"maskfleet": about}), file)
    return file.getvalue()


@dataclass(frozen=True)
class Format:
    """A kind of object: those that match `glob`, how a newer version writes one, and commands that read it."""

    glob: str
    change: Change
    commands: tuple[tuple[str, ...], ...]


STATUS, REPORT = ("runs", "status", "{run}"), ("report", "{run}", "--out", "{out}/page.html")
FORMATS = {
    "metrics": Format("run/metrics/a000003/*.jsonl", _line, (STATUS, REPORT)),
    "packed metrics": Format("run/metrics/a000002/*.parquet", _archive, (STATUS, REPORT)),
    "events": Format("run/events/*/*.jsonl", _line, (STATUS, REPORT)),
    "weights of a commit": Format("run/evaluations/commits/*.json", _sealed, (REPORT,)),
    "a measure": Format("run/evaluations/[0-9a]*/*.json", _sealed, (REPORT,)),
    "a row of a table": Format("run/tables/*.json", _sealed, (REPORT,)),
    "baselines": Format("run/baselines.json", _sealed, (REPORT,)),
    "run.json": Format("run/run.json", _object, (STATUS, REPORT, ("checkpoints", "list", "{run}"))),
    "an export": Format(
        "exported/maskfleet_export.json", _object, (("checkpoints", "export", "{run}", "--out", "{root}/exported"),)
    ),
    "a corpus": Format("corpus/manifest.json", _manifest, (("corpus", "stats", "{root}/corpus"),)),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it, an export and a corpus."""
    root = tmp_path_factory.mktemp("place")
    for name in ("corpus", "tokenizer"):
        shutil.copytree(inputs / name, root / name)
    uri, store = new_run(root, "run"), LocalStore(root / "run")
    Committing(uri).commit(3)
    _record_steps(store)
    run = open_run(uri)
    _measure(store, baselines_fingerprint(run.record.fingerprint, run.recipe.evaluation.samples, run.removals))
    (root / "model").mkdir()
    (root / "model/config.json").write_text("{}")
    publish(root / "model", LocalStore(root / "exported"), [])
    return root


def _record_steps(store: LocalStore) -> None:
    """Of two attempts, the first one's packed."""
    for stop in (9, 12):
        attempt = Attempt(store)
        for step in range(attempt.step + 2, stop + 1, 2):
            attempt.train(step).journal.flush()
        attempt.journal.close()
        pack_once(store, 2, ended=True)


def _measure(store: LocalStore, fingerprint: str) -> None:
    write_commit_weights(store, CheckpointName(1, 3), weights := "ab" * 32)
    measured = DiagnosticCell(weights=weights, task=EvaluationTask(heldout=HeldOutSettings()), data="d", seed=0)
    write_result(store, DiagnosticResult(cell=measured, figures=(), seconds=1.0))
    names = {"source": "runs/base", "step": 100, "weights": "w", "task": "sst2", "data": "d"}
    cell = Cell.model_validate(names | {"measure": "finetune", "settings": {"lr": 1e-5}, "seed": 0})
    store_rows(store, tabulate_results([cell], {}))
    counted = Baselines(targets=1, unigram=1.0, bigram=1.0, counted=1, fingerprint=fingerprint)
    store.put(counted.path, sealed_bytes(counted))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("draw", [0, *(pytest.param(draw, marks=pytest.mark.long) for draw in range(1, 6))])
@pytest.mark.parametrize("name", FORMATS)
def test_a_command_says_so_and_changes_nothing(
    place: Path,
    tmp_path: Path,
    name: str,
    draw: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    form, draws = FORMATS[name], random.Random(f"{name} {draw}")
    path = draws.choice(sorted(place.glob(form.glob)))
    original = path.read_bytes()
    path.write_bytes(form.change(original, draws))
    before = contents(place)
    command = [
        part.format(root=place, run=place / "run", out=tmp_path) for part in form.commands[draw % len(form.commands)]
    ]
    try:
        code = exit_code(*command)
        said = " ".join(capsys.readouterr().err.split())
        assert code == 2, said
        assert " newer " in said
        assert path.name in said
        assert "remedy" in said
        assert contents(place) == before
        assert not list(tmp_path.iterdir())
    finally:
        path.write_bytes(original)


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "attempts/deaths.json": (lambda root: read_deaths(LocalStore(root), print), RunError),
    "trackers/x.state.json": (lambda root: Publisher(LocalStore(root), None, "x"), RunError),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("draw", range(3))
@pytest.mark.parametrize("name", READERS)
def test_who_reads_it_inside_a_long_command_refuses_it(tmp_path: Path, name: str, draw: int) -> None:
    draws = random.Random(f"{name} {draw}")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    content = _more(draws)
    path.write_text(json.dumps(content | {"version": content["format"]}))
    before = contents(tmp_path)
    read, kind = READERS[name]
    with pytest.raises(kind, match="newer"):
        read(tmp_path)
    assert contents(tmp_path) == before


def test_newer_records_are_not_packed_and_none_is_deleted(tmp_path: Path) -> None:
    store, lines = LocalStore(tmp_path), [json.dumps({"kind": "step", "step": step}) for step in range(4)]
    lines[2] = json.dumps({"kind": "step", "format": 2, "step": {"of": 2}})
    for number, line in enumerate(lines):
        store.put(segment_key(METRICS, 1, number), line.encode())
    before = contents(tmp_path)
    with pytest.raises(RunError, match="newer"):
        pack_once(store, 1, ended=True)
    pack_older(store, 2, threading.Event())
    assert contents(tmp_path) == before


def test_a_table_of_similar_words_and_a_request_to_stop(tmp_path: Path) -> None:
    table = dump_similar_words([], tokenizer="t", vocab_size=5, build_settings={})
    with pytest.raises(CorpusError, match="newer"):
        parse_similar_words(
            table.replace(b'"version": 1', b'"version": 2').replace(b'"version":1', b'"version":2'), "x"
        )
    request = StopRequest(attempt=1, by="x", time=0.0)
    LocalStore(tmp_path).put("attempts/stop.json", _object(request.model_dump_json().encode(), random.Random(1)))
    assert find_stop_request(LocalStore(tmp_path), 1) is None
