"""Detects the language of a document with a fastText model, given as a file and its hash."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pydantic import Field

from data_service.errors import PrepareError
from data_service.formats import StrictRecord
from data_service.ingest.inputs import INSTALL_REMEDY
from data_service.prepare.documents import Document, DropDecision
from data_service.prepare.model_file import check_file_hash

_LABEL_PREFIX = "__label__"  # all labels of a fastText model begin with it
_DETECTION_CHARACTERS = 20_000  # length of the beginning of a document that is used for detection


class Language(StrictRecord):
    """Drops documents in other languages; records the detected language of kept documents.

    Attributes:
        model: path of a fastText model for languages (lid.176.bin, GlotLID), the same on all workers.
        sha256: hash of the file, in hexadecimal.
        languages: labels of the model to keep, without their prefix `__label__`; empty to keep all.
        least: smallest probability of the detected label; documents below it are dropped.
    """

    stage: Literal["language"]
    model: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    languages: tuple[str, ...] = ()
    least: float = Field(default=0.65, ge=0.0, le=1.0)


def make_language_filter(stage: Language) -> Callable[[Document], Document | DropDecision]:
    """Return the function that applies the stage to a document.

    Raises:
        PrepareError: the file is missing, has another hash or is not a model, or fasttext is not installed.
    """
    check_file_hash(stage.model, stage.sha256, "language model")
    try:
        import fasttext
    except ImportError as error:
        raise PrepareError("stage language needs fasttext, which is not installed", remedy=INSTALL_REMEDY) from error
    try:
        model = fasttext.load_model(stage.model)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise PrepareError(
            f"{stage.model} is not a fastText model: {error}", remedy="give a .bin or .ftz file of fastText"
        ) from error

    def filter_document(document: Document) -> Document | DropDecision:
        labels, shares = model.predict(" ".join(document.text[:_DETECTION_CHARACTERS].split()), k=1)
        if not len(labels):
            return DropDecision("no_language")
        found, share = labels[0].removeprefix(_LABEL_PREFIX), min(1.0, float(shares[0]))
        if share < stage.least:
            return DropDecision("unsure", f"{found} {share:.3f}")
        if stage.languages and found not in stage.languages:
            return DropDecision("other_language", f"{found} {share:.3f}")
        return replace(document, language=found)

    return filter_document
