"""Checks before a run is created that its corpora are large enough for the recipe and the mixture of each phase
(`phases.N.mixture`), and that no source's training text contains held-out text of another source.

Most checks need only the manifests. For small corpora, rows are counted. Sources that hold out documents by the same
rule cannot leak into each other; where the rules differ, the texts are compared.
"""

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import permutations

from data_service.corpus.corpus import open_corpus
from data_service.corpus.manifest import HeldoutRule
from data_service.corpus.manifest_file import load_manifest
from data_service.errors import CorpusError, PlanError
from data_service.ingest.heldout_overlap import Overlap, find_overlap, rules_exclude_overlap
from data_service.printable import one_line
from data_service.samples.lanes import Lanes
from data_service.samples.packing import PackedInput
from data_service.samples.spec import StreamSpec
from data_service.samples.texts import RepeatedSentences, TextPairs
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.stream.stages import stage_weights
from data_service.stream.stream import Stream
from data_service.tokenizers.loss import WARNED_LOSS_SHARE, TextLoss, describe_loss
from data_service.tokenizers.tokenizer import Tokenizer
from launcher.errors import RecipeError
from launcher.runtime.recipe.corpora import corpora_by_name, corpus_key
from launcher.runtime.recipe.phases import is_staged
from launcher.runtime.recipe.schema import Recipe, RecipePhase
from launcher.runtime.recipe.timeline import batch_schedule, tokens_before
from launcher.runtime.run.log import record_operator_event
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import heldout_spec, stream_spec

# Rows are counted only in corpora with at most this many tokens: that takes a second or two.
MAX_COUNTED = 50_000_000
MIN_ROW_FILL = 0.85  # assumed fill of rows, which end early if the next sentence does not fit


def check_mixture(run: Run, tokenizer: Tokenizer) -> None:
    """Raise an error if `run`, which need not be stored yet, would read a source too often, or never.

    For small corpora the check is exact, because rows are counted. For others, rows are assumed to be nearly full: a
    source that is read slightly too often is refused only when training starts, after rows have been counted.

    Raises:
        PlanError, RecipeError: a source would be read more often than its phase allows, or never.
        CorpusError, StoreError: text cannot be read.
    """
    recipe = run.recipe
    if not is_staged(recipe):
        return
    sizes = {
        name: int(load_manifest(open_store(source.uri)).train.tokens.sum())
        for name, source in recipe.corpus.sources.items()
    }
    if sum(sizes.values()) <= MAX_COUNTED:
        Stream(stream_spec(run, tokenizer, len(recipe.phases) - 1))
    elif isinstance(recipe.input, PackedInput) and recipe.input.packing != "doc_sentences":
        _refuse_too_many_readings(run, tokenizer, sizes)


def _refuse_too_many_readings(run: Run, tokenizer: Tokenizer, source_tokens: dict[str, int]) -> None:
    recipe, read, step = run.recipe, dict.fromkeys(source_tokens, 0.0), 0
    for number, phase in enumerate(recipe.phases):
        tokens = MIN_ROW_FILL * (tokens_before(recipe, step + phase.steps) - tokens_before(recipe, step))
        step += phase.steps
        spec = stream_spec(run, tokenizer, number)
        shares = dict(
            zip(source_tokens, stage_weights(spec, spec.stages[-1], list(source_tokens.values())), strict=True)
        )
        most = None if phase.mixture is None else phase.mixture.most_readings
        for name, share in shares.items():
            read[name] += share * tokens / source_tokens[name]
            if share and most is not None and read[name] > most:
                raise RecipeError(
                    f"corpus.sources.{name} has {source_tokens[name]:,} tokens, and would be read about "
                    f"{read[name]:.1f} times "
                    f"by the end of phase {number}, but phases.{number}.mixture.most_readings is {most:g}",
                    remedy="give the source less weight or more text, shorten the phases, or set "
                    f"most_readings to {1.2 * read[name]:.1f}",
                )


# With tokens for this many batches, rows need not be counted: an epoch is surely larger than a batch.
PLENTY_BATCHES = 16
MAX_EPOCHS = 200  # `init` warns above this; published recipes read their text 40 to 100 times
MAX_ROWS_PER_ID = 1.5  # `init` warns if embedding rows / token ids is above this

MAX_ONE_TOKEN_SHARE = 0.99  # a corpus is refused if one token is a larger share of it


def check_token_variety(run: Run, tokenizer: Tokenizer) -> None:
    """Raise CorpusError if nearly all tokens of a source are the same. `run` need not be stored yet.

    Raises:
        CorpusError: nearly all tokens are the same, usually the unknown token.
        StoreError: a manifest cannot be read.
    """
    for name, source in run.recipe.corpus.sources.items():
        counts = load_manifest(open_store(source.uri)).unigram
        most = int(counts.argmax())
        if counts[most] < MAX_ONE_TOKEN_SHARE * counts.sum():
            continue
        raise CorpusError(
            f"corpus.sources.{name}: {counts[most] / counts.sum():.2%} of the tokens of {source.uri} are "
            f"{tokenizer.piece(most)!r}, so there is nothing to learn",
            remedy="build the corpus with a tokenizer that fits the text: maskfleet tokenizer check TOKENIZER TEXT "
            "shows what text is lost",
        )


