"""A checkpoint as a `SentenceTransformer`: our exports, and folders that sentence-transformers wrote.

Weights are read from safetensors only, none of the folder's code is run, and nothing is downloaded.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.hf.folder import INDEX, WEIGHTS
from checkpoints.hf.load import parse_json_object
from data_service.formats import parse_json
from data_service.tokenizers.files import VOCABULARY_FILES, check_definition_file, library_errors
from encoder_core.errors import ModelError
from launcher.after.embed.settings import EncodingSettings
from launcher.after.export.sentence_transformer import MODULES_FILE, SETTINGS_FILE, sbert_pooling_name
from launcher.after.finetune.model import max_row_tokens
from launcher.after.finetune.pretrained import LocalModel, read_module_list, require_transformers_class
from launcher.errors import EVALUATE_EXTRA, describe_error, import_optional
from launcher.progress import work

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

QUERY_PROMPT, DOCUMENT_PROMPT = "query", "document"
"""Names of the prompts that retrieval uses, where the model has them."""
_LOG = logging.getLogger(__name__)
_LOADABLE_MODULES = (  # kinds of SentenceTransformer's modules that maskfleet loads
    "Transformer",
    "Pooling",
    "Normalize",
    "Dense",
    "LayerNorm",
    "Dropout",
    "WeightedLayerPooling",
)
_MODULES_WITH_WEIGHTS = ("Transformer", "Dense", "LayerNorm", "WeightedLayerPooling")
_CHECKED_TEXTS = 10_000  # number of texts that are checked for truncation


def import_sbert_module(module_name: str) -> Any:
    """Return the module `sentence_transformers.sentence_transformer.<module_name>`. Raises MissingPackage if the
    library is not installed."""
    import_optional("sentence_transformers", "maskfleet embed", EVALUATE_EXTRA)
    return import_module(f"sentence_transformers.sentence_transformer.{module_name}")


def load_model(pretrained: LocalModel, encoding: EncodingSettings) -> "SentenceTransformer":
    """Return the model with the pooling, normalisation, length and prompts of `encoding`, or, where it has None, those
    of the folder.

    Raises:
        ModelError: if the folder has no tokenizer or one without a padding token, no safetensors, modules of an unknown
            kind, files that transformers cannot read, or a model without a class in transformers; or if the length
            exceeds that of the model.
        MissingPackage: if sentence-transformers is not installed.
    """
    folder = pretrained.folder
    require_transformers_class(folder, pretrained.name)
    modules = _loadable_modules(folder)
    _check_model_files(folder, [path for path, kind in modules if kind in _MODULES_WITH_WEIGHTS] or [""])
    st = import_optional("sentence_transformers", "maskfleet embed", EVALUATE_EXTRA)
    settings = folder / SETTINGS_FILE
    stored = parse_json_object(settings.read_bytes(), str(settings)) if settings.is_file() else {}
    try:
        with library_errors(str(folder), "no model that can be read"):
            stack = _load_modules(folder, st) if modules else [_load_transformer(folder)]
        model: SentenceTransformer = st.SentenceTransformer(
            modules=_apply_encoding(stack, encoding, folder),
            similarity_fn_name="cosine",
            prompts={**(stored.get("prompts") or {}), **encoding.prompts},
            default_prompt_name=stored.get("default_prompt_name"),
            truncate_dim=stored.get("truncate_dim"),
        )
    except ModelError:
        raise
    except Exception as error:  # for a damaged file the library may raise anything
        raise ModelError(
            f"{pretrained.name} cannot be loaded: {describe_error(error)}",
            remedy="give a complete folder, as `save_pretrained` writes it",
        ) from error
    if model.tokenizer.pad_token is None:  # texts of one batch have different lengths
        raise ModelError(
            f"the tokenizer in {folder} has no pad_token",
            remedy="put the model's own tokenizer files beside its weights",
        )
    _set_max_length(model, pretrained, encoding.max_length)
    return model


def _loadable_modules(folder: Path) -> list[tuple[str, str]]:
    """Return folder and kind of each module in modules.json; an empty list for a plain transformers folder."""
    modules = []
    for place, kind in read_module_list(folder):
        package, _, name = kind.rpartition(".")
        if not package.startswith("sentence_transformers.") or name not in _LOADABLE_MODULES:
            raise ModelError(
                f"{folder / MODULES_FILE} names the module {kind}, which maskfleet does not load",
                remedy=f"give a model made of {', '.join(_LOADABLE_MODULES)}",
            )
        modules.append((place, name))
    if (folder / MODULES_FILE).is_file() and (not modules or modules[0][1] != "Transformer"):
        raise ModelError(
            f"{folder / MODULES_FILE} does not begin with a Transformer", remedy="give an encoder's folder"
        )
    return modules


def _check_model_files(folder: Path, module_folders: Iterable[str]) -> None:
    for place in module_folders:
        if not any((folder / place / name).is_file() for name in (WEIGHTS, INDEX)):
            raise ModelError(
                f"{folder / place} has no {WEIGHTS}",
                remedy="Maskfleet opens no pickled weights: load the model where you trust it, and write it with "
                "save_pretrained(folder)",
            )
    first = next(iter(module_folders), "")
    if not any((folder / first / name).is_file() for name in VOCABULARY_FILES):
        raise ModelError(
            f"{folder / first} has no tokenizer", remedy=f"put one of its files there: {', '.join(VOCABULARY_FILES)}"
        )
    check_definition_file(folder / first)
    for path in sorted(folder.glob("*.json")):
        try:
            parse_json(path.read_bytes())
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}", remedy="fetch the file again") from error


def _load_modules(folder: Path, library: Any) -> list[Any]:
    options = {"use_safetensors": True}
    return list(library.SentenceTransformer(str(folder), local_files_only=True, model_kwargs=options))


def _load_transformer(folder: Path) -> Any:
    options = {"local_files_only": True}
    weights = options | {"use_safetensors": True}
    return import_sbert_module("modules").Transformer(
        str(folder), model_kwargs=weights, processor_kwargs=options, config_kwargs=options
    )


def _apply_encoding(loaded_modules: Sequence[Any], encoding: EncodingSettings, folder: Path) -> list[Any]:
    """Return the modules of `loaded_modules` with the pooling and normalisation of `encoding` in place of their own."""
    modules, kind = import_sbert_module("modules"), loaded_modules[0].model.config.model_type
    pools = [module for module in loaded_modules if isinstance(module, modules.Pooling)]
    rest = [module for module in loaded_modules[1:] if not isinstance(module, modules.Pooling | modules.Normalize)]
    normalize = encoding.normalize
    if normalize is None:
        normalize = any(isinstance(module, modules.Normalize) for module in loaded_modules)
    if encoding.pooling is not None or not pools:
        width = loaded_modules[0].get_embedding_dimension()
        pools = [modules.Pooling(width, sbert_pooling_name(encoding.pooling or "mean", kind))]
        _check_width(rest, width, folder)
    return [loaded_modules[0], *pools, *rest, *([modules.Normalize()] if normalize else [])]


def _check_width(later_modules: Sequence[Any], width: int, folder: Path) -> None:
    """Raise ModelError if a module after the pooling takes vectors of another width than `width`."""
    for module in later_modules:
        needed = getattr(module, "in_features", width)
        if needed != width:
            raise ModelError(
                f"{folder} has a {type(module).__name__} for vectors of {needed} numbers, as its own pooling makes",
                remedy="leave out `pooling`, to keep the folder's own pooling",
            )


def _set_max_length(model: "SentenceTransformer", pretrained: LocalModel, requested_length: int | None) -> None:
    limit = max_row_tokens(model.tokenizer, model[0].model)
    if requested_length is not None and limit is not None and requested_length > limit:
        raise ModelError(
            f"max_length is {requested_length}, but {pretrained.name} has only {limit} positions",
            remedy=f"give {limit} or fewer",
        )
    current = model.max_seq_length
    if current is not None and (type(current) is not int or current < 1):
        raise ModelError(
            f"{pretrained.name} has a max_seq_length of {current!r}, which is not a number of tokens",
            remedy="correct sentence_bert_config.json or tokenizer_config.json in the folder",
        )
    known = [length for length in (requested_length or current, limit) if length is not None]
    model.max_seq_length = min(known) if known else None


def warn_of_truncation(model: "SentenceTransformer", texts: Iterable[str], texts_name: str) -> int:
    """Return how many of the first 10,000 texts are longer than the model's length, and log a warning if any is."""
    length, looked_at = model.max_seq_length, list(islice(texts, _CHECKED_TEXTS))
    if length is None or not looked_at:
        return 0
    rows = model.tokenizer(looked_at, truncation=False, padding=False, verbose=False)["input_ids"]
    longer: int = sum(len(row) > length for row in rows)
    if longer:
        _LOG.warning(
            "%s: %s of %s texts are longer than %s tokens and are cut",
            texts_name,
            f"{longer:,}",
            f"{len(looked_at):,}",
            length,
        )
    return longer


@contextmanager
def show_encoding_progress(model: "SentenceTransformer", work_name: str, text_count: int) -> Iterator[None]:
    """Show the progress of `work_name` inside the `with` block: how many of the texts have a vector."""
    with work(work_name, text_count, "texts") as now:
        counter = model.register_forward_hook(lambda module, given, made: now.advance(len(made["sentence_embedding"])))
        try:
            yield
        finally:
            counter.remove()
