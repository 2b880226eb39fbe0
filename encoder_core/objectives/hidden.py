"""Distillation layer by layer: a student's states learn those of chosen layers of its teacher (TinyBERT: Jiao et al.
2020, section 3.1). The paper's loss on attention scores is left out: no kernel here keeps scores, and without them it
would have to hold a square of every row, of student and teacher alike.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from encoder_core.batch import Batch
from encoder_core.families.build import ModelConfig
from encoder_core.objectives.distil import DISTIL
from encoder_core.objectives.distil import DistilConfig, Distillation
from encoder_core.objectives.states import States
from encoder_core.objectives.term import HeadConfig, HeadTerm, Refusal, Setting, TermSums
from encoder_core.objectives.weights import Weight

HIDDEN = "hidden"


class HiddenConfig(HeadConfig):
    """Mean squared differences of states, summed over the student's layers, its embeddings among them.

    Attributes:
        layers: for the student's embeddings and each of its layers, in order, the teacher's states that they learn:
            0 the embeddings, n the output of its n-th layer. None: evenly.
        projection: width of the teacher's states where the student's are of another: a learned Linear, one for all
            layers, brings these to it. It is no part of the exported model. None: the widths are the same.
    """

    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    projection: int | None = Field(default=None, gt=0)

    def device(self, model: ModelConfig, word: nn.Embedding) -> "LayersAlike":
        wide = self.projection
        return LayersAlike(self, model.layers, None if wide is None else nn.Linear(model.hidden, wide))

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Needs one teacher, of the width that the states are projected to, and its layers."""
        distil = setting.terms.get(DISTIL)
        if not isinstance(distil, DistilConfig):
            yield Refusal(
                ("objective", HIDDEN),
                "hidden compares the student's layers with those of distil's teacher, and there is none",
                "add objective.distil, or leave hidden out",
            )
            return
        if len(distil.teachers) > 1:
            yield Refusal(
                ("objective", HIDDEN),
                f"the student's layers learn those of one teacher, and there are {len(distil.teachers)}",
                "keep one teacher, or leave hidden out",
            )
        teacher = distil.teachers[0].model
        yield from self._widths(setting.model, teacher)
        yield from self._depths(setting.model.layers, teacher.layers)

    def _widths(self, student: ModelConfig, teacher: ModelConfig) -> Iterator[Refusal]:
        own, wanted = self.projection or student.hidden, teacher.hidden
        if own != wanted:
            yield Refusal(
                ("objective", HIDDEN, "projection"),
                f"the teacher has states of {wanted}, and the student's are of {own}",
                f"set objective.hidden.projection to {'null' if student.hidden == wanted else wanted}",
            )

    def _depths(self, student: int, teacher: int) -> Iterator[Refusal]:
        if self.layers is not None and (
            len(self.layers) != student + 1 or not all(0 <= number <= teacher for number in self.layers)
        ):
            yield Refusal(
                ("objective", HIDDEN, "layers"),
                f"the student has embeddings and {student} layers, which cannot learn states {[*self.layers]} of a "
                f"teacher of {teacher} layers",
                f"name a state of the teacher, 0 (embeddings) to {teacher}, for each of {student + 1}",
            )

    def teacher_layers(self, student: int, teacher: int) -> tuple[int, ...]:
        """The teacher's states in the order of the student's, given their numbers of layers."""
        if self.layers is not None:
            return self.layers
        return tuple(round(number * teacher / student) for number in range(student + 1))


class LayersAlike(HeadTerm):
    """Sums over all tokens."""

    reads = "layers"

    def __init__(self, config: HiddenConfig, layers: int, projection: nn.Linear | None) -> None:
        weight: Weight = config.weight
        super().__init__(HIDDEN, weight, {} if projection is None else {"hidden_projection": projection})
        self._config, self._layers, self._projection = config, layers, projection
        self._distillation: Distillation | None = None

    def meet(self, others: Mapping[str, HeadTerm]) -> None:
        distillation = others[DISTIL]
        assert isinstance(distillation, Distillation)
        distillation.keep(self._config.teacher_layers(self._layers, distillation.teacher.layers))
        self._distillation = distillation

    def targets(self, batch: Batch) -> int:
        return batch.tokens.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._distillation is not None
        theirs = self._distillation.taught(states, batch)[0].layers
        wide = torch.promote_types(theirs[0].dtype, torch.float32)
        loss_sum = torch.zeros((), dtype=wide, device=batch.tokens.device)
        for own_TH, teacher_TH in zip(states.layers, theirs, strict=True):
            projected_TH = own_TH if self._projection is None else self._projection(own_TH)
            squares = F.mse_loss(projected_TH.to(wide), teacher_TH.to(wide), reduction="sum")
            loss_sum = loss_sum + squares / teacher_TH.shape[1]
        return TermSums(loss_sum, self.targets(batch))
