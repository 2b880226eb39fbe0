"""Loads the weights with which a new run begins: `start` in its recipe.

`start` is `scratch`, `teacher` (layers of the network that the run learns from), another run (its newest checkpoint),
or a folder in the transformers format, with `generator/` and `discriminator/` for a pair of networks, or with the
discriminator alone (`initial_sources`). The start must have all parameters of the encoder. Missing heads keep their
fresh values, and the record of the start names them. If the model's tokenizer is not the run's, rows of vocabulary
tables are carried over piece by piece: the row of the same piece if the old vocabulary has it, else the mean of the
rows of its parts.

`start.json` in the run pins the weights that the run's first attempt read, because another run continues and a folder
may be replaced. An attempt without a checkpoint to resume from must read the same weights, or it fails.

A fresh language-model head begins by predicting word frequencies. Its decoder is tied to the word embeddings of the
model that the run starts from. Nothing in that model's training kept these rows short; a distilled model never used
them in a decoder. With the usual initial values, the spread of logits after the fresh LayerNorm is the length of the
rows, and the loss is too high by half the square of that spread: 15.8 nats at the first step where word frequencies
alone give 6.2, and still 14.2 after ten steps of a slow warmup (measured in `tests/bench/RESULTS-runs.md`). So the
head's bias is the logarithm of the corpora's unigram frequencies, and the gain of its last LayerNorm is set so that
logits spread by half a nat around them, whatever the scale of the embeddings.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import JsonValue, TypeAdapter, ValidationError
from torch import Tensor, nn

from checkpoints.errors import DamagedCheckpoint
from checkpoints.gather import Peers, broadcast_or_raise
from checkpoints.hf.folder import CONFIG, PAIR_FOLDERS
from checkpoints.layout import CheckpointName
from data_service.formats import StrictRecord
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.vocabulary import find_piece_origins
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import ENCODER_PREFIX
from encoder_core.heads.prediction import MaskedLanguageModelHead, SpanBoundaryHead
from encoder_core.train.zero_state import MASTER, ReadRange
from launcher.errors import RunError
from launcher.runtime.rank.initial_sources import (
    InitialSource,
    Shapes,
    check_start_folder,
    check_start_run,
    network_folder,
    reader_of_tensors,
    source_from_folder,
    source_from_run,
    source_from_teacher,
)
from launcher.runtime.recipe.network import meta_module
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import SCRATCH, TEACHER, Recipe
from launcher.runtime.run.inputs import unigram_probabilities
from launcher.runtime.run.record import RECORD_FILE, Run
from launcher.runtime.run.teachers import FoundTeacher

START_KEY = "start.json"  # key in the run's store of the pin (`_StartPin`) of the weights that it began from


@dataclass(frozen=True)
class InitialWeights:
    """The initial weights of a run.

    Attributes:
        read: function that reads a range of a parameter's master weight, by the parameter's name in the run's module.
        record: fields for the run's "start" event.
        close: function that ends reading.
    """

    read: ReadRange
    record: dict[str, JsonValue]
    close: Callable[[], None]

    def summary(self) -> str:
        """Return a line for the operator that says where the weights come from."""
        fresh = self.record["fresh"]
        parts = [f"weights from {self.record['start']}"]
        layers = self.record.get("layers")
        if self.record.get("network") == PAIR_FOLDERS[1] and isinstance(layers, list):
            parts.append(f"generator: the discriminator's embeddings and layers {', '.join(map(str, layers))}")
        if isinstance(fresh, list) and fresh:
            parts.append(f"fresh, because the start lacks them: {', '.join(map(str, fresh))}")
        if "copied" in self.record:
            parts.append(f"vocabulary: {self.record['copied']} rows copied, {self.record['averaged']} averaged")
        return "; ".join(parts)


def initial_weights(
    run: Run, tokenizer: Tokenizer, model: nn.Module, peers: Peers, teachers: Sequence[FoundTeacher] = ()
) -> InitialWeights | None:
    """Return the weights that `run` begins from; None if these are the fresh weights of `model`. Collective.

    `model`: the run's module, which must not be sharded yet. `teachers`: the run's teachers, if it distils.

    Raises:
        RunError: if the run that `start` names has no checkpoint, its model does not fit, or ranks read different
            files.
        ModelError: if the folder's model is not the recipe's.
        TokenizerError: if the vocabularies of the start and of the recipe have nothing in common.
        StoreError: if a store does not answer.
    """
    recipe = run.recipe
    if recipe.start == SCRATCH:
        return None
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    if recipe.start == TEACHER:
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        source = source_from_teacher(recipe, config, teachers[0], shapes)
        return _fit_to_run(model, source, recipe, config, tokenizer)
    store = open_store(recipe.start)
    pinned = broadcast_or_raise(peers, lambda: _read_pin(run), _PIN_ADAPTER)
    if store.size(RECORD_FILE) is not None:
        commit = CheckpointName(*pinned.commit) if pinned and pinned.commit else None
        source = source_from_run(recipe, config, tokenizer, store, peers, commit)
    else:
        source = source_from_folder(recipe, config, tokenizer, network_folder(recipe, store), peers)
    _check_or_write_pin(run, pinned, source, peers)
    return _fit_to_run(model, source, recipe, config, tokenizer)


class _StartPin(StrictRecord):
    """The record of the weights that the run's first attempt began from.

    Attributes:
        start: the recipe's `start`.
        digest: digest of the weights.
        commit: attempt and step of the checkpoint that was read, if `start` is a run.
    """

    format: Literal[1] = 1
    start: str
    digest: str
    commit: tuple[int, int] | None = None


_PIN_ADAPTER = TypeAdapter(_StartPin | None)  # converts the pin that rank 0 sends; None: the run has no pin


def _read_pin(run: Run) -> _StartPin | None:
    """Return the pin of the run's start; None if there is none for the recipe's `start`. Raises DamagedCheckpoint."""
    try:
        pin = _StartPin.model_validate_json(run.store.get(START_KEY))
    except KeyMissing:
        return None
    except ValidationError as error:
        where = f"{run.store.uri.rstrip('/')}/{START_KEY}"
        remedy = "restore it from a copy of the run, or create the run again"
        raise DamagedCheckpoint(f"{where} is damaged", remedy=remedy) from error
    return pin if pin.start == run.recipe.start else None


def _check_or_write_pin(run: Run, pinned: _StartPin | None, source: InitialSource, peers: Peers) -> None:
    """Pin the weights that were read, or raise RunError if other weights are pinned. Collective."""
    attempt, step = source.record.get("start_attempt"), source.record.get("start_step")
    found = _StartPin.model_validate(
        {
            "start": run.recipe.start,
            "digest": source.record["start_digest"],
            "commit": None if attempt is None else (attempt, step),
        }
    )
    if pinned is None:
        data = found.model_dump_json().encode() + b"\n"
        broadcast_or_raise(peers, lambda: run.store.put(START_KEY, data), TypeAdapter(None))
    elif pinned != found:
        raise RunError(
            f"start: {run.recipe.start} holds other weights than when {run.uri} first began from it",
            remedy="put the former model back, or create a new run with the present model",
        )


def check_start(recipe: Recipe) -> None:
    """Check `recipe`'s start, as far as that is possible without reading weights. Raises the errors of
    `initial_weights`."""
    if recipe.start in (SCRATCH, TEACHER):  # a teacher's weights were checked when the run was created
        return
    tokenizer, store = load_tokenizer(recipe.tokenizer.uri), open_store(recipe.start)
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    if store.size(RECORD_FILE) is None:
        _refuse_missing_start(recipe.start, store)
        check_start_folder(recipe, config, network_folder(recipe, store))
    else:
        check_start_run(recipe, config, tokenizer)


def _refuse_missing_start(start: str, store: Store) -> None:
    """Raise RunError if there is neither a run nor a model at `start`. The message suggests a similar name."""
    if any(store.size(name) is not None for name in (CONFIG, *(f"{part}/{CONFIG}" for part in PAIR_FOLDERS))):
        return
    close = get_close_matches(start, ["scratch"], n=1, cutoff=0.6)
    if not close and isinstance(store, LocalStore) and store.root.parent.is_dir():
        names = get_close_matches(store.root.name, os.listdir(store.root.parent), n=1, cutoff=0.6)
        close = [str(Path(start).parent / name) for name in names if name != store.root.name]
    guess = f"did you mean {close[0]}? " if close else ""
    raise RunError(
        f"start: {start} is neither a run nor a folder with a {CONFIG}",
        remedy=f"{guess}set start to a run, a model's folder in the transformers format, or scratch",
    )


def _fit_to_run(
    model: nn.Module, source: InitialSource, recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer
) -> InitialWeights:
    """Return the weights of `source` for the run's module `model`: vocabulary tables are carried over to the run's
    tokenizer, and missing parameters keep their fresh values."""
    parameters = dict(model.named_parameters())
    fresh = [name for name in parameters if name not in source.shapes]
    tables = _tables_to_carry(source, recipe, config, tokenizer)
    record: dict[str, JsonValue] = source.record | {"fresh": list[JsonValue](fresh)}
    held = {name: parameters[name].detach().clone() for name in fresh}
    if source.tokenizer is not None and tables:
        carry = VocabularyCarryOver(source.tokenizer, tokenizer)
        lacking = _count_missing_rows(source, source.tokenizer, tables)
        record |= {"copied": carry.copied - lacking, "averaged": carry.averaged}
        held |= {name: carry(_read_parameter(source, name), parameters[name].detach()) for name in sorted(tables)}
    _check_shapes({name: tuple(p.shape) for name, p in parameters.items() if name not in tables}, source, recipe.start)
    held |= initial_head_values(
        model, recipe, fresh, lambda name: held[name] if name in held else _read_parameter(source, name)
    )
    record.setdefault("left", list[JsonValue](sorted(source.shapes.keys() - parameters.keys())))
    return InitialWeights(_reader_with_overrides(held, source.read), record, source.close)


def _tables_to_carry(source: InitialSource, recipe: Recipe, config: ModelConfig, new: Tokenizer) -> set[str]:
    """Return the vocabulary tables of `source` that must be converted for the tokenizer `new`. Raises the errors of
    `_count_missing_rows`."""
    old = source.tokenizer
    if old is None:
        return set()
    tables = vocabulary_tables(config, recipe.objective) & source.shapes.keys()
    return tables if old.hash != new.hash or _count_missing_rows(source, old, tables) else set()


def _count_missing_rows(source: InitialSource, old: Tokenizer, tables: Collection[str]) -> int:
    """Return how many of the last ids of `old` have no row in the tables.

    Raises:
        RunError: some of them are not special tokens, which `source_from_folder` may append to a tokenizer.
    """
    rows = min((source.shapes[name][0] for name in tables), default=old.vocab_size)
    if not old.special_mask[rows:].all():
        raise RunError(
            f"start: the model has {rows} rows of embeddings, but its tokenizer has {old.vocab_size} ids",
            remedy="start from a folder with the model's own tokenizer",
        )
    return max(0, old.vocab_size - rows)


def _read_parameter(source: InitialSource, name: str) -> Tensor:
    shape = torch.Size(source.shapes[name])
    return source.read(name, MASTER, 0, shape.numel()).view(shape)


def _check_shapes(expected: Shapes, source: InitialSource, where: str) -> None:
    """Raise RunError if `source` lacks a parameter of the encoder, or has one of another shape than `expected`."""
    missing = [name for name in expected if name not in source.shapes and _is_encoder_parameter(name)]
    if missing:
        raise RunError(
            f"start: {where} lacks parameters of the encoder: {', '.join(missing)}",
            remedy="start from a model of the same family and objective, or export it and start from the folder",
        )
    wrong = [
        f"{name} is {source.shapes[name]} in the start and {shape} in the run"
        for name, shape in expected.items()
        if name in source.shapes and tuple(source.shapes[name]) != shape
    ]
    if wrong:
        raise RunError(
            f"start: {where} has parameters of another shape: {'; '.join(wrong)}",
            remedy="set `model` in the recipe to the values of that model, and model.vocab to the number of rows "
            "of its word embeddings",
        )


def _is_encoder_parameter(name: str) -> bool:
    return name.startswith((ENCODER_PREFIX, *(f"{part}.{ENCODER_PREFIX}" for part in PAIR_FOLDERS)))


def _reader_with_overrides(overrides: Mapping[str, Tensor], read: ReadRange) -> ReadRange:
    """Return a function that reads a parameter from `overrides` if it is there, else with `read`."""
    first = reader_of_tensors(overrides)
    return lambda name, kind, start, stop: (first if name in overrides else read)(name, kind, start, stop)


def vocabulary_tables(config: ModelConfig, objective: RecipeObjective) -> set[str]:
    """Return the names of the parameters with a row for each token id, whose shape follows the vocabulary's size."""
    other = config.model_copy(update={"vocab": config.vocabulary_size + 1})
    shapes = {name: p.shape for name, p in meta_module(other, objective).named_parameters()}
    return {name for name, p in meta_module(config, objective).named_parameters() if p.shape != shapes[name]}


