"""Runs what lies between two passes: the tasks that compare all documents."""

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from data_service.ingest.pool import Progress, Runner
from data_service.ingest.tasks import find_receipts, perform
from data_service.prepare.clusters import LinkReceipt, LinkTask, link, name_members, plan_link, plan_names
from data_service.prepare.duplicates import (
    ChunkClusters,
    CompareHashesReceipt,
    HashedChunk,
    compare_hashes,
    locate_clusters,
    plan_compare,
)
from data_service.prepare.frequent_paragraphs import CountReceipt, count_range, locate_cuts, plan_counts
from data_service.prepare.layout import PrepareLayout
from data_service.prepare.minhash import choose_bands
from data_service.prepare.near_duplicates import JoinReceipt, join_range, plan_joins
from data_service.prepare.paragraphs import DuplicateParagraphs, ParagraphCuts
from data_service.prepare.passes import IDS_KIND, PassReceipt, texts_kind
from data_service.prepare.signatures import SignedChunk
from data_service.prepare.stages import ComparingStage, ExactDuplicates, NearDuplicates

PrepareRunner = Runner[PrepareLayout]


def compare_texts(
    runner: PrepareRunner, stage: ComparingStage, number: int, before: Sequence[PassReceipt]
) -> Sequence[ChunkClusters | ParagraphCuts]:
    """Compare the documents that pass `number` left; return for each chunk where it says what is a copy of what, or
    what is cut.

    Raises:
        StoreError: the store cannot be used.
    """
    kind = texts_kind(number)
    match stage:
        case ExactDuplicates():
            compared = _compare(runner, kind, [receipt.texts for receipt in before])
        case NearDuplicates():
            signed = [receipt.signed for receipt in before if receipt.signed is not None]
            compared = _find_near(runner, kind, stage, signed)
        case DuplicateParagraphs():
            hashed = [receipt.paragraphs for receipt in before if receipt.paragraphs is not None]
            tasks = plan_counts(runner.layout, kind, stage, hashed)
            counted = runner.run("counting", tasks, count_range, receipt=CountReceipt)
            return locate_cuts(tasks[0], counted)
        case other:
            assert_never(other)
    return [locate_clusters(chunk, runner.layout, kind, compared) for chunk in range(len(before))]


def compare_ids(runner: PrepareRunner, read: Sequence[PassReceipt]) -> list[CompareHashesReceipt]:
    """Compare the ids of all documents read."""
    return _compare(runner, IDS_KIND, [receipt.ids for receipt in read])


def _compare(
    runner: PrepareRunner, kind: str, chunks: Sequence[HashedChunk | None]
) -> list[CompareHashesReceipt]:
    tasks = plan_compare(runner.layout, kind, [chunk for chunk in chunks if chunk is not None])
    return runner.run("comparing", tasks, compare_hashes, receipt=CompareHashesReceipt)


def _find_near(
    runner: PrepareRunner, kind: str, stage: NearDuplicates, signed: Sequence[SignedChunk]
) -> list[CompareHashesReceipt]:
    tasks = plan_joins(runner.layout, kind, signed, choose_bands(stage.similarity))
    joined = runner.run("matching", tasks, join_range, receipt=JoinReceipt)
    task = plan_link(runner.layout, kind, tasks[0].signed, joined)
    linked = _link(runner, task)
    names = plan_names(task, linked)
    return runner.run("naming", names, name_members, receipt=CompareHashesReceipt)


def _link(runner: PrepareRunner, task: LinkTask) -> LinkReceipt:
    """Find clusters in this process, unless that is done."""

    def report(done: int) -> None:
        finished = int(done == task.input_bytes)
        runner.progress(Progress("linking", finished, 1, done, task.input_bytes))

    (found,) = find_receipts(runner.layout.open(), [task], LinkReceipt)
    report(task.input_bytes if found else 0)
    return found or perform(partial(link, progress=report), task)
