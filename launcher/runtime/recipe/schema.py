"""The schema of a recipe: one flat, complete YAML file that describes a pretraining run.

Settings of a class are defined beside that class (model, masking, optimizer, schedule). Settings of a whole run are
defined here.
"""

from operator import not_
from typing import Annotated, Literal

import yaml
from pydantic import Field, PlainSerializer, PositiveInt, model_validator
from pydantic.types import ByteSize

from data_service.formats import StrictRecord
from data_service.samples.spec import Input, SourceWeight
from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.term import Weight
from encoder_core.optim.schedules import ScheduleConfig
from encoder_core.optim.settings import AdamWConfig, AverageConfig, LambConfig, MuonConfig, StableAdamWConfig
from encoder_core.train.settings import MemoryRefresh, Precision
from launcher.runtime.policies.elastic import Trainers
from launcher.runtime.policies.recovery import Recovery
from launcher.runtime.policies.spikes import Spikes
from launcher.runtime.policies.stragglers import Stragglers
from launcher.runtime.policies.watchdog import Watchdog
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.parts import Events, Mlflow, SparseRecord, Tasks, Wandb, WeightCheck
from launcher.runtime.recipe.phase_parts import PhaseMixture, PhaseMlm, Temperature

PLACEHOLDER = "s3://your-bucket/"  # bundled recipes name it in place of the user's own bucket

SCRATCH, TEACHER = "scratch", "teacher"
"""The values of `start` that are not URIs: fresh weights, or layers of the first teacher (objective.distil)."""


