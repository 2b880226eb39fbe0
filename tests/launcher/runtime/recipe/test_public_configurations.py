"""Bundled recipes against the public configurations of their authors, key by key: equal, or marked beside the key.

The values are those of the files that are named, in our keys; where a repository has none for the released model, the
paper's table. A mark is a comment on the key's line, or above it, that says what theirs is. `-s` prints a table of
recipes, keys and deviations.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from launcher.runtime.recipe.identity import flatten
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.source import bundled


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


def adamw(
    lr: float, betas: list[float], eps: float, decay: float, clip: float | None, **more: Any
) -> dict[str, Any]:
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


def electra(
    name: str, *, batch: int, length: int, lr: float, steps: int, rate: float, divisor: int
) -> Public:
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
            **phase(
                1, length=7999, batch__sequences=4608, schedule__decay="one_minus_sqrt", schedule__floor=0.5
            ),
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


SOURCES = (
    Public(
        "google-research/bert: modeling.py, optimization.py, create_pretraining_data.py; appendix A.2",
        BERTS,
        {
            **GOOGLES,
            **MASKS,
            **DROPOUT,
            **adamw(1e-4, [0.9, 0.999], 1e-6, 0.01, 1.0, **ADAM_WITHOUT_CORRECTION),
            **phase(0, steps=900_000, length=128, batch__sequences=256),
            **phase(1, steps=100_000, length=512, batch__sequences=256),
            **schedule(warmup=10_000, decay="linear", floor=0.0),
            "model.activation": "gelu_tanh",
            "model.token_types": 2,
            "model.vocab": 30_522,
            "objective.mlm.copies": 10,
            "input.packing": "segment_pair",
            "input.copies": 10,
            "input.short": 0.1,
            "input.random": 0.5,
        },
    ),
    Public(
        "google-research/albert: README.md, create_pretraining_data.py, lamb_optimizer.py, modeling.py",
        ALBERTS,
        {
            **GOOGLES,
            **MASKS,
            **phase(0, steps=125_000, length=512, batch__sequences=4096),
            **schedule(warmup=3125, decay="linear", floor=0.0),
            **{
                f"optimizer.lamb.{name}": value
                for name, value in {
                    **{"lr": 0.00176, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01, "clip": 1.0},
                    **ADAM_WITHOUT_CORRECTION,
                }.items()
            },
            "model.activation": "gelu_tanh",
            "model.embedding": 128,
            "model.groups": 1,
            "objective.mlm.max_predictions": 20,
            "objective.mlm.unit": "ngram",
            "objective.mlm.longest": 3,
            "input.copies": 40,
            "input.short": 0.1,
            "input.swapped": 0.5,
        },
    ),
    Public("google-research/albert: the released xxlarge", ("albert-xxlarge",), dict.fromkeys(DROPOUT, 0.0)),
    Public(
        "fairseq: examples/roberta/config/pretraining/base.yaml; table 9",
        ("roberta-base", "roberta-large", "roberta-large-160gb"),
        {
            **DROPOUT,
            **MASKS,
            "model.activation": "gelu",
            "model.max_length": 512,
            "optimizer.adamw.betas": [0.9, 0.98],
            "optimizer.adamw.eps": 1e-6,
            "optimizer.adamw.weight_decay": 0.01,
            "optimizer.adamw.decayed": "all",
            "optimizer.adamw.clip": None,
            "objective.mlm.rate": 0.15,
            "input.packing": "full_sentences",
            "schedule.decay": "linear",
        },
    ),
    *(
        Public("table 9", (name,), {"optimizer.adamw.lr": lr, "schedule.warmup": warmup})
        for name, lr, warmup in (("roberta-base", 6e-4, 24_000), ("roberta-large-160gb", 4e-4, 30_000))
    ),
    Public(
        "facebookresearch/SpanBERT: pretraining/README.md, fairseq/models/pair_bert.py",
        ("spanbert-large",),
        {
            **DROPOUT,
            **MASKS,
            **adamw(1e-4, [0.9, 0.999], 1e-8, 0.01, 1.0, decayed="all"),
            **phase(0, steps=2_400_000, length=512, batch__sequences=256),
            **schedule(warmup=10_000, decay="linear", floor=0.0),
            "model.activation": "gelu",
            "objective.mlm.rate": 0.15,
            "objective.mlm.unit": "span",
            "objective.mlm.longest": 10,
            "objective.mlm.span_p": 0.2,
            "objective.sbo.weight": 1.0,
        },
    ),
    Public(
        "zihangdai/xlnet: train.py, model_utils.py; the paper's hyperparameters for pretraining",
        ("xlnet-large",),
        {
            **DROPOUT,
            **adamw(4e-4, [0.9, 0.999], 1e-6, 0.01, 1.0, bias_correction=False, decayed="xlnet"),
            **phase(0, steps=500_000, length=512, batch__sequences=8192),
            **schedule(warmup=40_000, decay="linear", floor=0.001),
            "model.activation": "gelu_tanh",
            "model.memory": 384,
            "model.initializer": "normal",
            "model.initializer_range": 0.02,
            "objective.plm.predict": 85,
            "objective.plm.context": 6,
            "objective.plm.chosen": 1,
            "objective.plm.permutation": 256,
            "objective.plm.unit": "piece",
            "input.reuse": 256,
            "input.both_directions": True,
        },
    ),
    electra("electra-small", batch=128, length=128, lr=5e-4, steps=1_000_000, rate=0.15, divisor=4),
    electra("electra-base", batch=256, length=512, lr=2e-4, steps=766_000, rate=0.15, divisor=3),
    electra("electra-large", batch=2048, length=512, lr=2e-4, steps=400_000, rate=0.25, divisor=4),
    Public(
        "huggingface/transformers: research_projects/distillation, README.md, train.py, distiller.py",
        ("distilbert-base",),
        {
            **DROPOUT,
            **MASKS,
            **adamw(5e-4, [0.9, 0.98], 1e-6, 0.0, 5.0),
            **schedule(decay="linear", floor=0.0),
            "model.layers": 6,
            "model.position": "frozen",
            "model.initializer_range": 0.02,
            "objective.mlm.rate": 0.15,
            "objective.mlm.weight": 2.0,
            "objective.mlm.count": "0.15 of the batch's tokens, rare ones more often",
            "objective.distil.weight": 5.0,
            "objective.distil.temperature": 2.0,
            "objective.distil.places": "all",
            "objective.cosine.weight": 1.0,
            "input.packing": "a text a row",
        },
    ),
    Public(
        "microsoft/DeBERTa: DeBERTa/optims/args.py, xadam.py, apps/tasks; the table of appendix A",
        (*DEBERTAS, *DEBERTA_V3),
        {
            **DROPOUT,
            "model.activation": "gelu",
            "model.layer_norm_eps": 1e-7,
            "model.initializer_range": 0.02,
            "model.initializer": "normal",
            "objective.mlm.rate": 0.15,
            "optimizer.adamw.eps": 1e-6,
            "optimizer.adamw.weight_decay": 0.01,
            "optimizer.adamw.clip": 1.0,
            "optimizer.adamw.bias_correction": False,
            "optimizer.adamw.decayed": "no_bias_norm",
            "schedule.decay": "linear",
            "schedule.floor": 0.0,
        },
    ),
    *(
        Public(
            f"microsoft/DeBERTa: experiments/language_model/rtd.sh and {config}.json",
            (name,),
            {
                **{
                    "model.layers": layers,
                    "model.hidden": hidden,
                    "model.buckets": 256,
                    "model.vocab": 128_100,
                },
                **phase(0, steps=1_000_000, length=512, batch__sequences=batch),
                "optimizer.adamw.lr": lr,
                "optimizer.adamw.betas": [0.9, 0.999],
                "schedule.warmup": 10_000,
                "objective.rtd.weight": 10.0,
                "objective.rtd.embeddings": "gradient_disentangled",
            },
        )
        for name, config, layers, hidden, lr, batch in (
            ("deberta-v3-xsmall", "rtd_xsmall", 12, 384, 3e-4, 64),
            ("deberta-v3-base", "rtd_base", 12, 768, 1e-4, 256),
            ("deberta-v3-large", "rtd_large", 24, 1024, 1e-4, 256),
        )
    ),
    *(
        Public(
            "microsoft/DeBERTa: experiments/language_model/mlm.sh",
            (name,),
            {
                **phase(0, steps=1_000_000, length=512, batch__sequences=batch),
                "optimizer.adamw.lr": 1e-4,
                "schedule.warmup": warmup,
                "objective.mlm.unit": "ngram",
                "objective.mlm.longest": 3,
            },
        )
        for name, batch, warmup in (
            ("deberta-base", 256, 10_000),
            ("deberta-v2-xlarge", 32, 1000),
            ("deberta-v2-xxlarge", 32, 1000),
        )
    ),
    *(
        Public(
            "AnswerDotAI/ModernBERT: yamls/modernbert; section 2 and appendix A",
            (name,),
            {
                **MODERN,
                **stable(lr, [0.9, 0.98], 1e-6, 1e-5 / lr),
                **phase(0, length=1024),
                "objective.mlm.rate": 0.3,
                "objective.mlm.count": "each token by itself",
                "model.vocab": 50_368,
                "start": start,
            },
        )
        for name, lr, start in (
            ("modernbert-base", 8e-4, "scratch"),
            ("modernbert-large", 5e-4, "base's weights, tiled"),
        )
    ),
    ettin("ettin-17m", "very_tiny", 7, 256, 384, 3e-3, 3e-4),
    ettin("ettin-32m", "tiny", 10, 384, 576, 3e-3, 3e-4),
    ettin("ettin-68m", "mini", 19, 512, 768, 3e-3, 3e-4),
    ettin("ettin-150m", "base", 22, 768, 1152, 8e-4, 1e-5),
    ettin("ettin-400m", "large", 28, 1024, 2624, 5e-4, 1e-5),
    ettin("ettin-1b", "huge", 28, 1792, 3840, 5e-4, 5e-5),
    mmbert("mmbert-small", 384, 0.3, 4e-4, 0.04),
    mmbert("mmbert-base", 768, 0.25, 8e-4, 0.02),
    Public(
        "mosaicml/examples: examples/benchmarks/bert/yamls/main/mosaic-bert-base-uncased.yaml",
        ("mosaicbert-like",),
        {
            **MASKS,
            **adamw(5e-4, [0.9, 0.98], 1e-6, 1e-5 / 5e-4, None),
            **phase(0, steps=70_000, length=128, batch__sequences=4096),
            **schedule(warmup=4200, decay="linear", floor=0.02),
            "model.attention_dropout": 0.0,
            "model.position": "ALiBi",
            "objective.mlm.rate": 0.3,
            "objective.mlm.count": "each token by itself",
            "input.packing": "not packed",
        },
    ),
    Public(
        "chandar-lab/NeoBERT: conf/, jobs/neobert.sh and neobert-4096.sh, src/neobert/scheduler",
        ("neobert-base",),
        {
            **adamw(1e-4, [0.9, 0.95], 1e-8, 0.01, 1.0, bias_correction=True, decayed="all"),
            **phase(0, steps=900_000, length=1024, batch__sequences=2048, schedule__warmup=2000),
            **phase(0, schedule__decay="cosine", schedule__floor=0.1),
            **phase(1, steps=100_000, length=1024, batch__sequences=2048, lr=6e-5),
            **phase(2, steps=50_000, length=4096, batch__sequences=512, lr=6e-5),
            "model.layers": 28,
            "model.hidden": 768,
            "model.heads": 12,
            "model.feed_forward": 2048,
            "model.dropout": 0.0,
            "model.layer_norm_eps": 1e-5,
            "model.initializer": "uniform",
            "model.initializer_range": 0.0115,
            "model.vocab": 30_522,
            "objective.mlm.rate": 0.2,
            "objective.mlm.count": "each token by itself",
            "objective.mlm.replace.mask": 1.0,
            "input.packing": "a document a row",
        },
    ),
    Public(
        "Nicolas-BZRD/EuroBERT: optimus/trainer/configuration/train.py, docs/trainer.md",
        ("eurobert-210m",),
        {
            **adamw(1e-4, [0.9, 0.95], 1e-5, 0.1, 1.0),
            "objective.mlm.replace.mask": 1.0,
            "model.vocab": 128_256,
            "objective.mlm.rate": 0.3,
        },
    ),
    Public(
        "facebookresearch/XLM: README.md, the command for XNLI; xlm/optim.py, xlm/model/transformer.py",
        ("xlm-mlm-tlm-base",),
        {
            **DROPOUT,
            **MASKS,
            **adamw(1e-4, [0.9, 0.98], 1e-8, 0.0, 5.0),
            **schedule(warmup=4000, decay="inverse_sqrt"),
            **phase(0, length=256),
            "model.layers": 12,
            "model.hidden": 1024,
            "model.heads": 8,
            "model.activation": "gelu",
            "model.initializer_range": 0.03125,
            "objective.mlm.rate": 0.15,
        },
    ),
)
# Recipes whose authors published no code or configuration of the pretraining, or which are compositions of ours.
WITHOUT = {
    *(
        "bart-base",
        "bart-large",
        "chinese-modernbert-base",
        "contrastive-base",
        "deberta-base-sop",
        "ernie-base-zh",
    ),
    *("macbert-base-zh", "quickstart", "roberta-wwm-ext-zh", "simcse-base", "spanbert-base", "xlnet-base"),
}

_MARKS = re.compile(
    r"\b(theirs?|authors'?|official|codes?|code's|papers?|published|released|command|rtd\.sh|mlm\.sh|configuration)\b"
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: ?%)?")


def deviations(public: Public, name: str) -> Iterator[tuple[str, Any]]:
    """Each path where the recipe differs from the source, and the source's value."""
    data = load(name).to_data()
    for path, value in public.values.items():
        ours = value_at(data, path)
        if isinstance(value, float | int) and isinstance(ours, float | int) and not isinstance(value, bool):
            if not math.isclose(value, ours, rel_tol=1e-9):
                yield path, value
        elif ours != value:
            yield path, value


