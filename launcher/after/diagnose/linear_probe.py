"""A linear probe: what a frozen encoder knows of a task, by logistic regression on its hidden states.

The encoder is never trained on the task, so the probe's accuracy says what pretraining alone put into it. The same
network with its initial weights is the figure to beat: random features classify better than chance.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from launcher.after.diagnose.frozen import Frozen
from launcher.after.diagnose.states import pooled_states, rows_of_texts
from launcher.after.tasks.examples import Sentences
from launcher.errors import RunError
from launcher.runtime.recipe.evaluation import Pooling
from launcher.runtime.run.evaluations import Figure

_PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)  # times the sum of squared weights; the one best on dev is taken
_ITERATIONS = 100  # for each penalty, from the weights of the one before
_TOLERANCE = 1e-5  # of the gradient


@dataclass(frozen=True)
class Splits:
    """What to fit on, to choose the penalty by, and to measure on."""

    train: Sentences
    dev: Sentences
    test: Sentences


@dataclass(frozen=True)
class _Fitted:
    """The best penalty's probe: accuracies on dev and on test."""

    dev: float
    test: float


def linear_probe(frozen: Frozen, splits: Splits, pooling: Pooling = "mean") -> list[Figure]:
    """`accuracy` on the test split: on the states of each layer, on those of all layers concatenated (no layer), and
    `best_accuracy`, on the one layer that is best on dev, `best_layer`; `majority`: of always naming train's largest
    class.

    Of two texts the probe sees |u - v| and u * v (SentEval, 1803.05449). Features are standardised by their mean and
    deviation on train. Deterministic: nothing is drawn.

    Raises RunError: a split is empty, or train has only one class.
    """
    _check(splits)
    train, dev, test = (_features(frozen, part, pooling) for part in (splits.train, splits.dev, splits.test))
    layers = [_probe((train[layer], dev[layer], test[layer]), splits) for layer in range(len(train))]
    whole = _probe((_joined(train), _joined(dev), _joined(test)), splits)
    best = max(range(len(layers)), key=lambda layer: layers[layer].dev)
    common = int(np.bincount(splits.train.labels.astype(np.int64)).argmax())
    return [
        Figure(measure="accuracy", value=whole.test, pooling=pooling),
        *(
            Figure(measure="accuracy", value=layer.test, layer=depth, pooling=pooling)
            for depth, layer in enumerate(layers)
        ),
        Figure(measure="best_accuracy", value=layers[best].test, pooling=pooling),
        Figure(measure="best_layer", value=best, pooling=pooling),
        Figure(measure="majority", value=float((splits.test.labels == common).mean())),
    ]


def _check(splits: Splits) -> None:
    for name in ("train", "dev", "test"):
        if not len(getattr(splits, name)):
            raise RunError(f"the probe's {name} split is empty", remedy="give a task with examples in it")
    if len(np.unique(splits.train.labels)) < 2:
        raise RunError(
            "all examples that the probe is fitted on have one label", remedy="give more or other examples"
        )


def _features(frozen: Frozen, sentences: Sentences, pooling: Pooling) -> NDArray[np.float32]:
    """[D, N, F], F hidden or twice as many."""
    first = pooled_states(frozen, rows_of_texts(frozen, sentences.first), (pooling,))[pooling]
    if sentences.second is None:
        return first
    second = pooled_states(frozen, rows_of_texts(frozen, sentences.second), (pooling,))[pooling]
    return np.concatenate([np.abs(first - second), first * second], axis=2)


def _joined(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """[D, N, F] to [N, D * F]."""
    return features.transpose(1, 0, 2).reshape(features.shape[1], -1)


def _probe(parts: tuple[NDArray[np.float32], ...], splits: Splits) -> _Fitted:
    mean, spread = parts[0].mean(0), parts[0].std(0) + 1e-6
    train, dev, test = (torch.from_numpy((part - mean) / spread) for part in parts)
    fits = _fits(train, torch.from_numpy(splits.train.labels.astype(np.int64)))
    best = max(fits, key=lambda weights: _accuracy(weights, dev, splits.dev))
    return _Fitted(_accuracy(best, dev, splits.dev), _accuracy(best, test, splits.test))


def _fits(
    features: Float32[Tensor, "sentences width"], labels: Int64[Tensor, " sentences"]
) -> list[Float32[Tensor, "width_plus_1 classes"]]:
    """Weights of multinomial logistic regression, bias first, for each penalty."""
    inputs = F.pad(features, (1, 0), value=1.0)
    weights = torch.zeros(inputs.shape[1], int(labels.max()) + 1, requires_grad=True)
    found = []
    for penalty in _PENALTIES:
        _descend(weights, inputs, labels, penalty)
        found.append(weights.detach().clone())
    return found


def _descend(weights: Tensor, inputs: Tensor, labels: Tensor, penalty: float) -> None:
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=_ITERATIONS,
        history_size=20,
        tolerance_grad=_TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(inputs @ weights, labels) + penalty * weights[1:].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]


def _accuracy(weights: Tensor, features: Tensor, sentences: Sentences) -> float:
    chosen = (F.pad(features, (1, 0), value=1.0) @ weights).argmax(1).numpy()
    return float((chosen == sentences.labels).mean())
