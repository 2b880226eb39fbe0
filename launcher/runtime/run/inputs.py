"""Checks the inputs of a run, its corpora and its tokenizer, against the recipe and each other, and fingerprints
them."""

from collections.abc import Mapping, Sequence
from operator import not_

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import TOKENIZER_FOLDER, CorpusManifest
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.removals import load_removals
from data_service.errors import CorpusError, TokenizerError
from data_service.formats import StrictRecord
from data_service.printable import shell_word
from data_service.samples.similar_words import describe_similar_words_table
from data_service.store.open import open_store
from data_service.stream.mixture import min_weight, unread_sources
from data_service.stream.sources import check_corpus_kind, check_languages, check_unit_levels
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RecipeError
from launcher.runtime.recipe.checks import tokenizer_issues
from launcher.runtime.recipe.corpora import corpora_by_name, corpus_key, corpus_source
from launcher.runtime.recipe.identity import flatten
from launcher.runtime.recipe.parts import CorpusOption
from launcher.runtime.recipe.phases import recipe_in_phase
from launcher.runtime.recipe.schema import PLACEHOLDER, Recipe

FILE_SECTIONS = ("tokenizer", "similar_words")
"""Sections of a recipe that name one file or folder by its `uri`."""


class TeacherIdentity(StrictRecord):
    """The identity of a teacher, independent of its URI.

    Attributes:
        weights: digest of the weights.
        step: step of the commit, if the teacher is a run's.
    """

    weights: str
    step: int | None = None


class Inputs(StrictRecord):
    """The fingerprints of a run's inputs. They depend on the content only.

    Attributes:
        corpora: fingerprint of the manifest, by name of the corpus (`launcher.runtime.recipe.corpora`), which is that
            of the source, unless a phase reads another corpus in its place.
        tokenizer: hash of the tokenizer.
        teachers: identities of the teachers (`launcher.runtime.run.teachers`), in the recipe's order.
        similar_words: hash of the table of similar words. If there is none, the record has no such field.
        manifests: digest of the whole manifest, by name of the source. `corpora` covers only what decides the samples.
            The run's fingerprint does not cover it.
        removals: digest up to which removals are left out, by name of the source, where anything was removed when the
            run was made (`launcher.runtime.run.removals`). If nothing was, the record has no such field.
    """

    corpora: dict[str, str]
    tokenizer: str
    teachers: tuple[TeacherIdentity, ...] = ()
    similar_words: str | None = Field(default=None, exclude_if=not_)
    manifests: dict[str, str]
    removals: dict[str, str] = Field(default_factory=dict, exclude_if=not_)

    def named_fingerprints(self) -> dict[str, object]:
        """Return the fingerprints under the names that a run's fingerprint and diffs between runs use."""
        corpora = {f"{corpus_key(name)} (content)": value for name, value in self.corpora.items()}
        corpora |= {f"{corpus_key(name)} (removals)": value for name, value in self.removals.items()}
        files = {f"{name} (content)": value for name in FILE_SECTIONS if (value := getattr(self, name)) is not None}
        teachers = {
            f"objective.distil.teachers.{number} (weights)": teacher.weights
            for number, teacher in enumerate(self.teachers)
        }
        return {**corpora, **files, **teachers}

    def named_manifest_digests(self, other: "Inputs") -> dict[str, object]:
        """Return the digests of the manifests, under the names that diffs use.

        Left out are sources of which `other` has other content, which `named_fingerprints` shows.
        """
        return {
            f"{corpus_key(name)} (manifest)": value
            for name, value in self.manifests.items()
            if self.corpora[name] == other.corpora.get(name)
        }


def recipe_sections(corpora: Sequence[str], tokenizer: str | None) -> dict[str, object]:
    """Return the sections `corpus` and `tokenizer` of a recipe that trains on these corpora, from what their
    manifests say.

    Args:
        corpora: values of the option `--corpus`, see `CorpusOption`.
        tokenizer: URI of the tokenizer. None: that of the first corpus.

    Raises:
        RecipeError: two corpora have the same name.
        CorpusError: a URI holds no corpus, or the corpora have different held-out shares.
        StoreError: a store cannot be read.
    """
    given = [CorpusOption.parse(text) for text in corpora]
    sources: dict[str, object] = {}
    shares: dict[str, float] = {}
    for one in given:
        if one.name in sources:
            raise RecipeError(
                f"two corpora are called {one.name}",
                remedy="give them names: --corpus NAME=URI --corpus NAME=URI",
            )
        sources[one.name] = {"uri": one.uri, "weight": "auto" if one.weight is None else one.weight}
        shares[one.uri] = load_manifest(open_store(one.uri)).heldout_fraction
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"{uri} {share:g}" for uri, share in shares.items())
        raise CorpusError(
            f"the corpora hold out different shares of their documents: {listed}",
            remedy="build them with the same --heldout",
        )
    uri = tokenizer or f"{given[0].uri.rstrip('/')}/{TOKENIZER_FOLDER}"
    heldout = {"fraction": next(iter(shares.values()))}
    return {"corpus": {"sources": sources, "heldout": heldout}, "tokenizer": {"uri": uri}}


