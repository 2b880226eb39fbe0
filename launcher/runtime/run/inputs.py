"""Checks that the inputs of a run (corpora, tokenizer) fit its recipe and each other, and fingerprints them."""

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
"""Sections of a recipe with one `uri`, that of a file or folder."""


class TeacherIdentity(StrictRecord):
    """The identity of a teacher, independent of its URI.

    Attributes:
        weights: digest of the weights.
        step: step of the teacher's checkpoint; None if the teacher is a folder.
    """

    weights: str
    step: int | None = None


class Inputs(StrictRecord):
    """The fingerprints of a run's inputs. They depend on content, not on URIs.

    Attributes:
        corpora: fingerprint of each corpus, by name. The name is that of the source, unless the corpus replaces a
            source in some phase (`launcher.runtime.recipe.corpora`).
        tokenizer: hash of the tokenizer.
        teachers: identities of the teachers (`launcher.runtime.run.teachers`), in the recipe's order.
        similar_words: hash of the table of similar words; None, and absent from run.json, without a table.
        manifests: digest of each whole manifest, by name of the corpus. `corpora` covers only what decides the
            samples. The run's fingerprint does not include `manifests`.
        removals: digest of each corpus's list of removed documents when the run was created, by name of the corpus
            (`launcher.runtime.run.removals`). Corpora without removals are absent.
    """

    corpora: dict[str, str]
    tokenizer: str
    teachers: tuple[TeacherIdentity, ...] = ()
    similar_words: str | None = Field(default=None, exclude_if=not_)
    manifests: dict[str, str]
    removals: dict[str, str] = Field(default_factory=dict, exclude_if=not_)

    def named_fingerprints(self) -> dict[str, object]:
        """Return the fingerprints by the names that they have in a run's fingerprint and in diffs."""
        corpora = {f"{corpus_key(name)} (content)": value for name, value in self.corpora.items()}
        corpora |= {f"{corpus_key(name)} (removals)": value for name, value in self.removals.items()}
        files = {f"{name} (content)": value for name in FILE_SECTIONS if (value := getattr(self, name)) is not None}
        teachers = {
            f"objective.distil.teachers.{number} (weights)": teacher.weights
            for number, teacher in enumerate(self.teachers)
        }
        return {**corpora, **files, **teachers}

    def named_manifest_digests(self, other: "Inputs") -> dict[str, object]:
        """Return the digests of the manifests by the names that they have in diffs.

        Corpora whose fingerprint differs in `other` are left out, because `named_fingerprints` shows them already.
        """
        return {
            f"{corpus_key(name)} (manifest)": value
            for name, value in self.manifests.items()
            if self.corpora[name] == other.corpora.get(name)
        }


def recipe_sections(corpora: Sequence[str], tokenizer: str | None) -> dict[str, object]:
    """Return the sections `corpus` and `tokenizer` of a recipe that trains on these corpora.

    Args:
        corpora: values of the option `--corpus` (`CorpusOption`).
        tokenizer: URI of the tokenizer; None: the tokenizer of the first corpus.

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
                f"two corpora have the name {one.name}",
                remedy="give them different names: --corpus NAME=URI --corpus NAME=URI",
            )
        sources[one.name] = {"uri": one.uri, "weight": "auto" if one.weight is None else one.weight}
        shares[one.uri] = load_manifest(open_store(one.uri)).heldout_fraction
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"{uri} {share:g}" for uri, share in shares.items())
        raise CorpusError(
            f"the corpora hold out different shares of their documents: {listed}",
            remedy="build them again with the same --heldout",
        )
    uri = tokenizer or f"{given[0].uri.rstrip('/')}/{TOKENIZER_FOLDER}"
    heldout = {"fraction": next(iter(shares.values()))}
    return {"corpus": {"sources": sources, "heldout": heldout}, "tokenizer": {"uri": uri}}


def refuse_placeholders(recipe: Recipe, command: str = "maskfleet init RECIPE RUN") -> None:
    """Raise RecipeError if `recipe` still has placeholder URIs. `command`: the command line to show as the remedy."""
    values = flatten(recipe.to_data()).items()
    found = {path: value for path, value in values if str(value).startswith(PLACEHOLDER)}
    if found:
        others = [path for path in found if not path.startswith(("corpus.", "tokenizer."))]
        given = "".join(f" --set {path}=URI" for path in others)
        corpus = (
            "" if len(others) == len(found) else " --corpus URI, where URI is the output of `maskfleet corpus build`"
        )
        raise RecipeError(
            f"the recipe has placeholders in place of your own data: "
            f"{'; '.join(f'{path} = {value}' for path, value in found.items())}",
            remedy=f"{command}{given}{corpus}",
        )


def read_inputs(recipe: Recipe, tokenizer: Tokenizer) -> Inputs:
    """Check the inputs of `recipe` and return their fingerprints; teachers are not read.

    Raises:
        CorpusError: a corpus or its list of removals is absent or damaged; its held-out share is not the recipe's, or
            its held-out text is empty; it lacks the sentences that next-sentence prediction needs; its weight is too
            small for any row to be read; or the table of similar words is absent or belongs to another tokenizer.
        TokenizerError: a corpus was built with another tokenizer.
        RecipeError: the tokenizer has more ids than the model, or whole words are masked but it does not mark words.
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
    """Raise CorpusError if documents were removed from the parts of a merged corpus, but not from the merged corpus."""
    from data_service.corpus.remove import find_unapplied_removals  # imports pyarrow

    documents = find_unapplied_removals(open_corpus(uri))
    if len(documents):
        raise CorpusError(
            f"{uri} still has {len(documents):,} documents that were removed from the corpora that it was merged from",
            remedy=f"to remove them here, too: maskfleet corpus remove {shell_word(uri)} --from-parts --reason TEXT",
        )


