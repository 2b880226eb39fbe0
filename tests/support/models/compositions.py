"""Families by objectives: what is trained together, on which rows. The guide's table is printed from this.

`python -m tests.support.models.compositions` prints it for infra/docs/keys.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from data_service.samples.spec import Input
from encoder_core.families import catalogue
from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.compose import refusals
from encoder_core.objectives.term import Refusal, TermSetting
from launcher.runtime.recipe.objective import RecipeObjective, row_facts

SHAPE: dict[str, object] = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "feed_forward": 32,
    "max_length": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_SETTINGS: Mapping[str, dict[str, object]] = {
    "albert": {"embedding": 8},
    "electra": {"embedding": 8, "generator_divisor": 2},
    "deberta_v2": {"buckets": 8},
    "modernbert": {"local_attention": 8},
    "eurobert": {"key_value_heads": 1},
    "xlm": {"feed_forward": 64, "languages": ["en", "re", "up"]},
    "xlnet": {"reuse": 8, "memory": 8},
}
"""What a family's small model needs beside `SHAPE`, which is common to all."""
FAMILIES: Mapping[str, dict[str, object]] = {
    family.name: {"family": key, **_SETTINGS.get(key, {})}
    for family in catalogue.FAMILIES
    for key in [family.model_fields["family"].default]
}
"""Every family in small, as a recipe's `model`, by its column in the table."""

_SPANS: dict[str, object] = {"unit": "span", "rate": 0.3}
_TOKENS: dict[str, object] = {"rate": 0.3}
_NGRAMS: dict[str, object] = {"unit": "ngram", "rate": 0.3}
_DISENTANGLED: dict[str, object] = {"embeddings": "gradient_disentangled"}
# There is something to learn: at 0.05 fresh weights tell texts apart already.
_FAR: dict[str, object] = {"temperature": 0.5}
TEACHER = "teacher"  # its place
LANGUAGES = ("en", "re")  # of the one source: a sentence's and its translation's
_TAUGHT: dict[str, object] = {"teachers": [{"uri": TEACHER, "model": SHAPE | FAMILIES["BERT"]}]}


@dataclass(frozen=True)
class Row:
    """A line of the table: an objective as a recipe writes it, the rows it is tried on, and what phases set."""

    name: str
    objective: dict[str, dict[str, object]]
    packing: str = "full_sentences"
    phases: tuple[dict[str, object], ...] = ({},)

    @property
    def terms(self) -> RecipeObjective:
        return RecipeObjective.model_validate(self.objective)

    @property
    def input(self) -> Input:
        settings = {"lanes": {"reuse": 8, "both_directions": False}}.get(self.packing, {})
        rows: Input = TypeAdapter(Input).validate_python({"packing": self.packing, **settings})
        return rows


