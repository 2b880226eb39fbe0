"""Files of text as a build reads them, and how they are packed."""

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from data_service.ingest.documents import read_records
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import BadRecord, TextRecord
from data_service.ingest.tasks import plan_splits

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def records_of(path: Path | str, options: BuildOptions | None = None, **settings: Any) -> list[TextRecord | BadRecord]:
    """All records of a file, or of the files of a folder or glob. `settings`: of the options, if none are given."""
    options = options or BuildOptions(**settings)
    splits = plan_splits(list_inputs([str(path)], options.encoding).files, options)
    return [record for split in splits for record in read_records(split, options)]


def texts_of(path: Path | str, options: BuildOptions | None = None, **settings: Any) -> list[str]:
    """The texts of all documents among the records."""
    found = records_of(path, options, **settings)
    return [record.text for record in found if isinstance(record, TextRecord) and not record.absent]


def write_lines(path: Path, records: Iterable[Mapping[str, object]]) -> Path:
    """JSON lines, packed as the name says, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(PACKED.get(path.suffix, bytes)(lines.encode()))
    return path


def tar_of(members: Mapping[str, bytes], kind: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of files."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=kind) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def write_table(path: Path, table: pa.Table, rows: int = 5, *, with_footer: bool = False) -> Path:
    """Parquet or Arrow, a stream or with a footer, as the name says, so many rows together."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    else:
        new_writer = pa.ipc.new_file if with_footer else pa.ipc.new_stream
        with new_writer(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def size_and_memory_of_reading(path: Path) -> tuple[int, int]:
    """Read a packed file in a process of its own; return the bytes of its text, and by how many MiB its memory grew."""
    script = (
        "import resource, sys\n"
        "from data_service.ingest.files import open_text\n"
        "from data_service.ingest.inputs import list_inputs\n"
        "(file,) = list_inputs([sys.argv[1]]).files\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before, total = peak(), 0\n"
        "with open_text(file) as text:\n"
        "    while data := text.read(1 << 20): total += len(data)\n"
        "print(total, peak() - before)\n"
    )
    shown = subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True).stdout
    total, grown = map(int, shown.split())
    return total, grown