def _similar_words_hash(recipe: Recipe, tokenizer_hash: str) -> str | None:
    """Check the table of similar words and return its hash; None if the recipe has no table."""
    if recipe.similar_words is None:
        return None
    return describe_similar_words_table(recipe.similar_words.uri, tokenizer_hash).hash


def _check_phase_corpora(recipe: Recipe, manifests: Mapping[str, CorpusManifest]) -> None:
    """Raise CorpusError if a corpus that replaces a source in some phase is not that source's corpus plus appended
    text: the id of a document, such as `news:12`, must mean the same document in both."""
    parts = {
        name: [part.digest for part in manifest.parts] or [manifest.digest] for name, manifest in manifests.items()
    }
    corpora, before = corpora_by_name(recipe), {name: name for name in recipe.corpus.sources}
    for name, source in corpora.items():
        former = before[corpus_source(name)]
        if parts[name][: len(parts[former])] != parts[former]:
            raise CorpusError(
                f"{corpus_key(name)}: {source.uri} must be the corpus that it replaces plus appended text, but it "
                f"does not begin with {corpora[former].uri}",
                remedy="make it with `maskfleet corpus append`, or give the recipe both corpora as sources",
            )
        before[corpus_source(name)] = name


def _check_masking_units(recipe: Recipe, manifests: Mapping[str, CorpusManifest]) -> None:
    """Raise CorpusError if phrases or entities are masked, but a corpus was built without a lexicon."""
    levels = [() if manifest.words is None else manifest.words.levels for manifest in manifests.values()]
    uris = {name: source.uri for name, source in corpora_by_name(recipe).items()}
    for phase in recipe.phases:
        mlm = recipe_in_phase(recipe, phase).objective.mlm
        if mlm is not None:
            check_unit_levels(mlm.unit, uris, levels)


def unigram_probabilities(recipe: Recipe) -> NDArray[np.float64]:
    """Return [V] float64, the frequency of each token id in the training text of all sources. Add-one smoothing: no
    frequency is 0."""
    stores = [open_store(source.uri) for source in recipe.corpus.sources.values()]
    counts = np.sum([load_manifest(store).unigram for store in stores], axis=0, dtype=np.float64) + 1
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def _check_corpus_text(manifest: CorpusManifest, uri: str, recipe: Recipe, tokenizer_hash: str) -> None:
    """Raise TokenizerError if the tokenizers differ; CorpusError if `input` does not fit, or no text is held out."""
    if manifest.tokenizer_hash != tokenizer_hash:
        raise TokenizerError(
            f"{uri} was built with another tokenizer ({manifest.tokenizer_hash[:12]}) than the recipe's, "
            f"{recipe.tokenizer.uri} ({tokenizer_hash[:12]})",
            remedy=f"set tokenizer.uri to {uri.rstrip('/')}/tokenizer, or build the corpus again",
        )
    check_corpus_kind(manifest, uri, recipe.input)
    if not manifest.heldout.tokens.sum():
        raise CorpusError(
            f"{uri} has no held-out text, which evaluation needs",
            remedy="build the corpus again, in another folder: some text is then held out even of a small corpus",
        )


def _check_corpus(manifest: CorpusManifest, uri: str, recipe: Recipe, tokenizer_hash: str) -> None:
    """Raise as `_check_corpus_text`; CorpusError if the held-out share is not the recipe's."""
    _check_corpus_text(manifest, uri, recipe, tokenizer_hash)
    configured_fraction = recipe.corpus.heldout.fraction
    if manifest.heldout_fraction != configured_fraction:
        raise CorpusError(
            f"{uri} holds out {manifest.heldout_fraction:g} of its documents, but the recipe's "
            f"corpus.heldout.fraction is {configured_fraction:g}",
            remedy=f"set corpus.heldout.fraction to {manifest.heldout_fraction:g}, or build the corpus again",
        )


def _check_before_text(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raise CorpusError or TokenizerError if the corpus of `evaluation.before` does not fit the run's tokenizer and
    input. That corpus is not among the run's fingerprinted inputs."""
    if recipe.evaluation.before is not None:
        uri = recipe.evaluation.before.uri
        manifest = load_manifest(open_store(uri))
        _check_corpus_text(manifest, uri, recipe, tokenizer.hash)
        check_languages(manifest, uri, recipe.input, "before", 0)


def _check_sentences(manifest: CorpusManifest, uri: str, recipe: Recipe) -> None:
    """Raise CorpusError if the objective has next-sentence prediction, but every document is a single sentence: there
    would be no pairs of consecutive sentences."""
    if recipe.objective.nsp is None or manifest.train.sentences.sum() > manifest.train.documents.sum():
        return
    raise CorpusError(
        f"{uri} has no document of two or more sentences, which objective.nsp needs",
        remedy="build the corpus from text whose sentences end with a newline, or with a mark such as . ! ? that no "
        "lower-case letter follows; or remove nsp from the objective",
    )


def _check_source_weights(recipe: Recipe, manifests: list[CorpusManifest]) -> None:
    """Raise CorpusError if the weight of a source is so small that none of its rows would be read.

    Rows have not been counted yet, so the largest possible number is assumed: a row for each sentence, and more for
    sentences longer than a row. When training starts, rows are counted, and the check is repeated exactly.
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
                remedy=f"set corpus.sources.{name}.weight to {least:.2g} or more, or remove the source",
            )
