"""The `objective` of a recipe: the terms of the loss, by name, and the module that trains them together.

A term has settings of its loss, which devices compute, and may have settings of its masks, which the data service
draws. Each term declares what it needs, and what it cannot be combined with (`encoder_core/objectives/term.py`).
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

LANE_SPECIAL_TOKENS = 3  # two separators and <cls> in every row of XLNet's lanes (`data_service.samples.lanes`)
MASKING_CLASSES: tuple[type[Masking], ...] = get_args(get_args(Masking)[0])  # the classes of the union `Masking`


class MlmTerm(MlmConfig, MlmMasking):
    """Masked language modelling: settings of the loss and of the masks."""

    unwritten: ClassVar[Mapping[str, object]] = {"weight": 1.0, "ngram_weights": None}


class DiffusionTerm(DiffusionConfig, DiffusionMasking):
    """Masked diffusion: settings of the loss and of the masks."""


class ClmTerm(ClmConfig, NextToken):
    """Next-token prediction: settings of the loss and of the targets."""


class DenoiseTerm(DenoiseConfig, Denoising):
    """Denoising: settings of the loss and of the corruption of rows."""


class PlmTerm(PlmConfig, PermutedPrediction):
    """Permuted language modelling: settings of the loss and of the factorisation order."""

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Yield the refusals of every term, and one for each phase whose rows are too short for the targets."""
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
        mlm: masked tokens (BERT and most others). With `rtd`, the generator learns them.
        clm: the next token, under causal attention. Alone, or with mlm in other phases (`phases.N.objective`).
        diffusion: tokens that are hidden at a rate between 0 and 1, drawn for each row (MDLM, LLaDA). Stands alone.
        nsp: whether the second segment follows the first (BERT). Needs input of segment or sentence pairs.
        sop: whether two segments are in order (ALBERT). Needs input of ordered pairs.
        sbo: masked spans from their boundaries (SpanBERT).
        retromae: the whole text from its vector, by a shallow decoder (RetroMAE). Goes with mlm.
        condenser: masked tokens from early states and the text's vector (Condenser). Goes with mlm.
        rtd: which tokens a generator replaced (ELECTRA, DeBERTa v3).
        plm: tokens in a random factorisation order (XLNet). Needs input of lanes; stands alone.
        denoise: rows from their corrupted forms, by a decoder (BART). Stands alone.
        contrastive: which texts belong together. Alone, it needs input of text pairs or of sentences, and goes with
            any family; with mlm, each row is paired with itself.
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
        """The terms that the recipe sets, by name."""
        return self.given

    @property
    def causal(self) -> bool:
        """Whether rows are causal: the objective predicts next tokens, and no masked ones."""
        return self.clm is not None and self.mlm is None

    def for_rows(self, *, causal: bool) -> "RecipeObjective":
        """Return the objective without mlm if `causal`, else without clm; unchanged if it does not have both."""
        if self.clm is None or self.mlm is None:
            return self
        return self.model_copy(update={"mlm": None} if causal else {"clm": None})

    @property
    def teachers(self) -> tuple[TeacherSource, ...]:
        """The networks from which `distil` learns; empty without `distil`."""
        return () if self.distil is None else self.distil.teachers

    @property
    def masking(self) -> Masking:
        """The settings of masks or targets of the first term that has some."""
        for term in self.terms.values():
            for half in MASKING_CLASSES:
                if issubclass(type(term), half):
                    return half(**{name: getattr(term, name) for name in half.model_fields})
        return NoMasking()


def row_facts(rows: Input, masking: Masking) -> RowFacts:
    """Return the properties of rows that terms check. `rows`, `masking`: how rows are cut and masked."""
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
    """Return which heads of a single network are exported, because transformers has a class for them.

    They are the language-model head, for BERT and ALBERT also the sentence-pair head. "none" if the terms train no such
    head; then only the encoder is exported.
    """
    trained = {term.exported for term in objective.terms.values()}
    if "mlm_pair" in trained and config.has_pair_class:
        return "mlm_pair"
    language_models: tuple[Heads, ...] = ("plm", "mlm", "denoise")
    return next((heads for heads in language_models if heads in trained), "none")