def check_rows(run: Run, tokenizer: Tokenizer) -> None:
    """Raise an error if a batch of `run` is larger than an epoch, or a row is longer than the text.

    Raises:
        RecipeError: a batch is larger than an epoch (the remedy has the size that fits), or the text is too short for a
            row of a phase's length.
        PlanError: each batch is of one source (`mixing.batches`), and a source is too small for a batch.
        CorpusError, StoreError: blocks cannot be read.
    """
    _check_lane_lengths(run, tokenizer)
    text = _training_tokens(run)
    problems: list[str] = []
    fitting: dict[int, int] = {}
    for number, phase in enumerate(run.recipe.phases):
        counted_by_rows = isinstance(run.recipe.input, TextPairs)  # cheap: manifests have the number of pairs
        if text >= PLENTY_BATCHES * _batch_tokens(phase) and not counted_by_rows:
            continue
        batch, epoch = _batch_and_epoch_sizes(run, tokenizer, number)
        if batch > epoch:
            key, unit = ("sequences", "rows") if phase.batch.sequences else ("tokens", "tokens")
            problems.append(
                f"phases.{number}.batch.{key}: a batch of {batch:,} {unit} is larger than an epoch of the corpora "
                f"({epoch:,} {unit}, in rows of length {phase.length})"
            )
            fitting[number] = epoch
    if problems:
        raise RecipeError(
            "\n".join(problems),
            remedy=f"{_fitting_batch_options(run, fitting)} fits; or use more text, or --tiny",
        )


def run_warnings(run: Run) -> list[str]:
    """Return warnings about settings that work but are probably mistakes: very many epochs, a vocabulary much larger
    than the tokenizer's, or text that the tokenizer does not represent well."""
    found: list[str] = []
    text = _training_tokens(run)
    epochs = _epoch_count(run)
    if epochs > MAX_EPOCHS:
        found.append(
            f"the run reads its text about {epochs:,.0f} times ({text:,} tokens): give more text, or "
            "set fewer steps (phases.N.steps)"
        )
    ids = run.tokenizer().vocab_size
    rows = run.recipe.model.vocab
    if rows is not None and rows > MAX_ROWS_PER_ID * ids:
        found.append(
            f"model.vocab is {rows:,} and the tokenizer has {ids:,} ids: {rows - ids:,} rows are never used; "
            "to use the tokenizer's size: --set model.vocab=null"
        )
    for name, source in run.recipe.corpus.sources.items():
        loss = load_manifest(open_store(source.uri)).loss or TextLoss()
        found += [
            f"corpus.sources.{name}: {one_line(describe_loss(loss, kind))}"
            for kind in loss.kinds_above(WARNED_LOSS_SHARE)
        ]
    return found


def _check_lane_lengths(run: Run, tokenizer: Tokenizer) -> None:
    """Raise RecipeError if rows in lanes do not fit into a corpus. Rows of other inputs may be short."""
    if not isinstance(run.recipe.input, Lanes):
        return
    phases = (stream_spec(run, tokenizer, number) for number in range(len(run.recipe.phases)))
    for spec in (heldout_spec(run, tokenizer), *map(_without_batch_options, phases)):
        try:
            Stream(spec)
        except PlanError as error:
            raise RecipeError(
                error.problem, remedy="set shorter rows (phases.N.length), give more text, or use --tiny"
            ) from error


def _without_batch_options(spec: StreamSpec) -> StreamSpec:
    """Return the spec of the same rows without batch-dependent settings: lanes, batches of one source, stages."""
    return spec.model_copy(update={"lanes": None, "one_source": None, "stages": ()})


def _batch_and_epoch_sizes(run: Run, tokenizer: Tokenizer, number: int) -> tuple[int, int]:
    """Return the sizes of a batch and of an epoch of phase `number`, both in rows, or in tokens if its batch is so."""
    phase = run.recipe.phases[number]
    spec = stream_spec(run, tokenizer, number)
    stream = Stream(_without_batch_options(spec))
    if phase.batch.sequences is None:
        return phase.batch.tokens or 0, stream.token_axis().unit_of_sample(1, 0)
    if spec.one_source is not None and stream.samples_per_epoch >= spec.one_source:
        Stream(spec)  # raises PlanError if a source is too small for a batch
    if spec.lanes is None:
        return phase.batch.sequences, stream.samples_per_epoch
    # The source with the smallest share must have enough rows for its part of one batch.
    shares = stream.plan.epoch_layout.quotas
    weights = [source.weight for source in spec.sources if source.weight is not None] or list(shares)
    return phase.batch.sequences, math.floor(sum(shares) * min(weights) / sum(weights))


