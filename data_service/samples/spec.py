"""`StreamSpec` holds everything that decides the samples of a stream. Equal specs give equal bytes on any machine."""

import hashlib
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from data_service.formats import GrowingRecord
from data_service.samples.denoising import Denoising
from data_service.samples.diffusion import DiffusionMasking
from data_service.samples.lanes import Lanes, check_lane_settings
from data_service.samples.masking import MlmMasking, NoMasking
from data_service.samples.next_token import NextToken
from data_service.samples.packing import PackedInput
from data_service.samples.pairs import Pairs, Translations
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.replacement import Vocabulary
from data_service.samples.similar_words import SimilarSource
from data_service.samples.texts import ClassTokenPlace, RepeatedSentences, TextPairs, Texts
from data_service.tokenizers.specials import SpecialIds

WINDOW_BATCHES = 16  # batches that are shuffled together


class _Config(GrowingRecord):
    model_config = ConfigDict(allow_inf_nan=False)


SourceWeight = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Weight of a source, for example its number of tokens: bounded, so that no sum of weights overflows."""

Input = Annotated[PackedInput | Pairs | Lanes | Translations | Texts, Field(discriminator="packing")]
"""How documents become rows: the settings under a recipe's `input`."""

Masking = Annotated[
    MlmMasking | PermutedPrediction | DiffusionMasking | Denoising | NoMasking | NextToken,
    Field(discriminator="kind"),
]
"""What is predicted, and what stands in its place."""


class SourceSpec(_Config):
    """One corpus of a mixture.

    Attributes:
        name: name of the source in the recipe.
        uri: URI of the corpus. It is not part of the stream's identity: the same corpus at another place gives the same
            samples.
        manifest_fingerprint: `CorpusManifest.fingerprint` of the corpus.
        weight: share of an epoch's samples, relative to the other sources' weights. None, for all sources or for none:
            each source is read once an epoch, so they mix by their rows (but see `StreamSpec.temperature`).
        languages: language of its text; for translations both languages, the query's first; empty if not given.
        removals: digest of the last of the removals that are left out (`RemovalChain.digest`); empty if none are.
    """

    later_fields: ClassVar = ("languages", "removals")

    name: str
    uri: str
    manifest_fingerprint: str
    weight: Annotated[SourceWeight, Field(gt=0)] | None = None
    languages: tuple[str, ...] = Field(default=(), max_length=2)
    removals: str = ""

    @property
    def is_translation(self) -> bool:
        """Whether the source consists of sentences and their translations."""
        return len(self.languages) > 1


class Stage(_Config):
    """The part of the sources that a training phase takes, if the sources are continued from phase to phase.

    Attributes:
        phase: number of the phase, for messages.
        length: largest number of tokens in a row.
        units: number of samples, or of tokens of samples, in an epoch of the stage.
        in_tokens: whether units are tokens.
        epochs: number of epochs of the stage.
        weights: shares of the sources by tokens of text; 0: not read in this stage; None: in proportion to size **
            (1 / T), of what the numbers, then parts of 1, leave. Empty: the sources' own weights, or in proportion to
            their text.
        temperature: T; None: the stream's.
        most_readings: largest number of readings of any source from the beginning of the first stage to the end of this
            one; None for no limit.
    """

    later_fields: ClassVar = ("temperature",)

    phase: NonNegativeInt
    length: int = Field(ge=8)
    units: PositiveInt
    in_tokens: bool = False
    epochs: PositiveInt = 1
    weights: tuple[SourceWeight | None, ...] = ()
    temperature: float | None = Field(default=None, ge=1)
    most_readings: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_automatic_weights(self) -> Self:
        numbers = [weight for weight in self.weights if weight is not None]
        if len(numbers) < len(self.weights):
            if sum(numbers) >= 1:
                raise ValueError("if a source has no weight, the other weights must add up to less than 1")
        elif self.temperature is not None and self.weights:
            raise ValueError("a stage has a temperature for sources without a weight")
        return self


