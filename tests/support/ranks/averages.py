"""Averages of weights on ranks: trained, evaluated and handed to other ranks, with what a test needs to check them."""

from dataclasses import dataclass

import torch

from encoder_core.layers.initialise import initialise
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import Control
from encoder_core.train.metrics import evaluate, evaluate_all
from encoder_core.train.zero_state import ALL_KINDS, MASTER
from tests.support.ranks.fragments import Piece, Whole, gathered, pieces
from tests.support.ranks.small_training import SEED, Poisonable, Setting, engine_of, microbatch, step_of


@dataclass(frozen=True)
class Averaged:
    """What one rank saw of a training.

    Attributes:
        weights: all master weights before the first step and after each, the same on all ranks.
        applied: whether each step's update was.
        figures: held-out figures after the last step, and the loss of an engine that begins at its average.
        state: this rank's fragments at the end.
    """

    weights: list[Whole]
    applied: list[bool]
    figures: dict[str, float]
    loss_of_average: float
    state: list[Piece]
    shapes: dict[str, tuple[int, ...]]


def train(
    rank: int,
    world: int,
    settings: list[Setting],
    first: int,
    stop: int,
    states: list[Whole] | None = None,
    poisoned: int | None = None,
    evaluates: bool = True,
) -> list[Averaged]:
    """Steps [first, stop) under each setting, from `states` if given, with an evaluation after each if `evaluates`."""
    control = Control.join()
    found = []
    for number, setting in enumerate(settings):
        torch.manual_seed(SEED)
        model = Poisonable()
        initialise(model)
        engine = engine_of(model, setting)
        if states is not None:
            _put(engine, ALL_KINDS, states[number])
        weights, applied = [gathered(engine)], []
        for step in range(first, stop):
            model.factor = float("nan") if step == poisoned else 1.0
            applied.append(step_of(engine, control, step)[1].applied)
            model.factor = 1.0
            if evaluates:
                _evaluate(engine, control)
            weights.append(gathered(engine))
        state, shapes = pieces(engine.fragments()), engine.shapes
        figures = _evaluate(engine, control)
        end = gathered(engine)
        _put(engine, (MASTER,), {name: {MASTER: kinds["average"]} for name, kinds in end.items()})
        began = gathered(engine)
        assert all((kinds["average"] == kinds[MASTER]).all() for kinds in began.values())
        again = evaluate(engine, control, _heldout(control), SEED)["mlm_loss"]
        found.append(Averaged(weights, applied, figures, again, state, shapes))
        engine.close()
    return found


def _put(engine: Engine, kinds: tuple[str, ...], state: Whole) -> None:
    engine.restore(kinds, lambda name, kind, start, stop: torch.from_numpy(state[name][kind][start:stop]))


def _evaluate(engine: Engine, control: Control) -> dict[str, float]:
    return evaluate_all(engine, control, lambda: {"": _heldout(control)}, SEED, lambda done: None)


def _heldout(control: Control) -> list:  # type: ignore[type-arg]
    return [microbatch(999, control.rank)]