def value_at(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, list) else (data or {}).get(part)
    return data


def comments_beside(text: str, path: str) -> str:
    """The comments on the line of a key, or the lines of a phase, and on the comment lines above."""
    lines = text.splitlines()
    head, *rest = path.split(".")
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{head}:"))
    last = next((i for i in range(first + 1, len(lines)) if re.match(r"\w", lines[i])), len(lines))
    at = range(first, last)
    if head == "phases":
        items = [i for i in at if lines[i].lstrip().startswith("- {")] + [last]
        at = range(items[int(rest[0])], items[int(rest[0]) + 1])
    else:
        at = range(*(lambda found: (found, found + 1))(_line_of(lines, at, rest)))
    above = at.start
    while lines[above - 1].lstrip().startswith("#"):
        above -= 1
    return " ".join(line.partition("#")[2] for line in lines[above : at.stop] if "#" in line)


def _line_of(lines: list[str], at: range, keys: list[str]) -> int:
    """The line of the last key of a path, each below or on the line of the one before."""
    place = at.start
    for key in keys:
        place = next(
            (i for i in range(place, at.stop) if re.search(rf"\b{key}:", lines[i].partition("#")[0])), place
        )
    return place


def is_marked(comment: str, value: Any) -> bool:
    """Whether a comment says that theirs is another one, and if it is a number, which."""
    if not _MARKS.search(comment):
        return False
    if isinstance(value, bool) or not isinstance(value, float | int):
        return True
    spelt = [one.replace(",", "") for one in _NUMBER.findall(comment)]
    numbers = [float(one.rstrip(" %")) / (100 if one.endswith("%") else 1) for one in spelt]
    return any(math.isclose(number, value) for number in numbers)


