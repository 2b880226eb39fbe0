"""Reads the model that a run starts from: its teacher, another run, or a folder in the transformers format.

A pair of networks (generator and discriminator) may begin from a folder that holds only a discriminator. Then
the generator begins with the discriminator's embeddings, and with layers of the discriminator, evenly spaced from the
first to the last. The generator's head begins with fresh weights. With gradient-disentangled embeddings (DeBERTaV3: He
et al. 2021, section 3.2) the generator's table is the folder's, and the discriminator's difference begins at zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from checkpoints.gather import Peers, gather_or_raise
from checkpoints.hf.export import join_pair_weights, pair_weights_for
from checkpoints.hf.folder import (
    CONFIG,
    PAIR_FOLDERS,
    local_configs,
    local_folder,
    model_digest,
    replace_path_in_errors,
)
from checkpoints.hf.headers import check_weights
from checkpoints.hf.load import check_same_model, differing_settings, read_folder_config, unused_parameters, weights_for
from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed
from checkpoints.load import CheckpointReader
from checkpoints.verify import find_newest_good
from data_service.store.base import Store
from data_service.tokenizers.load import find_tokenizer, load_with_all_special_tokens
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import ENCODER_PREFIX, Heads
from encoder_core.objectives.modules.detection import EMBEDDINGS_PREFIX, is_embedding_difference
from encoder_core.objectives.modules.teacher import evenly_spaced_layers, teacher_names_of_student
from encoder_core.objectives.replaced import Sharing
from encoder_core.train.zero_state import ReadRange
from launcher.errors import RunError
from launcher.runtime.recipe.objective import RecipeObjective, exported_heads
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import recipe_after
from launcher.runtime.run.record import open_run
from launcher.runtime.run.sealed import hash_json
from launcher.runtime.run.teachers import FoundTeacher

Shapes = Mapping[str, tuple[int, ...]]  # shape of each parameter, by name


@dataclass(frozen=True)
class InitialSource:
    """A model to start from.

    Attributes:
        shapes: shape of each parameter, by its name in our modules.
        read: function that reads a range of a parameter.
        tokenizer: tokenizer of the model's vocabulary; None if it is that of the run. It may have more ids than the
            vocabulary tables have rows.
        record: fields for the run's "start" event.
        close: function that ends reading.
    """

    shapes: Shapes
    read: ReadRange
    tokenizer: Tokenizer | None
    record: dict[str, JsonValue]
    close: Callable[[], None] = field(default=lambda: None)


def source_from_teacher(recipe: Recipe, config: ModelConfig, teacher: FoundTeacher, shapes: Shapes) -> InitialSource:
    """Return the chosen layers of a teacher, and its parameters outside of layers. A student with fewer positions or
    token types takes the first rows of these tables. `shapes`: shapes of the student's parameters."""
    distil = recipe.objective.distil
    assert distil is not None  # a recipe that starts from a teacher without `distil` is refused
    layers = distil.layers or evenly_spaced_layers(config.distinct_layer_count, teacher.config.distinct_layer_count)
    names = teacher_names_of_student(list(teacher.weights), layers)
    tensors = {own: teacher.weights[its] for own, its in names.items()}
    tensors = with_padding_id(tensors, teacher.config, config)
    for name in tensors.keys() & shapes.keys():
        if name.endswith((".position.weight", ".token_type.weight")):
            tensors[name] = tensors[name][: shapes[name][0]]
    record: dict[str, JsonValue] = {
        "start": distil.teachers[0].uri,
        "start_step": teacher.step,
        "layers": list[JsonValue](layers),
    }
    its_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return InitialSource(its_shapes, reader_of_tensors(tensors), None, record)


def source_from_run(
    recipe: Recipe,
    config: ModelConfig,
    tokenizer: Tokenizer,
    store: Store,
    peers: Peers,
    pinned: CheckpointName | None = None,
) -> InitialSource:
    """Return the checkpoint `pinned` of the run in `store`; if `pinned` is None, the newest intact one. Collective.

    Raises:
        RunError: if the run has no checkpoint.
        ModelError: if its model is not that of `config`.
        CheckpointError, TokenizerError, StoreError: if the checkpoint or the run's tokenizer cannot be read.
    """
    other = check_start_run(recipe, config, tokenizer)
    good = find_newest_good(store, peers, only=pinned)
    if good is None:
        raise _no_checkpoint_error(recipe)
    reader = CheckpointReader(store, good.manifest)
    record: dict[str, JsonValue] = {
        "start": recipe.start,
        "start_step": good.manifest.step,
        "start_attempt": good.manifest.attempt,
        "start_digest": hash_json(good.manifest.model_dump(mode="json")),
    }
    shapes: Shapes = good.manifest.shapes
    read: ReadRange = reader.read
    pair = open_run(recipe.start).recipe.objective.rtd
    if pair is not None and recipe.objective.mlm is None:
        shapes, read = _discriminator_only(shapes, read, pair.embeddings)
        record["network"] = PAIR_FOLDERS[1]
    return InitialSource(shapes, read, other, record, reader.close)


