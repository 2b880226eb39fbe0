"""The stages of a preparation: their settings, and the functions that apply them to documents.

A document stage keeps, changes or drops a single document. A comparing stage compares all documents: `ExactDuplicates`
(`duplicates.py`), `NearDuplicates` (`near_duplicates.py`), `DuplicateParagraphs` (`paragraphs.py`). Every stage is a
pure function of documents and settings.
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

DocumentFilter = Callable[[Document], Document | DropDecision | CutDecision]  # applies a stage to a document


class Length(StrictRecord):
    """Drops documents that are too short or too long, in characters or in words separated by white space."""

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
                raise ValueError(f"the lower limit {least} is above the upper limit {most} for the number of {unit}")
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
    """Drops documents whose licence is not allowed.

    Attributes:
        allowed: allowed licences, as written in the inputs. `*` matches any text; case makes no difference.
        unstated: action on documents without a stated licence.
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
    """Keeps only the first of documents with equal texts, in input order. Any white space counts as one space."""

    stage: Literal["exact_duplicates"]


class NearDuplicates(StrictRecord):
    """Finds clusters of documents with nearly equal texts over all inputs; keeps the first document of each, or all.

    Attributes:
        keep: `first` keeps only the first document of a cluster, in input order. `all` drops none and records the
            cluster's name (the id of its first document), so that `corpus build` holds out whole clusters.
        similarity: least Jaccard similarity of two texts' shingles; 99 % of the pairs with this similarity are found.
        words: number of units in a shingle (`shingles.py`).
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
    """Return the function that applies a stage to a document. Loads its files and packages, once per process."""
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
    """Return a unique label for each stage: its kind, and a number from the second of a kind on, as in `length 2`."""
    names = [stage.stage for stage in stages]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True))


def cuts_text(stage: Stage) -> bool:
    """Return whether a stage cuts parts out of texts, so that text before and after a cut is joined."""
    return isinstance(stage, C4Quality | DuplicateParagraphs) or (
        isinstance(stage, Decontaminate) and stage.found == "cut"
    )