def refuse_placeholders(recipe: Recipe, command: str = "maskfleet init RECIPE RUN") -> None:
    """Raise RecipeError if `recipe` still names an example bucket in place of the user's own."""
    values = flatten(recipe.to_data()).items()
    found = {path: value for path, value in values if str(value).startswith(PLACEHOLDER)}
    if found:
        others = [path for path in found if not path.startswith(("corpus.", "tokenizer."))]
        given = "".join(f" --set {path}=URI" for path in others)
        corpus = (
            "" if len(others) == len(found) else " --corpus URI, with the URI of what `maskfleet corpus build` wrote"
        )
        raise RecipeError(
            f"the recipe has placeholders where your own data belong: "
            f"{'; '.join(f'{path} = {value}' for path, value in found.items())}",
            remedy=f"{command}{given}{corpus}",
        )


def read_inputs(recipe: Recipe, tokenizer: Tokenizer) -> Inputs:
    """Check the inputs of `recipe` and return their fingerprints; teachers are not read.

    Raises:
        CorpusError: a corpus or its list of removals is absent or damaged; it has another held-out share or no held-out
            text, lacks the sentences that next-sentence prediction needs, or has so small a weight that it is never
            read; or the table of similar words is absent or of another tokenizer.
        TokenizerError: a corpus was built with another tokenizer.
        RecipeError: the tokenizer has more ids than the model, or does not mark words although words are masked.
        StoreError: a store cannot be read.
    """
    problems = tokenizer_issues(recipe, tokenizer)
    if problems:
        raise RecipeError(
            "\n".join(f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in problems),
            remedy="; ".join(problem.remedy for problem in problems),
        )
    corpora: dict[str, str] = {}
    digests: dict[str, str] = {}
    removals: dict[str, str] = {}
    manifests: dict[str, CorpusManifest] = {}
    for name, source in corpora_by_name(recipe).items():
        store = open_store(source.uri)
        manifest = load_manifest(store)
        _check_corpus(manifest, source.uri, recipe, tokenizer.hash)
        check_languages(manifest, source.uri, recipe.input, name, len(source.languages))
        _check_sentences(manifest, source.uri, recipe)
        corpora[name], digests[name] = manifest.fingerprint, manifest.digest
        removals[name] = load_removals(store, manifest).digest
        if manifest.parts:
            _refuse_unmerged_removals(source.uri)
        manifests[name] = manifest
    _check_phase_corpora(recipe, manifests)
    _check_source_weights(recipe, [manifests[name] for name in recipe.corpus.sources])
    _check_masking_units(recipe, manifests)
    _check_before_text(recipe, tokenizer)
    return Inputs(
        corpora=corpora,
        tokenizer=tokenizer.hash,
        similar_words=_similar_words_hash(recipe, tokenizer.hash),
        manifests=digests,
        removals={name: digest for name, digest in removals.items() if digest},
    )


def _refuse_unmerged_removals(uri: str) -> None:
    """Raise CorpusError if documents were removed from parts of a merged corpus, but not from itself."""
    from data_service.corpus.remove import find_unapplied_removals  # imports pyarrow

    documents = find_unapplied_removals(open_corpus(uri))
    if len(documents):
        raise CorpusError(
            f"{uri} has {len(documents):,} documents that were removed from the corpora that it was merged from",
            remedy=f"maskfleet corpus remove {shell_word(uri)} --from-parts --reason TEXT removes them here, too",
        )


def _similar_words_hash(recipe: Recipe, tokenizer_hash: str) -> str | None:
    """Check the table of similar words and return its hash; None if the recipe has no table."""
    if recipe.similar_words is None:
        return None
    return describe_similar_words_table(recipe.similar_words.uri, tokenizer_hash).hash


def _check_phase_corpora(recipe: Recipe, manifests: Mapping[str, CorpusManifest]) -> None:
    """Refuse a corpus that has not grown from the one in whose place a phase reads it: `news:12` is one document."""
    parts = {
        name: [part.digest for part in manifest.parts] or [manifest.digest] for name, manifest in manifests.items()
    }
    corpora, before = corpora_by_name(recipe), {name: name for name in recipe.corpus.sources}
    for name, source in corpora.items():
        former = before[corpus_source(name)]
        if parts[name][: len(parts[former])] != parts[former]:
            raise CorpusError(
                f"{corpus_key(name)}: {source.uri} has not grown from the corpus in whose place it is read, "
                f"{corpora[former].uri}",
                remedy="make it with `maskfleet corpus append`, or give the recipe both as sources",
            )
        before[corpus_source(name)] = name


