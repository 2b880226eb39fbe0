"""Ranges of parameters that ranks hold, as plain data that they may return, and put together again."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch.distributed as dist

from encoder_core.train.engine import Engine
from encoder_core.train.zero_state import Fragment

Piece = tuple[str, int, dict[str, np.ndarray]]
"""Parameter, its first element here, and the values of each kind, flat."""
Whole = dict[str, dict[str, np.ndarray]]
"""Parameter -> kind -> all elements, flat."""


def pieces(fragments: Iterable[Fragment], kinds: Sequence[str] | None = None) -> list[Piece]:
    """Copies of a rank's fragments; of these kinds only, if given."""
    return [(f.name, f.start, {kind: f.tensors[kind].numpy().copy() for kind in kinds or f.tensors}) for f in fragments]


def whole(ranks: Iterable[Iterable[Piece]], shapes: Mapping[str, Sequence[int]] | None = None) -> Whole:
    """All ranks' pieces as whole parameters; fails where an element is missing or held twice.

    `shapes`: of all parameters. Without it nobody knows how many elements a parameter ought to have.
    """
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, start, tensors in sorted((piece for rank in ranks for piece in rank), key=_place):
        kinds = parts.setdefault(name, {kind: [] for kind in tensors})
        assert kinds.keys() == tensors.keys(), name
        for kind, values in tensors.items():
            assert start == sum(map(len, kinds[kind])), f"{name}: missing or held twice before element {start}"
            kinds[kind].append(values)
    found = {name: {kind: np.concatenate(its) for kind, its in kinds.items()} for name, kinds in parts.items()}
    if shapes is not None:
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if math.prod(shape)}
        assert {name: len(next(iter(kinds.values()))) for name, kinds in found.items() if sizes.get(name)} == sizes
    return found


def kind_of(ranks: Iterable[Iterable[Piece]], kind: str) -> dict[str, np.ndarray]:
    """Parameter -> all elements, of one kind."""
    return {name: kinds[kind] for name, kinds in whole(ranks).items()}


def _place(piece: Piece) -> tuple[str, int, int]:
    """Empty pieces come before what begins where they are."""
    name, start, tensors = piece
    return name, start, max(map(len, tensors.values()))


def gathered(engine: Engine) -> Whole:
    """All ranks' fragments put together, on every rank. Collective."""
    everyones: list[list[Piece]] = [[] for _ in range(engine.world)]
    dist.all_gather_object(everyones, pieces(engine.fragments()))
    return whole(everyones, engine.shapes)
