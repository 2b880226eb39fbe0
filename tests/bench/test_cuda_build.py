"""README's installation as a user with a GPU types it, with the CUDA build of each torch that is admitted, on a machine
that has no GPU: an environment of its own for each (5.4 GB, half an hour), the suite of the core, forward passes with
fake tensors, and the kernels compiled for three GPUs. `-k 2.15.0` chooses one of them.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import operations
import pytest
import wheels
import yaml

pytestmark = pytest.mark.long
VARIABLE = "MASKFLEET_CUDA_PYTHON"
ROOT = wheels.ROOT
_DROPPED = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")  # variables of the tests' own environment
TESTED = yaml.safe_load(wheels.TESTED.read_text("utf-8"))["torch"]
CORE = [f"tests/{name}" for name in ("encoder_core", "checkpoints", "parity", "determinism")]
"""The tests that another torch may change: `data_service` never imports it (tests/architecture)."""

NUMPY_FOR_INTERPRETERS = {"2.11.0": "numpy==2.3.5"}
"""By torch: the interpreter of its Triton, 3.6.0, fails with NumPy 2.4 and newer. GPUs do without the interpreter."""


@pytest.fixture(scope="module", params=[one["release"] for one in TESTED])
def torch(request: pytest.FixtureRequest) -> str:
    release: str = request.param
    return release


@pytest.fixture(scope="module")
def bin(torch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that README's lines made: of one that is there, or of a new one."""
    if (python := os.environ.get(VARIABLE)) is not None:
        there = run(Path(python).parent, "python", "-c", "import torch; print(torch.__version__)")
        if there.partition("+")[0].strip() != torch:
            pytest.skip(f"{VARIABLE} names an environment with torch {there.strip()}")
        return Path(python).parent
    if (reason := wheels.unreachable()) is not None:
        pytest.skip(f"the package index does not answer: {reason}; an environment may be named by {VARIABLE}")
    folder = tmp_path_factory.mktemp("clone")
    wheels.copy_sources(folder)
    lines = (f"{name}=={version}\n" for name, version in wheels.lock(torch).items())
    (folder / "infra/constraints.txt").write_text("".join(lines))
    (script,) = re.findall(r"^python3 -m venv env$.*?^maskfleet --version$", _readme(), re.MULTILINE | re.DOTALL)
    clean = {name: value for name, value in wheels.environment().items() if name not in _DROPPED}
    ran = subprocess.run(["bash", "-euc", script], cwd=folder, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return folder / "env/bin"


def _readme() -> str:
    return wheels.README.read_text("utf-8")


def run(bin: Path, *command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What a program of the environment prints, without this machine's settings of pip."""
    kept = {name: value for name, value in wheels.environment().items() if name not in _DROPPED}
    environment = kept | {"OMP_NUM_THREADS": "1"} | variables
    ran = subprocess.run([bin / command[0], *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.timeout(1800)
def test_it_is_the_lock_with_cuda(torch: str, bin: Path, tmp_path: Path) -> None:
    listed = json.loads(run(bin, "python", "-m", "pip", "list", "--format=json", cwd=tmp_path))
    installed = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in listed}
    ours = {name: installed.pop(name) for name in ("maskfleet", "pip")}
    lock = wheels.lock(torch)
    apart = {name for name, version in installed.items() if lock.get(name) != version}
    assert all(name.startswith(wheels.CUDAS) for name in apart)
    assert not (apart and torch == wheels.pins()["torch"])
    assert "nvidia-nccl-cu13" in installed
    code = "import torch, triton; print(torch.version.cuda, torch.cuda.is_available(), triton.__version__)"
    cuda, available, triton = run(bin, "python", "-c", code, cwd=tmp_path).split()
    assert installed["cuda-toolkit"].startswith(cuda)
    assert triton == lock["triton"]
    assert available == "False", "on a GPU, `maskfleet doctor --gpu` says more than these tests"
    assert run(bin, "maskfleet", "--version", cwd=tmp_path).split()[-1] == ours["maskfleet"]


def test_doctor_finds_that_there_is_no_gpu(bin: Path, tmp_path: Path) -> None:
    printed = run(bin, "maskfleet", "doctor", "--gpu", "--json", cwd=tmp_path)
    verdicts = [json.loads(line) for line in printed.splitlines()]
    assert {verdict["gpu"] for verdict in verdicts} == {"CPU"}
    assert all(one["right"] for verdict in verdicts for one in verdict["tried"])
    last = run(bin, "maskfleet", "doctor", "--gpu", cwd=tmp_path, COLUMNS="200").strip().splitlines()[-1]
    assert re.match(r"warning +GPUs +none", last), last
    assert f"CUDA {run(bin, 'python', '-c', 'import torch; print(torch.version.cuda)').strip()}" in last


@pytest.mark.timeout(900)
def test_every_familys_forward_pass_on_a_gpu_that_is_not_there(bin: Path) -> None:
    """The tensors have no numbers: what depends on them raises."""
    found = json.loads(run(bin, "python", "tests/bench/fake_cuda.py", "--json", PYTHONPATH=str(ROOT)))
    assert {one["family"] for one in found} == set(operations.RECIPES)
    for one in found:
        assert one["waits"] == [], one
        assert one["losses"] == ["float32"], one
        assert one["products"] == ["bfloat16"], one
        relative = one["family"].startswith(("DeBERTa", "XLNet"))
        expected = "fused forward" if one["dropout"] or relative else "_flash_attention_forward"
        assert expected in one["attention"], one
        assert one["dropout"] is False or one["attention"][expected] >= 6


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sm", ["80", "90", "100"])
def test_the_kernels_compile(bin: Path, sm: str) -> None:
    options = ("--sm", sm, "--dtype", "bf16", "--width", "64")
    run(bin, "python", "tests/bench/kernels.py", *options, PYTHONPATH=str(ROOT))


@pytest.mark.timeout(6 * 3600)
def test_the_core_passes_its_suite(torch: str, bin: Path) -> None:
    """With the dev extra, which is installed unless it is there."""
    clone = bin.parents[1]
    if VARIABLE not in os.environ:
        lock = clone / "infra/constraints.txt"
        run(bin, "python", "-m", "pip", "install", "-q", "-c", lock, f"{clone}[dev]")
        if (numpy := NUMPY_FOR_INTERPRETERS.get(torch)) is not None:
            run(bin, "python", "-m", "pip", "install", "-q", "--no-deps", numpy)
    run(bin, "python", "-m", "pytest", "-q", "-m", "not long", *CORE, PYTHONPATH=str(ROOT))


def test_nccls_communicators_can_be_aborted(bin: Path) -> None:
    """By the names that `nccl_backends` uses; torch's CPU build has no NCCL."""
    looks = "import torch.distributed as dist; p = dist.ProcessGroupNCCL; print(p.abort.__name__, p.get_error.__name__)"
    assert run(bin, "python", "-c", looks).split() == ["abort", "get_error"]
