"""Distillation: a student learns what its teachers hold likely, and to think in their directions (DistilBERT: Sanh et
al. 2019, section 3).

The teachers are frozen networks that read the same rows, masks included. Their weights are given after the module is
built (`hold_teachers`): they are no part of it (`objectives/frozen.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from encoder_core.batch import Batch
from encoder_core.families.build import ModelConfig
from encoder_core.heads.distillation import Scores, cosine_distances, linear_distillation
from encoder_core.heads.prediction import MaskedLanguageModelHead
from encoder_core.objectives.frozen import FrozenNetworks
from encoder_core.objectives.mlm import MaskedTokens
from encoder_core.objectives.states import States
from encoder_core.objectives.teacher import Said, Teacher
from encoder_core.objectives.term import HeadConfig, HeadTerm, Refusal, Setting, TermSums
from encoder_core.objectives.weights import Weight

DISTIL, COSINE = "distil", "cosine"

Places = Literal["all", "targets"]


class TeacherSource(BaseModel):
    """Where a teacher is, and what.

    Attributes:
        uri: a run, or a folder in the transformers format.
        step: of the run's commit; None: its newest when the student's run is created.
        model: its shape, as a recipe's `model`: what is computed is counted by it, and what is read is held to it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(min_length=1)
    step: int | None = Field(default=None, ge=0)
    model: ModelConfig


class DistilConfig(HeadConfig):
    """The teachers' distribution over the vocabulary: T^2 KL(teachers || student), both softened by T.

    Attributes:
        temperature: T.
        places: where: at every token (the official code), or at the targets of mlm alone.
        layers: the teacher's layers that the student's begin as, where the run starts from its teacher; None: evenly
            from the first to the last.
        teachers: with several, the student learns the mean of their distributions.
    """

    temperature: float = Field(default=2.0, gt=0)
    places: Places = "all"
    layers: tuple[int, ...] | None = None
    teachers: tuple[TeacherSource, ...] = Field(min_length=1)

    def device(self, model: ModelConfig, word: nn.Embedding) -> "Distillation":
        return Distillation(self)

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Needs the head of mlm, and one network that is the student."""
        if "mlm" not in setting.terms:
            yield Refusal(
                ("objective", DISTIL),
                "distil goes with mlm: the student's distribution is that of mlm's head",
                "add objective.mlm, with a small weight if it is to count little",
            )
        if "rtd" in setting.terms:
            yield Refusal(
                ("objective", DISTIL),
                "with rtd it is the generator that predicts tokens, and the generator is no model to keep",
                "leave rtd or distil out",
            )
        yield from self._of_layers(setting)

    def _of_layers(self, setting: Setting) -> Iterator[Refusal]:
        own, its = setting.model.distinct_layers, self.teachers[0].model.distinct_layers
        if self.layers is not None and (
            len(self.layers) != own or not all(0 <= i < its for i in self.layers)
        ):
            yield Refusal(
                ("objective", DISTIL, "layers"),
                f"the student has {own} layers, which cannot begin as layers {list(self.layers)} of {its}",
                f"name one of the teacher's layers, 0 to {its - 1}, for each of the student's",
            )


class CosineConfig(HeadConfig):
    """The direction of the teachers' last states: the mean over teachers of 1 - cos(teacher, student)."""

    def device(self, model: ModelConfig, word: nn.Embedding) -> "StatesAlike":
        return StatesAlike(self.weight)

    def refusals(self, setting: Setting) -> Iterator[Refusal]:
        """Needs teachers of the student's width."""
        distil = setting.terms.get(DISTIL)
        if not isinstance(distil, DistilConfig):
            yield Refusal(
                ("objective", COSINE),
                "cosine compares the student's states with those of distil's teachers, and there are none",
                "add objective.distil, or leave cosine out",
            )
            return
        for number, teacher in enumerate(distil.teachers):
            if teacher.model.hidden != setting.model.hidden:
                yield Refusal(
                    ("objective", COSINE),
                    f"teacher {number} has states of {teacher.model.hidden}, the student of {setting.model.hidden}",
                    f"set model.hidden to {teacher.model.hidden}, or leave cosine out",
                )


