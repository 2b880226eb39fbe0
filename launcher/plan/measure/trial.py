"""What of a recipe can be measured on this machine: as much as fits into memory and into seconds.

Judged beforehand by the estimate's own counts of FLOPs and bytes. Made smaller in this order: fewer microbatches of a
step, fewer rows of a microbatch, fewer layers. What was made smaller is said, and scaled back up by FLOPs.
"""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from data_service.samples.lanes import Lanes
from data_service.samples.pairs import Translations
from encoder_core.cost.saved import Kernel
from encoder_core.families.catalogue import language_table
from encoder_core.train import zero_memory as memory
from encoder_core.train.engine_config import BUCKET
from launcher.errors import EstimateError
from launcher.format import human_bytes
from launcher.plan.estimate.roofline import assumed
from launcher.plan.measure.rows import HELDOUT
from launcher.runtime.capacity.devices import Gpu, gpu_of_device, usable
from launcher.runtime.capacity.memory_fit import Bill, Device, bill, rows_that_fit
from launcher.runtime.capacity.workload import executed, microbatch_shape
from launcher.runtime.preflight.measure import available_memory
from launcher.runtime.rank.journal import peak
from launcher.runtime.recipe.operation import Events
from launcher.runtime.recipe.phases import during
from launcher.runtime.recipe.schema import (
    BatchSize,
    EverySteps,
    Heldout,
    Logging,
    Recipe,
    RecipeCorpus,
    RecipeEvaluation,
    RecipePhase,
    RecipeSource,
    TokenizerRef,
)
from launcher.runtime.recipe.summary import has_automatic, known, parameters, settled

STEP_S = 10.0  # a measured step may take about so long
_CPU_RANKS = 2
_CPU_SHARE = 0.3  # of a CPU's measured peak that training is expected to reach: a guess
_SPARE = 0.8  # share of the free memory that may be used
_SPEED_S = 0.1
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIZE = 512  # of the square matrices: large enough for a core's full speed, 10 ms of work
_ROUNDS = 2  # microbatches of a rank in a measured step: the first and the last differ by what is exchanged


@dataclass(frozen=True)
class Machine:
    """The devices here, one for each rank.

    Attributes:
        device: "cuda" or "cpu"; `name` is what the driver, or /proc, calls it.
        threads: of each rank. `memory`: bytes that each may fill.
        peak: FLOP/s of one in the recipe's precision: the vendor's; on a CPU what products reached just now, which
            does to foresee a step's time, and not for MFU. None if it is not known.
        gpu: its figures, if `estimate` has some.
    """

    ranks: int
    device: str
    name: str
    threads: int
    memory: int
    peak: float | None
    gpu: Gpu | None


@dataclass(frozen=True)
class Trial:
    """A phase of a recipe as it is measured.

    Attributes:
        recipe: one phase, for this machine's ranks; its corpus and its tokenizer are to be given to it (`at`).
        rounds, whole: microbatches of a rank in a measured step, and in the recipe's own step on as many ranks.
        smaller: what was made smaller, in words; empty if microbatch and model are the recipe's.
        bytes: that a rank is expected to fill.
        seconds: that a step is expected to take; None if the device's peak is not known.
    """

    recipe: Recipe
    rounds: int
    whole: int
    smaller: tuple[str, ...]
    bytes: int
    seconds: float | None

    @property
    def _languages(self) -> tuple[str, ...]:
        """Of the one synthetic source: a pair of translations, or the first of the model's."""
        pairs = isinstance(self.recipe.input, Translations)
        known = language_table(self.recipe.model) or (("first", "second") if pairs else ())
        return known[: 2 if pairs else 1]

    def at(self, corpus: str, tokenizer: str) -> Recipe:
        """The recipe over these inputs."""
        sources = RecipeCorpus(
            sources={"synthetic": RecipeSource(uri=corpus, languages=self._languages)},
            heldout=Heldout(fraction=HELDOUT),
        )
        mixing = self.recipe.mixing.model_copy(update={"translations": None})
        changes = {"corpus": sources, "mixing": mixing, "tokenizer": TokenizerRef(uri=tokenizer)}
        return self.recipe.model_copy(update=changes)