class Annealing(_Config):
    """A masking rate that changes linearly with each sample, from the masking's own rate to `end`.

    Attributes:
        end: rate after the last sample.
        samples: number of samples from the masking's own rate to `end`.
        before: number of them that precede the stream's first sample.
    """

    end: float = Field(gt=0, le=0.8)
    samples: PositiveInt
    before: NonNegativeInt = 0

    def rates_at_samples(self, start: float, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the rate of each of `samples`, numbered from the beginning of epoch 0. `start`: the masking's own."""
        done = np.minimum((self.before + samples) / self.samples, 1.0)
        rates: NDArray[np.float64] = start + (self.end - start) * done
        return rates


class WindowSize(_Config):
    """The size of a window, whose samples are shuffled together. It is part of the identity: the order depends on it.

    Attributes:
        samples: smallest number of samples (16 global batches).
        least_tokens: smallest number of tokens.
        most_tokens: approximate largest number of tokens, so that memory is bounded (about 8 bytes a token to build).
            It overrides the two others.
        stretches: number of stretches of the window to which consecutive rows of the text are dealt (`SpreadOrder`).
            With 1, rows are shuffled over the whole window.
    """

    samples: PositiveInt = 1
    least_tokens: PositiveInt = 1 << 24
    most_tokens: PositiveInt = 1 << 27
    stretches: PositiveInt = 1

    @classmethod
    def from_batches(cls, rows: int, *, is_spread: bool) -> Self:
        """Return the size of a window for batches of `rows` rows. `is_spread`: whether neighbours in the text are
        spread."""
        return cls(samples=WINDOW_BATCHES * rows, stretches=WINDOW_BATCHES if is_spread else 1)


class StreamSpec(_Config):
    """The definition of a stream, an immutable array of samples, epoch after epoch.

    Attributes:
        sources: corpora of the mixture.
        split: split that is read: train, or heldout (evaluation).
        input: settings by which blocks are cut into rows.
        length: largest number of tokens in a row, or in each text of a row of several; special tokens included.
        masking: host half of the objective, which chooses and replaces the targets.
        lanes: number of rows in a step, if each continues a row of the previous step (`Lanes` input). None if rows are
            independent and shuffled.
        one_source: number of rows in a step, if all of them come from one source (contrastive training). None if
            batches mix the sources.
        temperature: temperature T. Sources without weights are mixed in proportion to size ** (1 / T); 1: by size. The
            sources of one language, or of translations between the same two, count as one, and divide its share by
            size.
        translations: share of the rows that are translations, if sources have no weights; None: by size.
        languages: all languages that the model knows, in the order of their numbers; empty if rows have none.
        layout: place of the classification token in each text of a row of several.
        similar: table of similar words, if words are replaced by similar ones.
        stages: all phases up to the stream's own, which is the last: each source continues where the earlier phases
            ended (`data_service.stream.stages`). Empty: each source starts again.
        annealing: how the rate of masks changes from sample to sample; None: it does not.
        special: ids of the special tokens, by role.
        never_masked: ids that are neither targets nor random replacements: all special ones.
        vocab_size: number of ids.
        seed: seed of all draws.
        window: size of the window in which samples are shuffled.
    """

    later_fields: ClassVar = (
        "layout", "one_source", "temperature", "similar", "languages", "translations", "stages", "annealing",
    )  # fmt: skip

    sources: tuple[SourceSpec, ...] = Field(min_length=1)
    split: Literal["train", "heldout"] = "train"
    input: Input = PackedInput(packing="full_sentences")
    length: int = Field(ge=8)
    masking: Masking = MlmMasking()
    lanes: PositiveInt | None = None
    one_source: PositiveInt | None = None
    temperature: float = Field(default=1.0, ge=1)
    translations: float | None = Field(default=None, gt=0, lt=1)
    languages: tuple[str, ...] = ()
    layout: ClassTokenPlace = "cls_first"
    similar: SimilarSource | None = None
    stages: tuple[Stage, ...] = ()
    annealing: Annealing | None = None
    special: SpecialIds
    never_masked: tuple[NonNegativeInt, ...]
    vocab_size: PositiveInt
    seed: NonNegativeInt
    window: WindowSize = WindowSize()

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            raise ValueError(f"weights are given for {', '.join(weighted)} only; give one to every source or to none")
        return self

    @model_validator(mode="after")
    def _check_input_and_masking(self) -> Self:
        lanes = self.input if isinstance(self.input, Lanes) else None
        permuted = self.masking if isinstance(self.masking, PermutedPrediction) else None
        if (lanes is None) != (permuted is None) or (self.lanes is not None and lanes is None):
            raise ValueError("input lanes needs permuted prediction (plm), and permuted prediction needs input lanes")
        if lanes is not None and permuted is not None:
            check_lane_settings(lanes, permuted, self.length, self.lanes)
        if lanes is not None and self.one_source is not None:
            raise ValueError(
                "batches of one source are not possible with input lanes: each row continues one of the previous step"
            )
        texts = isinstance(self.input, TextPairs | RepeatedSentences)
        if texts != isinstance(self.masking, NoMasking):
            raise ValueError(
                "inputs of several texts (pairs, sentences) need masking none, and all other inputs need a masking"
            )
        if isinstance(self.masking, Denoising) and not isinstance(self.input, PackedInput):
            raise ValueError("denoising corrupts rows of one segment: it needs packed rows")
        return self

    @model_validator(mode="after")
    def _check_languages(self) -> Self:
        for source in self.sources if self.languages else ():
            if not source.languages or not set(source.languages) <= set(self.languages):
                raise ValueError(f"source {source.name} needs languages, of {', '.join(self.languages)}")
        return self

    @model_validator(mode="after")
    def _check_annealing(self) -> Self:
        if self.annealing is not None and not isinstance(self.masking, MlmMasking):
            raise ValueError("a masking rate that changes needs objective.mlm")
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not self.stages:
            return self
        if isinstance(self.input, Lanes) or self.one_source is not None:
            raise ValueError("stages need rows that are independent of each other, in batches that mix the sources")
        if self.stages[-1].length != self.length:
            raise ValueError("the rows of the last stage must have the stream's length")
        for stage in self.stages:
            reads = any(weight is None or weight > 0 for weight in stage.weights)
            if stage.weights and (len(stage.weights) != len(self.sources) or not reads):
                raise ValueError("a stage needs a weight for each source, not all 0, or no weights")
        return self

    @property
    def masking_at_highest_rate(self) -> Masking:
        """The masking, with the highest rate that it has in this stream."""
        if self.annealing is None or not isinstance(self.masking, MlmMasking):
            return self.masking
        return self.masking.model_copy(update={"rate": max(self.masking.rate, self.annealing.end)})

    def input_for_source(self, source: int) -> Input:
        """Return the settings by which the blocks of one source are cut. Beside translations, the
        sources that are plain text have their own: packed rows."""
        if isinstance(self.input, Translations) and not self.sources[source].is_translation:
            return PackedInput(packing=self.input.text)
        return self.input

    @property
    def row_length(self) -> int:
        """Largest number of tokens in a row, all its texts together."""
        return self.length * self.input.texts_per_row

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides the samples. URIs of corpora are not part of it."""
        sources = tuple(source.model_copy(update={"uri": ""}) for source in self.sources)
        similar = self.similar and self.similar.model_copy(update={"uri": ""})
        content = self.model_copy(update={"sources": sources, "similar": similar})
        return hashlib.sha256(content.model_dump_json().encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The ids that masking writes."""
        ordinary = np.delete(np.arange(self.vocab_size), self.never_masked)
        narrow = self.vocab_size <= 1 << 16
        return Vocabulary(self.special.mask, ordinary.astype(np.uint16) if narrow else ordinary.astype(np.uint32))
