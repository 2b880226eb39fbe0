"""A student's teachers: frozen networks that an objective runs and never trains.

A teacher returns its scores at the targets, and its states. Any family that predicts masked tokens can teach; the
student may be of another family.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.heads.distillation import LogitFactors
from encoder_core.layers.deberta_encoder import DisentangledEncoder
from encoder_core.layers.initialise import on_meta
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from encoder_core.objectives.modules.multitask import mask_decoder, tied_head

Network = TypeVar("Network", bound=nn.Module)


class FrozenNetworks(nn.Module, Generic[Network]):
    """Holds networks that move with the holding module to its device and precision, but are not its submodules.

    So their weights are not parameters of the holding module: optimizers, gradients, ZeRO and checkpoints do not
    include them, and every rank has them whole. They stay in evaluation mode, without dropout. Call them under
    `torch.no_grad`, so that no graph is built.
    """

    def __init__(self) -> None:
        super().__init__()
        self.networks: tuple[Network, ...] = ()  # in a tuple, where nn.Module does not look for submodules

    def set_networks(self, networks: Sequence[Network]) -> None:
        """Freeze these networks, and hold them in place of the former ones."""
        for network in networks:
            network.requires_grad_(False).eval()
        self.networks = tuple(networks)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, with names that differ from those of the holding module's parameters."""
        for number, network in enumerate(self.networks):
            for name, weight in network.named_parameters():
                yield f"frozen.{number}.{name}", weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenNetworks[Network]":
        """Apply `fn` also to the held networks' tensors. `to`, `bfloat16`, `cuda` and the like call this."""
        everything: list[Any] = [*self.networks, super()]  # Any, because torch does not annotate `_apply`
        for part in everything:
            part._apply(fn, recurse)
        return self


def frozen_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return names and weights of all networks that `FrozenNetworks` in `module` hold."""
    held: list[Any] = [part for part in module.modules() if isinstance(part, FrozenNetworks)]
    return [named for networks in held for named in networks.weights()]


class TeacherOutputs(NamedTuple):
    """The outputs of a teacher for a batch.

    Attributes:
        last: last layer's states of all tokens.
        scores: factors of the logits of all ids at the batch's targets.
        layers: states of the requested layers.
    """

    last: Float[Tensor, "tokens hidden"]
    scores: LogitFactors
    layers: tuple[Float[Tensor, "tokens hidden"], ...]


class Teacher(nn.Module):
    """An encoder with a masked-language-model head; parameters have the names of `build_network(config, "mlm")`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = config.encoder()
        self.head = tied_head(config, self.encoder.embeddings.word)
        self.decoder = mask_decoder(config)

    @torch.no_grad()
    def forward(self, batch: Batch, layers: Sequence[int] = ()) -> TeacherOutputs:
        """Return the outputs for the batch. `layers`: requested states; 0: the embeddings, n: output of layer n."""
        assert not isinstance(self.encoder, TwoStreamEncoder)  # XLNet predicts no masked tokens
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
        scores = LogitFactors(self.head.features(predicting_MH), self.head.decoder.weight, self.head.decoder.bias)
        return TeacherOutputs(states_TH, scores, tuple(kept[number] for number in layers))


def hold_teachers(module: nn.Module, teachers: Sequence[Teacher]) -> None:
    """Set the teachers from which `module` learns. A module without distillation is unchanged."""
    for part in module.modules():
        if isinstance(part, FrozenNetworks):
            part.set_networks(teachers)


def build_teacher(config: ModelConfig, weights: Mapping[str, Tensor]) -> Teacher:
    """Build a teacher that uses the given weight tensors themselves, without copies.

    Raises:
        KeyError: a weight is missing.
    """
    with on_meta():
        teacher = Teacher(config)
    teacher.load_state_dict({name: weights[name] for name, _ in teacher.named_parameters()}, strict=False, assign=True)
    if config.has_tied_decoder:  # `assign` has replaced the embeddings, so tie again
        teacher.head.decoder.weight = teacher.encoder.embeddings.word.weight
    return teacher


def evenly_spaced_layers(student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """Return the teacher's layers from which a student's layers are initialised, spread evenly from first to last.

    For a student with 6 layers of a teacher's 12 they are 0, 2, 4, 7, 9 and 11, as in DistilBERT.

    Raises:
        ValueError: the student has more layers than the teacher.
    """
    if student_layers > teacher_layers:
        raise ValueError(f"the teacher has {teacher_layers} layers, fewer than the student's {student_layers}")
    if student_layers == 1:
        return (0,)
    step = (teacher_layers - 1) / (student_layers - 1)
    return tuple(round(layer * step) for layer in range(student_layers))


def teacher_names_of_student(names: Sequence[str], layers: Sequence[int]) -> dict[str, str]:
    """Return, for each parameter name of a student, the name of the teacher's parameter from which it is initialised.

    Layer i is initialised from the teacher's layer `layers[i]`; parameters outside layers have the same name in both.
    `names`: the teacher's parameter names.
    """
    found: dict[str, str] = {}
    for name in names:
        before, marker, rest = name.partition("encoder.layers.")
        if not marker or before:
            found[name] = name
            continue
        number, _, part = rest.partition(".")
        found |= {f"encoder.layers.{own}.{part}": name for own, its in enumerate(layers) if its == int(number)}
    return found
