"""Writes the model card of an export from the run's own records; and keeps the data cards of the run's corpora beside
the model, as `data_cards.json`, for users who do not have the corpora."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoints.layout import CheckpointManifest
from checkpoints.listing import is_on_lineage, list_committed, read_manifest
from data_service.corpus.corpus import open_corpus
from data_service.corpus.data_card import DataCard, make_card
from data_service.corpus.data_card import render_markdown as render_card
from data_service.corpus.manifest_file import load_manifest
from data_service.errors import CorpusError
from data_service.printable import one_line
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError
from data_service.store.open import open_store
from encoder_core.objectives.figures import AVERAGE_PREFIX
from launcher.after.certificate.examine import read_certificate
from launcher.errors import CertificateError
from launcher.output import human_count
from launcher.runtime.recipe.corpora import corpora_by_name
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.summary import model_title
from launcher.runtime.recipe.timeline import tokens_before
from launcher.runtime.run.history import read_history
from launcher.runtime.run.metrics import losses_text, term_losses
from launcher.runtime.run.record import Run
from launcher.runtime.run.step_table import Record

_VECTOR_EXAMPLE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(folder)
print(model.similarity(*model.encode(["a text", "another one"])[:, None]))
```
"""
_GENERATION_EXAMPLE = """```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
read = tokenizer(f"A text with {tokenizer.mask_token} in it.", return_tensors="pt")
written = model.generate(read.input_ids, attention_mask=read.attention_mask, max_new_tokens=64)
print(tokenizer.decode(written[0], skip_special_tokens=True))
```
"""
_LICENCE_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # form of the Hub's licence identifiers


@dataclass(frozen=True)
class ExportedNetwork:
    """The network that is exported into one folder.

    Attributes:
        architecture: class of transformers that loads it; None if there is none.
        part: "generator" or "discriminator" of a pair; None for a single network.
        left_out: parts of the run's model that the transformers class does not have.
        causal: whether its last training step was next-token prediction.
    """

    architecture: str | None
    part: str | None
    left_out: tuple[str, ...]
    causal: bool = False


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts about a checkpoint for its model card.

    Attributes:
        heldout: the newest held-out evaluation up to the checkpoint's step; None if its history has none.
        data: for each source, its row in the model card's table of sources.
        cards: name and data card of each source whose card records origins of its text, or removed documents.
        certificate: sentence that says whether the run's certificate (hashes of its files) covers the checkpoint.
        weights_note: sentence that says how the weights were averaged; empty if they are the checkpoint's own.
    """

    run: Run
    step: int
    heldout: Record | None
    data: tuple[str, ...]
    cards: tuple[tuple[str, DataCard], ...]
    certificate: str
    weights_note: str


def read_checkpoint_facts(run: Run, manifests: Sequence[CheckpointManifest], weights_note: str) -> CheckpointFacts:
    """Return the facts about weights that were made from the checkpoints `manifests`, the oldest first. `weights_note`:
    as in `CheckpointFacts`. A corpus that no longer exists is no error: the card says so. Raises StoreError,
    CheckpointError if the run's own records cannot be read."""
    manifest = manifests[-1]
    known = len(manifests) == 1 and _is_on_lineage(run, manifest)  # no run evaluates a mean of checkpoints
    records = read_history(run.store).evaluations if known else ()
    before = [record for record in records if record["step"] <= manifest.step]
    data = tuple(_source_table_row(run, name) for name in corpora_by_name(run.recipe))
    newest = (_averaged_weight_figures(before[-1]) if weights_note else before[-1]) if before else None
    cards = tuple(
        (name, card) for name, card in read_run_cards(run).items() if card is not None and card.has_facts_beyond_inputs
    )
    return CheckpointFacts(run, manifest.step, newest, data, cards, _certificate_sentence(run, manifests), weights_note)


def _averaged_weight_figures(record: Record) -> Record:
    """Return an evaluation's figures of the averaged weights, under the names that the plain weights' figures have."""
    own = {
        name.removeprefix(AVERAGE_PREFIX): value for name, value in record.items() if name.startswith(AVERAGE_PREFIX)
    }
    return {"step": record["step"], **own}


def render_model_card(facts: CheckpointFacts, network: ExportedNetwork, licence: str | None) -> str:
    """Return the card as Markdown. `licence`: as the user states it; None if the user states none."""
    recipe = facts.run.recipe
    parts = (
        _front_matter(recipe, network, licence),
        f"# {recipe.name}\n",
        *_introduction_lines(facts, network),
        *_usage_section(recipe, network),
        *_data_section(facts),
        *_training_section(facts),
        "## Licence\n",
        f"{one_line(licence)}\n" if licence else "Not stated by who exported the model.\n",
        "## Recipe\n",
        f"```yaml\n{recipe.to_yaml()}```\n",
    )
    return "\n".join(parts)