def _fitting_batch_options(run: Run, epochs: Mapping[int, int]) -> str:
    """Return `--set` options that make the batches fit into an epoch. `epochs`: size of an epoch, by phase number."""
    microbatch = min(run.recipe.microbatch_rows(run.recipe.phases[number]) for number in epochs)
    rows = [epoch for number, epoch in epochs.items() if run.recipe.phases[number].batch.sequences]
    assignments = list[str]()
    if rows and min(rows) < microbatch:
        microbatch = 1 << (min(rows).bit_length() - 1)
        assignments.append(f"--set microbatch={microbatch}")
        own = [number for number in epochs if run.recipe.phases[number].microbatch]
        assignments += [f"--set phases.{number}.microbatch=null" for number in own]
    for number, epoch in epochs.items():
        batch = f"sequences={epoch // microbatch * microbatch}" if rows else f"tokens={epoch}"
        assignments.append(f"--set phases.{number}.batch.{batch}")
    return " ".join(assignments)


def _epoch_count(run: Run) -> float:
    recipe = run.recipe
    manifests = [load_manifest(open_store(source.uri)) for source in recipe.corpus.sources.values()]
    if isinstance(recipe.input, TextPairs | RepeatedSentences):
        pairs = isinstance(recipe.input, TextPairs)
        tables = [manifest.train for manifest in manifests]
        examples = sum(int((table.documents if pairs else table.sentences).sum()) for table in tables)
        return sum(batch_schedule(recipe, phase).units_before(phase.steps) for phase in recipe.phases) / examples
    return tokens_before(recipe, recipe.total_steps) / _training_tokens(run)


def _batch_tokens(phase: RecipePhase) -> int:
    return phase.batch.tokens or (phase.batch.sequences or 0) * phase.length


def _training_tokens(run: Run) -> int:
    stores = (open_store(source.uri) for source in run.recipe.corpus.sources.values())
    return sum(int(load_manifest(store).train.tokens.sum()) for store in stores)


MAX_OVERLAP_SHARE = 0.01
"""Share of a source's held-out tokens that may be training text of another source: boilerplate occurs everywhere."""
ReportBlocks = Callable[[int, int], None]  # its arguments: blocks just read, all blocks of the pair of sources


def pairs_with_differing_rules(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the ordered pairs of sources (first, second) whose held-out rules allow that held-out text of the first is
    training text of the second.

    Raises:
        CorpusError, StoreError: a corpus cannot be read.
    """
    corpora = corpora_by_name(recipe)
    if len(corpora) < 2:
        return []
    manifests = {name: load_manifest(open_store(source.uri)) for name, source in corpora.items()}
    return [
        (one, other)
        for one, other in permutations(manifests, 2)
        if not rules_exclude_overlap(manifests[one], manifests[other])
    ]


def refuse_heldout_leaks(recipe: Recipe, report: ReportBlocks = lambda more, total: None) -> list[str]:
    """Compare the texts of sources whose held-out rules differ. Return a line about each compared pair.

    `report` is called with the number of blocks just read, and the number of blocks of the pair.

    Raises:
        CorpusError: more than `MAX_OVERLAP_SHARE` of a source's held-out tokens are training text of another source.
        CorruptBlock, StoreError: a corpus cannot be read.
    """
    lines, corpora = list[str](), corpora_by_name(recipe)
    for one, other in pairs_with_differing_rules(recipe):
        held, trained = (open_corpus(corpora[name].uri) for name in (one, other))
        found = find_overlap(held, trained, report)
        if found.token_share > MAX_OVERLAP_SHARE:
            raise _leak_error(recipe, one, other, found)
        lines.append(f"documents held out of {one} and trained on in {other}: {found.found:,} of {found.documents:,}")
    return lines


def _leak_error(recipe: Recipe, one: str, other: str, found: Overlap) -> CorpusError:
    uris = [corpora_by_name(recipe)[name].uri for name in (one, other)]
    rules = [load_manifest(open_store(uri)).effective_heldout_rule for uri in uris]
    return CorpusError(
        f"{corpus_key(other)} ({uris[1]}) trains on {found.found:,} of {found.documents:,} documents that "
        f"{corpus_key(one)} ({uris[0]}) holds out, {found.token_share:.1%} of its held-out tokens; the first is "
        f"heldout:{found.first}. Their rules differ: {_rule_text(rules[0])} and {_rule_text(rules[1])}",
        remedy=f"build one of them again with --heldout-like the other ({uris[0]} holds out more), or remove "
        f"documents that both have from {uris[1]}: `corpus prepare` finds them in the text of both",
    )


def _rule_text(rule: HeldoutRule) -> str:
    of = "" if not rule.clusters else f" of clusters {rule.clusters[:12]}"
    what = "documents" if rule.unit == "document" else f"stretches of {rule.length:,} bytes"
    by = "tokens" if rule.by_tokens else "text"
    return f"{what}{of} with hashes of their {by} below {rule.below / 2**64:.4%}"


def record_compared_sources(store: Store, lines: list[str], now: datetime) -> None:
    """Record the lines of `refuse_heldout_leaks` as an event of the run, unless nothing was compared."""
    if lines:
        record_operator_event(store, "heldout_rules", now.timestamp(), compared=True, what="; ".join(lines))
