"""The stages of a preparation: their settings, and the functions that decide about documents.

A stage looks at one document alone, and keeps it, changes it or drops it with a reason; or it compares all documents
(`ExactDuplicates`, see `duplicates.py`; `NearDuplicates`, see `near_duplicates.py`; `DuplicateParagraphs`, see
`paragraphs.py`). Every stage is a pure function of documents and settings.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal, Self, assert_never

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from data_service.corpus.provenance import ValuePatterns, matches_any_pattern
from data_service.formats import StrictRecord
from data_service.prepare.contamination import Decontaminate, make_decontamination_filter
from data_service.prepare.datatrove_blocks import (
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    UrlFilter,
    make_datatrove_filter,
)
from data_service.prepare.documents import CutDecision, Document, DropDecision
from data_service.prepare.language import Language, make_language_filter
from data_service.prepare.paragraphs import DuplicateParagraphs
from data_service.prepare.personal_data import Pii

DocumentFilter = Callable[[Document], Document | DropDecision | CutDecision]


class Length(StrictRecord):
    """Drops documents that are too short or too long, in characters or in words between white space."""

    stage: Literal["length"]
    least_characters: NonNegativeInt = 0
    most_characters: PositiveInt | None = None
    least_words: NonNegativeInt = 0
    most_words: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for unit, least, most in (
            ("characters", self.least_characters, self.most_characters),
            ("words", self.least_words, self.most_words),
        ):
            if most is not None and least > most:
                raise ValueError(f"no text has at least {least} and at most {most} {unit}")
        return self

    def filter_document(self, document: Document) -> Document | DropDecision:
        """Return the document if its length is allowed."""
        characters = len(document.text)
        if characters < self.least_characters:
            return DropDecision("too_few_characters", str(characters))
        if self.most_characters is not None and characters > self.most_characters:
            return DropDecision("too_many_characters", str(characters))
        if self.least_words or self.most_words is not None:
            words = len(document.text.split())
            if words < self.least_words:
                return DropDecision("too_few_words", str(words))
            if self.most_words is not None and words > self.most_words:
                return DropDecision("too_many_words", str(words))
        return document


class Licence(StrictRecord):
    """Drops documents of other licences.

    Attributes:
        allowed: licences that are kept, as the inputs write them. `*` stands for any text; case makes no difference.
        unstated: what becomes of documents whose licence the input does not say.
    """

    stage: Literal["licence"]
    allowed: ValuePatterns
    unstated: Literal["drop", "keep"] = "drop"

    def filter_document(self, document: Document) -> Document | DropDecision:
        """Return the document if its licence is allowed."""
        if document.licence is None:
            return document if self.unstated == "keep" else DropDecision("unstated")
        if matches_any_pattern(document.licence, self.allowed):
            return document
        return DropDecision("not_allowed", document.licence)


class ExactDuplicates(StrictRecord):
    """Of documents with the same text, over all inputs, keeps the first in input order.

    White space at ends of lines and blank lines make no difference.
    """

    stage: Literal["exact_duplicates"]


class NearDuplicates(StrictRecord):
    """Of documents whose texts are nearly the same, over all inputs, keeps the first in input order, or all of them.

    Attributes:
        keep: `first` drops all but the first document of a cluster. `all` drops none, and gives each its cluster's
            name, the id of the first, so that `corpus build` holds out whole clusters.
        similarity: Jaccard similarity of two texts' shingles from which on 99 % of all pairs are found.
        words: units of a shingle (`shingles.py`).
    """

    stage: Literal["near_duplicates"]
    keep: Literal["first", "all"] = Field(default="first", exclude_if=lambda keep: keep == "first")
    similarity: float = Field(default=0.8, ge=0.3, le=0.98)
    words: int = Field(default=5, ge=1, le=64)


DocumentStage = (
    Length
    | Licence
    | Decontaminate
    | Language
    | GopherQuality
    | GopherRepetition
    | C4Quality
    | FineWebQuality
    | UrlFilter
    | Pii
)
ComparingStage = ExactDuplicates | NearDuplicates | DuplicateParagraphs
Stage = Annotated[DocumentStage | ComparingStage, Field(discriminator="stage")]


@lru_cache(maxsize=32)
def open_filter(stage: DocumentStage) -> DocumentFilter:
    """Return the function that decides about documents. Files and packages that the stage needs are loaded, once in a
    process."""
    match stage:
        case Length() | Licence() | Pii():
            return stage.filter_document
        case Decontaminate():
            return make_decontamination_filter(stage)
        case Language():
            return make_language_filter(stage)
        case GopherQuality() | GopherRepetition() | C4Quality() | FineWebQuality() | UrlFilter():
            return make_datatrove_filter(stage)
        case other:
            assert_never(other)


def stage_labels(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """Return a name for each stage. The second stage of a kind is called `length 2`."""
    names = [stage.stage for stage in stages]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True))


def cuts_text(stage: Stage) -> bool:
    """Return whether a stage cuts parts out of texts, so that what was apart is joined."""
    return isinstance(stage, C4Quality | DuplicateParagraphs) or (
        isinstance(stage, Decontaminate) and stage.found == "cut"
    )