def _is_on_lineage(run: Run, manifest: CheckpointManifest) -> bool:
    """Return whether the run's newest checkpoint continues this one. If not, the run's evaluations do not include this
    checkpoint's, because the run went back to an earlier one."""
    newest = list_committed(run.store)[0]
    return is_on_lineage(read_manifest(run.store, newest).lineage, manifest.name)


def _source_table_row(run: Run, name: str) -> str:
    source = corpora_by_name(run.recipe)[name]
    try:
        train = load_manifest(open_store(source.uri)).train
        size = f"{int(train.documents.sum()):,} | {human_count(int(train.tokens.sum()))}"
    except (CorpusError, StoreError) as error:
        size = f"not known: {one_line(error.problem)} |"
    weight = "by tokens" if source.weight == "auto" else f"{source.weight:g}"
    return f"| {name} | {one_line(source.uri)} | {size} | {weight} | {run.record.inputs.corpora[name][:12]} |"


def _certificate_sentence(run: Run, manifests: Sequence[CheckpointManifest]) -> str:
    """Return the model card's sentence about the run's certificate. Raises StoreError."""
    try:
        found = read_certificate(run.uri)
    except CertificateError as error:
        return f"The run's certificate cannot be read: {one_line(error.problem)}"
    if found is None:
        return "The run has no certificate."
    covered = all(manifest.name.manifest_key in found.newest_digests for manifest in manifests)
    what = "this checkpoint" if len(manifests) == 1 else "all these checkpoints"
    return f"The run's certificate, {found.digest}, {'covers' if covered else 'does not cover'} {what}."


def licence_identifier(licence: str) -> str:
    """Return the Hub's identifier of a licence: SPDX's in lower case; `other` if `licence` is not an identifier."""
    return licence.lower() if _LICENCE_IDENTIFIER.fullmatch(licence.lower()) else "other"


def _front_matter(recipe: Recipe, network: ExportedNetwork, licence: str | None) -> str:
    fields: dict[str, object] = {"tags": ["maskfleet", recipe.model.family]}
    if network.architecture is not None:
        fields["library_name"] = "transformers"
    task = _pipeline_tag(recipe, network)
    if task is not None:
        fields["pipeline_tag"] = task
    if task == "sentence-similarity":
        fields["library_name"] = "sentence-transformers"
    if licence:
        fields["license"] = licence_identifier(licence)
    return f"---\n{yaml.safe_dump(fields, sort_keys=True)}---\n"


def _pipeline_tag(recipe: Recipe, network: ExportedNetwork) -> str | None:
    """Return the Hub's `pipeline_tag`: the task for which users load the network; None if no pipeline loads it."""
    if _is_sentence_transformer(recipe, network):
        return "sentence-similarity"
    if not network.architecture or "XLNet" in network.architecture or recipe.model.has_decoder:
        return None
    filled = network.part != "discriminator" and not network.causal
    return "fill-mask" if filled else "feature-extraction"


def _is_sentence_transformer(recipe: Recipe, network: ExportedNetwork) -> bool:
    """Return whether sentence-transformers loads the export. It loads no generator and no discriminator."""
    return bool(network.architecture and recipe.objective.contrastive and not recipe.objective.rtd)


def _introduction_lines(facts: CheckpointFacts, network: ExportedNetwork) -> Iterator[str]:
    recipe = facts.run.recipe
    part = f", the {network.part} of a pair" if network.part else ""
    loads = f"loads it as `{network.architecture}`" if network.architecture else "has no class for it"
    yield (
        f"{model_title(recipe)}{part}, pretrained with Maskfleet up to step {facts.step:,} of {recipe.total_steps:,}. "
        f"transformers {loads}.\n"
    )
    if facts.weights_note:
        yield f"{facts.weights_note}\n"
    if network.left_out:
        yield f"Trained with it and not exported: {', '.join(network.left_out)}.\n"
    if network.causal:
        yield (
            "Its last phase was next-token prediction under causal attention (`clm`). The class attends to both sides, "
            "and its head has not learned to fill masks since: train a phase of `mlm` before using it as an encoder.\n"
        )
    if getattr(recipe.model, "mask_decoder", None) == "enhanced" and network.part != "discriminator":
        yield (
            "It was trained with an enhanced mask decoder, which transformers does not have: there masks are filled "
            "from the last layer, and worse than the held-out loss says.\n"
        )