def _discriminator_only(shapes: Shapes, read: ReadRange, sharing: Sharing) -> tuple[Shapes, ReadRange]:
    """Return the discriminator's parameters of a pair, under the names of a single model. A table that is stored as a
    difference from the generator's is read as the sum of both."""
    generator, own = (f"{part}." for part in PAIR_FOLDERS)
    stored = {name.removeprefix(own): name for name in shapes if name.startswith(own)}
    if sharing == "shared":
        shared = (name for name in shapes if name.startswith(f"{generator}{EMBEDDINGS_PREFIX}"))
        stored |= {name.removeprefix(generator): name for name in shared}

    def read_summed(name: str, kind: str, start: int, stop: int) -> Tensor:
        found = read(stored[name], kind, start, stop)
        if sharing == "shared" or not is_embedding_difference(name):
            return found
        return found + read(f"{generator}{name}", kind, start, stop)

    return {name: shapes[key] for name, key in stored.items()}, read_summed


def check_start_run(recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer) -> Tokenizer | None:
    """Check, without reading weights, that `recipe` can start from the run that it names. Return the run's tokenizer;
    None if it is `tokenizer`. Raises the errors of `source_from_run`."""
    source = open_run(recipe.start)
    there = list_committed(source.store)
    if not there:
        raise _no_checkpoint_error(recipe)
    _check_same_sharing(source.recipe, recipe)
    other = None
    if source.record.inputs.tokenizer != tokenizer.hash:
        other = source.tokenizer()
    its = other or tokenizer
    trained = recipe_after(source.recipe, there[0].step).model
    found = trained.with_tokenizer(its.vocab_size, its.special.pad)
    if _padding_ids_differ(found, config):
        raise RunError(
            f"start: the position table of {recipe.start} begins after its padding id {found.pad_id}, this run's "
            f"after {config.pad_id}",
            remedy="export that run, and start from the exported folder",
        )
    check_same_model(config.model_copy(update={"vocab": found.vocab}), found, recipe.start)
    return other


def _no_checkpoint_error(recipe: Recipe) -> RunError:
    return RunError(
        f"start: {recipe.start} is a run without a checkpoint",
        remedy="train that run first, or set start: scratch",
    )


def _check_same_sharing(start_recipe: Recipe, recipe: Recipe) -> None:
    """Raise RunError if two pairs share embeddings differently. Full tables and tables of differences have the same
    names, so one kind would be read as the other."""
    a, b = start_recipe.objective.rtd, recipe.objective.rtd
    if a is not None and b is not None and a.embeddings != b.embeddings:
        raise RunError(
            f"objective.rtd.embeddings is {b.embeddings} in the recipe and {a.embeddings} in {recipe.start}",
            remedy="export that run, and start from the exported folder",
        )


def source_from_folder(
    recipe: Recipe, config: ModelConfig, tokenizer: Tokenizer, store: Store, peers: Peers
) -> InitialSource:
    """Return the model, or the pair, of the folder in `store`, which each rank reads whole. Collective.

    Raises:
        RunError: if the folder holds a pair and the recipe trains one network, or the other way round; or if ranks
            found different files.
        ModelError: if `weights_for` raises it.
        TokenizerError, StoreError: if the folder or its tokenizer cannot be read.
    """
    tensors: dict[str, Tensor] = {}
    record: dict[str, JsonValue] = {"start": recipe.start}

    def load_tensors() -> JsonValue:
        with local_folder(store) as folder:
            with replace_path_in_errors(folder, recipe.start):
                its = _folder_config(recipe.objective, config, folder, recipe.start)
                tensors.update(with_padding_id(_folder_weights(recipe.objective, its, folder), its, config))
                if _padding_ids_differ(its, config):
                    record["pad_id"] = its.pad_id
                record.update(_left_parameters_record(recipe.objective, config, folder))
            return model_digest(folder)

    digests = gather_or_raise(peers, load_tensors)
    if len(set(map(str, digests))) > 1:
        raise RunError(
            f"start: {recipe.start} holds different files on different machines",
            remedy="put the folder on a shared disk or in a bucket",
        )
    record["start_digest"] = digests[0]
    found = find_tokenizer((store, store.with_prefix(PAIR_FOLDERS[1])), load_with_all_special_tokens)
    if found is None:
        record["tokenizer"] = "none in the folder: taken to be the recipe's"
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return InitialSource(shapes, reader_of_tensors(tensors), found, record)


