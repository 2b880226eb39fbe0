"""The measuring programs run on small cases and print what they found; how fast anything is, is not tested."""

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import data
import failures
import fake_cuda
import gpu_cuts
import gpu_pairs
import gpu_step
import mup
import operations
import prepare_stages
import program
import pytest
import step
import torch
import torch_versions
from step_batch import row_lengths
from torch_versions import largest_difference

from encoder_core.families.electra import ElectraConfig
from launcher.app.cli.demo_path import write_documentation

ROOT = Path(__file__).parents[2]
Main = Callable[..., None]

# The program, its arguments, and how many lines of its result look how.
RUNS = [
    (operations.main, "DistilBERT", r"^\| DistilBERT \| 6 \| 2\d\d \| 2\d\d \| \d \| 44 \| 0 \|$", 1),
    (failures.main, "bert-base 4 --set microbatch=8", r"^\| (best )?goodput( \| 9\d\.\d+%){4} \|$", 2),
]
MUP = "{text} --out {out} --width 32 --width 64 --lowest -9 --highest -7 --steps 20 --rows 4 --vocabulary 400"
EQUAL_CUTS = r"^relative-keys, \w+: in use [^;]*;( \([\d, ]+\) [\d.]+ \((0e\+00|\de-0[6-9])\),?)+$"
LONG_RUNS = [
    (step.main, "xlnet --layers 1 --rounds 1", r"^(maskfleet|transformers).* CPU s +[\d,]+ tokens/s", 2),
    (gpu_cuts.main, "--form relative-keys", EQUAL_CUTS, 3),
    (
        gpu_pairs.main,
        "{root} --form relative-keys --length 20 --pairs 1",
        r"^relative-keys, (new|earlier): ",
        2,
    ),
    (gpu_step.main, "roberta-base --python", r"^ +\d+\.\d{3} ms +\d+ x ", 40),
    (prepare_stages.main, "{text} --most 100000 --pairs 1 --old {root}", r"\| yes \|$", 7),
    (mup.main, MUP, r"^\| (muP|without) \|", 4),
    (torch_versions.main, "{python} {python} --family RoBERTa,_MLM", r"\| equal \| equal \|$", 2),
]
MISTAKES = [
    (torch_versions.main, "{python} --family GPT", "GPT"),
    (gpu_cuts.main, "--form none", "'none'"),
    (gpu_pairs.main, "{out}", "tests/gpu/problems.py"),
    pytest.param(
        *(data.main, "{out}", "MosaicML"),
        marks=pytest.mark.skipif(find_spec("streaming") is not None, reason="the peer is installed"),
    ),
    pytest.param(
        *(fake_cuda.main, "", "without CUDA"),
        marks=pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA"),
    ),
]


@pytest.fixture
def exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Main, str], int]:
    """How a program ends that is given these arguments."""

    def ended(main: Main, arguments: str) -> int:
        text = tmp_path / "text.jsonl"
        if "{text}" in arguments:
            write_documentation(text)
        places = {"root": ROOT, "text": text, "out": tmp_path / "out", "python": sys.executable}
        words = [word.format(**places).replace(",_", ", ") for word in arguments.split()]
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as end:
            program.run(main)
        return int(end.value.code or 0)

    return ended


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("main", "arguments", "line", "count"),
    [*RUNS, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG_RUNS)],
    ids=[one[0].__module__ for one in (*RUNS, *LONG_RUNS)],
)
def test_a_program_prints_what_it_found(
    main: Main,
    arguments: str,
    line: str,
    count: int,
    exit_code: Callable[[Main, str], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(main, arguments) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(line, printed, re.MULTILINE)) == count, printed


@pytest.mark.parametrize(("main", "arguments", "named"), MISTAKES)
def test_a_program_that_cannot_measure_names_the_remedy(
    main: Main,
    arguments: str,
    named: str,
    exit_code: Callable[[Main, str], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(main, arguments) == 2
    problem, remedy = capsys.readouterr().err.split("remedy: ")
    assert named in problem + remedy


def test_a_weight_that_differs_by_a_bit_is_a_difference() -> None:
    weights = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    assert largest_difference(weights, {name: one.clone() for name, one in weights.items()}) == 0.0
    other = weights | {"b": torch.nextafter(weights["b"], torch.tensor(2.0))}
    assert largest_difference(weights, other) == pytest.approx(2**-23)
    assert not largest_difference(weights, weights | {"a": torch.full((3,), torch.nan)}) <= 0.0


@pytest.mark.parametrize("family", get_args(step.Family))
def test_both_sides_compute_the_same_loss(family: step.Family) -> None:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "feed_forward": 48, "vocab": 101}
    config = step.BASE[family].model_copy(update=shape)
    if isinstance(config, ElectraConfig):
        config = config.model_copy(update={"embedding": 16, "generator_divisor": 2})
    setting = step.Setting(
        family, config, rows=3, length=40, lengths="mixed", rounds=1, threads=torch.get_num_threads()
    )
    result = step.bench_step(setting, progress=lambda _: None)
    assert result.loss_gap < 1e-5
    assert result.tokens == sum(row_lengths("mixed", 3, 40)) < 3 * 40
    assert (result.peer_masked is None) == (family == "xlnet")
