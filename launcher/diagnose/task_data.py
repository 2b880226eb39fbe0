"""The examples that probes and similarity are measured on."""

from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from launcher.diagnose.linear_probe import Splits
from launcher.errors import RunError
from launcher.recipe.evaluation import AnisotropySettings, ProbeSettings, SimilaritySettings
from launcher.tasks.examples import Sentences
from launcher.tasks.measurable import compared, measured_split, probed, with_texts
from launcher.tasks.task import Task

SAMPLED_BY = 0
"""The seed of samples of a task's examples: the same ones for every run and checkpoint."""
_APART = 10  # one in so many examples of train, to choose the penalty by where dev is what is measured


def probe_splits(settings: ProbeSettings) -> Splits:
    """The splits of a classification task. Without a labelled test split the probe is measured on dev, and its penalty
    is chosen on a tenth of train.

    Raises:
        RunError: not a task of classification. TaskError: no such task, or its files are not what it says.
    """
    task = probed(settings)
    train, dev = (_classified(task, split, settings.examples) for split in ("train", "dev"))
    if measured_split(task) == "test":
        return Splits(train, dev, _classified(task, "test", settings.examples))
    order = np.random.default_rng(SAMPLED_BY).permutation(len(train))
    apart = -(-len(train) // _APART)
    return Splits(select(train, order[apart:]), select(train, order[:apart]), dev)


def similarity_pairs(settings: SimilaritySettings) -> Sentences:
    """The test split if it is labelled, else dev: nothing is chosen by it. Raises as `probe_splits`."""
    task = compared(settings)
    pairs = task.read(measured_split(task))
    if not isinstance(pairs, Sentences) or pairs.second is None:
        raise RunError(
            f"{task.name} has no pairs of texts with a score each", remedy="give a task of kind similarity"
        )
    return pairs


def texts_of(settings: AnisotropySettings) -> tuple[str, ...]:
    """The first texts of a task's dev split, or of test where there is no dev. Raises as `probe_splits`."""
    task = with_texts(settings)
    examples = task.read("dev" if "dev" in task.splits else measured_split(task))
    assert isinstance(examples, Sentences)  # of those kinds
    return at_most(examples, settings.texts).first


def _classified(task: Task, split: str, most: int) -> Sentences:
    examples = task.read(split)
    assert isinstance(examples, Sentences)  # of those kinds
    return at_most(examples, most)


def at_most(examples: Sentences, count: int) -> Sentences:
    """`count` of the examples, the same ones every time, or all if there are not as many."""
    if len(examples) <= count:
        return examples
    return select(examples, sorted(np.random.default_rng(SAMPLED_BY).permutation(len(examples))[:count]))


def select(examples: Sentences, chosen: Sequence[SupportsIndex] | np.ndarray) -> Sentences:
    """The examples at these indices, in that order."""
    places = [int(index) for index in chosen]
    first = tuple(examples.first[place] for place in places)
    second = None if examples.second is None else tuple(examples.second[place] for place in places)
    return Sentences(first, second, examples.labels[places])