def check_start_folder(recipe: Recipe, config: ModelConfig, store: Store) -> None:
    """Check that `store` holds a model to start from, by its configuration and the headers of its files, without
    reading weights. Raises the errors of `source_from_folder`."""
    with local_configs(store) as folder, replace_path_in_errors(folder, recipe.start):
        its = _folder_config(recipe.objective, config, folder, recipe.start)
        _check_padding(its, config, store, recipe.start)
        if recipe.objective.rtd is None or holds_single_network(folder):
            check_same_model(its, read_folder_config(folder), recipe.start)
            check_weights(its, store, _heads_of_one(config, recipe.objective))
            return
        for part, expected in zip(PAIR_FOLDERS, (its.generator, its), strict=True):
            check_same_model(expected, read_folder_config(folder / part), f"{recipe.start}/{part}")
            check_weights(expected, store.with_prefix(part), "mlm" if part == PAIR_FOLDERS[0] else "rtd")


def network_folder(recipe: Recipe, folder: Store) -> Store:
    """Return the folder of the network that `recipe` starts from. In the folder of a pair, a recipe without masked
    language modelling starts from the discriminator."""
    alone = recipe.objective.mlm is not None or folder.size(CONFIG) is not None
    part = folder.with_prefix(PAIR_FOLDERS[1])
    return folder if alone or part.size(CONFIG) is None else part


def _folder_config(objective: RecipeObjective, config: ModelConfig, folder: Path, where: str) -> ModelConfig:
    """Return `config` with the vocabulary size and padding id of the folder. Raises RunError if the folder holds a pair
    and the objective trains one network, or if it trains a pair and the folder's network cannot give a generator."""
    pair = [part for part in PAIR_FOLDERS if (folder / part / CONFIG).is_file()]
    if objective.rtd is None and pair and not (folder / CONFIG).is_file():
        raise RunError(
            f"start: {where} holds a pair of networks, and the recipe trains one",
            remedy=f"start from one of the two: add /{' or /'.join(pair)} to start",
        )
    network = folder
    if objective.rtd is not None and holds_single_network(folder):
        check_derivable(config, where)
    elif objective.rtd is not None:
        if len(pair) < len(PAIR_FOLDERS):
            raise RunError(f"start: {where} does not hold both networks that rtd trains", remedy=BOTH_REMEDY)
        network = folder / PAIR_FOLDERS[1]
    found = read_folder_config(network)
    return config.model_copy(update={"vocab": found.vocab, "pad_id": found.pad_id})


def _folder_weights(objective: RecipeObjective, folder_config: ModelConfig, folder: Path) -> dict[str, Tensor]:
    if objective.rtd is None:
        return weights_for(folder_config, folder, exported_heads(folder_config, objective))
    read = pair_from_discriminator if holds_single_network(folder) else pair_weights_for
    return read(folder_config, folder, objective.rtd.embeddings)


def _padding_ids_differ(source_config: ModelConfig, config: ModelConfig) -> bool:
    return config.offsets_positions_by_padding and source_config.pad_id != config.pad_id


def with_padding_id(tensors: dict[str, Tensor], source_config: ModelConfig, config: ModelConfig) -> dict[str, Tensor]:
    """Return `tensors`, parameters of a model `source_config`, for the padding id of `config`: if positions begin after
    the padding id, the rows of the position table are shifted. The rows before the first position are never used."""
    if not _padding_ids_differ(source_config, config):
        return tensors
    return tensors | {
        name: torch.cat([table.new_zeros(config.pad_id + 1, table.shape[1]), table[source_config.pad_id + 1 :]])
        for name, table in tensors.items()
        if name.endswith("embeddings.position.weight")
    }


