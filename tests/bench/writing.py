"""Seconds in which a BART writes a text token by token, with keys and values kept and with all tokens before computed
anew for each: python tests/bench/writing.py. Fresh weights, one thread, the two sides in turns over the same ids.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import typer
from program import note, run
from torch import Tensor

from encoder_core.batch import Batch, untargeted
from encoder_core.families.bart import BASE, BartConfig
from encoder_core.layers.incremental import IncrementalDecoder
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.denoise import DenoisingModel, denoising_model

END = 2


class Pair(NamedTuple):
    """Seconds of both sides, one after the other, and the largest difference of their logits."""

    kept: float
    anew: float
    apart: float


def kept(model: DenoisingModel, read: Batch, ids_W: Tensor) -> Tensor:
    """[W, V], the logits from which each of `ids_W` is chosen."""
    decoder = IncrementalDecoder(model.decoder, model.encoder(read), read)
    inputs = torch.cat((torch.tensor([END]), ids_W[:-1]))
    return torch.cat([model.head.logits(decoder.step(ids_1)) for ids_1 in inputs[:, None]])


def anew(model: DenoisingModel, read: Batch, ids_W: Tensor) -> Tensor:
    """The same, as it was before keys and values were kept."""
    states_SH = model.encoder(read)
    rows = [torch.cat((ids_W[:count], torch.tensor([END]))) for count in range(len(ids_W))]
    return torch.cat(
        [model.head.logits(model.decoder(untargeted(row, [len(row)]), states_SH, read)[-1:]) for row in rows]
    )


@torch.no_grad()
def bench_writing(
    config: BartConfig, tokens: int, rounds: int, progress: Callable[[str], None]
) -> list[Pair]:
    """A text of `tokens` tokens written from one of as many."""
    torch.manual_seed(1)
    model = denoising_model(config).eval()
    initialise(model)
    ids = torch.randint(8, config.vocabulary, (2, tokens))
    read, pairs = untargeted(ids[0], [tokens]), list[Pair]()
    for number in range(rounds):
        seconds, logits = [], []
        for side in (kept, anew):
            began = time.perf_counter()
            logits.append(side(model, read, ids[1]))
            seconds.append(time.perf_counter() - began)
        apart = float((logits[0] - logits[1]).abs().max())
        pairs.append(Pair(seconds[0], seconds[1], apart))
        progress(f"round {number + 1}: {seconds[0]:.2f} s kept, {seconds[1]:.2f} s anew")
    return pairs


def writing(
    tokens: Annotated[list[int] | None, typer.Option(min=2, help="Of a text; may be given again.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each.")] = 3,
) -> None:
    """Medians of the seconds and of the ratio, for a BART of base size."""
    torch.set_num_threads(1)
    for count in tokens or [64, 256]:
        pairs = bench_writing(BASE, count, rounds, note)
        one, other = (statistics.median(each[:2][side] for each in pairs) for side in (0, 1))
        ratio = statistics.median(pair.anew / pair.kept for pair in pairs)
        apart = max(pair.apart for pair in pairs)
        typer.echo(
            f"{count} tokens: {one:.2f} s kept, {other:.2f} s anew, {ratio:.1f} times; logits {apart:.0e} apart"
        )


if __name__ == "__main__":
    run(writing)
