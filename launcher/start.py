"""What a fresh run begins from: `start` in its recipe.

scratch, another run (its newest checkpoint), or a folder in the transformers format; a pair of networks lies in
`generator/` and `discriminator/`. The encoder must be there whole; heads that are not keep their fresh values, and the
record of the start says which. Where the model's tokenizer is not the run's, rows follow their pieces
(`launcher.vocabulary`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from checkpoints.gather import Peers, gather_or_raise
from checkpoints.hf.electra import pair_weights_for
from checkpoints.hf.fetch import PARTS, folder_digest, local_folder
from checkpoints.hf.load import CONFIG, check_same_model, read_folder_config, weights_for
from checkpoints.load import Reader, newest_good
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import find_tokenizer, load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.build import ModelConfig
from encoder_core.families.hf.interchange import Heads
from encoder_core.families.hf.keys import ENCODER
from encoder_core.train.zero_state import MASTER, Read
from launcher.errors import RunError
from launcher.objective import Objective
from launcher.recipe import Recipe
from launcher.runs import RECORD, Run, open_run
from launcher.vocabulary import CarryOver, vocabulary_tables

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Start:
    """Initial weights.

    Attributes:
        read: ranges of every parameter's master weight, by its name in the run's module.
        record: for the run's "start" event.
        close: ends reading.
    """

    read: Read
    record: dict[str, JsonValue]
    close: Callable[[], None]

    def summary(self) -> str:
        """One line for people."""
        fresh = self.record["fresh"]
        parts = [f"weights from {self.record['start']}"]
        if isinstance(fresh, list) and fresh:
            parts.append(f"fresh, since it has none: {', '.join(map(str, fresh))}")
        if "copied" in self.record:
            parts.append(
                f"vocabulary: {self.record['copied']} rows copied, {self.record['averaged']} averaged"
            )
        return "; ".join(parts)


@dataclass(frozen=True)
class _Source:
    """A model to start from, its parameters by our names. `tokenizer`: of its rows, where it is not the run's."""

    shapes: Shapes
    read: Read
    tokenizer: Tokenizer | None
    record: dict[str, JsonValue]
    close: Callable[[], None] = field(default=lambda: None)


def initial_weights(run: Run, tokenizer: Tokenizer, model: nn.Module, peers: Peers) -> Start | None:
    """What `run` begins from; None for `model`'s own fresh weights, which are not yet sharded. A collective.

    Raises:
        RunError: the run that `start` names has no checkpoint, its model does not fit, or ranks read different files.
        ModelError: the folder's model is not the recipe's. TokenizerError: its tokenizer has nothing in common.
        StoreError: a store does not answer.
    """
    recipe = run.recipe
    if recipe.start == "scratch":
        return None
    store = open_store(recipe.start)
    config = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    find = _from_folder if store.size(RECORD) is None else _from_run
    return _onto(model, find(recipe, config, tokenizer, store, peers), recipe, config, tokenizer)


def _from_run(
    recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer, store: Store, peers: Peers
) -> _Source:
    source = open_run(recipe.start)
    good = newest_good(store, peers)
    if good is None:
        raise RunError(
            f"start: {recipe.start} is a run without a checkpoint", remedy="train it first, or start: scratch"
        )
    _check_sharing(source.recipe, recipe)
    other = None
    if source.record.inputs.tokenizer != tokenizer.hash:
        other = load_tokenizer(source.recipe.tokenizer.uri)
    its = other or tokenizer
    found = source.recipe.model.with_tokenizer(its.vocab_size, its.special.pad)
    check_same_model(config.model_copy(update={"vocab": found.vocab}), found, recipe.start)
    reader = Reader(store, good.manifest)
    record: dict[str, JsonValue] = {"start": recipe.start, "start_step": good.manifest.step}
    return _Source(good.manifest.shapes, reader.read, other, record, reader.close)


def _check_sharing(theirs: Recipe, ours: Recipe) -> None:
    """A discriminator's table of differences and a table of its own bear the same name."""
    a, b = theirs.objective.rtd, ours.objective.rtd
    if a is not None and b is not None and a.embeddings != b.embeddings:
        raise RunError(
            f"objective.rtd.embeddings is {b.embeddings} here and {a.embeddings} in {ours.start}",
            remedy="export that run, and start from the exported folder",
        )


