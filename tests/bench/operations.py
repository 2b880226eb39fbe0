"""How many kernels a training step gives a GPU, and how often it waits for one: python tests/bench/operations.py.

Counted on a CPU, without a GPU and without training anything: the base recipes, as deep as they are and narrow, run a
forward pass, a backward pass and an update under a dispatch mode. Attention takes the path that it takes on a GPU in
bf16, but for its kernels, which are counted and not run. Losses mean nothing here; the counts are those of a GPU.

To count an earlier commit: git worktree add BEFORE COMMIT, and PYTHONPATH=BEFORE before this command.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from dispatched import Dispatched
from gpu_path import as_on_a_gpu
from program import note, run
from step_batch import in_random_order, make_batch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.objectives.modules.teacher import Teacher, hold_teachers
from encoder_core.optim.updates import set_update
from launcher.runtime.rank.build import build_optimizer
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.tiny import tiny

RECIPES = {
    "BERT": "bert-base",
    "RoBERTa": "roberta-base",
    "ALBERT": "albert-base",
    "SpanBERT": "spanbert-base",
    "XLNet": "xlnet-base",
    "ELECTRA": "electra-base",
    "DeBERTa": "deberta-base",
    "DeBERTa, with order": "deberta-base-sop",
    "DeBERTa v2": "deberta-v2-xlarge",
    "DeBERTa v3": "deberta-v3-base",
    "ModernBERT": "modernbert-base",
    "EuroBERT": "eurobert-210m",
    "XLM": "xlm-mlm-tlm-base",
    "DistilBERT": "distilbert-base",
}
VOCABULARY, LENGTHS = 512, (32, 5, 23, 17)


@dataclass(frozen=True)
class PassCost:
    """Of one step: operations that are kernels, and places where a GPU is waited for."""

    forward: int
    backward: int
    optimizer: int
    waits: list[str]


def main(
    families: Annotated[list[str] | None, typer.Argument(help="All, if none is named.")] = None,
) -> None:
    torch.set_num_threads(1)
    print("| family | layers | forward | backward | update | a layer | waits |\n|---|--:|--:|--:|--:|--:|--:|")
    for family in families or RECIPES:
        if RECIPES[family] not in bundled():
            note(f"{family}: this commit has no recipe of it")
            continue
        recipe = small(RECIPES[family])
        found, less = counted(recipe), counted(with_layers(recipe, recipe.model.layers - 1))
        layer = found.forward + found.backward - less.forward - less.backward
        print(
            f"| {family} | {recipe.model.layers} | {found.forward:,} | {found.backward:,} | {found.optimizer:,} "
            f"| {layer} | {len(found.waits)} |",
            flush=True,
        )


def small(name: str) -> Recipe:
    """The recipe as deep as it is, with its dropout, narrow."""
    recipe = load(name)
    shrunk = tiny(recipe)
    rates = ("dropout", "attention_dropout", "attention_output_dropout", "generator_layers", "groups")
    kept = {rate: getattr(recipe.model, rate) for rate in rates if hasattr(recipe.model, rate)}
    model = shrunk.model.model_copy(
        update={**kept, "vocab": VOCABULARY, "layers": recipe.model.layers, "max_length": 2 * max(LENGTHS)}
    )
    return shrunk.model_copy(update={"model": model})


def with_layers(recipe: Recipe, layers: int) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"layers": layers})})


def counted(recipe: Recipe) -> PassCost:
    """One microbatch, and the update by its gradient."""
    module = built(recipe).train()
    batch = batch_of(recipe)
    optimizer = build_optimizer(recipe, module)
    forward, backward, update = (Dispatched() for _ in range(3))
    memory: tuple[Tensor, ...] = ()
    active = [forward]
    with as_on_a_gpu(module, lambda name: active[-1].kernels.update([name])):
        for group in module.update_groups():
            active.append(forward)
            with forward:
                losses = module(batch, memory) if memory else module(batch)
                loss = sum(term.loss_sum * (term.step_weight({}) / 8.0) for term in losses.terms)
            memory = losses.memory
            active.append(backward)
            with backward:
                loss.backward()
            set_update(optimizer, lr=1e-4, count=1, update_group=group)
            optimizer.step()  # the first one makes the moments
            with update:
                optimizer.step()
    return PassCost(forward.count, backward.count, update.count, forward.waits + backward.waits)


def built(recipe: Recipe) -> ObjectiveModule:
    torch.manual_seed(0)
    module = objective_module(recipe.model, recipe.objective)
    add_teachers(module, recipe)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def add_teachers(module: ObjectiveModule, recipe: Recipe) -> None:
    """Give a student teachers with its own vocabulary, and fresh weights."""
    if recipe.objective.distil is not None:
        models = [source.model for source in recipe.objective.distil.teachers]
        taught = [model.model_copy(update={"vocab": recipe.model.vocab}) for model in models]
        hold_teachers(module, [Teacher(model) for model in taught])


def batch_of(recipe: Recipe, lengths: Sequence[int] = LENGTHS, vocabulary: int = VOCABULARY) -> Batch:
    """Rows of these lengths; XLNet's, which carry memory on, have the longest one."""
    permuted = recipe.objective.plm is not None
    rows = [max(lengths)] * len(lengths) if permuted else list(lengths)
    batch = make_batch(rows, vocabulary, spans=recipe.objective.sbo is not None)
    batch = in_random_order(batch) if permuted else batch
    return replace(batch, languages=batch.segments) if hasattr(recipe.model, "languages") else batch


if __name__ == "__main__":
    run(main)
