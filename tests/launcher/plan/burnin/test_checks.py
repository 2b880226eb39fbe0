"""The checks themselves: what they can tell apart, and that they come to their end on a CPU and from their pack."""

import inspect
import json
import os
import random
import subprocess
import sys
import tarfile
import venv
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.burnin.checks import CHECKS, checks_for
from launcher.plan.burnin.problems import error
from launcher.plan.burnin.record import PAGE, RECORD, BurninRecord

ROOT = Path(__file__).parents[4]


def command(*words: str, site: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([*([str(site)] if site else []), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "maskfleet", "burnin", *words],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes(out: Path) -> dict[str, str]:
    record = BurninRecord.model_validate_json((out / RECORD).read_text())
    return {name: one.status for name, one in record.outcomes.items()}


def test_every_check_has_a_function_that_takes_its_arguments() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        module, _, name = check.function.partition(":")
        inspect.signature(getattr(import_module(module), name)).bind(None, *check.arguments)
        assert 0 < check.seconds("cpu") < check.limit("cpu")
    alone = sum(check.gpu for check in CHECKS if not (check.figures or check.beside))
    assert (
        alone + sum(check.gpu for check in CHECKS if check.beside) / 4 <= 25 * 60
    )  # so many cores have 4 at a time
    kinds = [check.figures for check in CHECKS]
    assert kinds == sorted(kinds)


def test_an_own_recipe_is_timed_in_place_of_others() -> None:
    def speeds(recipe: str | None) -> set[str]:
        return {check.name for check in checks_for(recipe) if check.figures}

    assert speeds("albert-base") == {"kernel-times", "speed-own"}
    assert "speed-own" not in speeds(None)
    assert len(speeds(None)) == 6


@given(st.integers(0, 2**32), st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([0.99, 1.01]))
def test_a_kernel_that_is_one_percent_off_is_told_from_rounding(
    seed: int, dtype: torch.dtype, factor: float
) -> None:
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rounded = {"context": exact.to(dtype)}
    off = {"context": (factor * exact).to(dtype)}
    least = 2e-3  # in bf16, the widest bound
    assert error(rounded, {"context": exact})[1] < least / 4
    assert error(off, {"context": exact})[1] > 2 * least


@given(st.sampled_from([float("nan"), float("inf")]), st.integers(0, 99))
def test_numbers_that_are_none_are_wrong(value: float, place: int) -> None:
    exact = torch.ones(100, dtype=torch.float64)
    found = exact.clone()
    found[place] = value
    assert error({"x": found}, {"x": exact})[0] == float("inf")


@pytest.mark.long
def test_a_cpu_passes_and_is_not_asked_again(tmp_path: Path) -> None:
    chosen = [word for name in ("environment", "draws") for word in ("--only", name)]
    out = tmp_path / "out"
    done = command("--out", str(out), "--json", *chosen)
    assert done.returncode == 0, done.stderr
    assert outcomes(out) == dict.fromkeys(("environment", "draws"), "passed")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["check"] for one in told} == {"environment", "draws"}
    assert {one["form"] for one in told} == {"cpu"}
    assert 'id="draws"' in (out / PAGE).read_text()
    before = (out / RECORD).read_text()
    assert command("--out", str(out), *chosen).returncode == 0
    assert json.loads((out / RECORD).read_text())["outcomes"] == json.loads(before)["outcomes"]


@pytest.mark.long
def test_a_name_that_no_check_has_is_a_mistake(tmp_path: Path) -> None:
    done = command("--out", str(tmp_path / "out"), "--only", "no-such-check")
    assert done.returncode == 2
    assert "no-such-check" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_checks_are_listed() -> None:
    told = command("--list", "--json")
    assert [json.loads(line)["check"] for line in told.stdout.splitlines()] == [
        c.name for c in checks_for(None)
    ]


# Kernels in place of the right ones, by check: "raise", "off" (by 1 %), "die"; the others are as they are.
BAD_KERNELS = """
import json, os, signal, sys
if "encoder_core.trials.trial_process" in " ".join(sys.orig_argv):
    from launcher.plan.burnin import problems, tokenwise
    ways = json.loads(os.environ["BAD_KERNELS"])
    attention, norm, gradient = problems.fused_attention, tokenwise.residual_norm, tokenwise.to_gradient
    def misbehave(check):
        way = ways.get(check)
        if way == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "raise":
            raise RuntimeError("no kernel image is available for execution on the device")
        return 1.01 if way == "off" else 1.0
    def fused_attention(q, k, v, terms, layout, cuts=None):
        keys = "kernel-deberta" if terms.table_b is not None else "kernel-relative-keys"
        check = "kernel-window" if layout.window is not None else keys if terms.table_a is not None else "kernel-plain"
        return attention(q, k, v, terms, layout, cuts) * misbehave(check)
    def residual_norm(*given):
        total, normed = norm(*given)
        return total, normed * misbehave("kernel-norm")
    def to_gradient(logits, ids, sums, *, biased):
        by_bias = gradient(logits, ids, sums, biased=biased)
        logits.mul_(misbehave("kernel-loss"))
        return by_bias
    problems.fused_attention = fused_attention
    tokenwise.residual_norm, tokenwise.to_gradient = residual_norm, to_gradient
"""
KERNELS = (
    "kernel-plain",
    "kernel-window",
    "kernel-relative-keys",
    "kernel-deberta",
    "kernel-norm",
    "kernel-loss",
)
ENDS = {"raise": "failed", "off": "failed", "die": "died"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_bad_kernels_are_named_and_the_rest_goes_on(tmp_path: Path, seed: int) -> None:
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BAD_KERNELS)
    shuffled = random.Random(seed).sample(KERNELS, len(KERNELS))
    ways = dict(zip(shuffled, ENDS, strict=False))  # and the others are right
    names = [word for name in (*KERNELS, "environment") for word in ("--only", name)]
    done = command("--out", str(out), *names, site=site, BAD_KERNELS=json.dumps(ways))
    assert done.returncode == 1
    expected = {name: ENDS[ways[name]] if name in ways else "passed" for name in (*KERNELS, "environment")}
    assert outcomes(out) == expected, ways
    record = BurninRecord.model_validate_json((out / RECORD).read_text())
    bad = {way: record.outcomes[name] for name, way in ways.items()}
    assert "SIGKILL" in bad["die"].why
    assert [
        line for line in bad["raise"].lines if line.right is False and "no kernel image" in str(line.found)
    ]
    assert [line for line in bad["off"].lines if line.right is False and "off " in line.what]
    page = (out / PAGE).read_text()
    assert "SIGKILL" in page
    assert "no kernel image" in page


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_whole_burn_in_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command("--tiny", "--out", str(out))
    assert done.returncode == 0, (done.stderr, (out / RECORD).read_text())
    assert set(outcomes(out)) == {check.name for check in checks_for(None)}
    assert set(outcomes(out).values()) == {"passed"}


# What a bare machine has beside Python; the rest of the burn-in's needs comes from its pack.
BARE = [
    "torch",
    "torchgen",
    "functorch",
    "triton",
    "numpy",
    "numpy.libs",
    "sympy",
    "mpmath",
    "networkx",
    "filelock",
    "fsspec",
    "jinja2",
    "markupsafe",
    "typing_extensions.py",
    "tokenizers",
    "sentencepiece",
    "safetensors",
    "transformers",
    "regex",
    "huggingface_hub",
    "tqdm",
    "yaml",
]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_bare_machine_burns_in_from_the_pack(tmp_path: Path) -> None:
    """The pack for this Python, in an environment without Maskfleet, DeepSpeed, Ray and pydantic."""
    packs, home = tmp_path / "packs", tmp_path / "home"
    subprocess.run([sys.executable, ROOT / "infra" / "pack_burnin", "--out", packs], check=True)
    (archive,) = packs.iterdir()
    assert archive.stat().st_size <= 60 << 20
    with tarfile.open(archive) as tar:
        tar.extractall(home, filter="data")
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    ours = Path(torch.__file__).parents[1]
    for name in BARE:
        for path in (ours / name, *ours.glob(f"{name.removesuffix('.py')}-*.dist-info")):
            if path.exists():
                (site / path.name).symlink_to(path)
    env = {"PATH": f"{tmp_path / 'env' / 'bin'}:/usr/bin:/bin", "HOME": str(home)}
    for module in ("deepspeed", "ray", "pydantic", "maskfleet"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        subprocess.run(["python", "-c", code], env=env, check=True, cwd=home)
    names = ("environment", "kernel-plain", "zero-1", "checkpoint", "sums", "train")
    words = [word for name in names for word in ("--only", name)]
    done = subprocess.run(
        [home / "burnin" / "burnin", "--out", tmp_path / "out", *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )
    assert done.returncode == 0, done.stderr
    assert outcomes(tmp_path / "out") == dict.fromkeys(names, "passed") | {"train": "skipped"}
