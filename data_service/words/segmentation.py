"""How a corpus was cut into words when it was built: what is asked for, and what is kept of it in the manifest."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_service.types import Level

SegmenterName = Literal["jieba", "longest_match", "field"]


class WordOptions(BaseModel):
    """How to find words and other units of the text.

    Attributes:
        segmenter: jieba; the longest words of a file, from left to right; or a field of the input that holds each
            document's words already (LTP's, HanLP's and others' output). None: no words, only a lexicon's units.
        dictionary: URI of a file of words: of `longest_match`, or in place of jieba's own (`word frequency` a line).
        user_words: URI of a file of words that jieba is to know besides (`word [frequency] [tag]` a line).
        field: of the input, a list of words, a list of sentences that are lists of words, or words with spaces between.
        lexicon: URI of a file of entities and phrases, `text <TAB> entity` or `text <TAB> phrase` a line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    segmenter: SegmenterName | None = "jieba"
    dictionary: str | None = None
    user_words: str | None = None
    field: str = Field(default="words", min_length=1)
    lexicon: str | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.segmenter is None and self.lexicon is None:
            raise ValueError("neither a segmenter nor a lexicon is given")
        if self.segmenter == "longest_match" and self.dictionary is None:
            raise ValueError("longest_match takes its words from a dictionary; give one")
        if self.dictionary is not None and self.segmenter not in ("jieba", "longest_match"):
            raise ValueError("a dictionary is for the segmenters jieba and longest_match")
        if self.user_words is not None and self.segmenter != "jieba":
            raise ValueError("user words are for the segmenter jieba; longest_match has its dictionary")
        return self

    @property
    def input_field(self) -> str | None:
        """The field of the input that holds words; None if none does."""
        return self.field if self.segmenter == "field" else None

    def files(self) -> dict[str, str]:
        """URIs of the files of words, by what they are."""
        named = {"dictionary": self.dictionary, "user_words": self.user_words, "lexicon": self.lexicon}
        return {name: uri for name, uri in named.items() if uri is not None}


class Segmentation(BaseModel):
    """What decided where units begin in a corpus: part of its identity.

    Attributes:
        segmenter: its name; None if only a lexicon's units are stored.
        version: of the segmenter.
        field: of the input, if the words came with it.
        dictionary, user_words, lexicon: sha256 (hex) of each file of words; None where there was none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    segmenter: SegmenterName | None
    version: str
    field: str | None = None
    dictionary: str | None = None
    user_words: str | None = None
    lexicon: str | None = None

    @property
    def levels(self) -> tuple[Level, ...]:
        """What is stored."""
        words: tuple[Level, ...] = () if self.segmenter is None else ("word",)
        return words if self.lexicon is None else (*words, "phrase", "entity")
