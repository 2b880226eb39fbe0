"""Gives the module of a run that distils its teachers: on ranks, and wherever else its losses are computed."""

import torch
from torch import nn

from checkpoints.gather import Alone, Peers, gather_or_raise
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.distil import hold_teachers
from encoder_core.objectives.teacher import Teacher, teacher_of
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.record import Run
from launcher.runtime.run.teachers import FoundTeacher, read_teachers

_ALONE = Alone()


def teach(model: nn.Module, run: Run, tokenizer: Tokenizer, peers: Peers = _ALONE) -> list[FoundTeacher]:
    """Read the teachers of `run`, whole, and give them to `model`; nothing for a run that does not distil.

    Each rank has all of them. What is returned stays in fp32, whatever becomes of the model. A collective.

    Raises as `launcher.runtime.run.teachers.read_teachers`, on all ranks.
    """
    found: list[FoundTeacher] = []
    if run.recipe.objective.distil is None:
        return found

    def read() -> None:
        found.extend(read_teachers(run, tokenizer))

    gather_or_raise(peers, read)
    hold_teachers(model, [teacher_of(teacher.config, teacher.weights) for teacher in found])
    return found


def teach_anything(model: nn.Module, recipe: Recipe, vocabulary: int) -> None:
    """Give it teachers of the recipe's shapes and random weights: they take as long, and as much memory."""
    if recipe.objective.distil is None:
        return
    teachers = []
    for source in recipe.objective.distil.teachers:
        config = source.model.model_copy(update={"vocab": source.model.vocab or vocabulary})
        teacher = Teacher(config)
        with torch.random.fork_rng(devices=[]):
            initialise(teacher, config.initializer_range)
        teachers.append(teacher)
    hold_teachers(model, teachers)
