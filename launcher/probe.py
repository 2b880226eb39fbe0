"""A linear probe: what a frozen encoder knows of a task, by logistic regression on its mean hidden states.

The encoder is never trained on the task, so the probe's accuracy says what pretraining alone put into it. The
same network with its initial weights is the figure to beat: random features classify better than chance.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from checkpoints.gather import Alone
from checkpoints.load import Reader, newest_good
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch
from encoder_core.families.build import AnyEncoder
from encoder_core.families.xlnet import XlnetConfig
from launcher import session
from launcher.errors import RunError
from launcher.objective import task_encoder
from launcher.runs import Run

_ROWS = 64  # sentences a forward pass
_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # of the L2 penalty; the one best on the development set is taken
_FILES = ("train.tsv", "dev.tsv", "test.tsv")


@dataclass(frozen=True)
class Labelled:
    """Sentences and their classes, [N] from 0."""

    sentences: tuple[str, ...]
    labels: Int64[Tensor, " sentences"]


@dataclass(frozen=True)
class Task:
    """A classification task: to fit, to choose the penalty, to measure."""

    train: Labelled
    dev: Labelled
    test: Labelled


@dataclass(frozen=True)
class Frame:
    """How a sentence becomes a row of at most `length` tokens; `first_is_last` puts the class token last (XLNet)."""

    length: int
    first_is_last: bool = False


@dataclass(frozen=True)
class Accuracies:
    """On the test set: of the probe on trained and on initial weights, and of always naming the largest class."""

    trained: float
    untrained: float
    majority: float


def read_task(folder: Path) -> Task:
    """`train.tsv`, `dev.tsv` and `test.tsv`, a sentence, a tab and a whole number in each line.

    Raises RunError naming file and line of whatever is not so.
    """
    return Task(*(_read(folder / name) for name in _FILES))


def probe_run(run: Run, task: Task) -> Accuracies:
    """Probe the run's newest checkpoint, and its network as it was before the first step.

    Raises:
        RunError: the run has no checkpoint. CheckpointError, StoreError: it cannot be read.
    """
    good = newest_good(run.store, Alone())
    if good is None:
        raise RunError(f"{run.uri} has no checkpoint yet", remedy=f"maskfleet train {run.uri}")
    tokenizer = run.tokenizer()
    module = session.build_model(run.recipe, tokenizer)
    frame = Frame(max(phase.length for phase in run.recipe.phases), isinstance(run.recipe.model, XlnetConfig))
    untrained = probe(task_encoder(module), tokenizer, frame, task)
    with Reader(run.store, good.manifest) as reader, torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(reader.read_full(name))
    trained = probe(task_encoder(module), tokenizer, frame, task)
    return Accuracies(
        trained, untrained, float(torch.bincount(task.test.labels).max() / len(task.test.labels))
    )


def _read(path: Path) -> Labelled:
    if not path.is_file():
        raise RunError(f"{path} does not exist", remedy=f"give a folder with {', '.join(_FILES)}")
    sentences, labels = [], []
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), start=1):
            if len(row) != 2 or not row[1].isdecimal():
                raise RunError(
                    f"{path}, line {number}: not a sentence, a tab and a class number",
                    remedy="write one example a line: sentence<TAB>label, labels from 0",
                )
            sentences.append(row[0])
            labels.append(int(row[1]))
    return Labelled(tuple(sentences), torch.tensor(labels))


def probe(encoder: AnyEncoder, tokenizer: Tokenizer, frame: Frame, task: Task) -> float:
    """Accuracy on the test set of logistic regression on the encoder's mean hidden states."""
    encoder.eval()
    parts = (task.train, task.dev, task.test)
    train, dev, test = (_embed(encoder, tokenizer, frame, part.sentences) for part in parts)
    mean, spread = train.mean(0), train.std(0) + 1e-6
    train, dev, test = ((features - mean) / spread for features in (train, dev, test))
    fits = [_fit(train, task.train.labels, strength) for strength in _STRENGTHS]
    best = max(fits, key=lambda weights: _accuracy(weights, dev, task.dev.labels))
    return _accuracy(best, test, task.test.labels)


def _embed(
    encoder: AnyEncoder, tokenizer: Tokenizer, frame: Frame, sentences: Sequence[str]
) -> Float32[Tensor, "sentences hidden"]:
    """The mean of each sentence's last hidden states, special tokens included; long sentences are cut."""
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    rows = []
    for sentence in sentences:
        text = tokenizer.encode(sentence)[: frame.length - 2].astype(np.int64)
        rows.append(np.r_[text, sep, cls] if frame.first_is_last else np.r_[cls, text, sep])
    pooled = [_pool(encoder, rows[first : first + _ROWS]) for first in range(0, len(rows), _ROWS)]
    return torch.cat(pooled)


@torch.no_grad()
def _pool(encoder: AnyEncoder, rows: Sequence[np.ndarray]) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.from_numpy(np.concatenate(rows))
    none = tokens[:0]
    batch = Batch(
        tokens=tokens,
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).int(),
        max_length=int(lengths.max()),
        positions=torch.cat([torch.arange(int(n)) for n in lengths]),
        target_positions=none,
        target_ids=none,
        segments=torch.zeros_like(tokens),
    )
    hidden: Tensor = encoder(batch)
    row = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    sums = torch.zeros(len(rows), hidden.shape[1]).index_add_(0, row, hidden.float())
    return sums / lengths[:, None]


def _fit(
    features: Float[Tensor, "sentences hidden"], labels: Int64[Tensor, " sentences"], strength: float
) -> Tensor:
    """[1 + H, classes] weights of multinomial logistic regression, bias first, to convergence."""
    inputs = F.pad(features, (1, 0), value=1.0)
    weights = torch.zeros(inputs.shape[1], int(labels.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(inputs @ weights, labels) + strength * weights[1:].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


def _accuracy(weights: Tensor, features: Tensor, labels: Tensor) -> float:
    chosen = (F.pad(features, (1, 0), value=1.0) @ weights).argmax(1)
    return float((chosen == labels).float().mean())
