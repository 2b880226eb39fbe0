"""`StreamSpec`: everything that decides the samples of a stream. Equal specs give equal bytes anywhere."""

import hashlib
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from data_service.samples.lanes import Lanes, check_lanes
from data_service.samples.masking import MlmMasking, NoMasking
from data_service.samples.packing import Packed
from data_service.samples.pairs import Pairs, Translations
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.replacement import Vocabulary
from data_service.samples.similar_words import SimilarSource
from data_service.samples.texts import RepeatedSentences, TextLayout, TextPairs, Texts
from data_service.tokenizers.specials import SpecialIds

WINDOW_BATCHES = 16  # batches that are shuffled together
_LATER = (
    "layout",
    "one_source",
    "temperature",
    "similar",
    "languages",
    "translations",
    "stages",
)  # fields that came later: left out where nobody set them


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Input = Annotated[Packed | Pairs | Lanes | Translations | Texts, Field(discriminator="packing")]
"""How documents become rows: the settings under a recipe's `input`."""

Masking = Annotated[MlmMasking | PermutedPrediction | NoMasking, Field(discriminator="kind")]
"""What is predicted, and what stands in its place."""


class SourceSpec(_Config):
    """One corpus of a mixture.

    Attributes:
        name: what the recipe calls it.
        uri: where it is. Not part of the stream's identity: the same corpus elsewhere gives the same samples.
        manifest_fingerprint: `CorpusManifest.fingerprint` of the corpus that is meant.
        weight: share of an epoch's samples, relative to the other sources'. None, for all sources alike: each
            source is read once an epoch, so they mix by their rows (but see `StreamSpec.temperature`).
        languages: of its text; of a corpus of translations both, the query's first. Left out where they are not told.
    """

    name: str
    uri: str
    manifest_fingerprint: str
    weight: float | None = Field(default=None, gt=0)
    languages: tuple[str, ...] = Field(default=(), max_length=2)

    @property
    def translated(self) -> bool:
        """Whether its examples are a sentence and its translation."""
        return len(self.languages) > 1

    @model_serializer(mode="wrap")
    def _as_before(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in serialize(self).items() if name != "languages" or value}


class Stage(_Config):
    """What a phase of training takes of the sources, where these go on from phase to phase.

    Attributes:
        phase: its number, for messages.
        length: most tokens in a row.
        units: how many samples, or tokens of samples, the stage is planned for.
        in_tokens: whether units are tokens.
        epochs: how often it takes them before the next stage begins.
        weights: shares of the sources by tokens of text; 0: not read in this stage. Empty: as the sources' own weights
            say, or in proportion to their text.
        most_readings: how often any source may have been read when the stage ends, since the first stage began.
    """

    phase: NonNegativeInt
    length: int = Field(ge=8)
    units: PositiveInt
    in_tokens: bool = False
    epochs: PositiveInt = 1
    weights: tuple[NonNegativeFloat, ...] = ()
    most_readings: float | None = Field(default=None, gt=0)


class WindowSize(_Config):
    """How many samples are shuffled together. Part of the identity: the order depends on it.

    Attributes:
        samples: at least this many (16 global batches), and
        least_tokens: at least this many tokens, but
        most_tokens: at most about this many, so that memory is bounded (about 8 bytes a token to build).
        stretches: rows that follow each other in the text are dealt to so many stretches of the window (`SpreadOrder`).
            With 1, they are shuffled over the whole window.
    """

    samples: PositiveInt = 1
    least_tokens: PositiveInt = 1 << 24
    most_tokens: PositiveInt = 1 << 27
    stretches: PositiveInt = 1

    @classmethod
    def of_batches(cls, rows: int, *, spread: bool) -> Self:
        """Return the window for batches of so many rows, whose neighbours in the text are spread over it or not."""
        return cls(samples=WINDOW_BATCHES * rows, stretches=WINDOW_BATCHES if spread else 1)


