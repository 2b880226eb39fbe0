"""Distillation: a student learns its teachers' distributions, the direction of their last states, and chosen layers.

`distil` and `cosine` are DistilBERT's losses (Sanh et al. 2019, section 3), `hidden` is TinyBERT's loss on states
(Jiao et al. 2020, section 3.1). TinyBERT's loss on attention scores is left out: our kernels store no scores, and
storing them would take the square of every row's length, for student and teacher.

The teachers are frozen networks that read the same rows, masks included. They are not part of the module
(`teacher.py`); `hold_teachers` passes them to it after it is built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.distillation import LogitFactors, cosine_distances, linear_distillation
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.objectives.mlm import MaskedTokens
from encoder_core.objectives.teacher import FrozenNetworks, Teacher, TeacherOutputs
from encoder_core.objectives.term import HeadTerm, Shared, States, TermSums
from encoder_core.terms.distil import CosineConfig, DistilConfig, HiddenConfig


class Teachers(FrozenNetworks):
    """The teachers of a module that distils; none at first."""

    @property
    def teachers(self) -> list[Teacher]:
        return [network for network in self.networks if isinstance(network, Teacher)]


def hold_teachers(module: nn.Module, teachers: Sequence[Teacher]) -> None:
    """Let `module` learn from these teachers from now on. A module that does not distil is unchanged."""
    for part in module.modules():
        if isinstance(part, Teachers):
            part.set_networks(teachers)


class Distillation(HeadTerm, of=DistilConfig):
    """Sums of the distillation loss over places; metric "correct": the student's first choice is its teachers'."""

    def __init__(self, config: DistilConfig, shared: Shared) -> None:
        self._teachers = Teachers()
        super().__init__(config, {"teachers": self._teachers})
        self._config = config
        self._head: MaskedLanguageModelHead | None = None
        self._taught: WeakKeyDictionary[States, list[TeacherOutputs]] = WeakKeyDictionary()
        self._layers: tuple[int, ...] = ()

    @property
    def teacher(self) -> ModelConfig:
        """The shape of the first teacher."""
        return self._config.teachers[0].model

    def keep(self, layers: tuple[int, ...]) -> None:
        """Let the teachers also return the states of these layers, for another term (`Teacher.run`)."""
        self._layers = layers

    def connect(self, others: Mapping[str, HeadTerm]) -> None:
        masked = others["mlm"]
        assert isinstance(masked, MaskedTokens)
        self._head = masked.head

    def targets(self, batch: Batch) -> int:
        return self._student_batch(batch).target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._head is not None, "the module has introduced its terms to each other"
        head, asked = self._head, self._student_batch(batch)
        own = LogitFactors(head.features(states.states_for(asked)), head.decoder.weight, head.decoder.bias)
        scores = [said.scores for said in self.teacher_outputs(states, batch)]
        found = linear_distillation(own, scores, self._config.temperature)
        return TermSums(found.loss_sum, asked.target_ids.numel(), {"correct": found.agreeing})

    def teacher_outputs(self, states: States, batch: Batch) -> list[TeacherOutputs]:
        """Return what each teacher returns, computed once for all terms of a batch."""
        if states not in self._taught:
            assert self._teachers.networks, "a module that distils has been given its teachers"
            asked = self._student_batch(batch)
            self._taught[states] = [teacher.run(asked, self._layers) for teacher in self._teachers.teachers]
        return self._taught[states]

    def _student_batch(self, batch: Batch) -> Batch:
        """Return the batch whose targets are the places where the student learns."""
        if self._config.places == "targets":
            return batch
        return _with_all_targets(batch)


def _with_all_targets(batch: Batch) -> Batch:
    """Return the batch with every token as a target at which something may be learned, also in its copy on the host."""
    at_T = batch.select_learnable(torch.arange(len(batch.tokens), device=batch.tokens.device))
    host = None if batch.host is None else _with_all_targets(batch.host)
    return replace(batch, target_positions=at_T, target_ids=batch.select_learnable(batch.tokens), host=host)


class LastStateDistillation(HeadTerm, of=CosineConfig):
    """Sums of the cosine loss over all tokens, as the mean over teachers."""

    def __init__(self, config: CosineConfig, shared: Shared) -> None:
        super().__init__(config, {})
        self._distillation: Distillation | None = None

    def connect(self, others: Mapping[str, HeadTerm]) -> None:
        distillation = others[DistilConfig.name]
        assert isinstance(distillation, Distillation)
        self._distillation = distillation

    def targets(self, batch: Batch) -> int:
        return batch.loss_tokens

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._distillation is not None
        teacher_outputs = self._distillation.teacher_outputs(states, batch)
        own = batch.select_learnable(states.all_states)
        distances = [cosine_distances(own, batch.select_learnable(said.last)) for said in teacher_outputs]
        return TermSums(sum(distances[1:], start=distances[0]) / len(distances), batch.loss_tokens)


class LayerDistillation(HeadTerm, of=HiddenConfig):
    """Sums of the loss on layers over all tokens."""

    def __init__(self, config: HiddenConfig, shared: Shared) -> None:
        wide = config.projection
        projection = None if wide is None else nn.Linear(shared.model.hidden, wide)
        super().__init__(config, {} if projection is None else {"hidden_projection": projection})
        self._config, self._layers, self._projection = config, shared.model.layers, projection
        self._distillation: Distillation | None = None

    def connect(self, others: Mapping[str, HeadTerm]) -> None:
        distillation = others[DistilConfig.name]
        assert isinstance(distillation, Distillation)
        distillation.keep(self._config.teacher_layers(self._layers, distillation.teacher.layers))
        self._distillation = distillation

    def targets(self, batch: Batch) -> int:
        return batch.loss_tokens

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._distillation is not None
        theirs = self._distillation.teacher_outputs(states, batch)[0].layers
        wide = torch.promote_types(theirs[0].dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=batch.tokens.device)
        for own_TH, teacher_TH in zip(
            map(batch.select_learnable, states.layers), map(batch.select_learnable, theirs), strict=True
        ):
            projected_TH = own_TH if self._projection is None else self._projection(own_TH)
            squares = F.mse_loss(projected_TH.to(wide), teacher_TH.to(wide), reduction="sum")
            loss_sum = loss_sum + squares / teacher_TH.shape[1]
        return TermSums(loss_sum, self.targets(batch))
