"""The process that opens a `pytorch_model.bin`. No other file of ours calls `torch.load`.

Such a file is a pickle, whose author may be anybody. `weights_only` reads nothing but tensors and plain containers. As
that is a promise of one library, the process first gives up all that it does not need: descriptors beyond input, output
and report, memory and time beyond what the file's size explains, and, by a seccomp filter, every system call but those
that read, write, and manage memory. It can open no file, start no process, and reach no network.

Descriptors: 0 the pickle, 1 the safetensors file to be written, 2 one line of JSON that says why there is none.
"""

import ctypes
import io
import json
import os
import pickle
import platform
import re
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch import Tensor

_INPUT_DESCRIPTOR, _OUTPUT_DESCRIPTOR, _REPORT_DESCRIPTOR = 0, 1, 2
_MIB = 1 << 20
_EXTRA_MEMORY_BYTES = 512 * _MIB  # memory allowed beyond twice the file's size
_SET_PDEATHSIG, _NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 1, 38, 22, 2  # options of prctl(2)
_BPF_LD, _BPF_JEQ, _BPF_RET = (0x20, 0x15, 0x06)  # instructions of a seccomp filter (classic BPF)
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # results of a filter: allow the call; let it fail with EPERM
_NUMBER_OFFSET, _MACHINE_OFFSET = (0, 4)  # byte offsets of a system call's number and architecture in a filter's input

# Architecture, and numbers of read, write, close, fstat, newfstatat, lseek, pread64, mmap, mprotect, munmap, mremap,
# madvise, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, sched_yield, futex, clock_gettime, getrandom, exit and
# exit_group.
_ALLOWED_SYSCALLS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 262, 8, 17, 9, 10, 11, 25, 28, 12, 13, 14, 15, 24, 202, 228, 318, 60, 231),
    ),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 80, 79, 62, 67, 222, 226, 215, 216, 233, 214, 134, 135, 139, 124, 98, 113, 278, 93, 94),
    ),
}
_DTYPES = {  # dtypes that are converted, and their names in a safetensors header
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,80})")  # the class or function that torch's error names


class PickleRefused(Exception):
    """The file is not weights, or the process cannot be confined; the text says why."""


def main(file_bytes: int, parent_pid: int) -> NoReturn:
    """Convert the pickle on descriptor 0, which has `file_bytes` bytes, and end the process."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before prctl took effect
        os._exit(1)
    try:
        _preload_torch_loader()
        _confine_process(file_bytes)
        _write_safetensors(_check_content(_load_weights(os.fdopen(_INPUT_DESCRIPTOR, "rb", closefd=False))))
    except BaseException as error:
        os.write(_REPORT_DESCRIPTOR, json.dumps({"refused": _refusal_text(error)}).encode())
        os._exit(1)
    os._exit(0)


def _load_weights(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _preload_torch_loader() -> None:
    """Make torch import all code that loading needs, by loading small files of both formats and two that it refuses."""
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"a": torch.ones(2, dtype=torch.bfloat16)}, file, _use_new_zipfile_serialization=zipped)
        file.seek(0)
        _tensor_bytes(_load_weights(file)["a"])
    for foreign in (b"\x80\x02cos\nsystem\n.", b""):
        try:
            _load_weights(io.BytesIO(foreign))
        except (pickle.UnpicklingError, EOFError, RuntimeError):
            continue


def _confine_process(file_bytes: int) -> None:
    sys.stdout = sys.stderr = io.StringIO()
    os.closerange(_REPORT_DESCRIPTOR + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    pages = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * pages
    seconds = int(sum(os.times()[:2])) + 60 + file_bytes // (10 * _MIB)
    limits = {
        resource.RLIMIT_AS: held + 2 * file_bytes + _EXTRA_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 2 * file_bytes + 64 * _MIB,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: _REPORT_DESCRIPTOR + 1,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    _install_syscall_filter()


class _BpfStep(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("yes", ctypes.c_ubyte),  # number of steps to skip if a comparison with `k` holds
        ("no", ctypes.c_ubyte),  # number of steps to skip if it does not
        ("k", ctypes.c_uint),  # operand
    ]


class _BpfProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_BpfStep))]


def _install_syscall_filter() -> None:
    """Make the kernel refuse every system call except `_ALLOWED_SYSCALLS` from now on (seccomp, filter mode)."""
    if platform.machine() not in _ALLOWED_SYSCALLS:
        raise PickleRefused(f"a process cannot be confined on {platform.machine()}")
    machine, calls = _ALLOWED_SYSCALLS[platform.machine()]
    steps = [
        (_BPF_LD, 0, 0, _MACHINE_OFFSET),
        (_BPF_JEQ, 1, 0, machine),
        (_BPF_RET, 0, 0, _REFUSE),
        (_BPF_LD, 0, 0, _NUMBER_OFFSET),
    ]
    for left, number in zip(range(len(calls), 0, -1), calls, strict=True):
        steps.append((_BPF_JEQ, left, 0, number))  # if the call has this number, skip to the last step
    steps += [(_BPF_RET, 0, 0, _REFUSE), (_BPF_RET, 0, 0, _ALLOW)]
    program = _BpfProgram(len(steps), (_BpfStep * len(steps))(*(_BpfStep(*step) for step in steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    confined = libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if not confined or libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0) != 0:
        raise PickleRefused(f"this kernel does not confine processes: {os.strerror(ctypes.get_errno())}")


def _check_content(content: Any) -> dict[str, Tensor]:
    """Return the file's content if it is names and plain tensors. Raises PickleRefused."""
    if type(content) not in (dict, OrderedDict):
        raise PickleRefused(f"it holds a {type(content).__name__[:80]}, not tensors by name")
    for name, value in content.items():
        if type(name) is not str or not name or len(name) > 500:
            raise PickleRefused("a name in it is not a text of 1 to 500 characters")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise PickleRefused(f"{name!r:.80} is a {type(value).__name__[:80]}, not a plain tensor")
        if value.layout is not torch.strided or value.device.type != "cpu" or value.dtype not in _DTYPES:
            raise PickleRefused(f"{name!r:.80} is a tensor of an unsupported kind: {value.dtype}, {value.layout}")
    tensors: dict[str, Tensor] = content
    return tensors


def _write_safetensors(tensors: dict[str, Tensor]) -> None:
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    for part in (len(text).to_bytes(8, "little"), text, *map(_tensor_bytes, tensors.values())):
        left = memoryview(part)
        while len(left):
            left = left[os.write(_OUTPUT_DESCRIPTOR, left[: 64 * _MIB]) :]


def _tensor_bytes(tensor: Tensor) -> Any:
    values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _refusal_text(error: BaseException) -> str:
    """Return why a file is refused. torch's own texts advise to open it without protection, so they are not shown."""
    if isinstance(error, PickleRefused):
        return str(error)
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return "it needs more memory than its size explains"
    named = _REFUSED_GLOBAL.search(str(error))
    return f"it holds {named[1]}" if named else f"it cannot be read as weights ({type(error).__name__})"
