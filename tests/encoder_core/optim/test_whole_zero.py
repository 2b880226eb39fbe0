"""Muon, StableAdamW and LAMB under real ZeRO 0-3, in fp32 and bf16, on 1 to 3 ranks, equal literal
unsharded references, and go on from their state anywhere. Parameters learn at rates of their own and decay alike, as
with muP."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from encoder_core.train.settings import Precision
from encoder_core.train.zero_memory import Stage
from encoder_core.train.zero_state import MASTER
from tests.support.ranks.chosen_gradients import (
    LAMB,
    MUON,
    RATE,
    STABLE,
    STEPS,
    Case,
    Model,
    gradients,
    run,
    run_fused,
    run_in_rounds,
    shapes_of,
)
from tests.support.ranks.forked import run_ranks
from tests.support.ranks.fragments import Whole, whole

pytestmark = pytest.mark.cluster

OPTIMIZERS: tuple[tuple[Literal["muon", "stableadamw", "lamb"], int], ...] = (
    ("muon", 5),
    ("stableadamw", 7),
    ("lamb", 9),
)
PRECISIONS: tuple[tuple[Precision, Sequence[Stage]], ...] = (("fp32", (0, 1, 2, 3)), ("bf16", (1, 2, 3)))
CASES = [
    Case(optimizer, stage, seed, precision)
    for optimizer, seed in OPTIMIZERS
    for precision, stages in PRECISIONS
    for stage in stages
]


FEW = 4  # steps; in the fourth the gradients leap
DRAWN = [replace(case, seed=case.seed + 10 * i) for case in CASES for i in range(1, 9)]


def _newton_schulz(m: Tensor) -> Tensor:
    """Moonlight's toy_train.py, in float64, on the matrix as it lies."""
    x = m / (m.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def _adam(p: Tensor, given: list[Tensor], rate: float, betas: tuple[float, float], eps: float, decay: float) -> Tensor:
    m = v = torch.zeros_like(p)
    for t, g in enumerate(given, start=1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p * (1 - RATE * decay)
        p = p - rate * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p


def _muon(p: Tensor, given: list[Tensor], rate: float, name: str, rows: list[int]) -> Tensor:
    """Liu et al. 2025, equations 1 to 4, with Nesterov's momentum as in their code; of each matrix by itself: the one
    of each row is in `rows`, unless the parameter is one."""
    decay = 0.0 if name.endswith("bias") else MUON.weight_decay
    if rows:
        result = torch.empty_like(p)
        for part in set(rows):
            its = torch.tensor([row == part for row in rows])
            result[its] = _muon(p[its], [g[its] for g in given], rate, name, [])
        return result
    if not name.startswith("layers") or name.endswith("bias"):
        return _adam(p, given, rate, MUON.betas, MUON.eps, decay)
    shape, p = p.shape, p.flatten(1)
    buffer = torch.zeros_like(p)
    for g in (g.flatten(1) for g in given):
        buffer = 0.95 * buffer + g
        update = _newton_schulz(g + 0.95 * buffer)
        p = p * (1 - RATE * decay) - rate * 0.2 * max(p.shape) ** 0.5 * update
    return p.view(shape)


def _stable(p: Tensor, given: list[Tensor], rate: float, name: str, rows: list[int]) -> Tensor:
    """Wortsman et al. 2023, algorithm 2, with its corrected betas."""
    v = u = torch.zeros_like(p)
    b1, b2 = STABLE.betas
    decay = 0.0 if name.endswith("bias") else STABLE.weight_decay
    for t, g in enumerate(given, start=1):
        b1_hat, b2_hat = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (b1, b2))
        v, u = b1_hat * v + (1 - b1_hat) * g, b2_hat * u + (1 - b2_hat) * g * g
        rms = (g * g / u.clamp(min=STABLE.eps**2)).mean().sqrt()
        eta = rate / max(1.0, float(rms))
        p = p - eta * (decay * RATE / rate) * p - eta * v / (u.sqrt() + STABLE.eps)
    return p


def _lamb(p: Tensor, given: list[Tensor], rate: float, name: str, rows: list[int]) -> Tensor:
    """You et al. 2020, algorithm 2, without correction of the moments, as ALBERT has it; a parameter has one ratio."""
    m = v = torch.zeros_like(p)
    (b1, b2), plain = LAMB.betas, name.endswith("bias")
    for g in given:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = m / (v.sqrt() + LAMB.eps) + (0.0 if plain else LAMB.weight_decay * RATE / rate) * p
        p = p - rate * (1.0 if plain else p.norm() / u.norm()) * u
    return p


LITERAL = {"muon": _muon, "stableadamw": _stable, "lamb": _lamb}


def expected(case: Case, steps: int) -> dict[str, np.ndarray]:
    model = Model(case.seed)
    given = [[g.double() for g in gradients(shapes_of(model), step)] for step in range(steps)]
    return {
        name: LITERAL[case.optimizer](
            p.detach().double(),
            [step[i] for step in given],
            RATE * model.rates[name],
            name,
            model.rows.get(name, []),
        )
        .numpy()
        .ravel()
        for i, (name, p) in enumerate(model.named_parameters())
    }


def error(found: Whole, wanted: dict[str, np.ndarray]) -> float:
    """The largest, relative to the largest weight of its parameter."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[n][MASTER] - w).max() / np.abs(w).max()) for n, w in wanted.items())


@pytest.mark.parametrize(
    ("world", "cases", "steps"),
    [
        *((world, CASES, FEW) for world in (1, 3)),
        *(pytest.param(world, CASES, STEPS, marks=pytest.mark.long) for world in (1, 2, 3)),
        *(pytest.param(world, DRAWN, STEPS, marks=pytest.mark.long, id=f"{world}-drawn") for world in (2, 4)),
    ],
)
def test_steps_at_every_stage_equal_the_reference(world: int, cases: list[Case], steps: int) -> None:
    """In bf16 too, since no gradient is rounded: master weights, momenta and the exchange are fp32."""
    ranks = run_ranks(run, world, cases, 0, steps)
    for i, case in enumerate(cases):
        assert error(whole(rank[i] for rank in ranks), expected(case, steps)) <= 1e-6, case


FUSED = [Case("stableadamw", 1, 7), Case("stableadamw", 3, 7, "bf16")]
ALL_FUSED = [case for case in CASES if case.optimizer == "stableadamw"]
ROUNDS = [case for case in CASES if case.optimizer == "muon"]


@pytest.mark.parametrize(
    ("how", "world", "cases"),
    [
        (run_fused, 3, FUSED),
        (run_in_rounds, 3, ROUNDS),
        *(pytest.param(run_fused, world, ALL_FUSED, marks=pytest.mark.long) for world in (1, 3)),
        pytest.param(run_in_rounds, 1, ROUNDS, marks=pytest.mark.long),
    ],
)
def test_kernels_and_several_rounds_equal_the_reference_too(
    how: Callable[..., object], world: int, cases: list[Case]
) -> None:
    """Over partitions that cut parameters, and ranks that hold nothing of some."""
    pytest.importorskip("triton", reason="Triton is not installed")
    ranks = run_ranks(how, world, cases, 0, FEW)
    for i, case in enumerate(cases):
        assert error(whole(rank[i] for rank in ranks), expected(case, FEW)) <= 1e-6, case


@pytest.mark.long
def test_state_restored_at_the_same_place_goes_on_bit_for_bit_and_elsewhere_equal() -> None:
    undisturbed, half = run_ranks(run, 2, CASES), run_ranks(run, 2, CASES, 0, STEPS // 2)
    states = [whole(rank[i] for rank in half) for i in range(len(CASES))]
    there = run_ranks(run, 2, CASES, STEPS // 2, STEPS, states)
    # At three ranks each case goes on at the next stage.
    following: dict[Stage, Stage] = {0: 1, 1: 2, 2: 3, 3: 0}
    moved = [replace(case, stage=following[case.stage], precision="fp32") for case in CASES]
    elsewhere = run_ranks(run, 3, moved, STEPS // 2, STEPS, states)
    for i, case in enumerate(CASES):
        straight, resumed, other = (whole(rank[i] for rank in ranks) for ranks in (undisturbed, there, elsewhere))
        for name, kinds in straight.items():
            matrix = case.optimizer == "muon" and name.startswith("layers") and name.endswith("weight")
            assert set(kinds) == {MASTER, "momentum"} if matrix else {MASTER, "exp_avg", "exp_avg_sq"}
            assert all(np.array_equal(values, resumed[name][kind]) for kind, values in kinds.items()), case
        assert error(other, {name: kinds[MASTER] for name, kinds in straight.items()}) <= 1e-6, case
