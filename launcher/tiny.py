"""Shrinks any recipe to minutes on a CPU: the same structure, small numbers."""

from encoder_core.families.build import ModelConfig
from launcher.recipe import (
    BatchSize,
    Checkpointing,
    DataService,
    Evaluation,
    Every,
    EverySteps,
    Phase,
    Recipe,
)
from launcher.recipe_checks import impossible

_STEPS, _LENGTH, _ROWS, _MICROBATCH = 6, 64, 8, 4


def tiny(recipe: Recipe) -> Recipe:
    """`recipe` with two narrow layers, rows up to 64 tokens, batches of 8 and six steps a phase, in fp32.

    Everything that says what kind of run it is stays: packing, masking, optimizer, decay, ZeRO stage,
    sources.
    """
    phases = tuple(_tiny_phase(phase) for phase in recipe.phases)
    steps = sum(phase.steps for phase in phases)
    small = recipe.model_copy(
        update={
            "model": _tiny_model(recipe.model),
            "phases": phases,
            "schedule": recipe.schedule.model_copy(
                update={"warmup": min(recipe.schedule.warmup, steps // 3)}
            ),
            "precision": "fp32",
            "microbatch": _MICROBATCH,
            "data_service": DataService(workers=1, memory=recipe.data_service.memory.__class__(256 << 20)),
            "checkpoint": Checkpointing(
                every=Every(steps=max(1, steps // 2)), keep_last=recipe.checkpoint.keep_last
            ),
            "evaluation": Evaluation(every=EverySteps(steps=max(1, steps // 2)), samples=4 * _ROWS),
        }
    )
    assert not impossible(small), "shrinking never makes a combination impossible"
    return small


def _tiny_phase(phase: Phase) -> Phase:
    length = min(phase.length, _LENGTH)
    batch = BatchSize(sequences=_ROWS) if phase.batch.sequences else BatchSize(tokens=_ROWS * length)
    return Phase(steps=min(phase.steps, _STEPS), length=length, batch=batch)


def _tiny_model(model: ModelConfig) -> ModelConfig:
    """Two layers of 64 with the tokenizer's own vocabulary; dropout, activation and epsilon as they are."""
    return model.model_copy(
        update={
            "layers": 2,
            "hidden": 64,
            "heads": 2,
            "feed_forward": 128,
            "max_length": _LENGTH,
            "vocab": None,
        }
    )
