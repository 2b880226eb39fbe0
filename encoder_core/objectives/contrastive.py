"""Settings of contrastive training of text vectors; `modules/text_vectors.py` computes it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveInt, field_validator

from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.sizes import linear_weight_count
from encoder_core.objectives.term import (
    HeadConfig,
    ModuleConfig,
    OmittedWeightTerm,
    Refusal,
    RowFacts,
    SmallObjective,
    TermSetting,
    last_weight,
    refuse_decoder_family,
)

if TYPE_CHECKING:  # torch is imported only where modules are built, not to read a recipe
    from encoder_core.layers.any_encoder import AnyEncoder
    from encoder_core.objectives.modules.losses import ObjectiveModule
    from encoder_core.objectives.modules.text_vectors import ContrastiveModel


class ContrastiveConfig(OmittedWeightTerm, ModuleConfig):
    """Contrastive training: how a text's vector is computed, and how vectors are compared. It may be the only term, or
    be added to other terms.

    Attributes:
        temperature: divisor of similarities; the smaller it is, the more the nearest negatives dominate.
        pooling: how a text's vector is computed: mean of its tokens' last states, or cls, the last state of the
            classification token.
        projection: whether a dense layer and tanh follow the pooling, in training only; they are not exported (SimCSE,
            section 6.3).
        normalize: whether vectors are normalised to length 1, so that similarity is the cosine, not the dot product.
        bidirectional: whether positives must also find their queries; the loss is the mean of both directions.
        matryoshka: widths in descending order. For each width, a loss term compares vectors truncated to it, so that
            vectors can be truncated later (Kusupati et al. 2022). None: whole vectors only.
    """

    name = "contrastive"

    temperature: float = Field(default=0.05, gt=0)
    pooling: Literal["mean", "cls"] = "mean"
    projection: bool = False
    normalize: bool = True
    bidirectional: bool = False
    matryoshka: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1)

    @field_validator("matryoshka")
    @classmethod
    def _check_widths_descend(cls, widths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if any(a <= b for a, b in pairwise(widths or ())):
            raise ValueError("list each width once, the largest first")
        return widths

    def refusals(self, setting: TermSetting) -> Iterator[Refusal]:
        """Refuse encoder-decoder families, running text if this is the only term, and several updates per step."""
        others = setting.terms.keys() - {self.name}
        yield from refuse_decoder_family(self.name, setting)
        if "plm" in others:
            yield Refusal(
                ("objective",),
                "contrastive cannot be combined with plm: with input.packing lanes, a row begins with the end of the "
                "previous row, so it is not a text by itself",
                "remove objective.contrastive or objective.plm",
            )
        elif "rtd" in others and getattr(setting.terms["rtd"], "embeddings", None) != "shared":
            yield Refusal(
                ("objective", "rtd", "embeddings"),
                "contrastive cannot be combined with two updates a step: the compared vectors would come from the "
                "model before the first update, and their gradients from the model after it",
                "set objective.rtd.embeddings to shared, or remove objective.contrastive",
            )
        elif not others and setting.rows is not None and not setting.rows.texts:
            yield Refusal(
                ("input", "packing"),
                f"a contrastive objective compares texts, but {setting.rows.packing} rows are running text",
                "set input.packing to pairs (a corpus of pairs) or sentences (SimCSE, from plain text), or add "
                "objective.mlm, so that its rows are compared",
            )
        widest, hidden = max(self.matryoshka or (0,)), setting.model.hidden
        if widest > hidden:
            yield Refusal(
                ("objective", self.name, "matryoshka"),
                f"the largest width is {widest}, but a vector has only {hidden} numbers",
                f"use widths of at most {hidden}",
            )
        if setting.phases and setting.rows is not None:
            yield from self._phase_refusals(setting, setting.rows)

    def _phase_refusals(self, setting: TermSetting, rows: RowFacts) -> Iterator[Refusal]:
        """Refuse examples whose two vectors would be equal, and batches without negatives."""
        model = setting.model
        rates = model.dropout, model.attention_dropout, getattr(model, "attention_output_dropout", 0.0)
        if (rows.repeats or "mlm" in setting.terms) and not any(rates):
            yield Refusal(
                ("model", "dropout"),
                "the two texts of an example are the same and would differ only by dropout, which is 0",
                "set model.dropout and model.attention_dropout above 0 (SimCSE: 0.1)",
            )
        for index, phase in enumerate(setting.phases if rows.texts == 2 else ()):
            if phase.rows == 1:
                yield Refusal(
                    ("phases", index, "batch", "sequences"),
                    "the negatives of an example are the other examples of its batch, but the batch has only one",
                    "use a larger batch",
                )

    def shrink(self, form: SmallObjective) -> "ContrastiveConfig":
        """Return the term with smaller Matryoshka widths, for a narrower model."""
        if self.matryoshka is None:
            return self
        widths = (min(width, form.hidden >> place) for place, width in enumerate(self.matryoshka))
        return self.model_copy(update={"matryoshka": tuple(filter(None, widths))})

    def build(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> "ContrastiveModel":
        """Build the module that trains only this term, on the encoder that is used after pretraining."""
        return self._build_vectors_model(model.encoder(), model)

    def wrap(self, module: "ObjectiveModule", model: ModelConfig) -> "ObjectiveModule":
        """Return a module that trains this term in addition to those of `module`. Parameters keep their names."""
        from encoder_core.objectives.modules.detection import task_encoder
        from encoder_core.objectives.modules.text_vectors import add_vectors

        return add_vectors(module, self._build_vectors_model(task_encoder(module), model))

    def _build_vectors_model(self, encoder: "AnyEncoder", model: ModelConfig) -> "ContrastiveModel":
        from encoder_core.objectives.modules.text_vectors import ContrastiveModel

        return ContrastiveModel(
            encoder,
            model.hidden,
            matryoshka=self.matryoshka or (),
            weight=last_weight(self.weight),
            temperature=self.temperature,
            pooling=self.pooling,
            projection=self.projection,
            normalize=self.normalize,
            bidirectional=self.bidirectional,
        )

    def weight_count(self, model: ModelConfig, heads: Sequence[HeadConfig] = ()) -> int:
        return super().weight_count(model) + self.added_weight_count(model)

    def added_weight_count(self, model: ModelConfig) -> int:
        """Return the number of parameters that the term adds to the module of the other terms."""
        return linear_weight_count(model.hidden, model.hidden) if self.projection else 0
