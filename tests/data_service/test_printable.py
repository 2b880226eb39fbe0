"""Text for a terminal."""

import pytest

from data_service.printable import escape_controls, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("naïve 日本語 a\u200cb", "naïve 日本語 a\u200cb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\rb\x00\x7f\x9b", r"a\rb\x00\x7f\x9b"),
        ("\u202egpj.exe\u2066", r"\u202egpj.exe\u2066"),
        ("\u2028\ud800", r"\u2028\ud800"),
    ],
)
def test_controls_are_escapes_and_text_stays(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


def test_one_line_folds_spaces_and_shows_control_characters() -> None:
    assert one_line("a \n  b\x1b") == r"a b\x1b"
