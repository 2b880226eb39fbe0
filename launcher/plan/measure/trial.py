"""Chooses the part of a recipe that this machine can measure: as much as fits into memory and takes seconds only.

The estimate's own counts of FLOPs and bytes decide beforehand. The recipe is made smaller in this order: fewer
microbatches in a step, fewer rows in a microbatch, fewer layers. The result says what was made smaller, and is scaled
back up by FLOPs.
"""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from checkpoints.host_memory import available_memory
from data_service.samples.lanes import Lanes
from data_service.samples.pairs import Translations
from encoder_core.cost.saved import Kernel
from encoder_core.families.catalogue import language_table
from encoder_core.train import zero_memory as memory
from encoder_core.train.settings import BUCKET
from launcher.errors import EstimateError
from launcher.output import human_bytes
from launcher.plan.estimate.roofline import step_share
from launcher.plan.measure.rows import HELDOUT
from launcher.runtime.capacity.devices import Gpu, gpu_of_device, usable
from launcher.runtime.capacity.memory_fit import Bill, Device, bill, rows_that_fit
from launcher.runtime.capacity.workload import executed, microbatch_shape
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
    """The devices of this machine, one for each rank.

    Attributes:
        ranks: number of ranks.
        device: "cuda" or "cpu".
        name: name of the device in the driver, or of the CPU in /proc.
        threads: number of threads of each rank.
        memory: bytes that each rank may fill.
        peak: FLOP/s of a device in the recipe's precision; None if unknown. A GPU's is the vendor's figure. A CPU's
            is measured with matrix products: good enough to predict a step's time, but not for MFU.
        gpu: figures of the GPU, if `estimate` knows it.
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
    """A phase of a recipe in the size in which it is measured.

    Attributes:
        recipe: a recipe of this one phase for this machine's ranks; `at` gives it a corpus and a tokenizer.
        rounds: number of microbatches of a rank in a measured step.
        whole: number of microbatches of a rank in the recipe's own step on as many ranks.
        smaller: what was made smaller, in words; empty if microbatch and model are the recipe's.
        bytes: memory that a rank is expected to fill.
        seconds: expected time of a step; None if the device's peak is unknown.
    """

    recipe: Recipe
    rounds: int
    whole: int
    smaller: tuple[str, ...]
    bytes: int
    seconds: float | None

    @property
    def _languages(self) -> tuple[str, ...]:
        """Languages of the one synthetic source: two for translations, else the model's first if it has languages."""
        pairs = isinstance(self.recipe.input, Translations)
        known = language_table(self.recipe.model) or (("first", "second") if pairs else ())
        return known[: 2 if pairs else 1]

    def at(self, corpus: str, tokenizer: str) -> Recipe:
        """Return the recipe with this corpus and this tokenizer."""
        sources = RecipeCorpus(
            sources={"synthetic": RecipeSource(uri=corpus, languages=self._languages)},
            heldout=Heldout(fraction=HELDOUT),
        )
        mixing = self.recipe.mixing.model_copy(update={"translations": None})
        objective = self.recipe.objective
        if objective.distil is not None:  # ranks make random ones of the same shapes
            teachers = tuple(
                source.model_copy(update={"uri": f"{corpus}/no-teacher"})
                for source in objective.distil.teachers
            )
            distil = objective.distil.model_copy(update={"teachers": teachers})
            objective = objective.model_copy(update={"distil": distil})
        changes = {
            "objective": objective,
            "corpus": sources,
            "mixing": mixing,
            "tokenizer": TokenizerRef(uri=tokenizer),
        }
        return self.recipe.model_copy(update=changes)


def this_machine(recipe: Recipe) -> Machine:
    """Return a machine of all GPUs or, without a GPU, of two halves of the CPU. It has no more ranks than the recipe
    has microbatches.
    """
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
    """Return `recipe` with `microbatch: auto` replaced with the most rows that fit into memory here."""
    if not has_automatic(recipe):
        return recipe
    device: Device = "cuda" if machine.device == "cuda" else "cpu"
    most = rows_that_fit(Bill.of(recipe, machine.ranks, device), machine.memory)
    return settled(recipe, machine.ranks, most)


def choose(recipe: Recipe, phase: RecipePhase, machine: Machine) -> Trial:
    """Return the largest trial of `phase` that fits into memory and has short steps. If all that fit are slow, return
    the smallest.

    Raises:
        EstimateError: one row through one layer needs more memory than a rank may fill.
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
    """Number of parameters by number of layers, each counted once, because counting builds a module."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __missing__(self, layers: int) -> int:
        model = known(self._recipe.model).with_layers(layers)
        self[layers] = parameters(self._recipe.model_copy(update={"model": model}))
        return self[layers]


def _candidates(recipe: Recipe, phase: RecipePhase, machine: Machine) -> Iterator[Trial]:
    """Yield trials from the recipe's own size to the smallest."""
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
    """Return the FLOP/s of the fastest of some products of two matrices, with this process's threads."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    torch.mm(matrix, matrix)  # the first one sets up
    best, end = float("inf"), time.perf_counter() + _SPEED_S
    while time.perf_counter() < end or best == float("inf"):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 2.0 * _SIZE**3 / best


def expected_bytes(recipe: Recipe, machine: Machine, rounds: int, size: int) -> int:
    """Return the bytes that a rank is expected to fill when it trains `recipe` with `size` parameters and a known
    vocabulary.

    On a CPU, buckets are filled only as far as there are gradients; their rest is address space.
    """
    shape = microbatch_shape(recipe, recipe.phases[0])
    cuda = machine.device == "cuda"
    kernel: Kernel = "gpu" if cuda else "cpu"
    bucket = BUCKET if cuda else min(BUCKET, size)
    parts = bill(
        recipe, size, machine.ranks, recipe.zero, shape=shape, rounds=rounds, kernel=kernel, bucket=bucket
    )
    return memory.total(parts)


def expected_seconds(recipe: Recipe, machine: Machine, rounds: int) -> float | None:
    """Return the expected seconds of a step with `rounds` microbatches on a rank, without the network, at an assumed
    utilisation.

    None if the device's peak is unknown.
    """
    if machine.peak is None:
        return None
    phase = recipe.phases[0]
    share = _CPU_SHARE
    if machine.gpu is not None:
        share = step_share(recipe, microbatch_shape(recipe, phase), machine.gpu, rounds)
    done = executed(recipe, microbatch_shape(recipe, phase))
    return rounds * done / (machine.peak * share)


def _processor() -> str:
    """Return the CPU's name, and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, {len(os.sched_getaffinity(0))} of {psutil.cpu_count()} cores"