def this_machine(recipe: Recipe) -> Machine:
    """Every GPU, or two halves of the CPU; no more ranks than the recipe has microbatches."""
    cores = len(os.sched_getaffinity(0))
    gpus = torch.cuda.device_count()
    ranks = max(1, min(gpus or _CPU_RANKS, cores, recipe.microbatches))
    threads = max(1, cores // ranks)
    if gpus:
        found = torch.cuda.get_device_properties(0)
        device, gpu = torch.device("cuda", 0), gpu_of_device(found.name, found.total_memory)
        room = usable(found.total_memory)
        return Machine(ranks, "cuda", found.name, threads, room, peak(device, recipe.precision), gpu)
    torch.set_num_threads(threads)
    room = int(_SPARE * available_memory()[0] / ranks)
    return Machine(ranks, "cpu", _processor(), threads, room, _speed(_DTYPES[recipe.precision]), None)


def settled_here(recipe: Recipe, machine: Machine) -> Recipe:
    """With as many rows of a microbatch as memory permits here, where the recipe leaves them to it."""
    if not has_automatic(recipe):
        return recipe
    device: Device = "cuda" if machine.device == "cuda" else "cpu"
    most = rows_that_fit(Bill.of(recipe, machine.ranks, device), machine.memory)
    return settled(recipe, machine.ranks, most)


def choose(recipe: Recipe, phase: RecipePhase, machine: Machine) -> Trial:
    """The largest trial of `phase` that fits into the machine's memory and ends soon; of those that take long, the
    smallest.

    Raises EstimateError: one row through one layer needs more memory than there is.
    """
    for trial in _candidates(recipe, phase, machine):  # the last is the smallest
        soon = trial.seconds is None or trial.seconds <= STEP_S
        if trial.bytes <= machine.memory and soon:
            return trial
    if trial.bytes > machine.memory:
        raise EstimateError(
            f"{recipe.name} cannot be measured here: {' and '.join(trial.smaller) or 'as it is'}, it still needs "
            f"{human_bytes(trial.bytes)} a rank, and there are {human_bytes(machine.memory)}",
            remedy="measure it on a machine with more memory, with a higher --set zero, or with --tiny",
        )
    return trial


class _Sizes(dict[int, int]):
    """Parameters of a recipe by its number of layers. They are counted once: that builds a module."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __missing__(self, layers: int) -> int:
        model = known(self._recipe.model).with_layers(layers)
        self[layers] = parameters(self._recipe.model_copy(update={"model": model}))
        return self[layers]


def _candidates(recipe: Recipe, phase: RecipePhase, machine: Machine) -> Iterator[Trial]:
    """From the recipe's own to the smallest."""
    microbatch = recipe.microbatch_of(phase)
    most = min(microbatch, phase.rows)
    whole = math.ceil(math.ceil(phase.rows / microbatch) / machine.ranks)
    least = 2 if isinstance(recipe.input, Lanes) or recipe.objective.contrastive is not None else 1
    layers, rows, sizes = recipe.model.layers, most, _Sizes(recipe)

    def trial(rounds: int) -> Trial:
        return _trial(
            recipe, phase, machine, rounds=rounds, whole=whole, rows=rows, layers=layers, sizes=sizes
        )

    for rounds in range(min(_ROUNDS, whole), 0, -1):
        yield trial(rounds)
    while rows > least:
        rows = max(least, rows // 2)
        yield trial(1)
    while layers > 1:
        layers //= 2
        yield trial(1)


def _trial(
    recipe: Recipe,
    phase: RecipePhase,
    machine: Machine,
    *,
    rounds: int,
    whole: int,
    rows: int,
    layers: int,
    sizes: _Sizes,
) -> Trial:
    own = min(recipe.microbatch_of(phase), phase.rows)
    smaller = []
    if rows < own:
        smaller.append(f"{rows} of the microbatch's {own} rows")
    if layers < recipe.model.layers:
        smaller.append(f"{layers} of {recipe.model.layers} layers")
    batch = BatchSize(sequences=rows * rounds * machine.ranks)
    recipe = during(recipe, phase)
    changes = {
        "start": "scratch",
        "model": known(recipe.model).with_layers(layers),
        "phases": (RecipePhase(steps=recipe.total_steps, length=phase.length, batch=batch),),
        "microbatch": rows,
        "trainers": machine.ranks,
        "evaluation": RecipeEvaluation(every=EverySteps(steps=recipe.total_steps), samples=1),
        "logging": Logging(tensorboard=False),
        "events": Events(),
    }
    tried = recipe.model_copy(update=changes)
    seconds = expected_seconds(tried, machine, rounds)
    return Trial(
        tried, rounds, whole, tuple(smaller), expected_bytes(tried, machine, rounds, sizes[layers]), seconds
    )


def _speed(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of some products of two matrices, with this process's threads."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    torch.mm(matrix, matrix)  # the first one sets up
    best, end = float("inf"), time.perf_counter() + _SPEED_S
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 2.0 * _SIZE**3 / best


def expected_bytes(recipe: Recipe, machine: Machine, rounds: int, size: int) -> int:
    """That a rank of `recipe`, of `size` parameters and with a known vocabulary, fills. On a CPU, buckets are filled as
    far as there are gradients: the rest of them is address space only."""
    shape = microbatch_shape(recipe, recipe.phases[0])
    cuda = machine.device == "cuda"
    kernel: Kernel = "gpu" if cuda else "cpu"
    bucket = BUCKET if cuda else min(BUCKET, size)
    parts = bill(
        recipe, size, machine.ranks, recipe.zero, shape=shape, rounds=rounds, kernel=kernel, bucket=bucket
    )
    return memory.total(parts)


def expected_seconds(recipe: Recipe, machine: Machine, rounds: int) -> float | None:
    """Of a step with so many microbatches on a rank, network apart, by a utilisation that is assumed."""
    if machine.peak is None:
        return None
    phase = recipe.phases[0]
    share = _CPU_SHARE
    if machine.gpu is not None:
        share = assumed(recipe, microbatch_shape(recipe, phase), machine.gpu).share
    done = executed(recipe, microbatch_shape(recipe, phase))
    return rounds * done / (machine.peak * share)


def _processor() -> str:
    """The CPU's own name, and its cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} of {psutil.cpu_count()} cores"
