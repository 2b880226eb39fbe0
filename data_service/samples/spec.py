"""`StreamSpec` holds everything that decides the samples of a stream. Equal specs give equal samples on any machine."""

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

WINDOW_BATCHES = 16  # number of batches that are shuffled together


class _SpecRecord(GrowingRecord):
    model_config = ConfigDict(allow_inf_nan=False)


SourceWeight = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Weight of a source, for example its number of tokens: bounded, so that no sum of weights overflows."""

Input = Annotated[PackedInput | Pairs | Lanes | Translations | Texts, Field(discriminator="packing")]
"""How documents become rows: the settings under a recipe's `input`."""

Masking = Annotated[
    MlmMasking | PermutedPrediction | DiffusionMasking | Denoising | NoMasking | NextToken,
    Field(discriminator="kind"),
]
"""How targets are chosen and replaced."""


class SourceSpec(_SpecRecord):
    """One corpus of a mixture.

    Attributes:
        name: name of the source in the recipe.
        uri: URI of the corpus. It is not part of the stream's identity, since a copy of the corpus gives the same
            samples.
        manifest_fingerprint: `CorpusManifest.fingerprint` of the corpus.
        weight: share of an epoch's samples, relative to the other sources' weights. None (then for all sources): each
            source is read once per epoch, so its share is its number of rows (but see `StreamSpec.temperature`).
        languages: language of the text; for translations both languages, the query's first; empty if not given.
        removals: digest of the removals whose documents are not read (`RemovalChain.digest`); empty if there are none.
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


class Stage(_SpecRecord):
    """What a training phase reads, if each phase continues the sources where the previous phase ended.

    Attributes:
        phase: number of the training phase, shown in messages.
        length: largest number of tokens in a row.
        units: number of samples, or of tokens if `in_tokens`, in an epoch of the stage.
        in_tokens: whether `units` counts tokens.
        epochs: number of epochs of the stage.
        weights: shares of the sources, by tokens of text. 0: the source is not read in this stage. None: the given
            shares add up to less than 1, and sources without a share divide the rest by size ** (1 / T). Empty: the
            sources' own weights, or their amounts of text.
        temperature: T in `weights`; None: the stream's.
        most_readings: largest number of times that any source may be read from the first stage to the end of this one;
            None: no limit.
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
            raise ValueError("a stage has a temperature, which is for sources without a weight, but all have one")
        return self


