"""Averages of weights on ranks: trained and evaluated, with what a test needs to check them."""

from dataclasses import dataclass

import torch

from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.metrics import evaluate, evaluate_all
from encoder_core.train.zero_state import MASTER
from tests.support.ranks.fragments import Piece, Whole, gathered, pieces
from tests.support.ranks.small_training import SEED, Setting, engine_of, fresh_model, microbatch, step_of


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


def train(rank: int, world: int, settings: list[Setting], steps: int, poisoned: int) -> list[Averaged]:
    """So many steps under each setting, with an evaluation after each; the gradients of step `poisoned` are NaN."""
    control = RankGroup.join()
    found = []
    for setting in settings:
        model = fresh_model()
        engine = engine_of(model, setting)
        weights, applied = [gathered(engine)], []
        for step in range(steps):
            model.factor = float("nan") if step == poisoned else 1.0
            applied.append(step_of(engine, control, step)[1].applied)
            model.factor = 1.0
            _evaluate(engine, control)
            weights.append(gathered(engine))
        state, shapes = pieces(engine.fragments()), engine.shapes
        figures = _evaluate(engine, control)
        end = gathered(engine)
        _begin_at_average(engine, end)
        began = gathered(engine)
        assert all((kinds["average"] == kinds[MASTER]).all() for kinds in began.values())
        again = evaluate(engine, control, _heldout(control), SEED)["mlm_loss"]
        found.append(Averaged(weights, applied, figures, again, state, shapes))
        engine.close()
    return found


def _begin_at_average(engine: Engine, state: Whole) -> None:
    engine.restore((MASTER,), lambda name, kind, start, stop: torch.from_numpy(state[name]["average"][start:stop]))


def _evaluate(engine: Engine, control: RankGroup) -> dict[str, float]:
    return evaluate_all(engine, control, lambda: {"": _heldout(control)}, SEED, lambda done: None)


def _heldout(control: RankGroup) -> list:  # type: ignore[type-arg]
    return [microbatch(999, control.rank)]
