"""The fused attention under Triton's interpreter against its formula: values, every gradient, dropout."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.kernels.tiling import Tiling, Tilings
from tests.support.models.relative_attention import DROPOUT, Form, assert_same, expected, fused, problem

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
}  # the interpreter multiplies no bf16
FORMS = {
    "plain": Form(heads=1, width=5, dropout=DROPOUT),
    "window": Form(heads=1, window=7, dropout=DROPOUT),
    "disentangled": Form(heads=3, width=24, table_a=True, table_b=True, dropout=DROPOUT),
    "with_positions": Form(heads=1, table_a=True, table_b=True, table_c=True),
    "few_queries": Form(heads=1, table_a=True, table_b=True, few=True, dropout=DROPOUT),
    "causal": Form(heads=1, table_a=True, table_b=True, table_c=True, causal=True, dropout=DROPOUT),
    "causal_window": Form(heads=1, window=7, causal=True),
    "causal_memory": Form(heads=1, table_a=True, few=True, carried=6, causal=True),
    "relative_keys": Form(heads=1, table_a=True, dropout=DROPOUT),
    "across": Form(heads=2, width=5, across=True, dropout=DROPOUT),
    "permuted": Form(
        heads=1, table_a=True, own_r=True, segments=True, order=True, signs=True, carried=6, dropout=DROPOUT
    ),
    "permuted_queries": Form(
        heads=1, table_a=True, own_r=True, segments=True, order=True, few=True, carried=8, dropout=DROPOUT
    ),
}
LENGTHS = {"mixed": [1, 0, 20], "none": []}
SHORT = [
    *(
        (form, "mixed")
        for form in (
            "window",
            "disentangled",
            "permuted_queries",
            "causal",
            "across",
        )
    ),
    ("disentangled", "none"),
]


@pytest.fixture(autouse=True)
def memory_begins_with_nan() -> Iterator[None]:
    """What no program writes is not a number, so that it shows."""
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` returns
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def even(size: int) -> Tilings:
    return Tilings(*[Tiling(size, 4, 1)] * 3)


@pytest.mark.parametrize(
    ("form", "lengths"),
    [
        pytest.param(form, lengths, marks=() if (form, lengths) in SHORT else pytest.mark.long)
        for form, lengths in product(FORMS, LENGTHS)
    ],
)
def test_equals_the_formula(form: str, lengths: str) -> None:
    given = problem(LENGTHS[lengths], FORMS[form])
    assert_same(fused(given, even(16)), expected(given), TOLERANCE[torch.float64])


forms = st.builds(
    Form,
    heads=st.integers(1, 3),
    width=st.integers(1, 40),
    table_a=st.booleans(),
    table_b=st.booleans(),
    table_c=st.booleans(),
    own_r=st.booleans(),
    segments=st.booleans(),
    order=st.booleans(),
    signs=st.booleans(),
    few=st.booleans(),
    dropout=st.sampled_from([0.0, DROPOUT]),
    causal=st.booleans(),
    carried=st.sampled_from([0, 0, 1, 4, 23]),
    dtype=st.sampled_from(list(TOLERANCE)),
).filter(lambda form: (form.table_a or not form.own_r) and not (form.signs and form.causal))


ONE_TOKEN = Form(
    heads=1,
    width=19,
    table_a=True,
    table_b=True,
    table_c=True,
    own_r=True,
    segments=True,
    signs=True,
    dropout=DROPOUT,
    carried=4,
    dtype=torch.float16,
)
"""Nearly all of its attention is on one key, so its gradients all but cancel."""


def check(lengths: list[int], form: Form, seed: int, cuts: Tilings | None) -> None:
    given = problem(lengths, form, seed)
    scale = expected(given, cancels=False)
    assert_same(fused(given, cuts), expected(given), TOLERANCE[form.dtype], scale)


@pytest.mark.long
@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a smaller failure takes minutes
@example([1], ONE_TOKEN, 480, 16)
@given(st.lists(st.integers(0, 33), max_size=2), forms, st.integers(0, 2**32), st.sampled_from([16, 32]))
def test_equals_the_formula_whatever_the_terms(lengths: list[int], form: Form, seed: int, size: int) -> None:
    check(lengths, form, seed, even(size))


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # up to a minute or two each
@given(st.lists(st.integers(0, 150), max_size=2), forms, st.integers(0, 2**32))
def test_equals_the_formula_in_the_tiles_that_are_used(lengths: list[int], form: Form, seed: int) -> None:
    check(lengths, form, seed, None)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_equals_the_formula_up_to_600_tokens(form: Form, dtype: torch.dtype) -> None:
    form = Form(**{**vars(form), "dtype": dtype, "heads": 1, "carried": form.carried * 16})
    check([600, 1, 64, 129], form, 3, None)
