"""Each family's training step beside the same step of transformers: one batch, one set of weights, two losses."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from program import BenchError
from step_batch import in_random_order
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families import xlnet as hf_xlnet
from encoder_core.families.catalogue import HfFormat, ModelConfig, hf_format_of
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.interchange import Heads
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.detection import replace_targets, shared_parameter_name
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.multitask import multitask_model
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.plm import PlmConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from encoder_core.objectives.term import last_weight
from tests.support.models.parity import copy_into, pad, parameters_of, permuted_inputs


class Pair(ABC):
    """Both sides of one family.

    Attributes:
        ours, theirs: the modules, same weights.
        note: what a reader of the ratios must know, or "".
    """

    ours: ObjectiveModule
    theirs: Any
    note: str = ""

    def __init__(self, batch: Batch, pad_id: int) -> None:
        self.batch = batch
        self.rectangle = pad(batch, pad_id)
        self.inputs = {"input_ids": self.rectangle.input_ids, "attention_mask": self.rectangle.attention_mask}
        self.at = self.rectangle.attention_mask.flatten().nonzero().flatten()[batch.target_positions]

    def our_loss(self) -> Tensor:
        """The whole objective, each term normalised by its targets."""
        terms = self.ours(self.batch).terms
        return torch.stack([term.weight * term.loss_sum / term.targets for term in terms]).sum()

    @abstractmethod
    def their_loss(self) -> Tensor:
        """As the class ships."""

    @abstractmethod
    def their_masked_loss(self) -> Tensor | None:
        """With its head on the masked positions only; None where the class does so by itself."""

    def gaps(self) -> list[tuple[Tensor, Tensor]]:
        """Losses that must be equal, with dropout off."""
        return [(self.our_loss(), self.their_loss())]

    def targets(self, hidden: Tensor) -> Tensor:
        """The states [M, H] at the targets, out of a rectangle of them."""
        return hidden.flatten(0, 1)[self.at]


class MaskedPair(Pair):
    """The families whose step is masked language modelling alone, and SpanBERT, whose peer lacks a term."""

    def __init__(self, config: ModelConfig, batch: Batch, *, span_boundary: bool = False) -> None:
        segments = batch.segments if "token_types" in type(config).model_fields else None
        super().__init__(replace(batch, segments=segments, pair_labels=None), config.pad_id)
        if segments is not None:
            self.inputs["token_type_ids"] = self.rectangle.token_type_ids
        if span_boundary:
            self.ours = multitask_model(config, [MlmConfig(), SboConfig()])
            self.note = "the peer has no span-boundary term: BertForMaskedLM"
        else:
            self.ours = masked_language_model(config)
        initialise(self.ours)
        self.theirs = peer(config, "mlm", self.ours)
        self.family = config.family

    def gaps(self) -> list[tuple[Tensor, Tensor]]:
        term = self.ours(self.batch).terms[0]
        return [(term.loss_sum / term.targets, self.their_loss())]

    def their_loss(self) -> Tensor:
        loss: Tensor = self.theirs(**self.inputs, labels=self.rectangle.labels).loss
        return loss

    def their_masked_loss(self) -> Tensor:
        body = self.theirs.base_model
        features = self.targets(body(**self.inputs)[0])
        match self.family:
            case "roberta":
                logits = self.theirs.lm_head(features)
            case "bert":
                logits = self.theirs.cls(features)
            case _:  # DeBERTa's heads are given the embeddings
                logits = self.theirs.lm_predictions(features, body.embeddings.word_embeddings)
        return F.cross_entropy(logits, self.batch.target_ids)


class PairsPair(Pair):
    """BERT with next sentence prediction, ALBERT with sentence order."""

    def __init__(self, config: ModelConfig, batch: Batch) -> None:
        super().__init__(batch, config.pad_id)
        self.inputs["token_type_ids"] = self.rectangle.token_type_ids
        self.family = config.family
        pairs = NspConfig() if self.family == "bert" else SopConfig()
        self.ours = multitask_model(config, [MlmConfig(), pairs])
        initialise(self.ours)
        self.theirs = peer(config, "mlm_pair", self.ours)

    def their_loss(self) -> Tensor:
        name = "next_sentence_label" if self.family == "bert" else "sentence_order_label"
        loss: Tensor = self.theirs(**self.inputs, labels=self.rectangle.labels, **{name: self.batch.pair_labels}).loss
        return loss

    def their_masked_loss(self) -> Tensor:
        states = self.theirs.base_model(**self.inputs)
        features = self.targets(states[0])
        assert self.batch.pair_labels is not None
        if self.family == "bert":
            logits, verdict = self.theirs.cls(features, states.pooler_output)
        else:
            logits = self.theirs.predictions(features)
            verdict = self.theirs.sop_classifier(states.pooler_output)
        return F.cross_entropy(logits, self.batch.target_ids) + F.cross_entropy(verdict, self.batch.pair_labels)


class ReplacedPair(Pair):
    """ELECTRA: transformers' two classes tied by hand, with the same weight and the same way of drawing ids."""

    note = "the peer is ElectraForMaskedLM and ElectraForPreTraining, embeddings tied by hand"

    def __init__(self, config: ElectraConfig, batch: Batch) -> None:
        super().__init__(replace(batch, pair_labels=None), config.pad_id)
        self.inputs["token_type_ids"] = self.rectangle.token_type_ids
        self.settings = ReplacedTokenConfig()
        self.ours = ours = self.settings.build(config)
        initialise(ours)
        self.generator = peer(config.generator, "mlm", ours.generator)
        table = hf_format_of(config, "rtd")
        self.discriminator = _build(table)
        names = table.table.their_names(table.layers)
        parameters = parameters_of(ours)
        state = {theirs: parameters[shared_parameter_name("discriminator", name)] for name, theirs in names.items()}
        _load(self.discriminator, state)
        self.discriminator.electra.embeddings = self.generator.electra.embeddings
        self.theirs = nn.ModuleList([self.generator, self.discriminator])

    def their_loss(self) -> Tensor:
        output = self.generator(**self.inputs, labels=self.rectangle.labels)
        return self._with_detection(output.loss, self.targets(output.logits))

    def their_masked_loss(self) -> Tensor:
        features = self.generator.generator_predictions(self.targets(self.generator.electra(**self.inputs)[0]))
        logits = self.generator.generator_lm_head(features)
        return self._with_detection(F.cross_entropy(logits, self.batch.target_ids), logits)

    def gaps(self) -> list[tuple[Tensor, Tensor]]:
        """Each network by itself, the second on ids of our choosing: the two sides draw different ones."""
        ours: Any = self.ours
        loss_sum, _, _ = ours.generator.head(
            ours.generator.encoder(self.batch), self.batch.target_positions, self.batch.target_ids
        )
        theirs = self.generator(**self.inputs, labels=self.rectangle.labels).loss
        drawn = self.batch.target_ids.roll(1)
        corrupted, replaced = replace_targets(self.batch, drawn)
        detected = ours.discriminator(corrupted, replaced).loss_sum / replaced.numel()
        return [(loss_sum / len(drawn), theirs), (detected, self._detection(drawn))]

    def _with_detection(self, loss: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        return loss + last_weight(self.settings.weight) * self._detection(drawn)

    def _detection(self, drawn: Tensor) -> Tensor:
        tokens = self.rectangle.input_ids.flatten().index_copy(0, self.at, drawn)
        replaced = torch.zeros_like(tokens).index_copy(0, self.at, (drawn != self.batch.target_ids).long())
        shape = self.rectangle.input_ids.shape
        inputs = self.inputs | {"input_ids": tokens.view(shape)}
        loss: Tensor = self.discriminator(**inputs, labels=replaced.view(shape)).loss
        return loss


class PermutedPair(Pair):
    """XLNet without memory. Its class scores targets only, by `target_mapping`."""

    note = "no memory on either side; the peer's own head scores targets only"

    def __init__(self, config: XlnetConfig, batch: Batch) -> None:
        super().__init__(in_random_order(replace(batch, pair_labels=None)), config.pad_id)
        self.ours = PlmConfig().build(config)
        initialise(self.ours)
        their = HfFormat(hf_xlnet.ARCHITECTURE, hf_xlnet.TABLE, hf_xlnet.to_json(config), config.layers)
        self.theirs = _build(their)
        copy_into(self.theirs, self.ours, their)
        self.inputs = permuted_inputs(self.batch, torch.float32, config.pad_id).arguments

    def their_loss(self) -> Tensor:
        loss: Tensor = self.theirs(**self.inputs, use_mems=False).loss
        return loss

    def their_masked_loss(self) -> None:
        return None


def peer(config: ModelConfig, heads: Heads, ours: nn.Module) -> Any:
    """transformers' class with our weights; what it has beyond them is as on export."""
    their = hf_format_of(config, heads)
    model = _build(their)
    parameters = parameters_of(ours)
    state = {theirs: parameters[name] for name, theirs in their.table.their_names(their.layers).items()}
    own = model.state_dict()
    _load(model, state | {fold.theirs: torch.zeros_like(own[fold.theirs]) for fold in their.table.folds})
    return model


def _build(their: HfFormat) -> Any:
    """Raises BenchError where transformers is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise BenchError(
            "the peer, transformers, is not installed",
            remedy="pip install -c infra/constraints.txt transformers",
        ) from error
    model_class = getattr(transformers, str(their.architecture))
    fields = {name: value for name, value in their.fields.items() if name != "architectures"}
    config = model_class.config_class(**fields)
    if model_class._supports_sdpa:
        config._attn_implementation = "sdpa"
    return model_class(config)


def _load(model: Any, state: dict[str, Tensor]) -> None:
    outcome = model.load_state_dict(state, strict=False)
    assert not outcome.unexpected_keys
