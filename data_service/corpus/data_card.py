"""The data card of a corpus: amount, sources and licences of its text, how it was filtered, and what was removed.

The card is made from the manifest and the lists of removed documents, so it cannot be out of date.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from data_service.corpus.corpus import Corpus, open_part
from data_service.corpus.manifest import BlockTable
from data_service.corpus.origin import IndexedSplit, Origin, PreparedInput, StageCounts, by_count
from data_service.corpus.removals import load_removals
from data_service.formats import StrictRecord
from data_service.printable import mask_secrets, one_line
from data_service.tokenizers.loss import KINDS, TextLoss, describe_loss

_LISTED_VALUES = 50  # largest number of a field's values (such as sources) in a table of the card
_LISTED_PATTERNS = 20  # largest number of input patterns in a card


class Amount(StrictRecord):
    """An amount of text, in documents and tokens."""

    documents: int
    tokens: int


class CardRemoval(StrictRecord):
    """One removal of documents. `at`: its time in seconds since 1970."""

    at: int
    reason: str
    removed: Amount


class BuiltPart(StrictRecord):
    """The facts about one built corpus: the card's own, or one of the corpora that were merged into it.

    Attributes:
        uri: URI of the built corpus.
        digest: digest of its manifest.
        inputs: files, folders and globs that it was built from.
        input_files, input_bytes: number and total size of the input files.
        counts: numbers of documents read, left out and the like.
        origin: where the text is from; None if that was not recorded.
        loss: characters that the tokenizer cannot represent; None if the build did not count them.
    """

    uri: str
    digest: str
    inputs: list[str]
    input_files: int
    input_bytes: int
    counts: dict[str, int]
    origin: Origin | None
    loss: TextLoss | None


class DataCard(StrictRecord):
    """The facts that the data card of a corpus shows.

    Attributes:
        uri: URI of the corpus when the card was made.
        fingerprint: hash of everything that a training run reads; `digest`: hash of the whole manifest.
        tokenizer: hash of the tokenizer.
        train, heldout: amounts of text, removed text included.
        built: facts about each built corpus: one, or several if the corpus was merged.
        removals: removals of documents since the corpus was built.
    """

    uri: str
    fingerprint: str
    digest: str
    tokenizer: str
    train: Amount
    heldout: Amount
    built: list[BuiltPart]
    removals: list[CardRemoval]

    @property
    def has_facts_beyond_inputs(self) -> bool:
        """Whether the origin of some text is recorded, or documents were removed."""
        return bool(self.removals) or any(part.origin is not None for part in self.built)

    @property
    def searched_splits(self) -> list[IndexedSplit]:
        """The splits of evaluation tasks whose texts were looked for in every document."""
        first, *others = ([] if part.origin is None else part.origin.searched_splits for part in self.built)
        return [split for split in first if all(split in other for other in others)]


def make_card(corpus: Corpus) -> DataCard:
    """Return the card of a corpus. Raises CorpusError, StoreError: a part's manifest or the list of removals cannot be
    read, or a part was rebuilt since the merge."""
    manifest, store = corpus.manifest, corpus.store
    chain = load_removals(store, manifest)
    removals = [
        CardRemoval(
            at=int(removal.at),
            reason=removal.reason,
            removed=Amount(documents=len(removal), tokens=removal.token_count),
        )
        for removal in chain.removals
    ]
    return DataCard(
        uri=store.uri,
        fingerprint=manifest.fingerprint,
        digest=manifest.digest,
        tokenizer=manifest.tokenizer_hash,
        train=_split_amount(manifest.train),
        heldout=_split_amount(manifest.heldout),
        built=list(_built_parts(corpus)),
        removals=removals,
    )


def _split_amount(table: BlockTable) -> Amount:
    return Amount(documents=int(table.documents.sum()), tokens=int(table.tokens.sum()))


def _built_parts(corpus: Corpus) -> Iterator[BuiltPart]:
    """Yield the corpus itself, or the corpora from which it was merged."""
    manifest = corpus.manifest
    if manifest.parts:
        for number in range(len(manifest.parts)):
            yield from _built_parts(open_part(corpus, number))
        return
    options = manifest.options
    patterns = options.get("inputs")
    yield BuiltPart(
        uri=corpus.store.uri,
        digest=manifest.digest,
        inputs=[str(one) for one in patterns] if isinstance(patterns, list) else [],
        input_files=_int_or_zero(options.get("input_files")),
        input_bytes=_int_or_zero(options.get("input_bytes")),
        counts=manifest.counts,
        origin=manifest.origin,
        loss=manifest.loss,
    )


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def render_markdown(card: DataCard, title: str, level: int = 1) -> str:
    """Return the card as Markdown. `level`: level of the card's heading; its sections are one level below."""
    head = "#" * level
    lines = [
        f"{head} {_escape_cell(title)}\n",
        *_corpus_lines(card),
        *(line for part in card.built for line in _part_lines(part, f"{head}#", named=len(card.built) > 1)),
        *_removal_lines(card, f"{head}#"),
    ]
    return "\n".join(lines) + "\n"


