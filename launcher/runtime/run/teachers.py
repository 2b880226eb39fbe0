"""Reads the teachers of a distillation run, and checks that they are the teachers with which it was created.

A teacher is a checkpoint of another run, or a folder in the transformers format. Its identity is the digest of its
weights by Maskfleet's parameter names, so a checkpoint and the model exported from it are the same teacher. The run's
own checkpoints do not contain its teachers.
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
    """A teacher that was read into memory.

    Attributes:
        config: configuration of the model.
        weights: fp32 parameters, by Maskfleet's parameter names.
        step: step of its checkpoint; None for a folder.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    step: int | None

    def identity(self) -> TeacherIdentity:
        """Return the digest of the names, shapes and bits of the weights, with the step of the checkpoint."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights.items()):
            digest.update(json.dumps([name, list(weight.shape)]).encode())
            digest.update(weight.contiguous().numpy().data)
        return TeacherIdentity(weights=digest.hexdigest(), step=self.step)


def read_teachers(run: Run, tokenizer: Tokenizer) -> list[FoundTeacher]:
    """Read the teachers of `run`. Raises as `read_teacher`; RunError if the weights of a teacher have changed since the
    run was created."""
    found = []
    for number, known in enumerate(run.record.inputs.teachers):
        teacher = read_teacher(run.recipe, number, tokenizer, known.step)
        if teacher.identity().weights != known.weights:
            raise RunError(
                f"{_recipe_path(number)}.uri: {run.recipe.objective.teachers[number].uri} holds other weights than "
                f"when {run.uri} was created",
                remedy="restore the earlier model there, or create a new run with the present one",
            )
        found.append(teacher)
    return found


def read_teacher(recipe: Recipe, number: int, tokenizer: Tokenizer, step: int | None = None) -> FoundTeacher:
    """Read teacher `number` of `recipe` and check that it fits the recipe.

    Args:
        tokenizer: the run's tokenizer; the teacher must have the same one.
        step: step of the teacher's checkpoint; None: that of the recipe, or else of the newest good checkpoint.

    Raises:
        RunError: there is no teacher at the URI; its tokenizer or vocabulary size differs; or it accepts too few tokens
            a row.
        ModelError: its configuration is not that of the recipe, or is unreadable.
        CheckpointError, TokenizerError, StoreError: the teacher is damaged or unreadable.
    """
    source, path = recipe.objective.teachers[number], _recipe_path(number)
    store = open_store(source.uri)
    wanted_step = source.step if step is None else step
    if store.size(RECORD_FILE) is not None:
        found = _teacher_of_run(open_run(source.uri), wanted_step, tokenizer, path)
    elif store.size(CONFIG) is None:
        raise RunError(
            f"{path}.uri: {source.uri} is neither a run nor a folder with a {CONFIG}",
            remedy="set it to the URI of a run, or of a model's folder in the transformers format",
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
            remedy="export the network that does (for ELECTRA, the generator), and give the URI of that folder",
        )
    manifest = select_checkpoint(run, step)
    if causal_after(run.recipe, manifest.step):
        raise RunError(
            f"{path}.uri: step {manifest.step:,} of {run.uri} is in a causal phase (clm), so it cannot predict masks",
            remedy="choose a step at the end of an mlm phase (add @STEP to the URI), or train such a phase first",
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
        raise ModelError(f"{path}.model: {error.problem}", remedy=f"set {path}.model as the teacher has it") from error
    student = recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    if found.vocab != student.vocab:
        raise RunError(
            f"{path}.uri: {source.uri} has {found.vocab:,} ids, but the student has {student.vocab:,}",
            remedy=f"set model.vocab to {found.vocab}",
        )
    longest = max(phase.length for phase in recipe.phases)
    if found.max_length < longest:
        raise RunError(
            f"{path}.uri: {source.uri} reads at most {found.max_length} tokens a row, but the longest rows have "
            f"{longest}",
            remedy=f"set phases.N.length to {found.max_length} or less, or choose another teacher",
        )


def _other_tokenizer_error(path: str, uri: str) -> RunError:
    return RunError(
        f"{path}.uri: the teacher {uri} has another tokenizer than this run, so its predictions cannot be used",
        remedy="use the teacher's tokenizer, and a corpus that was built with it",
    )


def _recipe_path(number: int) -> str:
    return f"objective.distil.teachers.{number}"
