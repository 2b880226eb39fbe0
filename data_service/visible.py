"""Text from data, stores and files as a terminal may show it: control characters are made visible, not obeyed."""

import unicodedata

_KEPT = "\n\t"
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, separators of lines and paragraphs
_DIRECTIONS = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # would reorder what follows


def visible(text: str) -> str:
    r"""`text` with every control character as its escape (`\x1b`, `\u202e`); line ends and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if _is_control(c) else c for c in text)


def one_line(text: str) -> str:
    """`text` on one line, its white space single spaces, its control characters visible."""
    return visible(" ".join(text.split()))


def _is_control(character: str) -> bool:
    if character in _KEPT:
        return False
    return unicodedata.category(character) in _CONTROLS or character in _DIRECTIONS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
