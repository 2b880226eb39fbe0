"""Settings and records of training that code without torch and DeepSpeed needs: how the engine shards and computes,
when XLNet's memory is recomputed, and a rank's speed.

Recipes, the launcher's decisions and lists of checkpoints use this file, and import neither library.
"""

from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16"]
BUCKET_SIZE = 2**23  # elements of a gradient bucket: enough for the network's bandwidth, few compared with a model


@dataclass(frozen=True)
class EngineConfig:
    """How training state is sharded, and in which precision it is computed. Settings change results only by rounding.

    Attributes:
        stage: ZeRO stage 0-3.
        precision: bf16 has fp32 master weights and accumulates gradients in fp32; it needs stage 1-3.
        clip: maximum global gradient norm; None: no clipping.
        persistence_threshold: at stage 3, parameters with fewer elements are not sharded; None: DeepSpeed's default.
        reduce_dtype: dtype in which ranks sum gradients. bf16 halves the traffic and rounds every sum, so its error
            grows with the number of ranks; it needs precision bf16.
        bucket: number of elements that ranks sum at a time, at stages 1 to 3. DeepSpeed's default is larger than most
            encoders: nothing would be sent before the backward pass ends, and its buffers take 3 GB.
    """

    stage: Literal[0, 1, 2, 3]
    precision: Precision
    clip: float | None
    persistence_threshold: int | None = None
    reduce_dtype: Precision = "fp32"
    bucket: int = BUCKET_SIZE

    @property
    def has_separate_fp32_sums(self) -> bool:
        """Whether DeepSpeed accumulates gradients in unsharded fp32 sums, which it reduces, as in stage 1 with bf16."""
        return self.stage == 1 and self.precision == "bf16"

    def deepspeed_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration. Its batch sizes are dummies: the engine sets accumulation boundaries."""
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
            "gradient_allreduce_op": "sum" if self.stage < 3 else "mean",  # see `sum_gradients` for stage 3
            "steps_per_print": None,
        }
        if self.precision == "bf16":
            # Without immediate updates, stage 1 (DeepSpeed 0.19.8) adds the running bf16 sum of gradients to its fp32
            # sum after each microbatch: of n microbatches the first counts n times and the last once.
            config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config["communication_data_type"] = self.reduce_dtype  # DeepSpeed's default is the dtype of the weights
        return config


MEMORY_KIND = "memory"
"""Kind of state under which a checkpoint stores XLNet's memory; the other kinds are those of parameters."""


@dataclass(frozen=True)
class MemoryRefresh:
    """When XLNet's memory is recomputed, and from how many steps: a function of the step, the same in every run.

    Attributes:
        every: period: memory is recomputed before each step that is a multiple of it. A phase starts with empty memory.
        steps: number of preceding steps, within the phase, from which memory is recomputed.
    """

    every: int
    steps: int

    def recomputed_steps(self, step: int, phase_start: int) -> range | None:
        """Return the steps from which memory is recomputed before `step`; None: the memory of the last step is used."""
        if step % self.every and step != phase_start:
            return None
        return range(max(phase_start, step - self.steps), step)


@dataclass(frozen=True)
class Pace:
    """The speed of one rank in a step, from which stragglers (slow ranks) are detected.

    Attributes:
        data: seconds from the start of the step until its data had arrived.
        forward: seconds in forward passes; 0 at ZeRO stage 3.
        tokens: number of tokens in the forward passes.
    """

    data: float
    forward: float
    tokens: int
