"""What a test sets for its whole process does not slow those after it down."""

import pytest
import torch

ODD = 61  # threads: what no machine of the tests has by default


@pytest.mark.parametrize("turn", ["first", "second"])
def test_torchs_threads_are_those_before_the_test(turn: str) -> None:
    """Several test processes share the cores: with two threads each, a test takes ten times as long."""
    assert torch.get_num_threads() != ODD, f"the {turn} of two tests finds what the other set"
    torch.set_num_threads(ODD)
