"""The tests of GPUs (tests/gpu) where there is none: what they can tell apart, and that they run small, and from their
pack."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.problems import error

ROOT = Path(__file__).parents[2]
SMALL = {"MASKFLEET_GPU_TESTS": "small", "TRITON_INTERPRET": "1"}
# What a bare machine has beside Python; all else comes from the pack.
BARE_ML = (
    "torch",
    "torchgen",
    "functorch",
    "triton",
    "tokenizers",
    "sentencepiece",
    "safetensors",
    "transformers",
)
BARE_OTHERS = (
    "numpy",
    "numpy.libs",
    "sympy",
    "mpmath",
    "networkx",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
)
BARE_SMALL = ("typing_extensions.py", "regex", "huggingface_hub", "tqdm", "yaml")
SAMPLE = "sum_on_the_device or copy_stalls or add_up or killed_run or (a_form and plain and fp32) or zero and 1"


@given(st.integers(0, 2**32), st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([0.99, 1.01]))
def test_a_kernel_that_is_one_percent_off_is_told_from_rounding(seed: int, dtype: torch.dtype, factor: float) -> None:
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    least = 2e-3  # in bf16, the widest bound
    assert error({"context": exact.to(dtype)}, {"context": exact})[1] < least / 4
    assert error({"context": (factor * exact).to(dtype)}, {"context": exact})[1] > 2 * least


@given(st.sampled_from([float("nan"), float("inf")]), st.integers(0, 99))
def test_numbers_that_are_none_are_wrong(value: float, place: int) -> None:
    exact = torch.ones(100, dtype=torch.float64)
    found = exact.clone()
    found[place] = value
    assert error({"x": found}, {"x": exact})[0] == float("inf")


def run_tests(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-rA", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | SMALL | variables, capture_output=True, text=True, check=False
    )


# Kernels that are off by 1 %, in place of the right ones.
BAD_KERNELS = """
import tests.support.models.relative_attention as problems, tests.support.models.kernel_formulas as others
attention, norm, gradient = problems.fused_attention, others.residual_norm, others.overwrite_with_gradient
def overwrite_with_gradient(logits, ids, sums, *, biased):
    by_bias = gradient(logits, ids, sums, biased=biased)
    logits.mul_(1.01)
    return by_bias
def residual_norm(*given):
    total, normed = norm(*given)
    return total, 1.01 * normed
problems.fused_attention = lambda *given: 1.01 * attention(*given)
others.residual_norm, others.overwrite_with_gradient = residual_norm, overwrite_with_gradient
"""


@pytest.mark.long
def test_bad_kernels_are_found(tmp_path: Path) -> None:
    (tmp_path / "bad_kernels.py").write_text(BAD_KERNELS)
    files = [f"tests/gpu/test_{name}.py" for name in ("attention", "other_kernels")]
    chosen = ["-k", "(a_form_equals or norms_equal or losses_equal) and fp32", *files]
    done = run_tests("-p", "bad_kernels", *chosen, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    ended = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert ended.count("FAILED") == len(ended) > 60, done.stdout[-3000:]


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(5400)
def test_they_pass_small_on_a_cpu() -> None:
    done = run_tests("tests/gpu")
    assert done.returncode == 0, done.stdout[-5000:]
    assert "tokens/s" in done.stdout.partition("= figures =")[2]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_bare_machine_runs_them_from_the_pack(tmp_path: Path) -> None:
    """The pack for this Python, in an environment without Maskfleet, DeepSpeed, Ray, pydantic and pytest."""
    packs, home = tmp_path / "packs", tmp_path / "home"
    subprocess.run([sys.executable, ROOT / "infra" / "pack_gpu_tests", "--out", packs], check=True)
    (archive,) = packs.iterdir()
    assert archive.stat().st_size <= 60 << 20
    home.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", home], check=True)
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    ours = Path(torch.__file__).parents[1]
    for name in (*BARE_ML, *BARE_OTHERS, *BARE_SMALL):
        for path in (ours / name, *ours.glob(f"{name.removesuffix('.py')}-*.dist-info")):
            if path.exists():
                (site / path.name).symlink_to(path)
    env = {"PATH": f"{tmp_path / 'env' / 'bin'}:/usr/bin:/bin", "HOME": str(home), **SMALL}
    for module in ("deepspeed", "ray", "pydantic", "maskfleet", "pytest"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        subprocess.run(["python", "-c", code], env=env, check=True, cwd=home)
    command = [f"{home}/gpu-tests/run", "-k", SAMPLE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=home)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Ray is not installed" in done.stdout
