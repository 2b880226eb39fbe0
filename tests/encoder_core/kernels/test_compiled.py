"""Our kernels compile for the GPUs that they are for, on the Tritons that torch brings.

`compiled.csv` has a line for each launch: `python tests/bench/kernels.py --write`. What it says is compiled anew here.
"""

import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from kernels import (
    ARCHITECTURES,
    DTYPES,
    EVERY_FORM,
    FORMS,
    LOSSES,
    NORMS,
    SHARED,
    STATES,
    UPDATE,
    VOCABULARIES,
    Compiled,
    read,
    widths_of,
)

from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.source import bundled
from launcher.runtime.recipe.summary import with_vocab

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests/encoder_core/kernels/compiled.csv"
RECORDED = read(TABLE)
PINS = dict(line.split("==") for line in (ROOT / "infra/constraints.txt").read_text().split() if "==" in line)
TESTED = yaml.safe_load((ROOT / "tests/bench/tested.yaml").read_text())
BROUGHT = {release["triton"] for release in TESTED["torch"]}  # Tritons, by the torches that are admitted
HALF = ("bf16", "fp16")
OTHERS = (64, 128)  # widths of heads on record for Tritons that are not the pinned one
FEW, HARDLY_ANY = 1 / 40, 1 / 100  # shares of a launch's instructions that may spill registers


def compiled(folder: Path, *options: str, tritons: Path | None = None) -> list[Compiled]:
    """In a process of its own, since Triton decides at import whether it interprets."""
    out = folder / "compiled.csv"
    path = os.pathsep.join(str(place) for place in (tritons, ROOT) if place is not None)
    subprocess.run(
        [sys.executable, str(ROOT / "tests/bench/kernels.py"), "--write", str(out), *options],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path},
        check=True,
        capture_output=True,
    )
    return read(out)


def lines(found: Sequence[Compiled]) -> dict[tuple[object, ...], Compiled]:
    return {(one.triton, one.sm, one.dtype, one.width, one.form, one.kernel): one for one in found}


def groups(found: Sequence[Compiled]) -> Iterator[tuple[tuple[str, int, str], list[Compiled]]]:
    by: dict[tuple[str, int, str], list[Compiled]] = defaultdict(list)
    for one in found:
        by[one.triton, one.sm, one.dtype].append(one)
    yield from by.items()


def test_on_blackwell_no_sum_of_two_products_is_in_tensor_memory() -> None:
    """Triton 3.6 to 3.8 miscompile such loops (triton-lang/triton#10821). Forms without tables have no such sum."""
    backward = [one for one in RECORDED if one.sm == 100 and one.kernel in ("queries", "keys")]
    uses = {one.form: 0 for one in backward}
    for one in backward:
        uses[one.form] += one.wgmma
    assert {form for form, count in uses.items() if count} == {"plain", "causal", "window"}


def test_every_launch_is_on_record_for_the_triton_that_the_pinned_torch_brings() -> None:
    """On every chip in every precision."""
    mine = [one for one in RECORDED if one.triton == PINS["triton"]]
    seen = {(one.sm, one.dtype, one.width, one.form) for one in mine}
    assert seen == {
        (sm, dtype, width, form)
        for sm in ARCHITECTURES
        for dtype in DTYPES
        for form in EVERY_FORM
        for width in widths_of(form)
    }


def test_every_torch_that_is_admitted_has_its_triton_on_record() -> None:
    assert {one.triton for one in RECORDED} >= BROUGHT


def test_every_other_triton_has_the_launches_that_train() -> None:
    """Of attention those in half precision, for heads of 64 and of 128; of one fewer."""

    def launches(version: str) -> set[tuple[object, ...]]:
        return {
            (one.sm, one.dtype, one.width, one.form, one.kernel)
            for one in RECORDED
            if one.triton == version and (one.form not in FORMS or (one.dtype in HALF and one.width in OTHERS))
        }

    pinned = launches(PINS["triton"])
    assert pinned
    for version in BROUGHT - {PINS["triton"]}:
        assert launches(version) == pinned


def timed(one: Compiled) -> bool:
    """Whether `tiling.py` has its cut from a GPU, on which spills decided nothing."""
    return one.sm == 90 and one.form in FORMS and one.width == 64


GROUPS = [pytest.param(found, id="-".join(map(str, name))) for name, found in groups(RECORDED)]


@pytest.mark.parametrize("group", GROUPS)
def test_every_launch_fits_its_gpu(group: list[Compiled]) -> None:
    """In shared memory, and in registers. Of the launches in half precision that no GPU has timed, none spills by
    more than few of its instructions, and nine in ten by hardly any. In fp32, in which nothing trains on GPUs, many do.
    """
    for one in group:
        assert one.shared <= SHARED[one.sm], f"{one}"
        assert one.programs >= 1
    half = [one for one in group if one.dtype in HALF and one.triton in BROUGHT and not timed(one)]
    assert [one for one in half if one.spills > FEW * one.instructions] == []
    assert 10 * sum(one.spills > HARDLY_ANY * one.instructions for one in half) <= len(half)


