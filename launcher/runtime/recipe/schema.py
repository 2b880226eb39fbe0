"""A recipe: one flat, complete YAML file that says everything a pretraining run is.

The parts that configure a class live beside that class (model, masking, optimizer, schedule); what only a
whole run has is here.
"""

from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.types import ByteSize

from data_service.samples.masking import MaskingUnit
from data_service.samples.replacement import Replacement
from data_service.samples.spec import Input
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.losses import Weight
from encoder_core.optim.adamw import AdamWConfig, StableAdamWConfig
from encoder_core.optim.lamb import LambConfig
from encoder_core.optim.muon import MuonConfig
from encoder_core.optim.schedules import ScheduleConfig
from encoder_core.train.engine_config import Precision
from encoder_core.train.memory_schedule import Refresh
from launcher.runtime.policies.elastic import Trainers
from launcher.runtime.policies.spikes import Spikes
from launcher.runtime.policies.stragglers import Stragglers
from launcher.runtime.policies.watchdog import Watchdog
from launcher.runtime.recipe.evaluation import Tasks
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.operation import Events, Mlflow, Wandb, WeightCheck
from launcher.runtime.recipe.parts import Choice, PhaseMixture

PLACEHOLDER = "s3://your-bucket/"  # what stands in recipes in place of a bucket

SCRATCH, TEACHER = "scratch", "teacher"
"""What `start` may say that is no place: fresh weights, or layers of the first teacher (objective.distil)."""