class StreamSpec(_Config):
    """An immutable array of samples, epoch after epoch.

    Attributes:
        sources: the corpora.
        split: train, or heldout (evaluation).
        input: how blocks are cut into rows.
        length: most tokens in a row, or in each text of a row of several; special tokens included.
        masking: the objective's part that is done on the data: which tokens are targets.
        lanes: rows of a step, if each continues a row of the step before (`Lanes` input). None if rows stand alone and
            are shuffled.
        one_source: rows of a step, if all of them come from one source (contrastive training). None if batches mix the
            sources.
        temperature: T: sources without weights are mixed in proportion to size ** (1 / T); 1: by size. The sources of
            one language, or of translations between the same two, count as one, and share by size.
        translations: share of the rows that are translations, where sources have no weights; None: by size.
        languages: all that the model knows, in the order of their numbers; empty where rows say none.
        layout: where the classification token of each text of a row of several stands.
        similar: the table of similar words, where these replace words.
        stages: empty, and each source begins anew. Or all phases up to the stream's own, which is the last: each source
            goes on where the phases before stopped (`data_service.stream.stages`).
        special: ids by role.
        never_masked: ids that are neither targets nor random replacements: all special ones.
        vocab_size: number of ids.
        seed: of every draw.
        window: extent of the shuffle.
    """

    sources: tuple[SourceSpec, ...] = Field(min_length=1)
    split: Literal["train", "heldout"] = "train"
    input: Input = Packed(packing="full_sentences")
    length: int = Field(ge=8)
    masking: Masking = MlmMasking()
    lanes: PositiveInt | None = None
    one_source: PositiveInt | None = None
    temperature: float = Field(default=1.0, ge=1)
    translations: float | None = Field(default=None, gt=0, lt=1)
    languages: tuple[str, ...] = ()
    layout: TextLayout = "cls_first"
    similar: SimilarSource | None = None
    stages: tuple[Stage, ...] = ()
    special: SpecialIds
    never_masked: tuple[NonNegativeInt, ...]
    vocab_size: PositiveInt
    seed: NonNegativeInt
    window: WindowSize = WindowSize()

    @model_validator(mode="after")
    def _weights_agree(self) -> Self:
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            raise ValueError(
                f"weights are given for {', '.join(weighted)} only; give one to every source or to none"
            )
        return self

    @model_validator(mode="after")
    def _input_and_masking_agree(self) -> Self:
        lanes = self.input if isinstance(self.input, Lanes) else None
        permuted = self.masking if isinstance(self.masking, PermutedPrediction) else None
        if (lanes is None) != (permuted is None) or (self.lanes is not None and lanes is None):
            raise ValueError(
                "input lanes needs permuted prediction (plm), and permuted prediction needs input lanes"
            )
        if lanes is not None and permuted is not None:
            check_lanes(lanes, permuted, self.length, self.lanes)
        if lanes is not None and self.one_source is not None:
            raise ValueError(
                "batches of one source are not possible with input lanes: each row continues one of the step before"
            )
        texts = isinstance(self.input, TextPairs | RepeatedSentences)
        if texts != isinstance(self.masking, NoMasking):
            raise ValueError(
                "inputs of several texts (pairs, sentences) go with no masking, and all others with masking"
            )
        return self

    @model_validator(mode="after")
    def _languages_are_known(self) -> Self:
        for source in self.sources if self.languages else ():
            if not source.languages or not set(source.languages) <= set(self.languages):
                raise ValueError(f"source {source.name} needs languages, of {', '.join(self.languages)}")
        return self

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        if not self.stages:
            return self
        if self.lanes is not None or self.one_source is not None:
            raise ValueError("stages go with rows that stand alone, in batches that mix the sources")
        if self.stages[-1].length != self.length:
            raise ValueError("the last stage is the stream's own, and has rows of its length")
        for stage in self.stages:
            if stage.weights and (len(stage.weights) != len(self.sources) or not any(stage.weights)):
                raise ValueError("a stage has a weight for each source, or none, and not only zeros")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Specs from before a field came have the JSON, and so the fingerprint, that they had."""
        fields = type(self).model_fields
        unset = {name for name in _LATER if getattr(self, name) == fields[name].default}
        return {name: value for name, value in serialize(self).items() if name not in unset}

    @property
    def reads_translations(self) -> bool:
        """Whether rows may be a sentence and its translation."""
        return isinstance(self.input, Translations)

    def input_of(self, source: int) -> Input:
        """Return how the blocks of one source are cut: text beside translations is packed."""
        if isinstance(self.input, Translations) and not self.sources[source].translated:
            return Packed(packing=self.input.text)
        return self.input

    @property
    def row_length(self) -> int:
        """Most tokens in a row, those of all its texts."""
        return self.length * self.input.texts

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of all that decides the samples; where the corpora lie does not."""
        sources = tuple(source.model_copy(update={"uri": ""}) for source in self.sources)
        similar = self.similar and self.similar.model_copy(update={"uri": ""})
        content = self.model_copy(update={"sources": sources, "similar": similar})
        return hashlib.sha256(content.model_dump_json().encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The ids that masking writes."""
        ordinary = np.delete(np.arange(self.vocab_size), self.never_masked)
        narrow = self.vocab_size <= 1 << 16
        return Vocabulary(
            self.special.mask, ordinary.astype(np.uint16) if narrow else ordinary.astype(np.uint32)
        )
