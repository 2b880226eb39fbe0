"""Keys that somebody puts where users put them: in URIs, in variables, in a webhook's address. None is ever shown, put
on record or told to anybody."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.checks.command import exit_code
from tests.support.runs.listeners import serving_webhook
from tests.support.runs.observer import MARK, Processes
from tests.support.runs.small_runs import SMALL, new_run, prepare_corpus
from tests.support.stores.s3 import S3Server

_VARIABLES = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "HF_TOKEN",
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def secret(draw: random.Random, length: int = 40, marks: str = "") -> str:
    return "".join(draw.choices(_LETTERS + marks, k=length))


def pieces(key: str) -> list[str]:
    """Of which none may be found: whoever splits a URI at a slash prints a part of it."""
    return [piece for piece in key.replace("+", "/").split("/") if len(piece) > 7]


FORMS = (
    "s3://{key}:{secret}@bucket/a/place",
    "s3://{secret}@bucket",
    "s3://bucket/a/place?X-Amz-Credential={key}&X-Amz-Signature={secret}",
    "az://{key}:{secret}@container/a/place",
    "az://container/a/place?sv=2021-12-02&sr=c&sig={secret}",
    "gs://{secret}@bucket/a/place",
    "https://bucket.s3.amazonaws.com/a/place?AWSAccessKeyId={key}&Signature={secret}&Expires=1",
    "https://user:{secret}@host.example/a/place",
    "S3://{key}:{secret}@bucket/a/place",
)
COMMANDS = (
    "runs status {uri}",
    "train {uri}",
    "report {uri} --out {out}/page.html",
    "report {run} --out {uri}",
    "demo --out {uri}",
    "launch slurm {run} --out {uri}",
    "show {uri} --step 1",
    "runs fork {uri} {out}/run",
    "runs fork {run} {uri}",
    "runs stop {uri}",
    "init roberta-base {out}/run --corpus {uri}",
    "init roberta-base {uri} --corpus {root}/corpus",
    "init {recipe} {out}/run --set corpus.sources.text.uri={uri}",
    "init {recipe} {out}/run --set tokenizer.uri={uri}",
    "init {recipe} {out}/run --set start={uri}",
    "init {recipe} {out}/run --set logging.mlflow.uri={uri}",
    "init {recipe} {out}/run --set evaluation.tasks=[{{probe:{{task:sst2,data:'{uri}'}}}}]",
    "init {out}/mine.yaml {out}/run",
    "recipe show {recipe} --set tokenizer.uri={uri}",
    "recipe show {out}/mine.yaml",
    "recipe from {uri}",
    "estimate {recipe} --set tokenizer.uri={uri}",
    "corpus build {uri} --tokenizer {root}/tokenizer --out {out}/corpus",
    "corpus build {root}/text.jsonl --tokenizer {uri} --out {out}/corpus",
    "corpus build {root}/text.jsonl --tokenizer {root}/tokenizer --out {uri}",
    "corpus stats {uri}",
    "corpus verify {uri}",
    "tokenizer train {uri} --out {out}/tokenizer",
    "tokenizer train {root}/text.jsonl --out {uri}",
    "tokenizer check {uri} {root}/text.jsonl",
    "checkpoints list {uri}",
    "checkpoints export {run} --out {uri}",
    "tasks check sst2 --data {uri}",
    "launch slurm {uri}",
    "launch aws-batch {uri}",
    "evaluate {run} glue --results {uri} --only-table",
    "finetune {uri} sst2",
    "embed eval {uri} stsb",
    "embed negatives {uri} {root}/text.jsonl --out {out}/mined.jsonl",
    "diagnose {uri}",
    "fill {uri} <mask>",
    "doctor {uri}",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    prepare_corpus(folder)
    new_run(folder, "run")
    return folder


@pytest.mark.parametrize(
    "draw", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 6 * len(COMMANDS)))]
)
def test_a_key_in_a_uri_is_nowhere(
    root: Path,
    tmp_path: Path,
    draw: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    draws = random.Random(draw)
    key, hidden = "AKIA" + secret(draws, 16), secret(draws, 40, "/+" if draws.random() < 0.5 else "")
    form = draws.choice(FORMS)
    if ":{secret}" not in form:  # there a slash would end it
        hidden = hidden.replace("/", "x")
    uri = form.format(key=key, secret=hidden)
    (tmp_path / "mine.yaml").write_text(f"{Path(SMALL).read_text()}\nnonsense: {uri}\ntokenizer: {{uri: {uri!r}}}\n")
    places = {"uri": uri, "out": tmp_path, "root": root, "run": root / "run", "recipe": SMALL}
    command = [part.format(**places) for part in COMMANDS[draw % len(COMMANDS)].split()]
    monkeypatch.chdir(tmp_path)
    code = exit_code(*command)
    said = "".join(capfd.readouterr()) + caplog.text
    assert code, said
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "mine.yaml"]
    for piece in (*pieces(hidden), key):
        assert piece not in said
        assert piece.encode() not in b"".join(written)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("draw", range(2))
def test_keys_of_a_training_are_nowhere(
    s3: S3Server, tmp_path: Path, draw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's, a webhook's and the trackers', in the variables where users put them. One training ends well; in the
    other the webhook refuses, and the store's key is not known there."""
    draws = random.Random(draw)
    keys = {name: secret(draws) for name in _VARIABLES}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{(login := secret(draws))}@127.0.0.1:9")
    bucket = s3.new_bucket()
    root = f"s3://{bucket}/here"
    prepare_corpus(tmp_path, root)
    trackers = "logging={flush_seconds: 1, tensorboard: false, wandb: {project: p, mode: offline}, mlflow: {}}"
    uri = new_run(root, "run", trackers, "events.webhook_env=HOOK", "trainers=1")
    with serving_webhook(200 if draw == 0 else 403) as server:
        hook = f"{server.url}/{secret(draws)}"
        monkeypatch.setenv("HOOK", hook)
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
        (tmp_path / "wandb").mkdir()
        said, lines = _train(uri, tmp_path)
        told = [str(body) for body in server.bodies]
    for command in (["runs", "status", uri], ["report", uri, "--out", str(tmp_path / "page.html")]):
        done = subprocess.run([sys.executable, "-m", "maskfleet", *command], capture_output=True, text=True, check=True)
        said += done.stdout + done.stderr
    client = s3.client()
    stored = [
        client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
        for entry in client.list_objects_v2(Bucket=bucket, Prefix="here/run")["Contents"]
    ]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    everything = [*stored, *written, said.encode(), *(text.encode() for text in (*lines, *told))]
    assert len(stored) > 5
    assert told
    for hidden in (*keys.values(), login, hook.rpartition("/")[2]):
        assert not [text[:200] for text in everything if hidden.encode() in text]


def _train(uri: str, folder: Path) -> tuple[str, list[str]]:
    """What the command showed, and the command lines of its processes meanwhile. Ray's logs lie in `folder` then."""
    processes, lines = Processes(f"{MARK}=secrets"), set[str]()
    short = Path(tempfile.mkdtemp(prefix="mf-", dir="/tmp"))  # paths of Ray's sockets must be
    with (folder / "shown.txt").open("w") as shown:
        command = subprocess.Popen(
            [sys.executable, "-m", "maskfleet", "train", uri],
            env=os.environ | {MARK: "secrets", "TMPDIR": str(short), "OMP_NUM_THREADS": "1"},
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    processes.commands.append(command.pid)
    try:
        while command.poll() is None:
            for one in processes.alive():
                try:
                    lines.add(" ".join(one.cmdline()))
                except psutil.Error:
                    continue
        text = (folder / "shown.txt").read_text()
        assert command.returncode == 0, text
        return text, sorted(lines)
    finally:
        processes.kill()
        shutil.move(short, folder / "temporary")
