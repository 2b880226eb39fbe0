"""Text from data, stores and files as a terminal may show it: control characters are made visible, not obeyed; keys
that somebody has put into a URI are not shown at all."""

import re
import shlex
import unicodedata

_KEPT = "\n\t"
_CONTROLS = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, separators of lines and paragraphs
_DIRECTIONS = frozenset(
    "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # would reorder what follows


_LOGIN = re.compile(
    r"""(?<=://)(?!arn:)(?:[^\s'"/@]*:[^\s'"]*|[^\s'"/@]+)@"""
)  # a key of AWS may have slashes
_SIGNED = re.compile(
    r"""([?&](?:x-amz-[\w-]*|signature|awsaccesskeyid|sig|\w*token|\w*key|\w*secret|password)=)[^&\s'"#]+""",
    re.IGNORECASE,
)
_HIDDEN = "***"


def without_secrets(text: str) -> str:
    """`text` with `***` in place of names, passwords and signatures in URIs."""
    if "://" not in text:
        return text
    return _SIGNED.sub(rf"\1{_HIDDEN}", _LOGIN.sub(f"{_HIDDEN}@", text))


def visible(text: str) -> str:
    r"""`text` with every control character as its escape (`\x1b`, `\u202e`); line ends and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if _is_control(c) else c for c in text)


def one_line(text: str) -> str:
    """`text` on one line, its white space single spaces, its control characters visible."""
    return visible(" ".join(text.split()))


def shell_word(path: str) -> str:
    """`path` or a URI as one word of a shell command that somebody may copy; never taken for an option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def control_characters(text: str) -> list[str]:
    """The escapes of those characters of `text` that end a line, move a cursor or are no text; empty if none do."""
    return sorted({_escape(c) for c in text if unicodedata.category(c) in _CONTROLS})


def _is_control(character: str) -> bool:
    if character in _KEPT:
        return False
    return unicodedata.category(character) in _CONTROLS or character in _DIRECTIONS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