def test_plain_scores_are_multiplied_by_warp_groups_forward_and_backward() -> None:
    """In tiles of 64 or more, where there are such instructions: sm_90 and sm_100."""
    plain = [
        one
        for one in RECORDED
        if one.form in ("plain", "window", "causal") and one.dtype in HALF and one.width <= 64 and one.sm >= 90
    ]
    assert plain
    for one in plain:
        assert (one.wgmma > 0, one.mma, int(one.tile) >= 64, one.stages > 1) == (True, 0, True, True), f"{one}"


@pytest.mark.long
def test_kernels_of_norms_and_losses_compile_without_spills_and_round(tmp_path: Path) -> None:
    """Gradients in half precision are rounded to the nearest: Triton's interpreter does not show that."""
    draws = random.SystemRandom()
    sm, dtype, norm = draws.choice(ARCHITECTURES), draws.choice(HALF), draws.choice(list(NORMS))
    widths = (draws.choice(widths_of(norm)), draws.choice(VOCABULARIES))
    found: dict[tuple[object, ...], Compiled] = {}
    for form, width in zip((norm, "loss"), widths, strict=True):
        options = {"--sm": str(sm), "--dtype": dtype, "--width": str(width), "--form": form}
        (folder := tmp_path / form).mkdir()
        found |= lines(compiled(folder, *(word for option in options.items() for word in option)))
    assert len(found) == 4
    assert [one for one in found.values() if one.faults] == []
    recorded = {name: one for name, one in lines(RECORDED).items() if name in found}
    assert recorded == {name: found[name] for name in recorded}
    (code,) = tmp_path.glob("loss/cache/*/gradient_kernel.ptx")
    kind = {"bf16": "bf16", "fp16": "f16"}[dtype]
    assert f"cvt.rn.{kind}" in code.read_text()
    assert "cvt.rz" not in code.read_text()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("form", ["LayerNorm", "loss", "DeBERTa", UPDATE])
def test_what_is_rounded_once_is_not_left_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Triton takes that from the environment, and from 3.10 on by another default."""
    found = []
    for default in ("0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
        (folder := tmp_path / default).mkdir()
        found.append(compiled(folder, "--sm", "80", "--dtype", "bf16", "--width", "64", "--form", form))
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_kernels_of_stable_adamw_compile_without_spills_and_round_as_they_are_written(tmp_path: Path, sm: int) -> None:
    """Every product and sum by itself but for the multiply-adds: two of each element in both kernels."""
    found = compiled(tmp_path, "--sm", str(sm), "--dtype", "fp32", "--form", UPDATE)
    assert [one.kernel for one in found] == ["moments", "squares", "weights"]
    assert [one for one in found if one.faults] == []
    for name in ("moments", "weights"):
        (path,) = tmp_path.glob(f"cache/*/{name}_kernel.ptx")
        code = path.read_text()
        each = 2048 // (32 * 8)  # elements of a thread
        assert code.count("fma.rn.f32") == 2 * each
        assert code.count("sqrt.rn.f32") == code.count("div.rn.f32") == each
        assert re.search(r"\b(?:approx|full|ftz)\.", code) is None


def test_widths_and_vocabularies_are_those_of_our_recipes() -> None:
    models = [with_vocab(load(name).model) for name in bundled()]
    networks = [*models, *(one.generator for one in models if one.has_generator)]
    assert {one.hidden for one in networks} <= {width for form in NORMS for width in widths_of(form)}
    post_norm = {one.hidden for one in networks if not one.has_rotary_positions}
    assert post_norm <= set(STATES)
    vocabularies = {one.vocab for one in models if one.vocab is not None}
    assert {-(-vocab // 64) * 64 for vocab in vocabularies} == set(VOCABULARIES)
    assert set(EVERY_FORM) == {*FORMS, *NORMS, *LOSSES}


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("version", sorted({one.triton for one in RECORDED}))
def test_all_launches_become_what_is_on_record(tmp_path: Path, version: str) -> None:
    """On each Triton, taken from the package index."""
    tritons = tmp_path / "triton"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--target",
        str(tritons),
        "--no-deps",
        f"triton=={version}",
    ]
    subprocess.run(install, check=True)
    recorded = {name: one for name, one in lines(RECORDED).items() if one.triton == version}
    names = {(one.sm, one.dtype) for one in recorded.values()}
    for sm, dtype in sorted(names):
        (folder := tmp_path / f"{sm}-{dtype}").mkdir()
        found = lines(compiled(folder, "--sm", str(sm), "--dtype", dtype, tritons=tritons))
        assert {name: found.get(name) for name, one in recorded.items() if (one.sm, one.dtype) == (sm, dtype)} == {
            name: one for name, one in recorded.items() if (one.sm, one.dtype) == (sm, dtype)
        }