def _usage_section(recipe: Recipe, network: ExportedNetwork) -> Iterator[str]:
    longest = max(phase.length for phase in recipe.phases)
    yield "## Use\n"
    if network.architecture is None:
        yield "Maskfleet reads the folder: `maskfleet diagnose`, `maskfleet fill`, and a recipe's `start:`.\n"
        return
    if _is_sentence_transformer(recipe, network):
        yield _VECTOR_EXAMPLE
        yield f"Text is cut at {recipe.model.max_length} tokens; training saw texts of up to {longest}.\n"
        return
    if recipe.model.has_decoder:
        yield _GENERATION_EXAMPLE
        yield f"Training saw rows of up to {longest} tokens, with spans of text behind one mask each.\n"
        return
    masks = _pipeline_tag(recipe, network) == "fill-mask"
    call = (
        'pipeline("fill-mask", model=folder, tokenizer_kwargs={"truncation": True})'
        if masks
        else 'pipeline("feature-extraction", model=folder, truncation=True)'
    )
    yield f"```python\nfrom transformers import pipeline\n\n{call}\n```\n"
    yield (
        f"With `truncation=True` the tokenizer cuts text at {recipe.model.max_length} tokens; training saw rows of up "
        f"to {longest}.\n"
    )


def _data_section(facts: CheckpointFacts) -> Iterator[str]:
    yield "## Data\n"
    yield "| source | where it was | documents | tokens | weight | content |\n|---|---|---|---|---|---|"
    yield "\n".join(facts.data) + "\n"
    for name, card in facts.cards:
        yield render_card(card, name, level=3)
    if any(card.removals for _, card in facts.cards):
        yield (
            "What was removed from a corpus after the run had begun may have been read before: "
            f"`maskfleet runs exposure {one_line(facts.run.uri)} --removed` lists the steps.\n"
        )


def _training_section(facts: CheckpointFacts) -> Iterator[str]:
    recipe = facts.run.recipe
    yield "## Training\n"
    objective = ", ".join(recipe.objective.model_dump(exclude_none=True))
    tokens = human_count(tokens_before(recipe, facts.step))
    versions = ", ".join(f"{name} {version}" for name, version in facts.run.record.versions.items())
    yield (
        f"Recipe `{recipe.name}`, objective {objective}, {tokens} tokens in full rows. The run is "
        f"{facts.run.record.fingerprint[:12]}, made with {versions}.\n"
    )
    if recipe.model.mup is not None:
        yield (
            f"Fresh weights and learning rates were those of a base of width {recipe.model.mup.hidden}, scaled by muP. "
            "The weights hold the output multiplier; the network needs none.\n"
        )
    yield f"Held-out loss in nats for each target: {_heldout_loss_text(facts.heldout)}.\n"
    yield f"{facts.certificate}\n"


def _heldout_loss_text(record: Record | None) -> str:
    if record is None:
        return "none on record"
    return f"{losses_text(term_losses(record), record.get('perplexity'))}, after step {record['step']:,}"


DATA_CARDS_FILE = "data_cards.json"  # beside an exported model: descriptions of the corpora it was trained on


class _DataCardsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    sources: dict[str, DataCard | None]


def read_run_cards(run: Run) -> dict[str, DataCard | None]:
    """Return the data cards of a run's corpora, by source. None for a corpus that cannot be read, or that is no longer
    the one that the run has read."""
    return {name: _read_data_card(run, name) for name in corpora_by_name(run.recipe)}


def _read_data_card(run: Run, name: str) -> DataCard | None:
    try:
        card = make_card(open_corpus(corpora_by_name(run.recipe)[name].uri))
    except (CorpusError, StoreError):
        return None
    return card if card.fingerprint == run.record.inputs.corpora[name] else None


def dump_cards(cards: Iterable[tuple[str, DataCard]], sources: Iterable[str]) -> str:
    """Return the text of `data_cards.json`. `sources`: names of all sources, including sources without a card."""
    kept = _DataCardsFile(sources=dict.fromkeys(sources) | dict(cards))
    return kept.model_dump_json(indent=1) + "\n"


def read_exported_cards(store: Store) -> Mapping[str, DataCard | None] | None:
    """Return the cards in the folder of an exported model; None if it has none that can be read. Raises StoreError."""
    try:
        return _DataCardsFile.model_validate_json(store.get(DATA_CARDS_FILE)).sources
    except (KeyMissing, ValidationError):
        return None
