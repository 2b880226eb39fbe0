"""Builds what a recipe describes, apart from its data: model, the module that distils its teachers, optimizer, engine
configuration, training plan."""

import os
from functools import partial

import torch
from torch import nn

from checkpoints.gather import Peers, SingleRank, gather_or_raise
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.mup import mup_scales
from encoder_core.objectives.modules.teacher import build_teacher, hold_teachers
from encoder_core.optim.adamw import AdamW, StableAdamW
from encoder_core.optim.groups import hidden_matrices, parameter_groups
from encoder_core.optim.lamb import Lamb
from encoder_core.optim.muon import Muon
from encoder_core.optim.settings import LambConfig, MuonConfig, StableAdamWConfig
from encoder_core.train.loop import TrainPlan
from encoder_core.train.settings import EngineConfig
from encoder_core.train.step import draw_seed
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.phases import layer_settings
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import with_vocab
from launcher.runtime.recipe.timeline import learning_rate, phase_at, term_weights
from launcher.runtime.run.record import Run
from launcher.runtime.run.teachers import FoundTeacher, read_teachers

_ONE_RANK = SingleRank()


def attach_teachers(model: nn.Module, run: Run, tokenizer: Tokenizer, peers: Peers = _ONE_RANK) -> list[FoundTeacher]:
    """Read the teachers of `run`, give them to `model`, and return them; an empty list if the run does not distil.

    Each rank reads all teachers whole. The returned weights stay in fp32, whatever the precision of `model`.
    Collective.

    Raises the errors of `launcher.runtime.run.teachers.read_teachers`, on all ranks.
    """
    found: list[FoundTeacher] = []
    if run.recipe.objective.distil is None:
        return found

    def read_all() -> None:
        found.extend(read_teachers(run, tokenizer))

    gather_or_raise(peers, read_all)
    hold_teachers(model, [build_teacher(teacher.config, teacher.weights) for teacher in found])
    return found


def set_determinism(deterministic: bool) -> None:
    """Set whether this process computes deterministically. Call this before its first matrix product: cuBLAS is
    deterministic only with a fixed workspace, whose size it reads from the environment then.

    `use_deterministic_algorithms` is not called, because it imports torch's compiler: a second at every start.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error" if deterministic else "default")


WEIGHTS_STEP = -1  # step number whose random seed draws the initial weights; training steps begin at 0


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> ObjectiveModule:
    """Return the model with fresh weights, which the recipe's seed determines on any machine."""
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    model = objective_module(config, recipe.objective, recompute=recipe.activation_checkpointing)
    factors = {name: scale.fresh for name, scale in mup_scales(config, recipe.objective.terms).items()}
    torch.manual_seed(draw_seed(recipe.seed, WEIGHTS_STEP))
    initialise(model, config.initializer_range, config.initializer, factors)
    return model


def build_optimizer(recipe: Recipe, model: ObjectiveModule) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over the model's parameter groups, with and without weight decay. The caller sets
    the learning rate and the update number for each update."""
    settings = recipe.optimizer.settings
    groups = parameter_groups(
        model,
        settings.weight_decay,
        decayed=settings.decayed,
        update_groups=model.update_groups(),
        matrices=isinstance(settings, MuonConfig),
        rates=_rate_factors(recipe, model),
    )
    match settings:
        case MuonConfig():
            return Muon(groups, settings)
        case LambConfig():
            return Lamb(groups, settings)
        case StableAdamWConfig():
            return StableAdamW(groups, settings)
        case _:
            return AdamW(groups, settings)


def _rate_factors(recipe: Recipe, model: ObjectiveModule) -> dict[str, float]:
    """Return the factor by which muP scales each parameter's learning rate, by name; empty without muP."""
    scales = mup_scales(with_vocab(recipe.model), recipe.objective.terms)
    matrices = hidden_matrices(model).keys() if recipe.optimizer.muon is not None and scales else ()
    return {name: its.muon_rate if name in matrices else its.rate for name, its in scales.items()}


def engine_config(recipe: Recipe) -> EngineConfig:
    return EngineConfig(
        recipe.zero,
        recipe.precision,
        recipe.optimizer.settings.clip,
        recipe.stage3_persistence,
        recipe.reduce_dtype,
    )


def training_plan(recipe: Recipe) -> TrainPlan:
    """Return the plan of training: seed, number of steps, learning rates, intervals of evaluation and of the weight
    check, weights of the loss terms, and the settings of layers in each phase."""
    compare_every = recipe.weight_check.interval(recipe.zero)
    return TrainPlan(
        recipe.seed,
        recipe.total_steps,
        partial(learning_rate, recipe),
        recipe.evaluation.every.steps,
        compare_every,
        weights=lambda step: term_weights(recipe, step),
        layers=lambda step: layer_settings(recipe, recipe.phases[phase_at(recipe, step)[0]]),
    )