def _corpus_lines(card: DataCard) -> Iterator[str]:
    yield from _table_lines(
        ("", "documents", "tokens"),
        [
            ("training", card.train.documents, card.train.tokens),
            ("held out", card.heldout.documents, card.heldout.tokens),
        ],
    )
    yield f"Fingerprint `{card.fingerprint}`, manifest `{card.digest}`, tokenizer `{card.tokenizer}`.\n"
    yield f"{_searched_splits_text(card.searched_splits)}\n"


def _searched_splits_text(splits: Sequence[IndexedSplit]) -> str:
    if not splits:
        return "The text was not searched for texts of evaluation sets, or only a part of it was."
    named = ", ".join(f"{_escape_cell(one.split)} ({one.looked_up:,} of {one.texts:,} texts)" for one in splits)
    return f"No document of it holds a text of these evaluation sets, as far as shared word n-grams show: {named}."


def _part_lines(part: BuiltPart, head: str, *, named: bool) -> Iterator[str]:
    """Yield the section on one built corpus. `head`: Markdown heading mark; `named`: whether it holds the URI."""
    yield f"{head} {f'Built at {_escape_cell(part.uri)}' if named else 'Inputs'}\n"
    files = ", ".join(f"`{_escape_cell(one)}`" for one in part.inputs[:_LISTED_PATTERNS])
    more = f" and {len(part.inputs) - _LISTED_PATTERNS:,} more" if len(part.inputs) > _LISTED_PATTERNS else ""
    yield f"{part.input_files:,} files, {part.input_bytes:,} bytes: {files}{more}.\n"
    counts = [(name.replace("_", " "), count) for name, count in part.counts.items() if count]
    yield from _table_lines(("at the build", ""), counts)
    if part.loss is not None:
        lost = [describe_loss(part.loss, kind) for kind in KINDS if kind in part.loss.lost]
        sentences = [f"{_escape_cell(one)}." for one in lost] or ["The tokenizer loses no character of it."]
        yield "\n\n".join(sentences) + "\n"
    if part.origin is None:
        yield "It is not recorded where the documents are from.\n"
        return
    for field, values in part.origin.values.items():
        yield f"{head}# Training text by {field}\n"
        rows = [(value or "(none)", *counts) for value, counts in list(values.items())[:_LISTED_VALUES]]
        yield from _table_lines((field, "documents", "tokens"), rows)
        if len(values) > _LISTED_VALUES:
            yield f"and {len(values) - _LISTED_VALUES:,} more\n"
    for prepared in part.origin.prepared:
        yield from _preparation_lines(prepared, f"{head}#")
    if part.origin.prepared and part.origin.unprepared:
        yield f"{part.origin.unprepared:,} other files were not prepared.\n"


def _preparation_lines(prepared: PreparedInput, head: str) -> Iterator[str]:
    yield f"{head} Prepared at {_escape_cell(prepared.uri)}\n"
    partly = "" if prepared.files == prepared.all_files else f", of which {prepared.files:,} files were read"
    yield (
        f"{prepared.documents_kept:,} of {prepared.documents_read:,} documents were kept, in {prepared.all_files:,} "
        f"files{partly}. Statistics `{prepared.digest}`.\n"
    )
    sources = [(name, source.documents, ", ".join(source.files)) for name, source in prepared.sources.items()]
    yield from _table_lines(("source", "documents kept", "files"), sources)
    settings: list[Mapping[str, object]] = [{}, *prepared.settings]
    stages = [
        (
            stage.stage,
            stage.entered,
            _format_counts(stage.dropped),
            _format_changed_count(stage),
            _format_settings(chosen),
        )
        for stage, chosen in zip(prepared.stages, settings, strict=False)
    ]
    yield from _table_lines(("stage", "documents", "dropped", "changed", "settings"), stages)
    if prepared.searched:
        found = [(one.split, one.texts, one.looked_up, one.digest) for one in prepared.searched]
        yield from _table_lines(("evaluation texts searched for", "texts", "looked up", "digest"), found)


def _format_changed_count(stage: StageCounts) -> str:
    """Return how many documents a stage changed and, by reason, how many of them it shortened."""
    return f"{stage.changed:,}{f' ({_format_counts(stage.cut)})' if stage.cut else ''}"


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in by_count(counts))


def _format_settings(chosen: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in chosen.items() if name != "stage"
    )


def _removal_lines(card: DataCard, head: str) -> Iterator[str]:
    if not card.removals:
        return
    yield f"{head} Removed since\n"
    rows = [
        (_format_time(removal.at), removal.removed.documents, removal.removed.tokens, removal.reason)
        for removal in card.removals
    ]
    yield from _table_lines(("time", "documents", "tokens", "reason"), rows)


def _format_time(unix_seconds: int) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table_lines(heads: Sequence[str], rows: Sequence[Sequence[str | int]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(map(_escape_cell, row))} |" for row in rows[:-1])
    yield f"| {' | '.join(map(_escape_cell, rows[-1]))} |\n"


def _escape_cell(value: str | int) -> str:
    """Return a value as text for a Markdown table cell: secrets masked, `|`, `<` and line ends escaped."""
    if isinstance(value, int):
        return f"{value:,}"
    return one_line(mask_secrets(value)).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