class VocabularyCarryOver:
    """Converts vocabulary tables from the ids of `old` to the ids of `new`. Raises the errors of `find_piece_origins`.

    Rows beyond the ids of both tokenizers, which pad a vocabulary to a round number, stay unchanged. Ids of `old`
    without a row in the table are those of appended special tokens, which the model does not know.

    Attributes:
        copied: number of new ids that take the row of the same piece.
        averaged: number of new ids that take the mean of the rows of their parts.
    """

    def __init__(self, old: Tokenizer, new: Tokenizer) -> None:
        found = find_piece_origins(old, new)
        self.copied, self.averaged = found.copied, found.averaged
        self._ids, self._offsets = torch.from_numpy(found.ids), torch.from_numpy(found.offsets)
        self._used = max(old.vocab_size, new.vocab_size)

    def __call__(self, table: Tensor, fresh: Tensor) -> Tensor:
        """Return the new table [new ids, ...], made from the old `table` [old ids, ...]. Rows of pieces without a known
        part come from `fresh`."""
        count = len(self._offsets) - 1
        flat = table.reshape(len(table), -1)
        means = F.embedding_bag(self._ids.clamp(max=len(flat) - 1), flat, self._offsets[:-1], mode="mean")
        lacking = F.pad((self._ids >= len(flat)).cumsum(0), (1, 0))[self._offsets].diff()
        result = fresh.clone()
        idle = slice(self._used, min(len(table), len(fresh)))
        result[idle] = table[idle]
        known = (self._offsets.diff() > 0) & (lacking == 0)
        result[:count][known] = means[known].reshape(-1, *table.shape[1:])
        return result


