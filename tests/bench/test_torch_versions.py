"""The program that compares runs on several releases of torch sees a difference of one bit."""

import sys
from pathlib import Path

import pytest
import torch
import torch_versions
from program import BenchError
from torch_versions import Compared, largest_difference


def test_a_weight_that_differs_by_a_bit_is_a_difference() -> None:
    weights = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    assert largest_difference(weights, {name: one.clone() for name, one in weights.items()}) == 0.0
    other = weights | {"b": torch.nextafter(weights["b"], torch.tensor(2.0))}
    assert largest_difference(weights, other) == pytest.approx(2**-23)
    assert not largest_difference(weights, weights | {"a": torch.full((3,), torch.nan)}) <= 0.0


def test_a_cell_says_equal_only_if_nothing_differs() -> None:
    assert str(Compared()) == "equal"
    assert str(Compared(None, 1e-7)) == "from step 20, 1e-07 at the end"
    assert str(Compared(3, 2e-6)) == "from step 3, 2e-06 at the end"
    assert str(Compared(failure="failed after step 4")) == "failed after step 4"


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(BenchError, match="GPT"):
        torch_versions.main([Path(sys.executable)], family=["GPT"])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_one_torch_computes_the_same_bits_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """In Python, and compiled."""
    python = Path(sys.executable)
    torch_versions.main([python, python], family=["RoBERTa, MLM"])
    *_, in_python, compiled = capsys.readouterr().out.splitlines()
    assert in_python.endswith("| Python | equal | equal |")
    assert compiled.endswith("| compiled | equal | equal |")
