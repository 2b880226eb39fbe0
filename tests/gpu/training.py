"""A process that trains small networks, or restores a state: `python -m tests.gpu.training REQUEST`."""

import hashlib
import json
import struct
import sys
from pathlib import Path

import torch
from pydantic import BaseModel

from checkpoints.save import take_snapshot
from encoder_core.train.engine import Engine
from encoder_core.train.settings import Precision
from encoder_core.train.zero_state import ALL_KINDS
from launcher.runtime.rank.build import set_determinism
from tests.gpu.machine import finish, start
from tests.gpu.networks import Steps, engine_of, joined, losses, small

RATE = 0.1  # of dropout
MICROBATCHES, ROWS, LENGTH = 2, 4, 48
STATE_NETWORK = "roberta-base"
_LIMIT_S = 400.0


class Request(BaseModel, frozen=True, extra="forbid"):
    """What a process does.

    Attributes:
        networks: recipes, trained in their small form.
        runs: ZeRO stages and precisions, trained in turn.
        steps: number of steps of each run.
        folder: folder of the process alone, which takes its answer.
        cpu: whether it sees no GPU.
        deterministic: the recipe setting of that name.
        state: file with a state, which is restored and copied again in place of any training.
    """

    networks: tuple[str, ...] = ()
    runs: tuple[tuple[int, Precision], ...] = ()
    steps: int = 0
    folder: Path
    cpu: bool = False
    deterministic: bool = False
    state: Path | None = None


class Trace(BaseModel, frozen=True, extra="forbid"):
    """Losses and gradient norms of each step of a run, and a digest of its final state."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    digest: str


def run(request: Request) -> dict[str, Trace]:
    """Return the traces by "network/stage/precision" of a process of its own."""
    request.folder.mkdir()
    log = request.folder / "log"
    environment = {"CUDA_VISIBLE_DEVICES": ""} if request.cpu else {}
    finish([start("training", request.model_dump_json(), log, environment)], log, _LIMIT_S)
    answer = request.folder / "answer.json"
    return {key: Trace(**one) for key, one in json.loads(answer.read_text("utf-8")).items()}


def carry_out(request: Request) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    set_determinism(request.deterministic)
    found = {}
    with joined(device, request.folder):
        if request.state is not None:
            engine = engine_of(small(STATE_NETWORK, RATE), 1, "bf16")
            fill(engine, request.state.read_bytes())
            request.state.with_suffix(".back").write_bytes(copied(engine))
        for name in request.networks:
            for stage, precision in request.runs:
                trace = train(name, stage, precision, request.steps)
                found[f"{name}/{stage}/{precision}"] = trace.model_dump()
    (request.folder / "answer.json").write_text(json.dumps(found), "utf-8")


def train(name: str, stage: int, precision: Precision, steps: int) -> Trace:
    """Train a recipe on this process's device, in torch's process group."""
    recipe = small(name, RATE)
    engine = engine_of(recipe, stage, precision)
    rows = Steps(recipe, MICROBATCHES, ROWS, min(LENGTH, recipe.model.max_length))
    taken = [rows.take(engine, step) for step in range(steps)]
    return Trace(
        losses=tuple(sum(losses(sums).values()) for sums, _ in taken),
        norms=tuple(update.grad_norm for _, update in taken),
        digest=digest(engine),
    )


def digest(engine: Engine) -> str:
    """Return a digest of all master weights and moments, by name."""
    hashed = hashlib.sha256()
    for fragment in sorted(engine.fragments(), key=lambda one: (one.name, one.start)):
        for kind in sorted(fragment.tensors):
            hashed.update(f"{fragment.name}/{kind}/{fragment.start}".encode())
            hashed.update(fragment.tensors[kind].detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def copied(engine: Engine) -> bytes:
    """Return all state as a run's checkpoint stores it: a header and its numbers."""
    return b"".join(bytes(buffer) for buffer in take_snapshot(engine.fragments()).buffers)


def fill(engine: Engine, state: bytes) -> None:
    """Restore what `copied` returned."""
    size = struct.unpack("<Q", state[:8])[0]
    entries = json.loads(state[8 : 8 + size])
    body = torch.frombuffer(bytearray(state[8 + size :]), dtype=torch.uint8)
    ranges: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for key, entry in entries.items():
        name, kind, begin = key.rsplit(":", 2)
        low, high = entry["data_offsets"]
        ranges.setdefault((name, kind), []).append((int(begin), body[low:high].view(torch.float32)))

    def read(name: str, kind: str, begin: int, stop: int) -> torch.Tensor:
        for first, numbers in ranges[name, kind]:
            if first <= begin and stop <= first + numbers.numel():
                return numbers[begin - first : stop - first]
        raise RuntimeError(f"{name} {kind} [{begin}, {stop}) is not in the state")

    engine.restore(ALL_KINDS, read)


if __name__ == "__main__":
    carry_out(Request.model_validate_json(sys.argv[1]))
