"""Pickled weights come back as the same tensors; whatever else such a file holds is refused, and nothing of it runs."""

import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints.hf.pickled import convert_network
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from tests.support.stores.s3 import S3Server

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def drawn(seed: int) -> dict[str, Tensor]:
    """Tensors of all types, among them transposed, empty and tied ones and scalars."""
    draw = torch.Generator().manual_seed(seed)
    found = {f"layer.{n}": (torch.randn(n, 3, generator=draw) * 9).to(dtype) for n, dtype in enumerate(DTYPES)}
    return OrderedDict(found | {"turned": found["layer.2"].t(), "scalar": torch.tensor(2.5), "tied": found["layer.2"]})


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder; temporary files go into another, which must be empty at the end."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (tmp_path / "out").mkdir()
    (tmp_path / "model").mkdir()
    return tmp_path


def converted(folder: Path) -> dict[str, Tensor]:
    try:
        convert_network(LocalStore(folder / "model"), folder / "out")
    finally:
        assert not list((folder / "temporary").iterdir())
    return {name: value for path in (folder / "out").glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("zipped", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_same_tensors(folder: Path, zipped: bool) -> None:
    expected = drawn(3)
    kept = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in expected.items()}
    some = dict(random.Random(3).sample(sorted(kept.items()), 2))  # as of state_dict(keep_vars=True)
    torch.save(expected | some, folder / "model/pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    found = converted(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert bits(found[name]) == bits(value)


@pytest.mark.long
def test_shards_and_their_index_from_a_bucket(folder: Path, s3: S3Server) -> None:
    store, expected = open_store(f"s3://{s3.new_bucket()}/model"), drawn(5)
    names = list(expected)
    parts = {f"pytorch_model-{n}-of-2.bin": names[n - 1 :: 2] for n in (1, 2)}
    for file, held in parts.items():
        content = io.BytesIO()
        torch.save({name: expected[name] for name in held}, content)
        store.put(file, content.getvalue())
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    store.put("pytorch_model.bin.index.json", json.dumps(index).encode())
    convert_network(store, folder / "out")
    index = json.loads((folder / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == expected.keys()
    for name, file in index.items():
        assert bits(load_file(folder / "out" / file)[name]) == bits(expected[name])
    assert not list((folder / "temporary").iterdir())


class Calling:
    """Calls a function of the author's choice when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class Own(Tensor):
    pass


HOSTILE: dict[str, Callable[[Path], object]] = {
    "os.system": lambda mark: Calling(os.system, f"touch {mark}"),
    "eval": lambda mark: Calling(eval, f"open({str(mark)!r}, 'w')"),  # noqa: S307
    "import": lambda mark: Calling(__import__, "antigravity"),
    "socket": lambda mark: Calling(socket.create_connection, ("127.0.0.1", 9)),
    "fork bomb": lambda mark: Calling(os.fork),
    "exec": lambda mark: Calling(subprocess.Popen, ["touch", str(mark)]),
    "memory bomb": lambda mark: Calling(bytearray, 1 << 40),
    "beside weights": lambda mark: {"weight": torch.ones(2), "more": Calling(os.system, f"touch {mark}")},
    "function": lambda mark: {"weight": torch.relu},
    "class": lambda mark: {"weight": nn.Linear},
    "module": lambda mark: nn.Linear(2, 2),
    "subclass": lambda mark: {"weight": torch.ones(2).as_subclass(Own)},
    "parameter": lambda mark: {"weight": nn.Parameter(torch.ones(2))},
    "nested": lambda mark: {"weights": {"weight": torch.ones(2)}},
    "list": lambda mark: [torch.ones(2)],
    "tensor": lambda mark: torch.ones(2),
    "sparse": lambda mark: {"weight": torch.eye(3).to_sparse()},
    "complex": lambda mark: {"weight": torch.ones(2, dtype=torch.complex64)},
    "huge view": lambda mark: {"weight": torch.ones(1).expand(1 << 40)},
    "many views": lambda mark: {f"{n}": view for n, view in enumerate([torch.ones(1 << 20)] * 200)},
    "numbers": lambda mark: {1: torch.ones(2)},
    "no name": lambda mark: {"": torch.ones(2)},
}
SHORT = {"os.system"}


@pytest.mark.parametrize(
    "kind", [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in HOSTILE]
)
def test_anything_else_is_refused_and_does_not_run(folder: Path, kind: str) -> None:
    mark = folder / "mark"
    torch.save(HOSTILE[kind](mark), folder / "model/pytorch_model.bin")
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin\b.*\brefused\b.*\n.*safetensors"):
        converted(folder)
    assert not mark.exists()
    assert time.monotonic() - began < 100


@pytest.mark.long
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_changes_values_only(folder: Path, seed: int, zipped: bool) -> None:
    draw, expected = random.Random(seed), drawn(seed)
    file = io.BytesIO()
    torch.save(expected, file, _use_new_zipfile_serialization=zipped)
    content = bytearray(file.getvalue())
    if seed:
        for _ in range(seed):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(len(content)) :]
    (folder / "model/pytorch_model.bin").write_bytes(content)
    with suppress(ModelError):
        assert {type(value) for value in converted(folder).values()} == {Tensor}


@pytest.mark.long
@pytest.mark.parametrize("content", [b"", b"\x80\x02.", b"\x80\x02cos\nsystem\n(S'true'\ntR.", b"(" * 10_000_000])
def test_what_torch_did_not_write_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model/pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match="refused"):
        converted(folder)


@pytest.mark.long
def test_a_zip_that_grows_needs_more_memory_than_it_may(folder: Path) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.zeros(4)}, file)
    with (
        zipfile.ZipFile(file) as plain,
        zipfile.ZipFile(folder / "model/pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            with packed.open(name, "w", force_zip64=True) as entry:
                if name.endswith("/data/0"):
                    for _ in range(3 << 10):
                        entry.write(bytes(1 << 20))
                else:
                    entry.write(plain.read(name))
    with pytest.raises(ModelError, match="refused"):
        converted(folder)


CONFINED = """
import ctypes, os, socket, subprocess, sys
from checkpoints.hf import pickled_process as confined
confined._preload_torch_loader()
libc = ctypes.CDLL(None, use_errno=True)
confined._confine_process(1000)
def attempts():
    yield lambda: open("/etc/passwd")
    yield lambda: socket.socket()
    yield os.fork
    yield lambda: os.execv("/bin/true", ["true"])
    yield lambda: os.posix_spawn("/bin/true", ["true"], {})
    yield lambda: os.kill(os.getppid(), 0)
    yield lambda: os.unlink(sys.argv[1])
    yield os.pipe
    yield lambda: bytearray(1 << 40)
left = []
for number, attempt in enumerate(attempts()):
    try:
        attempt()
        left.append(number)
    except (OSError, MemoryError):
        continue
os.write(1, repr(left).encode())
os._exit(0)
"""


@pytest.mark.long
def test_the_process_can_do_nothing_even_if_something_ran(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    done = subprocess.run([sys.executable, "-c", CONFINED, victim], capture_output=True, check=True, timeout=300)
    assert done.stdout == b"[]"
    assert victim.exists()