class Teachers(FrozenNetworks):
    """The teachers of a module that distils, none at first."""

    @property
    def teachers(self) -> list[Teacher]:
        return [network for network in self.networks if isinstance(network, Teacher)]


def hold_teachers(module: nn.Module, teachers: Sequence[Teacher]) -> None:
    """Let `module` learn from these from now on; nothing in one that does not distil."""
    for part in module.modules():
        if isinstance(part, Teachers):
            part.hold(teachers)


class Distillation(HeadTerm):
    """Sums over places; metric "correct", where the student's first choice is its teachers'."""

    reads = "all"

    def __init__(self, config: DistilConfig) -> None:
        self._teachers = Teachers()
        super().__init__(DISTIL, config.weight, {"teachers": self._teachers})
        self._config = config
        self._head: MaskedLanguageModelHead | None = None
        self._taught: WeakKeyDictionary[States, list[Said]] = WeakKeyDictionary()
        self._layers: tuple[int, ...] = ()

    @property
    def teacher(self) -> ModelConfig:
        """The shape of the first one."""
        return self._config.teachers[0].model

    def keep(self, layers: tuple[int, ...]) -> None:
        """Take these states of the teachers' layers along, for another term (`Teacher.say`)."""
        self._layers = layers

    def meet(self, others: Mapping[str, HeadTerm]) -> None:
        masked = others["mlm"]
        assert isinstance(masked, MaskedTokens)
        self._head = masked.head

    def targets(self, batch: Batch) -> int:
        return self._asked(batch).target_ids.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._head is not None, "the module has introduced its terms to each other"
        head, asked = self._head, self._asked(batch)
        own = Scores(head.features(states.predicting(asked)), head.decoder.weight, head.decoder.bias)
        scores = [said.scores for said in self.taught(states, batch)]
        found = linear_distillation(own, scores, self._config.temperature)
        return TermSums(found.loss_sum, asked.target_ids.numel(), {"correct": found.agreeing})

    def taught(self, states: States, batch: Batch) -> list[Said]:
        """What each teacher says, computed once for all terms of a batch."""
        if states not in self._taught:
            assert self._teachers.networks, "a module that distils has been given its teachers"
            asked = self._asked(batch)
            self._taught[states] = [teacher.say(asked, self._layers) for teacher in self._teachers.teachers]
        return self._taught[states]

    def _asked(self, batch: Batch) -> Batch:
        """The batch with the places where the student learns for targets."""
        if self._config.places == "targets":
            return batch
        return _everywhere(batch)


def _everywhere(batch: Batch) -> Batch:
    """Every token a target, in the host's memory too."""
    at_T = torch.arange(len(batch.tokens), device=batch.tokens.device)
    host = None if batch.host is None else _everywhere(batch.host)
    return replace(batch, target_positions=at_T, target_ids=batch.tokens, host=host)


class StatesAlike(HeadTerm):
    """Sums over all tokens, each teacher's divided by how many there are."""

    reads = "all"

    def __init__(self, weight: Weight) -> None:
        super().__init__(COSINE, weight, {})
        self._distillation: Distillation | None = None

    def meet(self, others: Mapping[str, HeadTerm]) -> None:
        distillation = others[DISTIL]
        assert isinstance(distillation, Distillation)
        self._distillation = distillation

    def targets(self, batch: Batch) -> int:
        return batch.tokens.numel()

    def sums(self, states: States, batch: Batch) -> TermSums:
        assert self._distillation is not None
        taught = self._distillation.taught(states, batch)
        distances = [cosine_distances(states.everywhere, said.last) for said in taught]
        return TermSums(sum(distances[1:], start=distances[0]) / len(distances), batch.tokens.numel())