def _check_masking_units(recipe: Recipe, manifests: Mapping[str, CorpusManifest]) -> None:
    """Refuse to mask phrases or entities in corpora that were built without a lexicon."""
    levels = [() if manifest.words is None else manifest.words.levels for manifest in manifests.values()]
    uris = {name: source.uri for name, source in corpora_by_name(recipe).items()}
    for phase in recipe.phases:
        mlm = recipe_in_phase(recipe, phase).objective.mlm
        if mlm is not None:
            check_unit_levels(mlm.unit, uris, levels)


def unigram_probabilities(recipe: Recipe) -> NDArray[np.float64]:
    """Return [V], the frequency of each id in the training text of all sources. Each id is counted once more than it
    occurs, so that no frequency is 0."""
    stores = [open_store(source.uri) for source in recipe.corpus.sources.values()]
    counts = np.sum([load_manifest(store).unigram for store in stores], axis=0, dtype=np.float64) + 1
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def _check_corpus_text(manifest: CorpusManifest, uri: str, recipe: Recipe, tokenizer_hash: str) -> None:
    if manifest.tokenizer_hash != tokenizer_hash:
        raise TokenizerError(
            f"{uri} was built with another tokenizer ({manifest.tokenizer_hash[:12]}) than "
            f"{recipe.tokenizer.uri} ({tokenizer_hash[:12]})",
            remedy=f"set tokenizer.uri to {uri.rstrip('/')}/tokenizer, or build the corpus again",
        )
    check_corpus_kind(manifest, uri, recipe.input)
    if not manifest.heldout.tokens.sum():
        raise CorpusError(
            f"{uri} has no held-out text, which evaluation needs",
            remedy="build the corpus again, in another folder: text is then held out however little there is",
        )


def _check_corpus(manifest: CorpusManifest, uri: str, recipe: Recipe, tokenizer_hash: str) -> None:
    _check_corpus_text(manifest, uri, recipe, tokenizer_hash)
    configured_fraction = recipe.corpus.heldout.fraction
    if manifest.heldout_fraction != configured_fraction:
        raise CorpusError(
            f"{uri} holds out {manifest.heldout_fraction:g} of its documents, but the recipe's "
            f"corpus.heldout.fraction is {configured_fraction:g}",
            remedy=f"set corpus.heldout.fraction to {manifest.heldout_fraction:g}, or build the corpus again",
        )


def _check_before_text(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse an `evaluation.before` that rows like those of the run cannot be made of. It is no input of the run."""
    if recipe.evaluation.before is not None:
        uri = recipe.evaluation.before.uri
        manifest = load_manifest(open_store(uri))
        _check_corpus_text(manifest, uri, recipe, tokenizer.hash)
        check_languages(manifest, uri, recipe.input, "before", 0)


def _check_sentences(manifest: CorpusManifest, uri: str, recipe: Recipe) -> None:
    """Refuse next-sentence prediction if every document is a single sentence: no sentence follows another, so the
    answer would always be "random"."""
    if recipe.objective.nsp is None or manifest.train.sentences.sum() > manifest.train.documents.sum():
        return
    raise CorpusError(
        f"{uri} has no document of two sentences, but objective.nsp asks which sentence follows another",
        remedy="build the corpus from text in which sentences end, with a newline or a mark such as . ! ? that no "
        "lower-case letter follows; or leave nsp out",
    )


def _check_source_weights(recipe: Recipe, manifests: list[CorpusManifest]) -> None:
    """Refuse a source with so small a weight that none of its rows would be read.

    Rows are not counted yet, so the largest possible number is assumed: a row for each sentence, and more for sentences
    longer than a row of the phase. Smaller sources that pass this check are refused when training starts.
    """
    if recipe.mixing.batches == "one_source":
        return
    sources = list(recipe.corpus.sources.items())
    weights = [source.weight for _, source in sources if source.weight != "auto"]
    for index, phase in enumerate(recipe.phases if weights else ()):
        tables = [manifest.train for manifest in manifests]
        most = sum(int(table.sentences.sum() + table.tokens.sum() // (phase.length - 3)) for table in tables)
        rows = most * recipe.input.cut_count
        for number, why in unread_sources(weights, rows).items():
            name, source = sources[number]
            least = min_weight(weights, number, rows)
            raise CorpusError(
                f"corpus.sources.{name} ({source.uri}) in phase {index}: {why}",
                remedy=f"set corpus.sources.{name}.weight to {least:.2g} or more, or leave the source out",
            )
