"""Masked rows from a block against transformers' MLM collator, one core each: python tests/bench/masking.py.

Both get the same text cut into the same rows. Ours is timed from the block to rows ready to train on (cutting,
special tokens, masking); the peer from ready rows, with the special tokens already marked, to a padded batch.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from program import BenchError, note, run
from synthetic import NEVER_MASKED, SPECIAL, VOCABULARY, random_block

from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows, masking_key
from data_service.samples.masking import MaskingTables, MlmMasking
from data_service.samples.packing import pack_block
from data_service.samples.spec import SourceSpec, StreamSpec

_KEY = stream_key("bench")
_PEER_ROWS = 256  # a batch for the collator
_PEER_BATCHES = 2
_UNITS = {
    "token": MlmMasking(),
    "whole_word": MlmMasking(unit="whole_word"),
    "ngram": MlmMasking(unit="ngram"),
    "span": MlmMasking(unit="span", count="ceil"),
}
_FORMS: dict[str, Callable[[list[int]], object]] = {"lists": list, "arrays": np.array}


@dataclass(frozen=True)
class Comparison:
    """Tokens a second on one core: ours by unit of masking, the peer's by the form in which it gets its rows."""

    length: int
    ours: dict[str, float]
    peer: dict[str, float]

    @property
    def ratio(self) -> float:
        """Ours, masking tokens, against the peer's best."""
        return self.ours["token"] / max(self.peer.values())


def bench_masking(length: int = 512, rounds: int = 5, progress: Callable[[str], None] = print) -> Comparison:
    """Measure. Raises BenchError where transformers is not installed."""
    collator = mlm_collator()
    block = random_block(0)
    starts_word = np.random.default_rng(0).random(VOCABULARY) < 0.7
    ours: dict[str, list[float]] = {unit: [] for unit in _UNITS}
    peer: dict[str, list[float]] = {form: [] for form in _FORMS}
    rows = pack_block(block, "full_sentences", length)
    plain = [block.tokens[a:b].tolist() for a, b in zip(rows.edges[:-1], rows.edges[1:], strict=True)]
    examples = [[SPECIAL.cls, *row, SPECIAL.sep] for row in plain[: _PEER_ROWS * _PEER_BATCHES]]
    batches = [examples[first : first + _PEER_ROWS] for first in range(0, len(examples), _PEER_ROWS)]
    for turn in range(rounds):
        for unit, masking in _UNITS.items():
            spec = _spec(length, masking)
            words = None if unit == "token" else starts_word
            began = time.perf_counter()
            found = cut_block(block, spec, _KEY)
            made = make_rows(
                block, found, 0, len(found), spec, masking_key(spec, 0, 0, turn), MaskingTables(words)
            )
            ours[unit].append(len(made.tokens) / (time.perf_counter() - began))
        for form, shape in _FORMS.items():
            ready = [[_example(row, shape) for row in batch] for batch in batches]
            began = time.perf_counter()
            for batch in ready:
                collator(batch)
            peer[form].append(sum(map(len, examples)) / (time.perf_counter() - began))
        progress(f"round {turn + 1} of {rounds}")
    return Comparison(length, _medians(ours), _medians(peer))


def render(result: Comparison) -> str:
    """A few lines for people."""
    best = max(result.peer.values())
    lines = [f"rows of {result.length} tokens, vocabulary {VOCABULARY:,}, one core; tokens a second"]
    lines += [
        f"{f'maskfleet, by {unit}':<44}{rate / 1e6:>8.1f} M {rate / best:>8.1f} x"
        for unit, rate in result.ours.items()
    ]
    lines += [
        f"{f'transformers collator, rows as {form}':<44}{rate / 1e6:>8.1f} M"
        for form, rate in result.peer.items()
    ]
    return "\n".join(lines)


def mlm_collator() -> Any:
    """The peer, with a vocabulary of our size. Its random words are drawn from all of it.

    Raises:
        BenchError: transformers is not installed.
    """
    try:
        import tokenizers
        import transformers
    except ImportError as error:
        raise BenchError(
            "the peer, transformers, is not installed",
            remedy="pip install -c infra/constraints.txt transformers",
        ) from error
    names = {SPECIAL.cls: "<s>", SPECIAL.pad: "<pad>", SPECIAL.sep: "</s>", SPECIAL.unk: "<unk>"}
    names[SPECIAL.mask] = "<mask>"
    pieces = {names.get(i, f"piece{i}"): i for i in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(pieces, unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)


def _example(row: list[int], shape: Callable[[list[int]], object]) -> dict[str, object]:
    special = [1, *[0] * (len(row) - 2), 1]
    return {"input_ids": shape(row), "special_tokens_mask": shape(special)}


def _spec(length: int, masking: MlmMasking) -> StreamSpec:
    return StreamSpec(
        sources=(SourceSpec(name="random", uri="", manifest_fingerprint=""),),
        length=length,
        masking=masking,
        special=SPECIAL,
        never_masked=NEVER_MASKED,
        vocab_size=VOCABULARY,
        seed=0,
    )


def _medians(rates: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rates.items()}


def main(
    length: Annotated[int, typer.Option(min=8, help="Tokens in a row.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each side.")] = 5,
) -> None:
    """Masking against transformers' MLM collator, on the same rows, one core each.

    Needs transformers (the dev extra).
    """
    typer.echo(render(bench_masking(length, rounds, note)))


if __name__ == "__main__":
    run(main)
