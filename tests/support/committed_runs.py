"""Runs with checkpoints of real weights that nobody trained: fresh ones, moved a little by each step."""

from collections.abc import Sequence

import torch

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.gather import Alone
from checkpoints.layout import CheckpointName
from checkpoints.retention import tidy
from checkpoints.save import Saver
from encoder_core.train.zero_state import KINDS, Fragment
from launcher.rank.build import build_model
from launcher.run.record import open_run


class Committing:
    """One attempt of a run, which commits at the steps it is told to."""

    def __init__(self, uri: str) -> None:
        self.run = open_run(uri)
        self.attempt: Attempt = claim(self.run.store, owner=Owner.here(0.0))
        self._saver = Saver(self.run.store, self.attempt, Alone())
        self._model = build_model(self.run.recipe, self.run.tokenizer())

    def commit(self, step: int) -> CheckpointName:
        """Weights that depend on `step` alone."""
        shapes, fragments = {}, []
        for name, parameter in self._model.named_parameters():
            draw = torch.Generator().manual_seed(step)
            moved = parameter.detach() + 0.02 * torch.randn(parameter.shape, generator=draw)
            shapes[name] = tuple(parameter.shape)
            fragments.append(Fragment(name, 0, dict.fromkeys(KINDS, moved.flatten())))
        self._saver.begin(step, fragments, shapes, {"step": step})
        self._saver.wait()
        self._saver.commit()
        return CheckpointName(self.attempt.number, step)

    def keep_last(self, count: int) -> None:
        """Delete all but the newest `count`."""
        tidy(self.run.store, self.attempt, keep_last=count, keep_every=None)


def task_files(folder: str, train: int = 60, test: int = 40) -> Sequence[str]:
    """YAML files of two small tasks in `folder`, with their data: one of classification, one of similarity. A text's
    class is whether a word is in it; two texts' score is how many words they share."""
    import random
    from pathlib import Path

    from small_runs import WORDS

    draw, root = random.Random(5), Path(folder)
    others = [word for word in WORDS if word != "machine"]

    def sentence(label: int) -> str:
        words = draw.choices(others, k=6) + ["machine"] * label
        draw.shuffle(words)
        return " ".join(words)

    for split, count in (("train", train), ("dev", test), ("test", test)):
        lines = [f"{sentence(number % 2)}\t{number % 2}" for number in range(count)]
        (root / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    pairs = []
    for number in range(test):
        first = draw.sample(others, 6)
        second = draw.sample(first, number % 6) + draw.sample(others, 6 - number % 6)
        pairs.append(f"{len(set(first) & set(second))}\t{' '.join(first)}\t{' '.join(second)}")
    (root / "pairs.tsv").write_text("\n".join(pairs) + "\n")
    common = "published: nowhere\nformat: tsv\n"
    (root / "word.yaml").write_text(
        f"name: word\nkind: classification\n{common}fields: {{first: 1, label: 2}}\nlabels: ['0', '1']\n"
        "files: {train: train.tsv, dev: dev.tsv, test: test.tsv}\nmetrics: [accuracy]\n"
    )
    (root / "shared.yaml").write_text(
        f"name: shared\nkind: similarity\n{common}fields: {{first: 2, second: 3, label: 1}}\nscore_range: [0, 6]\n"
        "files: {test: pairs.tsv}\nmetrics: [spearman]\n"
    )
    return [str(root / "word.yaml"), str(root / "shared.yaml")]