_NAMED = (
    Row("mlm", {"mlm": _TOKENS}),
    Row("mlm of n-grams of whole words", {"mlm": _NGRAMS}),
    Row("mlm (TLM)", {"mlm": _TOKENS}, "translations"),
    Row("clm", {"clm": {}}),
    Row("clm (of translations)", {"clm": {}}, "translations"),
    Row("clm, then mlm", {"mlm": _TOKENS, "clm": {}}, phases=({"objective": "clm"}, {"objective": "mlm"})),
    Row("clm + nsp", {"clm": {}, "nsp": {}}, "segment_pair"),
    Row("mlm + nsp", {"mlm": _TOKENS, "nsp": {}}, "segment_pair"),
    Row("mlm + sop", {"mlm": _NGRAMS, "sop": {}}, "ordered_pair"),
    Row("mlm + sbo", {"mlm": _SPANS, "sbo": {}}),
    Row("mlm + nsp + sbo", {"mlm": _SPANS, "nsp": {}, "sbo": {}}, "segment_pair"),
    Row("mlm + sop + sbo", {"mlm": _SPANS, "sop": {}, "sbo": {}}, "ordered_pair"),
    Row("mlm + retromae", {"mlm": _TOKENS, "retromae": {}}),
    Row("mlm + sop + retromae + contrastive", {"mlm": _NGRAMS, "sop": {}, "retromae": {}, "contrastive": _FAR},
        "ordered_pair"),
    Row("mlm + condenser", {"mlm": _TOKENS, "condenser": {}}),
    Row("mlm + retromae + condenser + contrastive", {"mlm": _TOKENS, "retromae": {}, "condenser": {"layers": 1},
        "contrastive": _FAR}),
    Row("mlm + retromae + rtd", {"mlm": _TOKENS, "retromae": {}, "rtd": {}}),
    Row("mlm + condenser + rtd", {"mlm": _TOKENS, "condenser": {}, "rtd": {}}),
    Row("mlm + rtd", {"mlm": _TOKENS, "rtd": {}}),
    Row("mlm + rtd, disentangled", {"mlm": _NGRAMS, "rtd": _DISENTANGLED}),
    Row("mlm + nsp + rtd", {"mlm": _TOKENS, "nsp": {}, "rtd": {}}, "segment_pair"),
    Row("mlm + rtd", {"mlm": _TOKENS, "rtd": {}}, "translations"),
    Row("mlm + sop + rtd, disentangled", {"mlm": _TOKENS, "sop": {}, "rtd": _DISENTANGLED}, "ordered_pair"),
    Row("mlm + sbo + rtd", {"mlm": _SPANS, "sbo": {}, "rtd": {}}),
    Row("mlm + nsp + sbo + rtd, disentangled", {"mlm": _SPANS, "nsp": {}, "sbo": {}, "rtd": _DISENTANGLED},
        "sentence_pair"),
    Row("mlm + distil + cosine", {"mlm": _TOKENS, "distil": _TAUGHT, "cosine": {}}),
    Row("mlm + sop + distil + cosine", {"mlm": _NGRAMS, "sop": {}, "distil": _TAUGHT, "cosine": {}}, "ordered_pair"),
    Row("mlm + nsp + sbo + distil", {"mlm": _SPANS, "nsp": {}, "sbo": {}, "distil": _TAUGHT}, "segment_pair"),
    Row("mlm + distil + hidden", {"mlm": _TOKENS, "distil": _TAUGHT, "hidden": {}}),
    Row("mlm + rtd + distil", {"mlm": _TOKENS, "rtd": {}, "distil": _TAUGHT}),
    Row("mlm + nsp + sop", {"mlm": _TOKENS, "nsp": {}, "sop": {}}, "segment_pair"),
    Row("plm", {"plm": {"predict": 4, "permutation": 12}}, "lanes"),
    Row("plm + nsp", {"plm": {"predict": 4, "permutation": 12}, "nsp": {}}, "lanes"),
    Row("contrastive", {"contrastive": _FAR}, "sentences"),
    Row("mlm + contrastive", {"mlm": _TOKENS, "contrastive": _FAR}),
    Row("mlm + sop + distil + contrastive", {"mlm": _NGRAMS, "sop": {}, "distil": _TAUGHT, "contrastive": _FAR},
        "ordered_pair"),
    Row("mlm + rtd + contrastive", {"mlm": _TOKENS, "rtd": {}, "contrastive": _FAR}),
    Row("mlm + rtd, disentangled + contrastive", {"mlm": _TOKENS, "rtd": _DISENTANGLED, "contrastive": _FAR}),
    Row("plm + contrastive", {"plm": {"predict": 4, "permutation": 12}, "contrastive": _FAR}, "lanes"),
)  # fmt: skip
_ALONE = tuple(
    Row(name, {name: {}}) for name in RecipeObjective.model_fields if not any(name in row.objective for row in _NAMED)
)
OBJECTIVES = (*_NAMED, *_ALONE)
"""Every term is in some row: one that no row names is tried alone, with its defaults."""


def model_of(family: str, vocab: int) -> ModelConfig:
    """The family in small."""
    config: ModelConfig = TypeAdapter(ModelConfig).validate_python({**SHAPE, **FAMILIES[family], "vocab": vocab})
    return config


def refused(family: str, row: Row) -> list[Refusal]:
    """Why a cell of the table is not trained; empty if it is."""
    objective = row.terms
    facts = row_facts(row.input, objective.masking)
    return refusals(TermSetting(model_of(family, 64), objective.terms, facts))


def table() -> str:
    """Markdown: a line for each objective, a column for each family; reasons below."""
    reasons: dict[str, int] = {}
    lines = [
        f"| objective | rows tried | {' | '.join(FAMILIES)} |",
        f"|---|---|{'---|' * len(FAMILIES)}",
    ]
    for row in OBJECTIVES:
        cells = [_cell(refused(family, row), reasons) for family in FAMILIES]
        lines.append(f"| {row.name} | `{row.packing}` | {' | '.join(cells)} |")
    notes = [f"{number}. {reason[:1].upper()}{reason[1:]}." for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def _cell(found: list[Refusal], reasons: dict[str, int]) -> str:
    """Of several reasons one that is not about rows."""
    if not found:
        return "yes"
    what = min(found, key=lambda refusal: refusal.path != ("objective",)).what
    what = re.sub(r"a model of family \w+", "a model of this family", what)
    return f"no ({reasons.setdefault(what, len(reasons) + 1)})"


if __name__ == "__main__":
    print(table(), end="")
