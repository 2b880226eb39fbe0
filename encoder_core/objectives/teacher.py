"""A student's teachers: frozen networks that an objective computes with and never trains.

A teacher gives its scores at each place and its states. Any family that predicts masked tokens can teach; the student
may be of another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig, build_encoder
from encoder_core.heads.distillation import Scores
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.initialise import on_meta
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.objectives.mlm import tied_head
from encoder_core.objectives.multitask import mask_decoder


class FrozenNetworks(nn.Module):
    """Holds networks that follow their holder to its device and precision, and are nothing else to it.

    They are no submodules, so that their weights are not among the holder's parameters: no optimizer, no gradient, no
    ZeRO stage and no checkpoint knows of them, and every rank has them whole. They stay in evaluation mode, without
    dropout. What they compute must not be trained either: call them under `torch.no_grad`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.networks: tuple[nn.Module, ...] = ()  # nn.Module looks for submodules in no tuple

    def hold(self, networks: Sequence[nn.Module]) -> None:
        """Take these in place of what is held."""
        for network in networks:
            network.requires_grad_(False).eval()
        self.networks = tuple(networks)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, by names that no parameter of the holder has."""
        for number, network in enumerate(self.networks):
            for name, weight in network.named_parameters():
                yield f"frozen.{number}.{name}", weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenNetworks":
        """What `to`, `bfloat16`, `cuda` and the like come down to."""
        everything: list[Any] = [*self.networks, super()]  # torch says nothing of the types
        for part in everything:
            part._apply(fn, recurse)
        return self


def frozen_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights of all frozen networks that `module` computes with."""
    held: list[Any] = [part for part in module.modules() if isinstance(part, FrozenNetworks)]
    return [named for networks in held for named in networks.weights()]


class TeacherOutputs(NamedTuple):
    """What a teacher says of a batch: the last layer's states of all tokens, the scores of all ids at the batch's
    targets, and the states that were asked for."""

    last: Float[Tensor, "tokens hidden"]
    scores: Scores
    layers: tuple[Float[Tensor, "tokens hidden"], ...]


class Teacher(nn.Module):
    """Encoder and masked-language-model head. Parameters have the names of `network(config, "mlm")`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.head = tied_head(config, self.encoder.embeddings.word)
        self.decoder = mask_decoder(config)

    def forward(self, batch: Batch) -> tuple[Float[Tensor, "tokens hidden"], Scores]:
        """The last layer's states of all tokens, and the scores of all ids at the batch's targets."""
        said = self.say(batch, ())
        return said.last, said.scores

    @torch.no_grad()
    def say(self, batch: Batch, layers: Sequence[int]) -> TeacherOutputs:
        """The same, and the states `layers`: 0 the embeddings, n the output of the n-th layer."""
        assert not isinstance(self.encoder, TwoStreamEncoder)  # which predicts no masked tokens
        kept: dict[int, Tensor] = {}
        before_TH = states_TH = torch.empty(0)
        for number, layer_TH in enumerate(self.encoder.states(batch)):
            before_TH, states_TH = states_TH, layer_TH
            if number in layers:
                kept[number] = layer_TH
        if self.decoder is None:
            predicting_MH = states_TH.index_select(0, batch.target_positions)
        else:
            assert isinstance(self.encoder, DisentangledEncoder)  # only this family has the decoder
            predicting_MH = self.decoder.decode(self.encoder, before_TH, batch)
        scores = Scores(self.head.features(predicting_MH), self.head.decoder.weight, self.head.decoder.bias)
        return TeacherOutputs(states_TH, scores, tuple(kept[number] for number in layers))


def teacher_of(config: ModelConfig, weights: Mapping[str, Tensor]) -> Teacher:
    """A teacher with these weights, which stay where they are: nothing is copied.

    Raises KeyError: a weight is missing.
    """
    with on_meta():
        teacher = Teacher(config)
    teacher.load_state_dict(
        {name: weights[name] for name, _ in teacher.named_parameters()}, strict=False, assign=True
    )
    if config.tied:  # again
        teacher.head.decoder.weight = teacher.encoder.embeddings.word.weight
    return teacher


def every_other_layer(student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """The layers of a teacher that a student's begin as: from the first to the last, evenly. Of 12 for 6 they are 0, 2,
    4, 7, 9 and 11, which DistilBERT begins with.

    Raises ValueError: the student has more layers.
    """
    if student_layers > teacher_layers:
        raise ValueError(f"{teacher_layers} layers are too few for a student of {student_layers}")
    if student_layers == 1:
        return (0,)
    step = (teacher_layers - 1) / (student_layers - 1)
    return tuple(round(layer * step) for layer in range(student_layers))


def student_names(names: Sequence[str], layers: Sequence[int]) -> dict[str, str]:
    """By a student's parameter name, the teacher's that it begins as: layer i is the teacher's layer `layers[i]`, and
    what is in no layer has the same name in both."""
    found: dict[str, str] = {}
    for name in names:
        before, marker, rest = name.partition("encoder.layers.")
        if not marker or before:
            found[name] = name
            continue
        number, _, part = rest.partition(".")
        found |= {
            f"encoder.layers.{own}.{part}": name for own, its in enumerate(layers) if its == int(number)
        }
    return found
