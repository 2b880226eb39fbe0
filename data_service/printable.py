"""Makes text from data, stores and files safe to show: control characters become visible, secret keys in URIs
hidden."""

import re
import shlex
import unicodedata

_ALLOWED_CONTROLS = "\n\t"  # control characters that `escape_controls` leaves as they are
_CONTROL_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, separators of lines and paragraphs
# These characters would reorder the text that follows them.
_DIRECTION_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


# User and password in a URL; the password may contain slashes, as keys of AWS do.
_URL_LOGIN = re.compile(r"""(?<=://)(?!arn:)(?:[^\s'"/@]*:[^\s'"]*|[^\s'"/@]+)@""")
_SECRET_PARAMETER = re.compile(
    r"""([?&](?:x-amz-[\w-]*|signature|awsaccesskeyid|sig|\w*token|\w*key|\w*secret|password)=)[^&\s'"#]+""",
    re.IGNORECASE,
)
_SECRET_MASK = "***"


def mask_secrets(text: str) -> str:
    """Return `text` with user names, passwords and signatures in URIs replaced by `***`."""
    if "://" not in text:
        return text
    return _SECRET_PARAMETER.sub(rf"\1{_SECRET_MASK}", _URL_LOGIN.sub(f"{_SECRET_MASK}@", text))


def escape_controls(text: str) -> str:
    r"""Return `text` with control characters replaced by their escapes (`\x1b`, `\u202e`), except line ends and
    tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if _is_control(c) else c for c in text)


def one_line(text: str) -> str:
    """Return `text` on one line: white space becomes single spaces, control characters become visible."""
    return escape_controls(" ".join(text.split()))


def shell_word(path: str) -> str:
    """Return `path` (or a URI) quoted as one word of a shell command, so that it cannot be mistaken for an option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def control_characters(text: str) -> list[str]:
    """Return the escaped control characters of `text`: those that end a line, move the cursor or are not text."""
    return sorted({_escape(c) for c in text if unicodedata.category(c) in _CONTROL_CATEGORIES})


def _is_control(character: str) -> bool:
    if character in _ALLOWED_CONTROLS:
        return False
    return unicodedata.category(character) in _CONTROL_CATEGORIES or character in _DIRECTION_CONTROLS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