class RecipePart(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _spell_bytes(size: int) -> str:
    """Return the exact size in the largest binary unit that divides it: 8589934592 -> "8GiB"."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return f"{size}B"


Bytes = Annotated[ByteSize, Field(gt=0), PlainSerializer(_spell_bytes, return_type=str, when_used="always")]


class RecipeSource(RecipePart):
    """One corpus of the mixture. `weight: auto` is in proportion to its tokens. `languages`: of its text, one; of
    translations two, the query's first; out of the YAML where they are not told."""

    uri: str = Field(min_length=1)
    weight: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    languages: tuple[str, ...] = Field(default=(), max_length=2)

    @model_serializer(mode="wrap")
    def _told(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if name != "languages" or value}


class Heldout(RecipePart):
    """The share of documents kept from training; must be what the corpora were built with."""

    fraction: float = Field(ge=0, lt=0.5)


class RecipeCorpus(RecipePart):
    sources: dict[str, RecipeSource] = Field(min_length=1)
    heldout: Heldout


class Mixing(RecipePart):
    """How the sources of the corpus come together.

    Attributes:
        batches: every batch mixes them, or is of one source (contrastive training: a batch's other examples are the
            negatives, and those of another source are told apart too easily). With one_source no row comes twice in an
            epoch, which ends when a source has no more rows for its weight.
        temperature: T: sources whose weight is auto are drawn in proportion to size ** (1 / T), so small ones come more
            often than by their size (1). Of several sources of one language the size is that of all.
        translations: share of the rows that are translations, where there are both these and plain text; null: by
            size. Out of the YAML then.
    """

    batches: Literal["mixed", "one_source"] = "mixed"
    temperature: float = Field(default=1.0, ge=1)
    translations: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_serializer(mode="wrap")
    def _asked_for(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if name != "translations" or value}


class TokenizerRef(RecipePart):
    uri: str = Field(min_length=1)


class SimilarWordsRef(RecipePart):
    """The table that `maskfleet corpus similar-words` wrote: what replaces words where `replace.similar` is not 0."""

    uri: str = Field(min_length=1)


class BatchWarmup(RecipePart):
    """A batch that begins with `start` rows or tokens, as it is counted, and grows evenly for `steps` steps, by whole
    rows (full ones, of a batch in tokens)."""

    start: PositiveInt
    steps: PositiveInt


class BatchSize(Choice):
    """One step's batch: so many rows, or so many tokens (rows then vary); the same in each step but for a warmup."""

    sequences: PositiveInt | None = None
    tokens: PositiveInt | None = None
    warmup: BatchWarmup | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "BatchSize":
        if (self.sequences is None) == (self.tokens is None):
            raise ValueError("give a batch in sequences or in tokens, exactly one of the two")
        return self


class PhaseMlm(Choice):
    """What a phase masks otherwise than the objective says: the share of tokens, what is masked whole, and what
    replaces it."""

    rate: Annotated[float, Field(gt=0, le=0.8)] | None = None
    unit: MaskingUnit | None = None
    replace: Replacement | None = None


class RecipePhase(Choice):
    """A stretch of training: what it sets takes the place of what the recipe says for the whole run.

    Attributes:
        steps: optimizer steps.
        length: of rows in tokens, special ones included.
        batch: of a step.
        microbatch: rows that a rank passes through the network at a time; auto: as many as memory permits. None: the
            recipe's.
        lr: peak learning rate, in place of the optimizer's.
        schedule: of this phase's steps alone. None: the run's schedule, which counts the steps of all phases.
        mlm: masks of this phase. Held-out loss is measured under the objective's own masks in every phase.
        weights: of terms of the objective, by name; a schedule counts the phase's steps. Held-out loss has the
            objective's own, of a schedule the last.
        mixture: of the sources, in this phase.
        rope_base: of the rotary positions of layers that see the whole row (ModernBERT's global ones, all of EuroBERT).
    """

    steps: PositiveInt
    length: int = Field(ge=8)
    batch: BatchSize
    microbatch: PositiveInt | Literal["auto"] | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    schedule: ScheduleConfig | None = None
    mlm: PhaseMlm | None = None
    weights: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    mixture: PhaseMixture | None = None
    rope_base: Annotated[float, Field(gt=0)] | None = None

    @property
    def rows(self) -> int:  # of a step; of a batch of tokens, rows that are full
        return self.batch.sequences or max(1, (self.batch.tokens or 0) // self.length)


OptimizerConfig = AdamWConfig | StableAdamWConfig | LambConfig | MuonConfig


class Optimizer(Choice):
    """Exactly one of the optimizers."""

    adamw: AdamWConfig | None = None
    stableadamw: StableAdamWConfig | None = None
    lamb: LambConfig | None = None
    muon: MuonConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "Optimizer":
        if len(self._given_ones()) != 1:
            raise ValueError("choose exactly one optimizer: adamw, stableadamw, lamb or muon")
        return self

    def _given_ones(self) -> list[OptimizerConfig]:
        every = (self.adamw, self.stableadamw, self.lamb, self.muon)
        return [settings for settings in every if settings is not None]

    @property
    def settings(self) -> OptimizerConfig:
        """Those of the one that is given."""
        return self._given_ones()[0]


class DataService(RecipePart):
    """Ray tasks that build windows (`auto`: half of the cluster's cores, four a rank at most), and the memory they may
    fill ahead."""

    workers: PositiveInt | Literal["auto"] = "auto"
    memory: Bytes


class Every(Choice):
    """An interval, in steps or in minutes."""

    steps: PositiveInt | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> "Every":
        if self.steps is None and self.minutes is None:
            raise ValueError("give the interval in steps, in minutes, or both (whichever comes first)")
        return self

    def spelt(self) -> str:
        """`100 steps or 15 minutes, whichever comes first`."""
        parts = [] if self.steps is None else [f"{self.steps:,} steps"]
        parts += [] if self.minutes is None else [f"{self.minutes:g} minutes"]
        return " or ".join(parts) + (", whichever comes first" if len(parts) > 1 else "")


class EverySteps(RecipePart):
    steps: PositiveInt


class Checkpointing(RecipePart):
    """When a run saves, and which checkpoints stay: the newest `keep_last`, and multiples of `keep_every`."""

    every: Every
    keep_last: PositiveInt = 3
    keep_every: EverySteps | None = None


class RecipeEvaluation(RecipePart):
    """How often the held-out loss is measured, on how many held-out rows (the same ones every time); and `tasks`, what
    is measured of every commit beside training (`launcher.after.diagnose`): out of the YAML where there is nothing."""

    every: EverySteps
    samples: PositiveInt
    tasks: Tasks = ()

    @model_serializer(mode="wrap")
    def _asked_for(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if name != "tasks" or value}


class Logging(RecipePart):
    """Seconds that metrics may wait in memory, whether a local run writes TensorBoard files too, and which trackers the
    run is published to."""

    flush_seconds: Annotated[float, Field(gt=0)] = 30.0
    tensorboard: bool = True
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None


class Recipe(RecipePart):
    """See library/roberta-base.yaml for every key, commented."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(ge=0, lt=2**63)
    start: str = Field(min_length=1)
    corpus: RecipeCorpus
    tokenizer: TokenizerRef
    similar_words: SimilarWordsRef | None = None
    model: ModelConfig
    input: Input
    shuffle: Literal["uniform", "spread"] = "uniform"
    mixing: Mixing = Mixing()
    objective: RecipeObjective
    phases: tuple[RecipePhase, ...] = Field(min_length=1)
    optimizer: Optimizer
    schedule: ScheduleConfig
    precision: Precision
    deterministic: bool = False
    zero: Literal[0, 1, 2, 3] = 1
    stage3_persistence: Annotated[int, Field(ge=0)] | None = None
    reduce_dtype: Precision = "fp32"
    microbatch: PositiveInt | Literal["auto"]
    activation_checkpointing: bool = False
    compile: Literal["auto"] | bool = "auto"
    trainers: PositiveInt | Literal["auto"] | Trainers = "auto"
    data_service: DataService
    checkpoint: Checkpointing
    evaluation: RecipeEvaluation
    logging: Logging = Logging()
    watchdog: Watchdog = Watchdog()
    spikes: Spikes = Spikes()
    weight_check: WeightCheck = WeightCheck()
    stragglers: Stragglers = Stragglers()
    events: Events = Events()

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def microbatches(self) -> int:
        """Logical microbatches of the largest batch: more ranks than that would have nothing to do. Of a batch of
        tokens the fewest that it can have; where memory decides, one for each row."""
        own = (1 if self.is_automatic(phase) else self.microbatch_of(phase) for phase in self.phases)
        return max(-(-phase.rows // size) for phase, size in zip(self.phases, own, strict=True))

    @property
    def phase_microbatches(self) -> tuple[int, ...]:
        """Rows of a microbatch in each phase."""
        return tuple(map(self.microbatch_of, self.phases))

    def microbatch_of(self, phase: RecipePhase) -> int:
        """Rows of a microbatch in one of the phases; where memory decides, those of a step: the most there can be."""
        own = phase.microbatch or self.microbatch
        return phase.rows if own == "auto" else own

    def is_automatic(self, phase: RecipePhase) -> bool:
        return (phase.microbatch or self.microbatch) == "auto"  # memory decides how many rows

    @property
    def memory_refresh(self) -> Refresh | None:
        """When the model's memory is recomputed; None if it has none."""
        model = self.model
        if not isinstance(model, XlnetConfig) or not model.memory or self.objective.plm is None:
            return None
        return Refresh(model.memory_refresh, -(-model.memory // model.reuse))

    def to_data(self) -> dict[str, object]:
        """Plain data, complete (defaults written out), in the order of the fields."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_data(), sort_keys=False, allow_unicode=True, width=100)
