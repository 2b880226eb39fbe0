"""Verified reads of stored chunks: nothing reaches a caller that does not match the manifest's hash."""

from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import File
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, Truncated
from data_service.store.verified import read_verified


def read_chunk(store: Store, file: File, index: int) -> bytes:
    """Chunk `index` of a file: bytes from index * file.chunk on.

    Raises:
        DamagedCheckpoint: the file is missing, too short, or holds other bytes there.
    """
    start = index * file.chunk
    length = min(file.chunk, file.size - start)
    where = f"{store.uri}/{file.key}"
    remedy = "see `maskfleet checkpoints verify`; an earlier checkpoint is used instead"
    wrong = DamagedCheckpoint(
        f"{where} does not match its hash in bytes {start} to {start + length}", remedy=remedy
    )
    try:
        return read_verified(store, file.key, start, length, file.hashes[index], wrong)
    except (KeyMissing, Truncated) as error:
        raise DamagedCheckpoint(error.problem, remedy=remedy) from error