def _exact_size_text(size: int) -> str:
    """Return the exact size in the largest binary unit that divides it: 8589934592 -> "8GiB"."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return f"{size}B"


Bytes = Annotated[ByteSize, Field(gt=0), PlainSerializer(_exact_size_text, return_type=str, when_used="always")]


class CorpusSource(StrictRecord):
    """One corpus of the mixture.

    Attributes:
        uri: URI of the corpus.
        weight: weight of the source; `auto`: in proportion to its tokens.
        languages: language of the text. Translations have two, the query's language first. Left out of the YAML if it
            is empty.
    """

    uri: str = Field(min_length=1)
    weight: Annotated[SourceWeight, Field(gt=0)] | Literal["auto"] = "auto"
    languages: tuple[str, ...] = Field(default=(), max_length=2, exclude_if=not_)


class Heldout(StrictRecord):
    """The share of documents that are held out from training. The corpora must have been built with the same share."""

    fraction: float = Field(ge=0, lt=0.5)


class RecipeCorpus(StrictRecord):
    sources: dict[str, CorpusSource] = Field(min_length=1)
    heldout: Heldout


class Mixing(StrictRecord):
    """How the sources of the corpus are mixed.

    Attributes:
        batches: whether every batch mixes the sources, or has rows of one source. One source is for contrastive
            training: a batch's other examples are the negatives, which are too easy if they are of another source. Then
            no row is repeated in an epoch, and the epoch ends when a source has no rows left for its weight.
        temperature: T; sources whose weight is auto are drawn in proportion to size ** (1 / T). With T > 1 small
            sources are drawn more often than by their size. Several sources of one language count with their joint
            size.
        translations: share of translations among the rows, if some sources are translations and others plain text.
            Null: by size; then it is left out of the YAML.
    """

    batches: Literal["mixed", "one_source"] = "mixed"
    temperature: Temperature = 1.0
    translations: Annotated[float, Field(gt=0, lt=1)] | None = Field(default=None, exclude_if=not_)


class TokenizerRef(StrictRecord):
    uri: str = Field(min_length=1)


class SimilarWordsRef(StrictRecord):
    """The table of `maskfleet corpus similar-words`, for masks that replace words by similar ones."""

    uri: str = Field(min_length=1)


class BatchWarmup(StrictRecord):
    """Batch-size warm-up: the batch begins with `start` and grows linearly for `steps` steps.

    A batch in sequences begins with `start` rows and grows by whole rows; a batch in tokens begins with `start` tokens
    and grows by multiples of a full row's tokens.
    """

    start: PositiveInt
    steps: PositiveInt


class BatchSize(SparseRecord):
    """The batch of one step: a number of rows (`sequences`), or of tokens (the number of rows then varies). It is the
    same in each step, except during a `warmup`."""

    sequences: PositiveInt | None = None
    tokens: PositiveInt | None = None
    warmup: BatchWarmup | None = None

    @model_validator(mode="after")
    def _check_one_unit(self) -> "BatchSize":
        if (self.sequences is None) == (self.tokens is None):
            raise ValueError("give a batch in sequences or in tokens, exactly one of the two")
        return self


class RecipePhase(SparseRecord):
    """A phase of training. Its settings replace those of the recipe for its steps.

    Attributes:
        steps: number of optimizer steps.
        length: length of rows in tokens, including special ones.
        batch: batch of a step.
        microbatch: number of rows that a rank passes through the network at a time; auto: as many as memory permits.
            None: the recipe's.
        lr: peak learning rate, in place of the optimizer's.
        schedule: schedule of this phase's steps alone. None: the run's schedule, which counts the steps of all phases.
        objective: which of clm and mlm the phase trains, if the objective has both. Held-out loss after a step of the
            phase is that of the same term.
        mlm: masks of this phase. Held-out loss is measured under the objective's own masks in every phase.
        weights: weights of terms of the objective, by name; a schedule counts the phase's steps. Held-out loss uses the
            objective's own weights (for a schedule, its final weight).
        mixture: shares of the sources in this phase.
        corpora: by source, the URI of a corpus that the phase reads in place of the source's. It extends the corpus
            that earlier phases read (`maskfleet corpus append`).
        rope_base: base of the rotary positions in layers that see the whole row (ModernBERT's global layers, all of
            EuroBERT's).
        local_rope_base: base of the rotary positions in layers that see a window.
    """

    steps: PositiveInt
    length: int = Field(ge=8)
    batch: BatchSize
    microbatch: PositiveInt | Literal["auto"] | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    schedule: ScheduleConfig | None = None
    objective: Literal["clm", "mlm"] | None = None
    mlm: PhaseMlm | None = None
    weights: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    mixture: PhaseMixture | None = None
    corpora: Annotated[dict[str, Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    rope_base: Annotated[float, Field(gt=0)] | None = None
    local_rope_base: Annotated[float, Field(gt=0)] | None = None

    @property
    def rows_per_step(self) -> int:  # number of rows in a step; for a batch in tokens, as if all rows were full
        return self.batch.sequences or max(1, (self.batch.tokens or 0) // self.length)


OptimizerConfig = AdamWConfig | StableAdamWConfig | LambConfig | MuonConfig


class Optimizer(SparseRecord):
    """The chosen optimizer with its settings; exactly one field is set."""

    adamw: AdamWConfig | None = None
    stableadamw: StableAdamWConfig | None = None
    lamb: LambConfig | None = None
    muon: MuonConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "Optimizer":
        if len(self.given) != 1:
            raise ValueError("choose exactly one optimizer: adamw, stableadamw, lamb or muon")
        return self

    @property
    def settings(self) -> OptimizerConfig:
        """The settings of the chosen optimizer."""
        settings: OptimizerConfig = next(iter(self.given.values()))
        return settings


class DataService(StrictRecord):
    """Resources of the data service.

    Attributes:
        workers: number of Ray tasks that build windows (stretches of consecutive samples, built as a whole); `auto`:
            half of the cluster's cores, at most four per rank.
        memory: memory that windows may fill before they are needed.
    """

    workers: PositiveInt | Literal["auto"] = "auto"
    memory: Bytes


class Interval(SparseRecord):
    """An interval, in steps or in minutes."""

    steps: PositiveInt | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> "Interval":
        if self.steps is None and self.minutes is None:
            raise ValueError("give the interval in steps, in minutes, or both (whichever comes first)")
        return self

    def to_text(self) -> str:
        """Return the interval as text, such as `100 steps or 15 minutes, whichever comes first`."""
        parts = [] if self.steps is None else [f"{self.steps:,} steps"]
        parts += [] if self.minutes is None else [f"{self.minutes:g} minutes"]
        return " or ".join(parts) + (", whichever comes first" if len(parts) > 1 else "")


class StepInterval(StrictRecord):
    steps: PositiveInt


class Checkpointing(StrictRecord):
    """When a run saves checkpoints (`every`), and which are kept: the newest `keep_last`, and those whose step is a
    multiple of `keep_every`."""

    every: Interval
    keep_last: PositiveInt = 3
    keep_every: StepInterval | None = None


class EvaluationText(StrictRecord):
    """A corpus, built with the run's tokenizer, whose held-out text is evaluated and never trained on."""

    uri: str = Field(min_length=1)


class RecipeEvaluation(StrictRecord):
    """The evaluation of a run while it trains.

    Attributes:
        every: interval between measurements of the held-out loss.
        samples: number of held-out rows, the same ones every time.
        before: text like that on which the model of `start` was trained; each evaluation also measures the losses on as
            many of its rows as `samples` says. Left out of the YAML if None.
        tasks: tasks that evaluate every checkpoint while training continues (`launcher.after.diagnose`). Left out of
            the YAML if empty.
    """

    every: StepInterval
    samples: PositiveInt
    before: EvaluationText | None = Field(default=None, exclude_if=not_)
    tasks: Tasks = Field(default=(), exclude_if=not_)


class Logging(StrictRecord):
    """Where metrics are written.

    Attributes:
        flush_seconds: largest age of metrics, in seconds, before they are written to the store.
        tensorboard: whether a local run also writes TensorBoard files.
        wandb, mlflow: trackers to which the run is published.
    """

    flush_seconds: Annotated[float, Field(gt=0)] = 30.0
    tensorboard: bool = True
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None


class Recipe(StrictRecord):
    """A recipe; library/roberta-base.yaml explains every key. YAML and identity leave `average` out if it is None."""

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
    average: AverageConfig | None = Field(default=None, exclude_if=not_)
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
    recovery: Recovery = Recovery()
    events: Events = Events()

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def max_microbatches_per_step(self) -> int:
        """The number of microbatches in the largest batch, over all ranks. More ranks would have nothing to do.

        For a batch in tokens it is the smallest possible number. If memory decides, each row counts as a microbatch.
        """
        own = (1 if self.is_microbatch_automatic(phase) else self.microbatch_rows(phase) for phase in self.phases)
        return max(-(-phase.rows_per_step // size) for phase, size in zip(self.phases, own, strict=True))

    @property
    def microbatch_rows_by_phase(self) -> tuple[int, ...]:
        """The number of rows of a microbatch in each phase."""
        return tuple(map(self.microbatch_rows, self.phases))

    def microbatch_rows(self, phase: RecipePhase) -> int:
        """Return the number of rows of a microbatch in a phase; if memory decides, the rows of a whole step."""
        own = phase.microbatch or self.microbatch
        return phase.rows_per_step if own == "auto" else own

    def is_microbatch_automatic(self, phase: RecipePhase) -> bool:
        # The device's free memory decides the number of rows.
        return (phase.microbatch or self.microbatch) == "auto"

    @property
    def memory_refresh(self) -> MemoryRefresh | None:
        """The interval at which XLNet's memory is recomputed; None if the model has no memory."""
        cache = self.model.recurrence
        if cache is None or self.objective.plm is None:
            return None
        return MemoryRefresh(cache.refresh_steps, -(-cache.length // cache.reuse))

    def to_data(self) -> dict[str, object]:
        """Return the recipe as plain data, including defaults, in the order of the fields."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_data(), sort_keys=False, allow_unicode=True, width=100)
