"""Commands of every kind, each with what it gives if nobody strikes it; and strikes, drawn from a seed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from data_service.store.open import open_store
from launcher.exit_codes import FINISHED, MISTAKE, REPEAT
from tests.support.data.made_up import write_text
from tests.support.models.exports import FAMILIES, export
from tests.support.runs import small_runs
from tests.support.runs.observer import MARK, Processes
from tests.support.tasks.small_tasks import scored, task_files, write_rows

COMMANDS = {
    "train": 4, "build": 4, "prepare": 3, "append": 2, "merge": 1, "tokenizer": 1, "export": 1, "stats": 1, "show": 1,
    "train on S3": 2, "build on S3": 2, "append on S3": 1, "finetune": 2, "embed": 2, "evaluate": 2,
}  # fmt: skip
"""Name -> how often it is drawn. Those on S3 write their output there."""
REFUSING = {"tokenizer", "export"}
"""Commands that refuse, with a remedy, to write over what they completed before."""
SIGNALS = ("KILL", "KILL", "KILL", "TERM", "INT", "HUP", "SEGV", "ABRT", "STOP")
LIMITS = {"few descriptors": "nofile=64", "fewer descriptors": "nofile=300", "little memory": "as=1000000000",
          "less memory": "as=3300000000", "small files": "fsize=200000", "few processes": "nproc=40",
          "fewer processes": "nproc=4"}  # fmt: skip
"""Name -> what prlimit is told. Root may have any number of processes, so those commands run as nobody."""
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+dac_override",
          "--ambient-caps=+dac_override")  # fmt: skip
PLACES = {"full TMPDIR": "tmp", "full /dev/shm": "/dev/shm", "full disk": "out", "full HOME": "home"}
"""Name -> where a file system of 64 KB is mounted."""
STUCK_S, REPEATS, STOPPED_S = 400.0, 8, 2.0
LEFT_S = 30.0  # for everything to end after a command that completed
ON_S3 = " on S3"
MOST_STRIKES = 4
_STEPS = 40
_ERRORS = "\n--- standard error:\n"
_ROUND = 'set -e; mount -t tmpfs -o size=64k t {}; shift 0; exec "$@"'


@dataclass(frozen=True)
class Strike:
    """`at`: the moment, as a share of the time that the command takes; `pick`: which of its processes; `times`: how
    often in a row, if the command does not end well before."""

    command: str
    signal: str = ""
    at: float = 0.0
    pick: float = 0.0
    environment: str = ""
    times: int = 1

    @property
    def what(self) -> str:
        return self.environment or self.signal


@dataclass
class Outcome:
    """`end`: of the command that was struck. `compared`: bytes that were found equal in the end."""

    end: str
    compared: int = 0
    problems: list[str] = field(default_factory=list)


def draw(rng: random.Random) -> Strike:
    """One strike: a signal to a process of a command, or an environment in which it is started."""
    command = rng.choices([*COMMANDS], [*COMMANDS.values()])[0]
    if rng.random() < 0.35:
        return Strike(command, environment=rng.choice([*LIMITS, *PLACES]))
    times = rng.choice((1, 1, 2, MOST_STRIKES))
    return Strike(command, rng.choice(SIGNALS), rng.uniform(0, 1.0), rng.random(), times=times)


class Bench:
    """Inputs for all commands below `folder`; what each gives undisturbed, once it was asked for.

    `bucket`: URI of a folder on S3 for what is written there.

    Attributes:
        starts: commands that were started.
        compared: bytes that were compared.
    """

    def __init__(self, folder: Path, bucket: str) -> None:
        self.starts = self.compared = 0
        self._bucket = bucket
        self._folder, self._short = folder, Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        self._processes = Processes(f"{MARK}={self._short.name}")
        self._calm: dict[str, tuple[dict[str, bytes], float]] = {}
        for name in ("tmp", "home"):
            (self._short / name).mkdir()
        for root in (str(folder), bucket):
            small_runs.prepare_corpus(folder, root, documents=300, block_tokens=1024)
        for number in range(3):
            write_text(folder / f"part{number}.jsonl", 30_000, seed=number)  # more than one task
        write_text(folder / "more.jsonl", 300, seed=9)
        built = [
            "--tokenizer",
            str(folder / "tokenizer"),
            "--heldout-like",
            str(folder / "corpus"),
            "--out",
            str(folder / "other"),
        ]
        code, said = self._run(["corpus", "build", str(folder / "more.jsonl"), *built])
        assert code == FINISHED, said
        stages = "stages: [{stage: length, least_words: 4}, {stage: exact_duplicates}]"
        source = f"{{source: one, files: ['{folder}/part*.jsonl']}}"
        (folder / "prepare.yaml").write_text(f"inputs: [{source}]\n{stages}\n")
        self._new_run(f"{folder}/trained")
        code, said = self._run(["train", str(folder / "trained")])
        assert code == FINISHED, said
        export(FAMILIES["bert"], folder / "bert")
        task_files(str(folder), train=600)
        pairs = {
            "files": [write_rows(folder / "pairs.jsonl", scored(400))],
            "texts": ["a", "b"],
            "label": "score",
        }
        settings = {"train": pairs | {"scores": [0, 5]}, "loss": {"kind": "cosent"}, "epochs": 3, "every": 20}
        (folder / "embed.yaml").write_text(json.dumps(settings | {"lr": 2e-3, "max_length": 16}))

    def until(self, seconds: float) -> Iterator[int]:
        """Numbers from 0, until so many seconds are over."""
        number, deadline = 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield number
            number += 1
        shutil.rmtree(self._short, ignore_errors=True)

    def strike(self, strike: Strike) -> Outcome:
        """Strike, repeat the command until it completes, compare. It is repeated even if it ended well."""
        calm, seconds = self._undisturbed(strike.command)
        out = self._fresh(strike.command)
        arguments = self._arguments(strike.command, out)
        outcome = Outcome("")
        for _ in range(strike.times):
            code, said, allowed = self._struck(strike, arguments, seconds)
            outcome.end = self._judge(code, said, allowed)
            if outcome.end.startswith("wrong"):
                outcome.problems.append(f"{outcome.end}: {said[-1500:]}")
            outcome.problems += _half_written(out)
            if code == FINISHED:
                break
        for _ in range(REPEATS):
            code, said = self._run(arguments)
            if code == FINISHED or (code == MISTAKE and strike.command in REFUSING):
                break
            if self._judge(code, said, set()).startswith("wrong"):
                outcome.problems.append(f"repeated: code {code}: {said[-1500:]}")
        found = self._result(strike.command, out, said)
        if code not in (FINISHED, *([MISTAKE] if strike.command in REFUSING else [])) or found != calm:
            unlike = sorted(key for key in {*found, *calm} if found.get(key) != calm.get(key))
            outcome.problems.append(f"code {code}, other bytes: {unlike[:10]}: {said[-800:]}")
        outcome.compared = sum(map(len, calm.values()))
        self.compared += outcome.compared
        outcome.problems += self._left(out)
        return outcome

    def _undisturbed(self, name: str) -> tuple[dict[str, bytes], float]:
        if name not in self._calm:
            out, began = self._fresh(name), time.monotonic()
            code, said = self._run(self._arguments(name, out))
            assert code == FINISHED, said
            self._calm[name] = self._result(name, out, said), time.monotonic() - began
        return self._calm[name]

    def _fresh(self, command: str) -> str:
        """Return the URI where the output of a command goes, always the same: manifests name places. It is empty."""
        if command.endswith(ON_S3):
            store = open_store(f"{self._bucket}/out")
            store.delete_many([entry.key for entry in store.list()])
            return store.uri
        place = self._folder / "struck"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return str(place / "out")

    def _arguments(self, name: str, out: str) -> list[str]:
        folder = self._folder
        tokenizer, trained = ["--tokenizer", str(folder / "tokenizer")], str(folder / "trained")
        match name.removesuffix(ON_S3):
            case "train":
                self._new_run(out)
                return ["train", out]
            case "build":
                texts = [str(folder / f"part{number}.jsonl") for number in range(3)]
                return ["corpus", "build", *texts, *tokenizer, "--out", out, "--workers", "2"]
            case "prepare":
                return ["corpus", "prepare", str(folder / "prepare.yaml"), out, "--workers", "2"]
            case "append":
                return ["corpus", "append", str(folder / "corpus"), str(folder / "more.jsonl"), "--out", out]
            case "merge":
                return ["corpus", "merge", str(folder / "corpus"), str(folder / "other"), "--out", out]
            case "tokenizer":
                kind = ["--kind", "wordpiece", "--vocab-size", "200"]
                return ["tokenizer", "train", str(folder / "part0.jsonl"), *kind, "--out", out]
            case "export":
                return ["checkpoints", "export", trained, "--out", out]
            case "finetune":
                settings = ["--set", "epochs=3", "--set", "lr=1e-3"]
                return ["finetune", str(folder / "bert"), str(folder / "word.yaml"), "--out", out, *settings]
            case "embed":
                return ["embed", "train", str(folder / "bert"), str(folder / "embed.yaml"), "--out", out]
            case "evaluate":
                grid = ["--set", "epochs=1", "--set", "lr=[1e-3,3e-3]", "--set", "batch=8", "--seeds", "2"]
                return ["evaluate", trained, str(folder / "word.yaml"), "--results", out, *grid]
            case "stats":
                return ["corpus", "stats", str(folder / "corpus"), "--json"]
            case _:
                return ["show", trained, "--step", "3"]

    def _new_run(self, uri: str) -> None:
        phases = f"phases=[{{steps: {_STEPS}, length: 32, batch: {{sequences: 12}}}}]"
        every = "checkpoint={every: {steps: 10}, keep_last: 2}"
        root, _, name = uri.rpartition("/")
        if not root.startswith("s3:"):
            root, name = str(self._folder), str(Path(uri).relative_to(self._folder))
        small_runs.new_run(root, name, phases, every, "trainers=2", "recovery.spares=1")

    def _result(self, name: str, out: str, said: str) -> dict[str, bytes]:
        """What a command gives, by name."""
        name = name.removesuffix(ON_S3)
        match name:
            case "train":
                state = {f"{key}": data for key, data in small_runs.final_state(out, _STEPS).items()}
                told = (small_runs.losses(out), small_runs.ledger(out), small_runs.digests(out))
                return state | {"steps": repr(told).encode()}
            case "stats" | "show":
                return {"said": said.partition(_ERRORS)[0].encode()}
        skipped = {"README.md"} if name == "export" else set()
        if name in ("append", "merge"):
            skipped.add("removals")  # say when they were made, which the manifest's digest holds
        store = open_store(out)
        keys = [entry.key for entry in store.list() if skipped.isdisjoint(entry.key.split("/"))]
        if name in ("finetune", "embed"):
            keys = [key for key in keys if key.endswith(".safetensors")]
        if name == "evaluate":
            cells = {key: json.loads(store.get(key)) for key in keys if key.startswith("cells/")}
            return {key: json.dumps(cell["measured"]).encode() for key, cell in cells.items()}
        return {key: store.get(key) for key in keys}

    def _start(self, arguments: list[str], prefix: list[str]) -> "subprocess.Popen[str]":
        self.starts += 1
        environment = os.environ | {
            MARK: self._short.name, "TMPDIR": str(self._short / "tmp"), "HOME": str(self._short / "home"),
            "OMP_NUM_THREADS": "1", "COLUMNS": "300",
        }  # fmt: skip
        with (self._short / "said").open("w") as said, (self._short / "errors").open("w") as errors:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "maskfleet", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                start_new_session=True,
                text=True,
            )
        self._processes.commands.append(process.pid)
        return process

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        return self._ended(self._start(arguments, []))

    def _ended(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        try:
            code = process.wait(STUCK_S)
        except subprocess.TimeoutExpired:
            self._processes.kill()
            code = process.wait()
            return 999, f"stuck for {STUCK_S:g} s (then {code})"
        return code, _ERRORS.join((self._short / name).read_text(errors="replace") for name in ("said", "errors"))

    def _struck(self, strike: Strike, arguments: list[str], seconds: float) -> tuple[int, str, set[int]]:
        """Return the code, what was said, and which codes are allowed beside the three."""
        if strike.environment:
            return *self._ended(self._start(arguments, self._prefix(strike.environment))), set()
        process = self._start(arguments, [])
        with suppress(subprocess.TimeoutExpired):
            process.wait(strike.at * seconds)
        allowed: set[int] = set()
        alive = self._processes.alive()
        if process.poll() is None and alive:
            target = alive[int(strike.pick * len(alive))]
            number = signal.Signals[f"SIG{strike.signal}"]
            if target.pid == process.pid:
                allowed = {-number, 128 + number}
            with suppress(psutil.Error):
                target.send_signal(number)
                if strike.signal == "STOP":
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(STOPPED_S)
                    target.send_signal(signal.SIGCONT)
        return *self._ended(process), allowed

    def _prefix(self, environment: str) -> list[str]:
        if environment in LIMITS:
            limited = ["prlimit", f"--{LIMITS[environment]}"]
            return [*NOBODY, *limited] if "nproc" in limited[1] else limited
        place = {"out": str(self._folder / "struck"), "/dev/shm": "/dev/shm"}.get(
            PLACES[environment], str(self._short / PLACES[environment])
        )
        return ["unshare", "-m", "sh", "-c", _ROUND.format(place), "sh"]

    def _judge(self, code: int, said: str, allowed: set[int]) -> str:
        if "Traceback (most recent call last)" in said:
            return f"wrong {code} (traceback)"
        if code in (FINISHED, REPEAT) or (code == MISTAKE and "remedy" in said):
            return str(code)
        return "its signal" if code in allowed else f"wrong {code}"

    def _left(self, out: str) -> list[str]:
        """What outlives the command that completed."""
        remains = list(Path(out).rglob(".tmp-*"))
        remains += [
            *(self._short / "tmp").glob("maskfleet-*"),
            *(self._short / "tmp/ray").glob("session_2*"),
        ]
        problems = [f"left: {path}" for path in remains]
        return problems + [f"alive: {one}" for one in self._processes.await_end(LEFT_S)]


def _half_written(out: str) -> list[str]:
    """Weights that do not load in a folder that a loader takes for a model: config.json is written last."""
    broken = []
    for path in Path(out).rglob("*.safetensors") if (Path(out) / "config.json").is_file() else ():
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            broken.append(f"half-written: {path}: {error}")
    return broken
