"""What a run reads: its corpora and its tokenizer, checked against the recipe and against each other."""

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from data_service.errors import CorpusError, TokenizerError
from data_service.shards.manifest import Manifest
from data_service.shards.manifest_file import load_manifest
from data_service.store.open import open_store
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RecipeError
from launcher.recipe import Recipe
from launcher.recipe_checks import unsuitable


class Inputs(BaseModel):
    """Content fingerprints: manifest by source name, and the tokenizer's hash."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    corpora: dict[str, str]
    tokenizer: str


def read_inputs(recipe: Recipe, tokenizer: Tokenizer) -> Inputs:
    """Fingerprints of everything `recipe` reads, with that tokenizer.

    Raises:
        CorpusError: no corpus there, damaged, with another held-out share, or without the sentences that next-sentence
            prediction needs.
        TokenizerError: it was made by another tokenizer.
        RecipeError: the tokenizer has more ids than the model, or knows no words where words are masked.
        StoreError: a store cannot be read.
    """
    problems = unsuitable(recipe, tokenizer)
    if problems:
        raise RecipeError(
            "\n".join(f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in problems),
            remedy="; ".join(problem.remedy for problem in problems),
        )
    corpora: dict[str, str] = {}
    for name, source in recipe.corpus.sources.items():
        manifest = load_manifest(open_store(source.uri))
        _check_corpus(manifest, source.uri, recipe, tokenizer.hash)
        _check_sentences(manifest, source.uri, recipe)
        corpora[name] = manifest.fingerprint
    return Inputs(corpora=corpora, tokenizer=tokenizer.hash)


def unigram_probabilities(recipe: Recipe) -> NDArray[np.float64]:
    """[V] frequencies in the training text of all sources, each id counted once more than it occurs."""
    stores = [open_store(source.uri) for source in recipe.corpus.sources.values()]
    counts = np.sum([load_manifest(store).unigram for store in stores], axis=0, dtype=np.float64) + 1
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def _check_corpus(manifest: Manifest, uri: str, recipe: Recipe, tokenizer_hash: str) -> None:
    if manifest.tokenizer_hash != tokenizer_hash:
        raise TokenizerError(
            f"{uri} was built with another tokenizer ({manifest.tokenizer_hash[:12]}) than "
            f"{recipe.tokenizer.uri} ({tokenizer_hash[:12]})",
            remedy=f"set tokenizer.uri to {uri.rstrip('/')}/tokenizer, or build the corpus again",
        )
    stated = recipe.corpus.heldout.fraction
    if manifest.heldout_fraction != stated:
        raise CorpusError(
            f"{uri} keeps {manifest.heldout_fraction:g} of its documents from training, "
            f"the recipe's corpus.heldout.fraction says {stated:g}",
            remedy=f"set corpus.heldout.fraction to {manifest.heldout_fraction:g}, or build the corpus again",
        )


def _check_sentences(manifest: Manifest, uri: str, recipe: Recipe) -> None:
    """Where every document is one sentence, no sentence follows another: the answer would always be "random"."""
    if recipe.objective.nsp is None or manifest.train.sentences.sum() > manifest.train.documents.sum():
        return
    raise CorpusError(
        f"{uri} has no document of two sentences, and objective.nsp asks which sentence follows another",
        remedy="build the corpus from text in which sentences end, with a newline or a mark such as . ! ? that no "
        "lower-case letter follows; or leave nsp out",
    )