LOGIT_SPREAD = 0.5  # standard deviation of a position's logits over the vocabulary


def initial_head_values(
    model: nn.Module, recipe: Recipe, fresh_names: Collection[str], initial_value: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return initial values, by name, of LayerNorm gain and decoder bias, for each language-model head of `model` for
    which both are in `fresh_names`, but the decoder's vocabulary table is not.

    `initial_value`: function from the name of a parameter to its whole initial value. Raises CorpusError, StoreError
    if a corpus cannot be read.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for prefix, norm, head in _language_model_heads(model):
        gain, bias, table = (
            f"{prefix}.{norm}.weight",
            f"{prefix}.decoder.bias",
            names[id(head.decoder.weight)],
        )
        if gain in fresh_names and bias in fresh_names and table not in fresh_names:
            words = initial_value(table).float()
            found[gain] = torch.full_like(initial_value(gain), min(1.0, LOGIT_SPREAD / _logit_spread(words)))
            found[bias] = _log_frequencies(recipe, len(words))
    return found


def _language_model_heads(
    model: nn.Module,
) -> Iterator[tuple[str, str, MaskedLanguageModelHead | SpanBoundaryHead]]:
    """Yield the language-model heads that have a LayerNorm: name of the head, name of its last LayerNorm, module."""
    for prefix, module in model.named_modules():
        if isinstance(module, MaskedLanguageModelHead) and module.norm is not None:
            yield prefix, "norm", module
        elif isinstance(module, SpanBoundaryHead):
            yield prefix, "second_norm", module


def _logit_spread(table: Tensor) -> float:
    """Return the standard deviation, over the rows of `table` [V, E], of the logits of a vector with independent
    components of variance 1."""
    return max(1e-6, math.sqrt(float((table - table.mean(0)).square().sum(1).mean())))


def _log_frequencies(recipe: Recipe, rows: int) -> Tensor:
    """Return the logarithms of unigram frequencies, [rows] float32. Rows beyond the tokenizer's ids get the frequency
    of the rarest id."""
    frequencies = torch.from_numpy(unigram_probabilities(recipe))
    result = torch.full((rows,), math.log(float(frequencies.min())))
    result[: len(frequencies)] = frequencies.log().float()
    return result