def _from_folder(
    recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer, store: Store, peers: Peers
) -> _Source:
    tensors: dict[str, Tensor] = {}

    def load() -> JsonValue:
        with local_folder(store) as folder:
            try:
                tensors.update(_folder_weights(recipe.objective, config, folder, recipe.start))
            except ModelError as error:  # name the place, not its copy
                problem = error.problem.replace(str(folder), recipe.start.rstrip("/"))
                raise ModelError(problem, remedy=error.remedy) from error
            return folder_digest(folder)

    digests = gather_or_raise(peers, load)
    if len(set(map(str, digests))) > 1:
        raise RunError(
            f"start: {recipe.start} holds different files on different machines",
            remedy="put the folder on a shared disk or in a bucket",
        )
    found = find_tokenizer((store, store.at(PARTS[1])))
    known = found is not None and found.hash != tokenizer.hash
    record: dict[str, JsonValue] = {"start": recipe.start, "start_digest": digests[0]}
    if found is None:
        record["tokenizer"] = "none in the folder: taken to be the recipe's"
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return _Source(shapes, _from_tensors(tensors), found if known else None, record)


def _folder_weights(objective: Objective, config: ModelConfig, folder: Path, where: str) -> dict[str, Tensor]:
    pair = [part for part in PARTS if (folder / part / CONFIG).is_file()]
    network = folder / PARTS[1] if objective.rtd is not None else folder
    if objective.rtd is not None and len(pair) < len(PARTS):
        raise RunError(
            f"start: {where} does not hold both networks that rtd trains",
            remedy=f"put the generator into {PARTS[0]}/ and the discriminator into {PARTS[1]}/ below it",
        )
    if objective.rtd is None and pair and not (folder / CONFIG).is_file():
        raise RunError(
            f"start: {where} holds a pair of networks, and the recipe trains one",
            remedy=f"start from one of them: add /{' or /'.join(pair)} to it",
        )
    its = config.model_copy(update={"vocab": read_folder_config(network).vocab})
    if objective.rtd is not None:
        return pair_weights_for(its, folder)
    return weights_for(its, folder, _heads(objective, config))


def _heads(objective: Objective, config: ModelConfig) -> Heads:
    if objective.plm is not None:
        return "plm"
    pairs = objective.nsp is not None or objective.sop is not None
    return "mlm_pair" if pairs and isinstance(config, BertConfig | AlbertConfig) else "mlm"


def _onto(
    model: nn.Module, source: _Source, recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer
) -> Start:
    """`source` for the run's module: tables that follow the vocabulary carried over, what is missing left fresh."""
    parameters = dict(model.named_parameters())
    fresh = [name for name in parameters if name not in source.shapes]
    tables = set[str]()
    record: dict[str, JsonValue] = source.record | {"fresh": list[JsonValue](fresh)}
    held = {name: parameters[name].detach().clone() for name in fresh}
    if source.tokenizer is not None:
        carry = CarryOver(source.tokenizer, tokenizer)
        tables = vocabulary_tables(config, recipe.objective) & source.shapes.keys()
        record |= {"copied": carry.copied, "averaged": carry.averaged}
        held |= {name: carry(_whole(source, name), parameters[name].detach()) for name in sorted(tables)}
    _check_fit(
        {name: tuple(p.shape) for name, p in parameters.items() if name not in tables}, source, recipe.start
    )
    record["left"] = list[JsonValue](sorted(source.shapes.keys() - parameters.keys()))
    return Start(_over(held, source.read), record, source.close)


def _whole(source: _Source, name: str) -> Tensor:
    shape = torch.Size(source.shapes[name])
    return source.read(name, MASTER, 0, shape.numel()).view(shape)


def _check_fit(expected: Shapes, source: _Source, where: str) -> None:
    missing = [name for name in expected if name not in source.shapes and _of_encoder(name)]
    if missing:
        raise RunError(
            f"start: {where} lacks parameters of the encoder: {', '.join(missing)}",
            remedy="start from a model of the same family and objective, or export it and start from the folder",
        )
    wrong = [
        f"{name} is {source.shapes[name]} there and {shape} here"
        for name, shape in expected.items()
        if name in source.shapes and tuple(source.shapes[name]) != shape
    ]
    if wrong:
        raise RunError(
            f"start: {where} has parameters of another shape: {'; '.join(wrong)}",
            remedy="set the recipe's `model` to that model's values; model.vocab to its number of rows",
        )


def _of_encoder(name: str) -> bool:
    return name.startswith((ENCODER, *(f"{part}.{ENCODER}" for part in PARTS)))


def _from_tensors(tensors: Mapping[str, Tensor]) -> Read:
    return lambda name, kind, start, stop: tensors[name].flatten()[start:stop]


def _over(held: Mapping[str, Tensor], read: Read) -> Read:
    """`held` where it has the parameter, else `read`."""
    first = _from_tensors(held)
    return lambda name, kind, start, stop: (first if name in held else read)(name, kind, start, stop)