def _check_padding(source_config: ModelConfig, config: ModelConfig, store: Store, where: str) -> None:
    """Raise RunError if the folder's padding id is its tokenizer's class or separator token. transformers gives such
    a token no position of its own, so the model has learnt other positions in every row than ours would have."""
    found = (
        find_tokenizer((store, store.with_prefix(PAIR_FOLDERS[1])), load_with_all_special_tokens)
        if _padding_ids_differ(source_config, config)
        else None
    )
    if found is not None and source_config.pad_id in (found.special.cls, found.special.sep):
        raise RunError(
            f"start: config.json in {where} has pad_token_id {source_config.pad_id}, a token that the tokenizer puts "
            f"into every row, so positions skip it; the tokenizer pads with {found.special.pad}",
            remedy="start from a model whose pad_token_id is its tokenizer's, or set start: scratch",
        )


def _left_parameters_record(objective: RecipeObjective, config: ModelConfig, folder: Path) -> dict[str, JsonValue]:
    """Return fields for the record. `left`: the folder's names of parameters that the objective does not train. If the
    generator is made from the discriminator, also `network`: "discriminator", and `layers`: those that it gets."""
    if objective.rtd is not None and not holds_single_network(folder):
        return {"left": []}
    left = unused_parameters(config, folder, _heads_of_one(config, objective))
    record: dict[str, JsonValue] = {"left": list[JsonValue](left)}
    if objective.rtd is not None:
        record |= {"network": PAIR_FOLDERS[1], "layers": list[JsonValue](generator_layers(config))}
    return record


def _heads_of_one(config: ModelConfig, objective: RecipeObjective) -> Heads:
    """Return the heads that the objective reads from a folder with one network."""
    return exported_heads(config, objective) if objective.rtd is None else "rtd"


def reader_of_tensors(tensors: Mapping[str, Tensor]) -> ReadRange:
    """Return a function that reads ranges of `tensors`, parameters by name."""
    return lambda name, kind, start, stop: tensors[name].flatten()[start:stop]


BOTH_REMEDY = f"put the generator into {PAIR_FOLDERS[0]}/ and the discriminator into {PAIR_FOLDERS[1]}/ below it"


def holds_single_network(folder: Path) -> bool:
    """Return whether `folder` holds one network, and no networks in the folders of a pair."""
    return (folder / CONFIG).is_file() and not any((folder / part / CONFIG).is_file() for part in PAIR_FOLDERS)


def generator_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the discriminator's layers whose weights the generator's layers begin with.

    Raises ValueError: the generator has more layers than the discriminator.
    """
    return evenly_spaced_layers(config.generator.distinct_layer_count, config.distinct_layer_count)


def check_derivable(config: ModelConfig, where: str) -> None:
    """Raise RunError if the generator of `config` cannot begin with layers of the discriminator in `where`."""
    generator = config.generator
    differing = [key for key in differing_settings(generator, config) if key != "layers"]
    if generator.distinct_layer_count > config.distinct_layer_count:
        differing.append("layers")
    if differing:
        listed = "; ".join(
            f"its {key} is {getattr(generator, key)} and the discriminator's {getattr(config, key)}"
            for key in differing
        )
        raise RunError(
            f"start: {where} does not hold both networks that rtd trains, and the recipe's generator cannot begin "
            f"with layers of the discriminator: {listed}",
            remedy=f"{BOTH_REMEDY}, or set `model` so that the generator is as wide as the discriminator and no deeper",
        )


def pair_from_discriminator(config: ModelConfig, folder: Path, sharing: Sharing) -> dict[str, Tensor]:
    """Return the initial parameters, by name, of the module that trains the pair of `config`, from the discriminator
    in `folder`. The generator's head is missing, and so is the discriminator's head if the folder lacks it.

    Raises ModelError if `weights_for` does.
    """
    whole = weights_for(config, folder, "rtd")
    encoder = {name: tensor for name, tensor in whole.items() if name.startswith(ENCODER_PREFIX)}
    generator = _select_layers(encoder, generator_layers(config))
    return join_pair_weights(generator, whole, sharing)


def _select_layers(encoder: Mapping[str, Tensor], layers: tuple[int, ...]) -> dict[str, Tensor]:
    return {ours: encoder[theirs] for ours, theirs in teacher_names_of_student(list(encoder), layers).items()}
