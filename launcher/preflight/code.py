"""Which code a node runs: versions of what computes, and a hash of our own sources, which a version does not tell."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import torch

_LIBRARIES = ("torch", "deepspeed", "ray", "numpy", "tokenizers", "safetensors")
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("encoder_core", "data_service", "checkpoints", "launcher")


def installed() -> dict[str, str]:
    """By name. NCCL only where there are GPUs."""
    found = {
        "python": platform.python_version(),
        "maskfleet": f"{metadata.version('maskfleet')}+{_sources()}",
    }
    found |= {name: metadata.version(name) for name in _LIBRARIES}
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "NCCL": _nccl()}
    return found


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(_ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
