"""Rows of Parquet files."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from data_service.ingest.files import open_ranged
from data_service.ingest.inputs import InputFile
from launcher.errors import TaskError

_ROWS = 1024  # in memory at a time
_READ_AHEAD = 64 * 1024


def read_parquet(
    file: InputFile, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[dict[str, object]]:
    """Rows as Python values, `optional` columns where the file has them.

    Raises:
        TaskError: a damaged file, or one without a column. StoreError: it cannot be read.
    """
    try:
        with pq.ParquetFile(open_ranged(file, chunk=_READ_AHEAD), pre_buffer=False) as table:
            names = table.schema_arrow.names
            if missing := [column for column in columns if names.count(column) != 1]:
                raise TaskError(
                    f"{file.uri}: no column {missing[0]!r} (it has {', '.join(names)})",
                    remedy="correct the task's `fields`",
                )
            chosen = [*columns, *(column for column in optional if column in names)]
            for batch in table.iter_batches(_ROWS, columns=chosen, use_threads=False):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{file.uri}: not a Parquet file, or a damaged one: {error}", remedy="write or fetch it again"
        ) from error
