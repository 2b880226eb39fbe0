"""The guide's table of families and objectives is the one that `tests/launcher/runtime/recipe/test_compositions.py`
tries."""

import pytest

from tests.support.checks.guide import GUIDE
from tests.support.models.compositions import table


@pytest.mark.long
def test_the_guides_table_of_what_is_trained_together_is_what_the_tests_try() -> None:
    """Print it with `python -m tests.support.models.compositions`."""
    assert table() in (GUIDE / "keys.md").read_text("utf-8")