class Annealing(_SpecRecord):
    """A masking rate that changes linearly from the masking's `rate` to `end`, then stays.

    Attributes:
        end: last rate.
        samples: number of samples during which the rate changes.
        before: number of these samples that precede the stream's first one.
    """

    end: float = Field(gt=0, le=0.8)
    samples: PositiveInt
    before: NonNegativeInt = 0

    def rates_at_samples(self, start: float, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the masking rate at each sample number, counted from epoch 0 on. `start`: the masking's `rate`."""
        done = np.minimum((self.before + samples) / self.samples, 1.0)
        rates: NDArray[np.float64] = start + (self.end - start) * done
        return rates


class WindowSize(_SpecRecord):
    """The size of the windows in which samples are shuffled. It is part of the stream's identity.

    Attributes:
        samples: smallest number of samples (16 global batches).
        least_tokens: smallest number of tokens.
        most_tokens: approximate largest number of tokens, which bounds memory (building takes about 8 bytes a token).
            It overrides `samples` and `least_tokens`.
        stretches: number of parts of the window over which consecutive rows of the text are spread (`SpreadOrder`).
            With 1, rows are shuffled over the whole window.
    """

    samples: PositiveInt = 1
    least_tokens: PositiveInt = 1 << 24
    most_tokens: PositiveInt = 1 << 27
    stretches: PositiveInt = 1

    @classmethod
    def from_batches(cls, rows: int, *, is_spread: bool) -> Self:
        """Return the size of a window for batches of `rows` rows. `is_spread`: whether consecutive rows of the text
        are spread over the window."""
        return cls(samples=WINDOW_BATCHES * rows, stretches=WINDOW_BATCHES if is_spread else 1)


class StreamSpec(_SpecRecord):
    """The definition of a stream: an immutable sequence of samples, epoch after epoch.

    Attributes:
        sources: corpora of the mixture.
        split: split to read: train, or heldout (evaluation).
        input: settings by which blocks are cut into rows.
        length: largest number of tokens in a row, or in each text of a row of several; special tokens included.
        masking: how targets are chosen and replaced.
        lanes: number of rows per step, if each continues a row of the previous step (`Lanes` input). None: rows are
            independent and shuffled.
        one_source: number of rows per step, if all of them come from one source (contrastive training). None: batches
            mix the sources.
        temperature: T. Sources without weights are mixed in proportion to size ** (1 / T); with 1, by size. Sources of
            the same language, or of translations between the same two languages, are treated as one source, and share
            its rows by size.
        translations: share of rows that are translations, if sources have no weights; None: by size.
        languages: all languages of the model, in the order of their numbers; empty if rows have no languages.
        layout: whether the classification token is first or last in each text, in rows of several texts.
        similar: table of similar words, if words are replaced by similar ones.
        stages: all training phases up to this stream's, the last one: each source continues where the previous phase
            ended (`data_service.stream.stages`). Empty: the stream begins each source at its start.
        annealing: how the masking rate changes; None: it is constant.
        special: ids of the special tokens, by role.
        never_masked: ids that are never targets or random replacements: all special tokens.
        vocab_size: number of ids.
        seed: seed of all random draws.
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
            raise ValueError("the objective plm (permuted prediction) needs `packing: lanes`, which needs plm")
        if lanes is not None and permuted is not None:
            check_lane_settings(lanes, permuted, self.length, self.lanes)
        if lanes is not None and self.one_source is not None:
            raise ValueError(
                "no batches of one source with `packing: lanes`: each row continues one of the previous step"
            )
        texts = isinstance(self.input, TextPairs | RepeatedSentences)
        if texts != isinstance(self.masking, NoMasking):
            raise ValueError("packings pairs and sentences need masking none, all other packings another masking")
        if isinstance(self.masking, Denoising) and not isinstance(self.input, PackedInput):
            raise ValueError("denoising needs rows of one segment: packing full_sentences, doc_sentences or contiguous")
        return self

    @model_validator(mode="after")
    def _check_languages(self) -> Self:
        for source in self.sources if self.languages else ():
            if not source.languages or not set(source.languages) <= set(self.languages):
                raise ValueError(f"source {source.name} needs `languages` out of {', '.join(self.languages)}")
        return self

    @model_validator(mode="after")
    def _check_annealing(self) -> Self:
        if self.annealing is not None and not isinstance(self.masking, MlmMasking):
            raise ValueError("only objective.mlm can have a masking rate that changes")
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if not self.stages:
            return self
        if isinstance(self.input, Lanes) or self.one_source is not None:
            raise ValueError("stages need rows independent of each other: no `packing: lanes` or batches of one source")
        if self.stages[-1].length != self.length:
            raise ValueError("the rows of the last stage must have the stream's length")
        for stage in self.stages:
            reads = any(weight is None or weight > 0 for weight in stage.weights)
            if stage.weights and (len(stage.weights) != len(self.sources) or not reads):
                raise ValueError("a stage must have no weights, or a weight for each source, not all 0")
        return self

    @property
    def masking_at_highest_rate(self) -> Masking:
        """The masking with its highest rate in this stream, which differs from `masking.rate` only with `annealing`."""
        if self.annealing is None or not isinstance(self.masking, MlmMasking):
            return self.masking
        return self.masking.model_copy(update={"rate": max(self.masking.rate, self.annealing.end)})

    def input_for_source(self, source: int) -> Input:
        """Return the settings by which blocks of a source are cut. With input translations, sources of plain text have
        packed rows."""
        if isinstance(self.input, Translations) and not self.sources[source].is_translation:
            return PackedInput(packing=self.input.text)
        return self.input

    @property
    def row_length(self) -> int:
        """Largest number of tokens in a row, with all its texts."""
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
        """The ids that may replace targets."""
        ordinary = np.delete(np.arange(self.vocab_size), self.never_masked)
        narrow = self.vocab_size <= 1 << 16
        return Vocabulary(self.special.mask, ordinary.astype(np.uint16) if narrow else ordinary.astype(np.uint32))
