"""Which checkpoints a run has."""

from dataclasses import dataclass

from checkpoints.errors import DamagedCheckpoint, NewerFormat
from checkpoints.layout import ROOT, CheckpointManifest, CheckpointName, LineageSegment, decode
from checkpoints.rewind import left_behind, rewinds
from data_service.store.base import Store
from data_service.store.errors import KeyMissing


@dataclass(frozen=True)
class CheckpointFolder:
    """What is stored of one checkpoint, complete or not.

    Attributes:
        sizes: bytes of each object, by key.
    """

    mark: CheckpointName
    sizes: dict[str, int]

    @property
    def committed(self) -> bool:
        return self.mark.manifest in self.sizes


@dataclass(frozen=True)
class CheckpointRow:
    """One line of `maskfleet checkpoints list`.

    Attributes:
        bytes: stored for it.
        created: seconds since 1970; None if the manifest cannot be read.
        world_size: ranks that wrote it; None if the manifest cannot be read.
        abandoned: the run went on from an earlier checkpoint, so this one is not part of its history.
        problem: why the manifest cannot be read, if so.
    """

    step: int
    attempt: int
    bytes: int
    created: float | None
    world_size: int | None
    abandoned: bool
    problem: str | None


def folders(store: Store) -> list[CheckpointFolder]:
    """Everything stored of checkpoints, newest first, in one listing."""
    sizes: dict[CheckpointName, dict[str, int]] = {}
    for entry in store.list(ROOT):
        mark = CheckpointName.of(entry.key)
        if mark is not None:
            sizes.setdefault(mark, {})[entry.key] = entry.size
    return [CheckpointFolder(mark, sizes[mark]) for mark in sorted(sizes, reverse=True)]


def committed(store: Store) -> list[CheckpointName]:
    """The checkpoints that have a manifest, newest first, without those that the run went back past."""
    gone_back = rewinds(store)
    marks = [folder.mark for folder in folders(store) if folder.committed]
    return [mark for mark in marks if not left_behind(mark, gone_back)]


def read_manifest(store: Store, mark: CheckpointName) -> CheckpointManifest:
    """Raises DamagedCheckpoint if the manifest is missing or not what was written, and NewerFormat."""
    where = f"{store.uri}/{mark.manifest}"
    try:
        manifest = decode(store.get(mark.manifest), where)
    except KeyMissing as error:
        raise DamagedCheckpoint(f"{where} is missing", remedy="use another checkpoint") from error
    if manifest.mark != mark:
        raise DamagedCheckpoint(
            f"{where} is the manifest of step {manifest.step}, attempt {manifest.attempt}",
            remedy="move the folder back to its own name",
        )
    return manifest


def rows(store: Store) -> list[CheckpointRow]:
    """The run's checkpoints, newest first."""
    found = []
    gone_back = rewinds(store)
    lineage: tuple[LineageSegment, ...] | None = None
    for folder in folders(store):
        if not folder.committed:
            continue
        mark, size = folder.mark, sum(folder.sizes.values())
        try:
            manifest = read_manifest(store, mark)
        except (DamagedCheckpoint, NewerFormat) as error:
            found.append(
                CheckpointRow(
                    step=mark.step,
                    attempt=mark.attempt,
                    bytes=size,
                    created=None,
                    world_size=None,
                    abandoned=False,
                    problem=error.problem,
                )
            )
            continue
        abandoned = left_behind(mark, gone_back)
        if not abandoned:
            lineage = lineage or manifest.lineage
            abandoned = not on(lineage, mark)
        found.append(
            CheckpointRow(
                step=mark.step,
                attempt=mark.attempt,
                bytes=size,
                created=manifest.created,
                world_size=manifest.world_size,
                abandoned=abandoned,
                problem=None,
            )
        )
    return found


def on(lineage: tuple[LineageSegment, ...], mark: CheckpointName) -> bool:
    """Whether the checkpoint is part of the history. (An attempt commits at the step that it began with only at the
    run's first step; its segment then has no steps.)
    """
    return any(part.attempt == mark.attempt and part.start <= mark.step <= part.stop for part in lineage)
