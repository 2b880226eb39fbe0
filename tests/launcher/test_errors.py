"""Packages that are not there: one line says what needs them, and how to install them."""

import re
import sys

import pytest

from launcher.errors import EVALUATE_EXTRA, MissingPackage, import_optional


def test_a_package_that_is_there_is_imported() -> None:
    assert import_optional("json", "a test") is sys.modules["json"]


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [(None, "pip install seqeval"), (EVALUATE_EXTRA, "pip install 'maskfleet[evaluate]'")],
)
def test_the_remedy_for_one_that_is_not_is_one_line(
    monkeypatch: pytest.MonkeyPatch, extra: str | None, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "seqeval", None)
    with pytest.raises(MissingPackage) as found:
        import_optional("seqeval", "tagging", extra)
    assert re.match(r"tagging\b.*\bseqeval\b", found.value.problem)
    assert found.value.remedy == remedy
