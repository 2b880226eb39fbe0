"""Runs the tasks that compare all documents with each other, after one pass over them and before the next."""

from collections.abc import Sequence
from functools import partial
from typing import assert_never

from data_service.ingest.pool import Progress, StageRunner
from data_service.ingest.tasks import find_receipts, run_task
from data_service.prepare.clusters import (
    FormClustersReceipt,
    FormClustersTask,
    form_clusters,
    plan_cluster_task,
    plan_naming_tasks,
    write_members_with_cluster_names,
)
from data_service.prepare.duplicates import (
    ChunkClusters,
    CompareHashesReceipt,
    compare_hashes,
    locate_clusters,
    plan_compare_tasks,
)
from data_service.prepare.frequent_paragraphs import (
    CountParagraphsReceipt,
    count_paragraph_range,
    plan_count_tasks,
    plan_paragraph_cuts,
)
from data_service.prepare.layout import PrepareLayout, StoredRecords
from data_service.prepare.minhash import choose_bands
from data_service.prepare.near_duplicates import MatchBandsReceipt, match_band_range, plan_band_tasks
from data_service.prepare.paragraphs import DuplicateParagraphs, ParagraphCuts
from data_service.prepare.passes import IDS_KIND, PassReceipt, text_hashes_kind
from data_service.prepare.signatures import ChunkSignatures
from data_service.prepare.stages import ComparingStage, ExactDuplicates, NearDuplicates

PrepareRunner = StageRunner[PrepareLayout]  # runs the tasks of a preparation


def compare_texts(
    runner: PrepareRunner, stage: ComparingStage, pass_number: int, receipts: Sequence[PassReceipt]
) -> Sequence[ChunkClusters | ParagraphCuts]:
    """Compare the documents that pass `pass_number` kept. Return, for each chunk, where the result is stored: copies or
    paragraphs to cut.

    Raises:
        StoreError: the store cannot be used.
    """
    kind, texts = text_hashes_kind(pass_number), [receipt.texts for receipt in receipts if receipt.texts is not None]
    match stage:
        case ExactDuplicates():
            compared = _find_equal_hashes(runner, kind, texts)
        case NearDuplicates():
            signed = [one for one in texts if isinstance(one, ChunkSignatures)]
            compared = _find_near_duplicates(runner, kind, stage, signed)
        case DuplicateParagraphs():
            tasks = plan_count_tasks(runner.layout, kind, stage, texts)
            counted = runner.run_stage("counting", tasks, count_paragraph_range, receipt=CountParagraphsReceipt)
            return plan_paragraph_cuts(tasks[0], counted)
        case other:
            assert_never(other)
    return [locate_clusters(chunk, compared) for chunk in range(len(receipts))]


def compare_ids(runner: PrepareRunner, receipts: Sequence[PassReceipt]) -> list[CompareHashesReceipt]:
    """Compare the ids of all documents that were read; equal ids count as copies."""
    return _find_equal_hashes(runner, IDS_KIND, [receipt.ids for receipt in receipts if receipt.ids is not None])


def _find_equal_hashes(runner: PrepareRunner, kind: str, chunks: Sequence[StoredRecords]) -> list[CompareHashesReceipt]:
    tasks = plan_compare_tasks(runner.layout, kind, chunks)
    return runner.run_stage("comparing", tasks, compare_hashes, receipt=CompareHashesReceipt)


def _find_near_duplicates(
    runner: PrepareRunner, kind: str, stage: NearDuplicates, signed: Sequence[ChunkSignatures]
) -> list[CompareHashesReceipt]:
    tasks = plan_band_tasks(runner.layout, kind, signed, choose_bands(stage.similarity))
    joined = runner.run_stage("matching", tasks, match_band_range, receipt=MatchBandsReceipt)
    task = plan_cluster_task(runner.layout, kind, tasks[0].signed, joined)
    linked = _form_clusters(runner, task)
    names = plan_naming_tasks(task, linked)
    return runner.run_stage("naming", names, write_members_with_cluster_names, receipt=CompareHashesReceipt)


def _form_clusters(runner: PrepareRunner, task: FormClustersTask) -> FormClustersReceipt:
    """Form clusters in this process, unless the store holds the task's receipt; return the receipt."""

    def report(done: int) -> None:
        finished = int(done == task.input_bytes)
        runner.progress(Progress("linking", finished, 1, done, task.input_bytes))

    (found,) = find_receipts(runner.layout.open_output(), [task], FormClustersReceipt)
    report(task.input_bytes if found else 0)
    return found or run_task(partial(form_clusters, progress=report), task)
