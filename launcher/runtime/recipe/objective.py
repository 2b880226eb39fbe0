"""The `objective` of a recipe: the terms of the loss, by name, and the module that trains them together.

A term has settings for the host (what the data service masks) and for the device (the losses). Each term
states itself what it needs, and which other terms it cannot be combined with (`encoder_core/objectives/term.py`).
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self, get_args

from pydantic import model_validator

from data_service.samples.denoising import Denoising
from data_service.samples.diffusion import DiffusionMasking
from data_service.samples.lanes import Lanes
from data_service.samples.masking import MlmMasking, NoMasking
from data_service.samples.next_token import NextToken
from data_service.samples.packing import PackedInput
from data_service.samples.pairs import OrderedPairs, SegmentPairs, SentencePairs
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.spec import Input, Masking
from data_service.samples.texts import RepeatedSentences, TextPairs
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.objectives.clm import ClmConfig
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.contrastive import ContrastiveConfig
from encoder_core.objectives.denoise import DenoiseConfig
from encoder_core.objectives.diffusion import DiffusionConfig
from encoder_core.objectives.distil import CosineConfig, DistilConfig, HiddenConfig, TeacherSource
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.objectives.term import Label, Refusal, RowFacts, SmallObjective, TermConfig, TermSetting
from launcher.runtime.recipe.parts import SparseRecord

LANE_SPECIAL_TOKENS = 3  # two separators and <cls> in every row of a lane
MASKING_CLASSES: tuple[type[Masking], ...] = get_args(get_args(Masking)[0])


class MlmTerm(MlmConfig, MlmMasking):
    """Masked language modelling: its settings for the device and for the host."""

    unwritten: ClassVar[Mapping[str, object]] = {"weight": 1.0, "ngram_weights": None}


class DiffusionTerm(DiffusionConfig, DiffusionMasking):
    """Masked diffusion: its settings for the device and for the host."""


class ClmTerm(ClmConfig, NextToken):
    """Next-token prediction: its settings for the device and for the host."""


class DenoiseTerm(DenoiseConfig, Denoising):
    """Denoising: its settings for the device and for the host."""


class PlmTerm(PlmConfig, PermutedPrediction):
    """Permuted language modelling: its settings for the device and for the host."""

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Yield also a refusal for every phase whose rows are too short for the targets."""
        yield from super().refusals(setting)
        if setting.rows is None or not setting.rows.lanes:
            return
        first, reuse = -(-self.predict // 2), setting.rows.reuse
        for index, phase in enumerate(setting.phases):
            new = phase.length - reuse - LANE_SPECIAL_TOKENS
            if first > reuse or self.predict - first > new > 0:
                yield Refusal(
                    ("objective", self.name, "predict"),
                    f"{self.predict} targets, half in each part, do not fit the {reuse} reused and {new} new tokens of "
                    f"a row in phase {index}",
                    f"use at most {min(2 * reuse, 2 * new + 1)}: about one in six tokens, here "
                    f"{max(1, phase.length // 6)}",
                )

    def shrink(self, form: SmallObjective) -> Self:
        """Return the term with fewer targets, for the shorter rows of a tiny run."""
        return self.model_copy(update={"predict": max(1, form.length // 6), "permutation": form.length // 2})


class RecipeObjective(SparseRecord):
    """The terms of the loss: what is predicted.

    Attributes:
        mlm: masked tokens (BERT and most others); the masks of the generator with `rtd`.
        clm: the next token, under causal attention. Alone, or in other phases than mlm (`phases.N.objective`).
        diffusion: tokens of rows that are hidden at rates between 0 and 1 (MDLM, LLaDA). Stands alone.
        nsp: whether the second segment follows the first (BERT). Needs input of segment or sentence pairs.
        sop: whether two segments are in order (ALBERT). Needs input of ordered pairs.
        sbo: masked spans from their boundaries (SpanBERT).
        retromae: the whole text from its vector, by a shallow decoder (RetroMAE). Goes with mlm.
        condenser: masked tokens from early states and the text's vector (Condenser). Goes with mlm.
        rtd: which tokens a generator replaced (ELECTRA, DeBERTa v3).
        plm: tokens in a random factorisation order (XLNet). Needs input of lanes; stands alone.
        denoise: rows from their corrupted forms, by a decoder (BART). Stands alone.
        contrastive: which texts belong together. Alone, it needs input of text pairs or of sentences, and goes with
            any family; with mlm, a row belongs together with itself.
        distil: probabilities that frozen teachers predict (DistilBERT). Goes with mlm.
        cosine: the direction of the teachers' last hidden states. Goes with distil.
        hidden: the states of chosen layers of one teacher (TinyBERT). Goes with distil.
    """

    mlm: MlmTerm | None = None
    clm: ClmTerm | None = None
    diffusion: DiffusionTerm | None = None
    nsp: NspConfig | None = None
    sop: SopConfig | None = None
    sbo: SboConfig | None = None
    retromae: RetromaeConfig | None = None
    condenser: CondenserConfig | None = None
    rtd: ReplacedTokenConfig | None = None
    plm: PlmTerm | None = None
    denoise: DenoiseTerm | None = None
    contrastive: ContrastiveConfig | None = None
    distil: DistilConfig | None = None
    cosine: CosineConfig | None = None
    hidden: HiddenConfig | None = None

    @model_validator(mode="after")
    def _some_term_is_given(self) -> Self:
        if not self.terms:
            raise ValueError(f"give at least one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def terms(self) -> dict[str, TermConfig]:
        """The terms that the recipe gives, by name."""
        return self.given

    @property
    def causal(self) -> bool:
        """Whether rows are causal: the next token is predicted, and no hidden one."""
        return self.clm is not None and self.mlm is None

    def for_rows(self, *, causal: bool) -> "RecipeObjective":
        """Return the terms that have targets in causal rows, or those that have some in other rows. An objective that
        has only one of the two is returned as it is."""
        if self.clm is None or self.mlm is None:
            return self
        return self.model_copy(update={"mlm": None} if causal else {"clm": None})

    @property
    def teachers(self) -> tuple[TeacherSource, ...]:
        """The networks from which `distil` learns; empty without it."""
        return () if self.distil is None else self.distil.teachers

    @property
    def masking(self) -> Masking:
        """The host half of the first term that has one."""
        for term in self.terms.values():
            for half in MASKING_CLASSES:
                if issubclass(type(term), half):
                    return half(**{name: getattr(term, name) for name in half.model_fields})
        return NoMasking()


def row_facts(rows: Input, masking: Masking) -> RowFacts:
    """Return the facts that terms check, of rows that are cut as `rows` and masked as `masking` say."""
    label: Label | None = "next" if isinstance(rows, SegmentPairs | SentencePairs) else None
    return RowFacts(
        packing=rows.packing,
        label="order" if isinstance(rows, OrderedPairs) else label,
        texts=rows.texts_per_row if isinstance(rows, TextPairs | RepeatedSentences) else 0,
        repeats=isinstance(rows, RepeatedSentences),
        lanes=isinstance(rows, Lanes),
        reuse=rows.reuse if isinstance(rows, Lanes) else 0,
        unit=masking.unit,
        packed=isinstance(rows, PackedInput),
    )


def exported_heads(config: ModelConfig, objective: RecipeObjective) -> Heads:
    """Return the heads of a single network for which transformers has a class.

    They are its language-model head, for BERT and ALBERT also the pair head. "none" if the terms train no such head;
    then only the encoder is exported.
    """
    trained = {term.exported for term in objective.terms.values()}
    if "mlm_pair" in trained and config.has_pair_class:
        return "mlm_pair"
    language_models: tuple[Heads, ...] = ("plm", "mlm", "denoise")
    return next((heads for heads in language_models if heads in trained), "none")
