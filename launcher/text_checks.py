"""Rows of several texts, and batches of one source: what they do not go with."""

from collections.abc import Iterator

from data_service.samples.inputs import Lanes, RepeatedSentences, TextPairs
from data_service.samples.masking import NoMasking
from launcher.problem import Problem
from launcher.recipe import Recipe


def text_problems(recipe: Recipe) -> Iterator[Problem]:
    """Every mismatch in `recipe`."""
    yield from _objective(recipe)
    yield from _batches(recipe)
    yield from _mixing(recipe)


def _objective(recipe: Recipe) -> Iterator[Problem]:
    texts = isinstance(recipe.input, TextPairs | RepeatedSentences)
    compared = isinstance(recipe.objective.masking, NoMasking)
    if texts and not compared:
        yield Problem(
            ("input", "packing"),
            f"{recipe.input.packing} rows hold whole texts to be compared, and the objective predicts tokens",
            "set objective to contrastive, or input.packing to full_sentences",
        )
    if compared and not texts:
        yield Problem(
            ("input", "packing"),
            f"a contrastive objective compares texts, and {recipe.input.packing} rows are running text",
            "set input.packing to pairs (a corpus of pairs) or sentences (SimCSE, from plain text)",
        )


def _batches(recipe: Recipe) -> Iterator[Problem]:
    for index, phase in enumerate(recipe.phases):
        if phase.batch.sequences is not None:
            continue
        if isinstance(recipe.input, TextPairs | RepeatedSentences):
            why = "each example is compared with all others of its batch, so that their number must not vary"
        elif recipe.mixing.batches == "one_source":
            why = "batches of one source each are counted in rows"
        else:
            continue
        yield Problem(("phases", index, "batch"), f"{why}: tokens will not do", "give the batch in sequences")


def _mixing(recipe: Recipe) -> Iterator[Problem]:
    if recipe.mixing.batches == "one_source" and isinstance(recipe.input, Lanes):
        yield Problem(
            ("mixing", "batches"),
            "rows in lanes go on from step to step, so that every batch has rows of all sources",
            "set mixing.batches to mixed",
        )
    weighted = [name for name, source in recipe.corpus.sources.items() if source.weight != "auto"]
    if weighted and recipe.mixing.temperature != 1:
        yield Problem(
            ("mixing", "temperature"),
            f"sources have weights of their own ({', '.join(weighted)}), and a temperature decides those that are auto",
            "set the weights to auto, or mixing.temperature to 1",
        )
