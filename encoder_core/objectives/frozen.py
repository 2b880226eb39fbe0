"""Networks that an objective computes with and never trains: a student's teachers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn


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
