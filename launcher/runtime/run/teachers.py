"""Reads the teachers of a run that distils, and checks that they are those that the run was created with.

A teacher is a commit of another run, or a folder in the transformers format. Its identity is the digest of its weights
under our names. So a commit and a model exported from it are the same teacher, whatever their URIs. The run's own
checkpoints do not contain its teachers.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from checkpoints.hf.folder import CONFIG, local_folder
from checkpoints.hf.load import check_same_model, load_pretrained
from checkpoints.load import CheckpointReader
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import find_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.distil import TeacherSource
from encoder_core.objectives.modules.teacher import Teacher
from launcher.errors import RunError
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.timeline import causal_after, recipe_after
from launcher.runtime.run.inputs import TeacherIdentity
from launcher.runtime.run.record import RECORD_FILE, Run, open_run, select_checkpoint


@dataclass(frozen=True)
class FoundTeacher:
    """A teacher in memory.

    Attributes:
        config: its configuration.
        weights: its parameters by our names, fp32.
        step: step of its commit; None for a folder.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    step: int | None

    def identity(self) -> TeacherIdentity:
        """Return the digest of the weights' names, shapes and bits, and the step of the commit."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights.items()):
            digest.update(json.dumps([name, list(weight.shape)]).encode())
            digest.update(weight.contiguous().numpy().data)
        return TeacherIdentity(weights=digest.hexdigest(), step=self.step)


def read_teachers(run: Run, tokenizer: Tokenizer) -> list[FoundTeacher]:
    """Read the teachers of `run`. Raises as `read_teacher`, and RunError if the weights of one are not those that the
    run was created with."""
    found = []
    for number, known in enumerate(run.record.inputs.teachers):
        teacher = read_teacher(run.recipe, number, tokenizer, known.step)
        if teacher.identity().weights != known.weights:
            raise RunError(
                f"{_recipe_path(number)}.uri: {run.recipe.objective.teachers[number].uri} holds other weights than "
                "when "
                f"{run.uri} was created",
                remedy="put the former model back, or create a new run with this one",
            )
        found.append(teacher)
    return found


def read_teacher(recipe: Recipe, number: int, tokenizer: Tokenizer, step: int | None = None) -> FoundTeacher:
    """Read teacher `number` of `recipe` and check that it fits the recipe.

    Args:
        tokenizer: the run's tokenizer; the teacher must have the same.
        step: step of the teacher's commit. None: the one that the recipe names, else the newest good one.

    Raises:
        RunError: there is no teacher at the URI, its tokenizer or number of ids is another one, or its rows are too
            short.
        ModelError: its configuration is not the one in the recipe, or it cannot be read.
        CheckpointError, TokenizerError, StoreError: it cannot be read.
    """
    source, path = recipe.objective.teachers[number], _recipe_path(number)
    store = open_store(source.uri)
    wanted_step = source.step if step is None else step
    if store.size(RECORD_FILE) is not None:
        found = _teacher_of_run(open_run(source.uri), wanted_step, tokenizer, path)
    elif store.size(CONFIG) is None:
        raise RunError(
            f"{path}.uri: {source.uri} is neither a run nor a folder with a {CONFIG}",
            remedy="give a run, or a model's folder in the transformers format",
        )
    else:
        found = _teacher_of_folder(store, source, tokenizer, path)
    _check_teacher_fits(recipe, source, found.config, tokenizer, path)
    return found


def _teacher_of_run(run: Run, step: int | None, tokenizer: Tokenizer, path: str) -> FoundTeacher:
    if run.record.inputs.tokenizer != tokenizer.hash:
        raise _other_tokenizer_error(path, run.uri)
    if run.recipe.objective.mlm is None or run.recipe.objective.rtd is not None:
        raise RunError(
            f"{path}.uri: {run.uri} does not train one network to predict masked tokens",
            remedy="export the network that does (of a pair, the generator), and give the exported folder",
        )
    manifest = select_checkpoint(run, step)
    if causal_after(run.recipe, manifest.step):
        raise RunError(
            f"{path}.uri: step {manifest.step:,} of {run.uri} is in a phase of clm, whose states saw no later token",
            remedy="name a step at the end of a phase of mlm: add @STEP to the URI, or train that phase first",
        )
    model = recipe_after(run.recipe, manifest.step).model
    config = model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    with CheckpointReader(run.store, manifest) as reader:
        return FoundTeacher(config, {name: reader.read_full(name) for name in _parameter_names(config)}, manifest.step)


def _teacher_of_folder(store: Store, source: TeacherSource, tokenizer: Tokenizer, path: str) -> FoundTeacher:
    found = find_tokenizer((store,))
    if found is not None and found.hash != tokenizer.hash:
        raise _other_tokenizer_error(path, source.uri)
    with local_folder(store) as folder:
        pretrained = load_pretrained(folder)
        return FoundTeacher(pretrained.config, pretrained.tensors, None)


def _parameter_names(config: ModelConfig) -> list[str]:
    with on_meta():
        return [name for name, _ in Teacher(config).named_parameters()]


def _check_teacher_fits(
    recipe: Recipe, source: TeacherSource, found: ModelConfig, tokenizer: Tokenizer, path: str
) -> None:
    resized_model = source.model.model_copy(
        update={"vocab": found.vocab, "max_length": found.max_length, "pad_id": found.pad_id}
    )
    try:
        check_same_model(resized_model, found, source.uri)
    except ModelError as error:
        raise ModelError(f"{path}.model: {error.problem}", remedy=f"set {path}.model to the values there") from error
    student = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    if found.vocab != student.vocab:
        raise RunError(
            f"{path}.uri: {source.uri} has {found.vocab:,} ids, but the student has {student.vocab:,}",
            remedy=f"set model.vocab to {found.vocab}",
        )
    longest = max(phase.length for phase in recipe.phases)
    if found.max_length < longest:
        raise RunError(
            f"{path}.uri: {source.uri} reads at most {found.max_length} tokens a row, but the longest phase has "
            f"{longest}",
            remedy=f"shorten the phases to {found.max_length}, or take another teacher",
        )


def _other_tokenizer_error(path: str, uri: str) -> RunError:
    return RunError(
        f"{path}.uri: {uri} has another tokenizer than this run, so its predictions are of other tokens",
        remedy="take the teacher's tokenizer, and a corpus that was built with it",
    )


def _recipe_path(number: int) -> str:
    return f"objective.distil.teachers.{number}"
