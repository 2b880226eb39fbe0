"""How the engine shards and computes. Apart from the engine, so that reading a recipe does not load DeepSpeed."""

from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "bf16"]
BUCKET = 2**23  # numbers; enough for a network to be busy, and few beside a model's


@dataclass(frozen=True)
class EngineConfig:
    """How state is sharded and computed; nothing here changes what is computed beyond rounding.

    Attributes:
        stage: ZeRO stage 0-3.
        precision: bf16 keeps fp32 master weights and accumulates gradients in fp32; it needs stage 1-3.
        clip: largest global gradient norm, None for no clipping.
        reduce_dtype: of gradients while ranks add them up; bf16 halves what they send and rounds every sum, the more
            the more ranks there are. Only with precision bf16.
        bucket: numbers that ranks add up at a time, at all stages but 0. DeepSpeed's default is more than most encoders
            have: nothing would be sent before the backward pass is over, and its buffers fill 3 GB.
        persistence_threshold: stage 3 keeps parameters with fewer elements whole; None for DeepSpeed's default.
    """

    stage: Literal[0, 1, 2, 3]
    precision: Precision
    clip: float | None
    persistence_threshold: int | None = None
    reduce_dtype: Precision = "fp32"
    bucket: int = BUCKET

    @property
    def sums_apart(self) -> bool:
        """Whether DeepSpeed adds gradients to fp32 sums of its own, whole on every rank, and reduces those."""
        return self.stage == 1 and self.precision == "bf16"

    def deepspeed(self) -> dict[str, Any]:
        """DeepSpeed's own configuration. Batch sizes are nominal: the step decides its boundaries itself."""
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
            "gradient_allreduce_op": "sum"
            if self.stage < 3
            else "mean",  # stage 3 has no choice, see the engine
            "steps_per_print": None,
        }
        if self.precision == "bf16":
            # Without immediate updates, stage 1 (DeepSpeed 0.19.8) adds the running bf16 sum of the microbatches to its
            # fp32 sum after each of them: of n, the first counts n times and the last once.
            config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config["communication_data_type"] = self.reduce_dtype  # DeepSpeed's default is the precision
        return config