def test_every_recipe_has_a_source_or_none_is_public() -> None:
    covered = {name for public in SOURCES for name in public.recipes}
    assert covered | WITHOUT == set(bundled())
    assert not covered & WITHOUT


@pytest.mark.parametrize("name", sorted({name for public in SOURCES for name in public.recipes}))
def test_a_recipe_is_its_authors_or_marked_beside_the_key(name: str) -> None:
    known, unmarked, count = 0, [], 0
    for public in (one for one in SOURCES if name in one.recipes):
        known += len(public.values)
        for path, value in deviations(public, name):
            count += 1
            comment = comments_beside(bundled()[name], path)
            if not is_marked(comment, value):
                unmarked.append(f"{path}: {value_at(load(name).to_data(), path)}, theirs {value} ({comment})")
    print(f"| {name} | {known} | {count} |")
    assert not unmarked, "\n".join(unmarked)


def test_paths_of_the_table_are_keys() -> None:
    """A typing error would be a deviation for ever."""
    for public in SOURCES:
        for name in public.recipes:
            data = load(name).to_data()
            paths = {path.rpartition(".")[0] for path in flatten(data)} | flatten(data).keys()
            unknown = [path for path in public.values if path not in paths and value_at(data, path) is None]
            assert [path for path in unknown if public.values[path] is not None] == [], name
