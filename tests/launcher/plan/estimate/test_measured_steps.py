"""The roofline against steps of one H200 (2026-11-26, torch 2.11.0, Triton 3.6.0): two microbatches of 32,768 tokens on
one rank, in bf16, timed alone.

Those steps had other kernels than those that the roofline counts: attention in the tiles of that day, and copies around
it; the loss, and without compiling the norms, as torch's operations. The test puts these in.
"""

import pytest

from encoder_core.cost.products import Shape
from launcher.plan.estimate import roofline as module
from launcher.plan.estimate.roofline import Picoseconds, roofline, update_seconds
from launcher.runtime.capacity.devices import find_gpu
from launcher.runtime.capacity.workload import full_rows, microbatch_flops, microbatch_products, phase_targets
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import known

H200, TOKENS, ROUNDS = find_gpu("H200"), 32_768, 2
OLD_TILES = {
    "fused kernels": Picoseconds(2.06, 2.47, 3.44),
    "fused kernels, DeBERTa": Picoseconds(13.32, 9.70, 15.36, 33.50),
}
COPIES = 36  # bytes of a state around our attention: zeros of four tensors, and deltas by four operations
WRITTEN_LOSS = 38  # bytes of a logit that the loss's kernels spare
WRITTEN_NORM = 101  # bytes of a state that the norm's kernels spare, twice in a layer
LAYERS = {
    "bert-large": 24,
    "roberta-base": 12,
    "deberta-v3-base": 19,
    "modernbert-base": 22,
}  # generator included


def recipe_of(name: str, dropout: bool, compiled: bool) -> Recipe:
    recipe = load(name)
    drops = {} if dropout else {"dropout": 0.0, "attention_dropout": 0.0}
    model = known(recipe.model).model_copy(update=drops)
    return recipe.model_copy(
        update={"model": model, "precision": "bf16", "compile": "auto" if compiled else False}
    )


def other_bytes(recipe: Recipe, shape: Shape, name: str, compiled: bool) -> float:
    """What a microbatch of those steps moved beside what the roofline counts."""
    states = LAYERS[name] * shape.tokens * recipe.model.hidden
    logits = sum(
        p.m * p.n * p.count for p in microbatch_products(recipe, shape) if p.what == "head: scores of all ids"
    )
    copies = COPIES * states * (module.attention_kernel(recipe.model) != "flash attention")
    return copies + WRITTEN_LOSS * logits + 2 * WRITTEN_NORM * states * (not compiled)


@pytest.mark.parametrize(
    ("name", "length", "dropout", "compiled", "milliseconds", "within"),
    [
        ("bert-large", 128, True, True, 342.4, 0.10),
        ("bert-large", 512, True, True, 417.2, 0.10),
        ("bert-large", 512, False, True, 329.8, 0.10),
        ("roberta-base", 512, True, True, 151.1, 0.10),
        ("deberta-v3-base", 512, True, True, 767.6, 0.10),
        ("modernbert-base", 1024, True, True, 206.4, 0.10),
        ("bert-large", 512, True, False, 502.1, 0.15),
        ("deberta-v3-base", 512, True, False, 824.7, 0.15),
    ],
)
def test_measured_steps_are_estimated(
    name: str,
    length: int,
    dropout: bool,
    compiled: bool,
    milliseconds: float,
    within: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SCORES", module.SCORES | OLD_TILES)
    recipe = recipe_of(name, dropout, compiled)
    phase = recipe.phases[0]
    shape = full_rows(recipe, TOKENS // length, length, phase_targets(recipe, phase) * length // phase.length)
    found = roofline(recipe, shape, H200)
    other = other_bytes(recipe, shape, name, compiled) / (module.TRAFFIC * H200.bandwidth)
    step = ROUNDS * (found.seconds + other) + update_seconds(recipe, H200)
    flops = ROUNDS * microbatch_flops(recipe, shape).model
    mfu = flops / step / H200.peak
    measured = flops / (milliseconds / 1e3) / H200.peak
    assert mfu == pytest.approx(measured, rel=within)
