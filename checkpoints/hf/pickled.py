"""Converts a `pytorch_model.bin` to safetensors, in a confined process (`checkpoints.hf.pickled_process`).

Only `maskfleet init` does so, for weights that the recipe's `start:` names. All other code reads safetensors only.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from checkpoints.hf.folder import INDEX, PICKLE, PICKLE_INDEX, WEIGHTS, copy_file
from checkpoints.hf.headers import stored_shapes
from data_service.formats import parse_json
from data_service.processes import temporary_folder, temporary_root
from data_service.store.base import Store
from data_service.store.local import LocalStore
from encoder_core.errors import ModelError

_SHARD_NAME = re.compile(r"pytorch_model-[\w-]{1,80}\.bin")
_CHILD_PROGRAM = "import sys\nfrom checkpoints.hf.pickled_process import main\nmain(*map(int, sys.argv[1:]))"
_BASE_TIMEOUT_S = 120.0  # time limit of the conversion of an empty file
_MIN_BYTES_PER_S = 5 << 20  # lowest accepted rate of the conversion, in bytes per second
_QUOTED_REPORT_BYTES = 4096  # bytes at the end of the process's report that an error quotes
_REMEDY = (
    "use a folder with model.safetensors; or, if you trust this file, load it with transformers on a disposable "
    "machine, and call save_pretrained(folder)"
)


def convert_network(network: Store, folder: Path, pickle: str = PICKLE) -> None:
    """Write the pickled weights at the root of `network` into the local `folder`, as safetensors. `pickle`: name of
    the weights' file if there is only one.

    Raises:
        ModelError: a file holds anything but names and plain tensors, is damaged, or is missing; or this machine
            cannot confine a process.
        StoreError: the store cannot be read.
    """
    if network.size(pickle) is not None:
        _convert_file(network, pickle, folder / WEIGHTS)
        stored_shapes(LocalStore(folder))
        return
    shards = {
        file: file.replace("pytorch_", "", 1).removesuffix(".bin") + ".safetensors" for file in _shard_files(network)
    }
    for file, safe in shards.items():
        _convert_file(network, file, folder / safe)
    names = {name: safe for safe in shards.values() for name in _tensor_names(folder / safe)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    stored_shapes(LocalStore(folder))


def _shard_files(network: Store) -> list[str]:
    try:
        files = set(parse_json(network.get(PICKLE_INDEX))["weight_map"].values())
        known = all(_SHARD_NAME.fullmatch(file) for file in files)
    except (ValueError, KeyError, TypeError, AttributeError):
        files, known = set[str](), False
    if not files or not known:
        raise ModelError(
            f"{network.uri.rstrip('/')}/{PICKLE_INDEX} is not an index of weights",
            remedy="download the file again",
        )
    return sorted(files)


def _convert_file(network: Store, file: str, target: Path) -> None:
    where = f"{network.uri.rstrip('/')}/{file}"
    size = network.size(file)
    if size is None:
        raise ModelError(f"{where} does not exist", remedy="download the missing file into the folder")
    with _local_file(network, file) as source, source.open("rb") as given:
        reason = _run_conversion(given, target, size)
    if reason is None:
        try:
            _tensor_names(target)
        except SafetensorError:
            reason = "the process that read it wrote something else than weights"
    if reason is not None:
        raise ModelError(f"{where} is refused: {reason}", remedy=_REMEDY)


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@contextmanager
def _local_file(network: Store, file: str) -> Iterator[Path]:
    if isinstance(network, LocalStore):
        yield Path(network.root, file)
        return
    with temporary_folder("pickle") as folder:
        copy_file(network, file, folder)
        yield folder / file


def _run_conversion(pickle_file: BinaryIO, target: Path, size: int) -> str | None:
    """Run the process that converts `pickle_file` into `target`. Return the reason if it failed, else None."""
    seconds = _BASE_TIMEOUT_S + size / _MIN_BYTES_PER_S
    with target.open("wb") as made, tempfile.TemporaryFile(dir=temporary_root()) as report:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD_PROGRAM, str(size), str(os.getpid())],
            stdin=pickle_file,
            stdout=made,
            stderr=report,
            start_new_session=True,
            env=_child_environment(),
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"reading it took more than {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None if code == 0 else _refusal_reason(report, code)


def _child_environment() -> dict[str, str]:
    """Return the child's environment: the paths of programs and libraries, and settings for one CPU thread."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return kept | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }


def _refusal_reason(report: BinaryIO, code: int) -> str:
    report.seek(max(0, report.seek(0, os.SEEK_END) - _QUOTED_REPORT_BYTES))
    line = report.read().rpartition(b"\n")[2]
    try:
        reason = json.loads(line)["refused"]
    except (ValueError, KeyError, TypeError):
        reason = f"the process that read it ended with {code}"
    return "".join(letter for letter in str(reason)[:300] if letter.isprintable())
