"""What others know of training without torch and DeepSpeed: how the engine shards and computes, when XLNet's memory is
recomputed, and how quick a rank was.

Recipes, decisions and lists of checkpoints read it, and import neither.
"""

from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16"]
BUCKET_SIZE = 2**23  # elements: enough to use a network's bandwidth, and few compared with a model


@dataclass(frozen=True)
class EngineConfig:
    """How state is sharded and computed. Results differ only by rounding.

    Attributes:
        stage: ZeRO stage 0-3.
        precision: bf16 has fp32 master weights and accumulates gradients in fp32; it needs stage 1-3.
        clip: maximum global gradient norm; None for no clipping.
        persistence_threshold: at stage 3, parameters with fewer elements stay whole; None: DeepSpeed's default.
        reduce_dtype: dtype of gradients while ranks sum them. bf16 halves the traffic and rounds every sum, the more
            the more ranks there are. Only with precision bf16.
        bucket: how many numbers ranks sum at a time, at all stages but 0. DeepSpeed's default exceeds most encoders:
            nothing would be sent before the backward pass ends, and its buffers take 3 GB.
    """

    stage: Literal[0, 1, 2, 3]
    precision: Precision
    clip: float | None
    persistence_threshold: int | None = None
    reduce_dtype: Precision = "fp32"
    bucket: int = BUCKET_SIZE

    @property
    def has_separate_fp32_sums(self) -> bool:
        """Whether DeepSpeed adds gradients to separate fp32 sums, whole on every rank, and reduces those."""
        return self.stage == 1 and self.precision == "bf16"

    def deepspeed_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration. Batch sizes are nominal: the step sets its boundaries itself."""
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": self.bucket}
        if self.stage == 2:
            zero["overlap_comm"] = True  # DeepSpeed's default at stage 3
        if self.persistence_threshold is not None:
            zero["stage3_param_persistence_threshold"] = self.persistence_threshold
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": self.clip or 0.0,
            "gradient_allreduce_op": "sum" if self.stage < 3 else "mean",  # stage 3 can only take means, see the engine
            "steps_per_print": None,
        }
        if self.precision == "bf16":
            # Without immediate updates, stage 1 (DeepSpeed 0.19.8) adds the running bf16 sum of the microbatches to its
            # fp32 sum after each of them: of n, the first counts n times and the last once.
            config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config["communication_data_type"] = self.reduce_dtype  # DeepSpeed's default is the precision
        return config


MEMORY_KIND = "memory"
"""Kind of state of XLNet's memory in a checkpoint, in addition to the kinds of parameters."""


@dataclass(frozen=True)
class MemoryRefresh:
    """When memory is recomputed, and from how many steps: a function of the step, the same in every run of a recipe.

    Attributes:
        every: number of steps; memory is recomputed at each multiple of it. It is empty where a phase begins.
        steps: number of preceding steps from which it is recomputed, as far as the phase has them.
    """

    every: int
    steps: int

    def recomputed_steps(self, step: int, phase_start: int) -> range | None:
        """Return the steps from which memory is recomputed for `step`; None if memory is kept."""
        if step % self.every and step != phase_start:
            return None
        return range(max(phase_start, step - self.steps), step)


@dataclass(frozen=True)
class Pace:
    """The speed of one rank in a step, by which stragglers are found.

    Attributes:
        data: seconds from the start of the step until its data had arrived.
        forward: seconds in forward passes; 0 at ZeRO stage 3.
        tokens: number of tokens in these passes.
    """

    data: float
    forward: float
    tokens: int
