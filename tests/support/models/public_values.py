"""What many public configurations of encoders share, under the keys of recipes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Public:
    """What a public source says about recipes. `values`: by path; lists are written as such."""

    source: str
    recipes: tuple[str, ...]
    values: Mapping[str, Any]


MASKS = {
    "objective.mlm.replace.mask": 0.8,
    "objective.mlm.replace.random": 0.1,
    "objective.mlm.replace.keep": 0.1,
}
DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
GOOGLES = {
    "model.initializer_range": 0.02,
    "model.initializer": "truncated_normal",
    "model.layer_norm_eps": 1e-12,
    "objective.mlm.rate": 0.15,
}


def adamw(lr: float, betas: list[float], eps: float, decay: float, clip: float | None, **more: Any) -> dict[str, Any]:
    fields = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "clip": clip, **more}
    return {f"optimizer.adamw.{name}": value for name, value in fields.items()}


def phase(number: int, **fields: Any) -> dict[str, Any]:
    return {f"phases.{number}.{name.replace('__', '.')}": value for name, value in fields.items()}


def schedule(**fields: Any) -> dict[str, Any]:
    return {f"schedule.{name}": value for name, value in fields.items()}


ADAM_WITHOUT_CORRECTION = {"bias_correction": False, "decayed": "no_bias_norm"}
BERTS = ("bert-tiny", "bert-mini", "bert-small", "bert-medium", "bert-base", "bert-large")
ALBERTS = ("albert-base", "albert-large", "albert-xlarge", "albert-xxlarge")
DEBERTA_V3 = ("deberta-v3-xsmall", "deberta-v3-small", "deberta-v3-base", "deberta-v3-large")
DEBERTAS = ("deberta-base", "deberta-large", "deberta-xlarge", "deberta-v2-xlarge", "deberta-v2-xxlarge")
MODERN = {
    "model.global_every": 3,
    "model.local_attention": 128,
    "model.attention_output_dropout": 0.1,
    "model.layer_norm_eps": 1e-5,
    "model.activation": "gelu",
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    **MASKS,
}


def electra(name: str, *, batch: int, length: int, lr: float, steps: int, rate: float, divisor: int) -> Public:
    return Public(
        "google-research/electra: configure_pretraining.py, model/optimization.py; table 6",
        (name,),
        {
            **GOOGLES,
            **DROPOUT,
            **adamw(lr, [0.9, 0.999], 1e-6, 0.01, 1.0, **ADAM_WITHOUT_CORRECTION),
            **phase(0, steps=steps, length=length, batch__sequences=batch),
            **schedule(warmup=10_000, decay="linear", floor=0.0),
            "model.activation": "gelu",
            "model.generator_divisor": divisor,
            "objective.mlm.rate": rate,
            "objective.mlm.replace.mask": 0.85,
            "objective.mlm.replace.keep": 0.15,
            "objective.rtd.weight": 50.0,
            "objective.rtd.temperature": 1.0,
            "input.single": 0.1,
            "input.short": 0.05,
        },
    )


def ettin(name: str, size: str, layers: int, hidden: int, inner: int, lr: float, decay: float) -> Public:
    """`decay`: theirs, which is not multiplied by the learning rate: ours is the quotient."""
    return Public(
        f"JHU-CLSP/ettin-encoder-vs-decoder: pretraining/configs/standard/{size}",
        (name,),
        {
            **MODERN,
            **{
                "model.layers": layers,
                "model.hidden": hidden,
                "model.feed_forward": inner,
                "model.vocab": 50_368,
            },
            **stable(lr, [0.9, 0.98], 1e-6, decay / lr),
            **phase(0, length=1024, batch__sequences=4608, rope_base=10_000.0),
            **phase(1, length=7999, batch__sequences=4608, schedule__decay="one_minus_sqrt", schedule__floor=0.5),
            **phase(2, length=7999, batch__sequences=4608, lr=lr / 2, mlm__rate=0.15),
            **phase(2, schedule__decay="one_minus_sqrt", schedule__floor=0.04),
            "objective.mlm.rate": 0.3,
            "objective.mlm.count": "each token by itself",
            "input.packing": "not packed",
        },
    )


def stable(lr: float, betas: list[float], eps: float, decay: float) -> dict[str, Any]:
    fields = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": decay,
        "decayed": "no_bias_norm",
        "clip": None,
    }
    return {f"optimizer.stableadamw.{name}": value for name, value in fields.items()}


def mmbert(name: str, hidden: int, rate: float, later: float, floor: float) -> Public:
    return Public(
        f"JHU-CLSP/mmBERT: configs/{name.replace('mmbert', 'mmBERT')}, -ext and -decay.yaml",
        (name,),
        {
            **MODERN,
            **{
                "model.layers": 22,
                "model.hidden": hidden,
                "model.feed_forward": 1152,
                "model.vocab": 256_000,
            },
            **stable(8e-4, [0.9, 0.95], 1e-8, 0.1),
            **phase(0, length=1024, batch__sequences=4608, rope_base=10_000.0, local_rope_base=10_000.0),
            **phase(1, length=8192, batch__sequences=4608, mlm__rate=0.15),
            **phase(2, length=8192, batch__sequences=4608, mlm__rate=0.05),
            **(phase(1, lr=later) | phase(2, lr=later) if later != 8e-4 else {}),
            **phase(2, schedule__floor=floor, schedule__decay="one_minus_sqrt"),
            **phase(2, mixture="one of three, merged"),
            "objective.mlm.rate": rate,
            "objective.mlm.count": "each token by itself",
            "input.packing": "full_sentences",
        },
    )
