"""`build_corpus` turns raw text into a corpus of shards, in two passes over splits of the input (one split a task).

1. Big files that are compressed or in another encoding than UTF-8 are measured, so that they can be cut into splits
   like others (`streamed.py`).
2. The first pass hashes every document (`scan.py`). The hashes are compared, one range at a time
   (`deduplicate.py`), and then the held-out text is chosen (`heldout.py`).
3. The second pass tokenises the documents that are not copies of earlier ones (`write.py`). The manifest comes last
   (`configuration.py`).

Every task is a pure function of the inputs and the options, and stores a receipt when it is done. So any number of
workers writes the same bytes, and an interrupted build repeats only tasks without a receipt.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from data_service.corpus.manifest import (
    CONFIGURATION_KEY,
    SHARD_FOLDERS,
    TOKENIZER_FOLDER,
    BuildLayout,
    CorpusManifest,
    HeldoutRule,
    PairTexts,
)
from data_service.corpus.manifest_file import save_manifest
from data_service.corpus.words import Segmentation, resolve_segmentation
from data_service.errors import CorpusError, InputError, TokenizerError
from data_service.ingest.configuration import (
    FILE_VERSIONS_ENTRY,
    Configuration,
    assemble_manifest,
    check_provenance_patterns,
    check_skipped_records,
    check_text_unchanged,
    claim_output,
    identity_hash,
    make_configuration,
)
from data_service.ingest.deduplicate import (
    CompareReceipt,
    FindStretchesReceipt,
    FindStretchesTask,
    KeptDocuments,
    compare_partition,
    find_drop_ranges,
    find_split_stretches,
    plan_partitions,
    sum_document_figures,
)
from data_service.ingest.documents import find_cluster_mismatch
from data_service.ingest.heldout import (
    DocumentFigures,
    heldout_rule_by_documents,
    heldout_rule_by_queries,
    heldout_rule_by_stretches,
)
from data_service.ingest.identifiers import RepeatedIdsReceipt, find_repeated_ids, plan_id_tasks, refuse_repeated_ids
from data_service.ingest.inputs import InputFile, InputListing, list_inputs, refuse_inputs_in_output
from data_service.ingest.options import BuildOptions
from data_service.ingest.origin import read_origin
from data_service.ingest.pool import (
    Progress,
    ReportProgress,
    StageRunner,
    WorkerPool,
    remove_build_files,
    remove_foreign_objects,
)
from data_service.ingest.scan import ScanReceipt, ScanTask, scan_split
from data_service.ingest.tasks import hash_strings, plan_splits, streamed_files
from data_service.ingest.write import WriteReceipt, WriteTask, write_split
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.loss import TextLoss, check_text_loss
from data_service.tokenizers.tokenizer import Tokenizer

_LOSS_CHECK_SPLITS = 4  # splits written first, so that an unsuitable tokenizer is noticed early


def build_corpus(
    inputs: list[str],
    output: str,
    tokenizer: str,
    options: BuildOptions,
    progress: ReportProgress,
    *,
    constants_must_match: bool = True,
) -> CorpusManifest:
    """Build a corpus and return its manifest. Continue a half-built corpus; if it is complete, only return the
    manifest.

    Word files (`options.words`) are copied into the output, so that workers need not reach the originals.

    Args:
        inputs: files, folders and globs, local or s3://. Of equal documents the first in this order is kept.
        output: folder or s3:// prefix for the corpus alone. All workers must be able to reach it.
        tokenizer: folder of the tokenizer, whose files are copied into the corpus.
        options: options of the build.
        progress: function that is called in this process as tasks finish.
        constants_must_match: whether each pattern of inputs with constant provenance must match an input.

    Raises:
        InputError: inputs are missing, empty, too small to hold any text out, or not valid text. The message names the
            file and the place in it.
        CorpusError: `output` holds another corpus, or no document is left to train on.
        TokenizerError: the tokenizer cannot be used.
        StoreError: a store cannot be used.
    """
    store = open_store(output)
    listing = list_inputs(inputs, options.encoding)
    refuse_inputs_in_output(store, listing)
    if constants_must_match:
        check_provenance_patterns(listing, options)
    encoder = load_tokenizer(tokenizer, options.tokenizer_rules)
    words, word_files = resolve_segmentation(options.words) if options.words is not None else (None, {})
    wanted = make_configuration(inputs, listing, encoder.hash, options, words)
    made = _Build(store, listing, wanted, options, progress)
    manifest = claim_output(store, wanted)
    if manifest is not None:
        made.check_finished(manifest)
    else:
        try:
            manifest = made.write_corpus(encoder, words, word_files)
        except KeyMissing:
            # Another process may have finished the same build meanwhile and deleted its intermediate files.
            manifest = claim_output(store, wanted)
            if manifest is None:
                raise
        except (InputError, TokenizerError):
            # After a user's mistake the output is released, because the corrected build may have another
            # configuration. The receipts stay: if bad records are now skipped, or a file is corrected at the same
            # size, the build is still the same. A different build deletes them (`StageRunner`).
            store.delete(CONFIGURATION_KEY)
            raise
    remove_build_files(store, progress)
    return manifest


@dataclass(frozen=True)
class _Build:
    """A build of the files of `listing` into `store`."""

    store: Store
    listing: InputListing
    configuration: Configuration
    options: BuildOptions
    progress: ReportProgress

    def write_corpus(
        self, tokenizer: Tokenizer, words: Segmentation | None, word_files: Mapping[str, bytes]
    ) -> CorpusManifest:
        """Write the corpus; return its manifest."""
        origin = read_origin(self.listing.files)
        with self._open_passes() as passes:
            scanned = passes.scan()
            heldout, kept = passes.choose_heldout(scanned)
            save_tokenizer(tokenizer, self.store.with_prefix(TOKENIZER_FOLDER).uri)
            for name, content in word_files.items():
                self.store.put(passes.layout.words_key(name), content)
            written = passes.write_shards(kept, heldout, tokenizer.hash, words)
        manifest = assemble_manifest(
            passes.layout,
            options=self.configuration,
            tokenizer=tokenizer,
            scanned=scanned,
            written=written,
            listing=self.listing,
            heldout_rule=heldout,
            origin=origin,
            progress=self.progress,
        )
        pairs = None if self.options.pairs is None else PairTexts(self.options.pairs.count)
        manifest = replace(manifest, pairs=pairs, words=words)
        remove_foreign_objects(self.store, SHARD_FOLDERS, {**manifest.shard_sizes, **manifest.provenance})
        save_manifest(self.store, manifest)
        return manifest

    def check_finished(self, manifest: CorpusManifest) -> None:
        """Check that the complete corpus is what this build would write. Raises CorpusError: bad records were left out
        of the corpus, which this build refuses; or the text of the inputs has changed."""
        check_skipped_records(self.store, manifest, self.options)
        if manifest.options.get(FILE_VERSIONS_ENTRY) != self.configuration[FILE_VERSIONS_ENTRY]:
            self._check_rewritten_inputs(manifest)
        shards, size = len(manifest.shard_sizes), sum(manifest.shard_sizes.values())
        self.progress(Progress("already built", shards, shards, size, size))

    def _check_rewritten_inputs(self, manifest: CorpusManifest) -> None:
        """Read the inputs again; raise CorpusError if their text is no longer that of the complete corpus."""
        with self._open_passes() as passes:
            scanned = passes.scan()
        try:
            check_text_unchanged(self.store, manifest, passes.splits, scanned)
        except CorpusError:
            remove_build_files(self.store, self.progress)
            raise

    @contextmanager
    def _open_passes(self) -> "Iterator[BuildPasses]":
        """Yield the passes of the build. Their workers are stopped when the `with` block ends."""
        files, options = self.listing.files, self.options
        with WorkerPool(options.workers, options.split_bytes if streamed_files(files, options) else 0) as pool:
            layout = BuildLayout(self.store.uri, identity_hash(self.configuration))
            yield BuildPasses(StageRunner(layout, pool, self.progress), files, options)


class BuildPasses:
    """The passes over the splits. Call `scan`, `choose_heldout` and `write_shards` in this order.

    Attributes:
        splits: splits of the input.

    Raises:
        InputError: from all methods: the text is not valid. If the build is continued after the text was corrected,
            only the tasks that depend on it are repeated.
    """

    def __init__(self, runner: StageRunner[BuildLayout], files: tuple[InputFile, ...], options: BuildOptions) -> None:
        self._options = options
        sizes, self._runner = runner.measure_streamed_files(streamed_files(files, options))
        self.splits = plan_splits(files, options, sizes)

    @property
    def layout(self) -> BuildLayout:
        """Keys that the tasks read and write."""
        return self._runner.layout

    def scan(self) -> list[ScanReceipt]:
        """Run the first pass; return its receipts."""
        tasks = [ScanTask(self.layout, i, split.source, split, self._options) for i, split in enumerate(self.splits)]
        scanned = self._runner.run_stage("reading", tasks, scan_split, receipt=ScanReceipt)
        if not any(split.documents for split in scanned):
            remove_build_files(self.layout.open_output(), self._runner.progress)
            raise _no_text_error(scanned)
        return scanned

    def choose_heldout(self, scanned: list[ScanReceipt]) -> tuple[HeldoutRule, list[KeptDocuments]]:
        """Return the held-out rule, and for each split the documents that are not copies of earlier ones.

        Documents are divided into stretches (runs of paragraphs) only if whole documents are too few or too long.
        """
        fraction = self._options.heldout_fraction
        clusters = self._find_clusters_digest(scanned)
        tasks = plan_partitions(self.layout, scanned, fraction, clusters=bool(clusters))
        compared = self._runner.run_stage("comparing", tasks, compare_partition, receipt=CompareReceipt)
        dropped = [part.digest for part in compared]
        kept = [
            KeptDocuments(
                find_drop_ranges(self.layout, i, compared),
                split.digest,
                hash_strings([split.digest, *dropped]),
                clusters=bool(clusters),
            )
            for i, split in enumerate(scanned)
        ]
        found = sum_document_figures(compared)
        if self._options.has_ids:
            of_ids = plan_id_tasks(self.layout, scanned, kept)
            compared_ids = self._runner.run_stage(
                "comparing ids", of_ids, find_repeated_ids, receipt=RepeatedIdsReceipt
            )
            refuse_repeated_ids(compared_ids, self.splits, self._options)
        rule = self._options.heldout_rule or heldout_rule_by_documents(found, fraction)
        if rule is None and self._options.pairs is not None:
            rule = heldout_rule_by_queries(found, fraction)
        rule = rule or self._choose_stretch_rule(kept, found)
        return replace(rule, clusters=clusters), kept

    def _find_clusters_digest(self, scanned: Sequence[ScanReceipt]) -> str:
        """Return the digest of the inputs' clusters of near duplicates; empty if they have none.

        Raises:
            InputError: the documents were not prepared together.
        """
        named = {name for split in scanned for name in split.clusters}
        if len(named) > 1:
            files = dict.fromkeys(piece.file for split in self.splits for piece in split.pieces)
            one, other = find_cluster_mismatch(files)
            raise InputError(
                f"{one.uri} and {other.uri} were not prepared together, so their common near duplicates are not known",
                remedy="prepare all inputs in one `corpus prepare` with `keep: all`, or build one corpus from each",
            )
        return next(iter(named), "")

    def write_shards(
        self,
        kept: list[KeptDocuments],
        heldout: HeldoutRule,
        tokenizer_hash: str,
        words: Segmentation | None = None,
    ) -> list[WriteReceipt]:
        """Run the second pass, first over a few evenly spread splits; return its receipts.

        Raises TokenizerError: the tokenizer loses more of the text than the options accept.
        """
        tasks = [
            WriteTask(
                self.layout,
                i,
                hash_strings([kept[i].source, repr(heldout)]),
                split,
                self._options,
                kept=kept[i],
                tokenizer_hash=tokenizer_hash,
                heldout=heldout,
                words=words,
            )
            for i, split in enumerate(self.splits)
        ]
        if len(tasks) > _LOSS_CHECK_SPLITS:
            first = tasks[:: -(-len(tasks) // _LOSS_CHECK_SPLITS)]
            self._check_tokenizer_loss(self._runner.run_stage("writing", first, write_split, receipt=WriteReceipt))
        written = self._runner.run_stage("writing", tasks, write_split, receipt=WriteReceipt)
        self._check_tokenizer_loss(written)
        return written

    def _check_tokenizer_loss(self, written: Sequence[WriteReceipt]) -> None:
        loss = TextLoss.sum_of(part.loss for part in written)
        what = f"the tokenizer does not fit the text of {self.layout.output}"
        check_text_loss(loss, self._options.accept_loss, what, remedy="give a tokenizer that was trained on such text")

    def _choose_stretch_rule(self, kept: list[KeptDocuments], figures: DocumentFigures) -> HeldoutRule:
        """Find the stretches of all splits; return the rule that holds out some of them."""
        tasks = [
            FindStretchesTask(self.layout, i, kept[i].source, split, self._options, kept=kept[i], size=figures.size)
            for i, split in enumerate(self.splits)
        ]
        candidates: Counter[int] = Counter()
        clustered: set[int] = set()
        for divided in self._runner.run_stage("dividing", tasks, find_split_stretches, receipt=FindStretchesReceipt):
            candidates.update(dict(divided.candidates))
            clustered.update(divided.clustered)
        return heldout_rule_by_stretches(candidates, figures.size, self._options.heldout_fraction, clustered)


def _no_text_error(scanned: list[ScanReceipt]) -> InputError:
    skipped = [record for split in scanned for record in split.first_skipped]
    first = f"; the first of {sum(split.skipped for split in scanned):,} bad records: {skipped[0]}" if skipped else ""
    others = sum(split.not_chosen for split in scanned)
    not_chosen = f", {others:,} that `only` in --provenance does not choose" if others else ""
    return InputError(
        f"no document with text in the inputs ({sum(split.empty for split in scanned)} empty ones{not_chosen}{first})",
        remedy="check the inputs, and --text-field, --txt-documents or the fields of pairs"
        + (", and how licences and sources are written there" if others else ""),
    )
