"""Arrays with the characters of a text, for rules that apply to single characters."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

CODE_POINT_COUNT = 0x110000  # number of Unicode code points


class CharacterClasses:
    """Maps each code point to a class, which is a small number.

    Attributes:
        table: [CODE_POINT_COUNT] uint8, class of each code point; `filling` at first. Classes of ASCII characters
            cannot be changed after the first `classify`.
    """

    def __init__(self, filling: int = 0) -> None:
        self.table = np.full(CODE_POINT_COUNT, filling, dtype=np.uint8)
        self._ascii = b""

    def classify(self, text: str) -> NDArray[np.uint8]:
        """Return [characters] uint8, the class of each character."""
        if not text.isascii():
            return self.table[code_points(text)]
        self._ascii = self._ascii or self.table[:256].tobytes()
        return np.frombuffer(text.encode().translate(self._ascii), dtype=np.uint8)


def code_points(text: str) -> NDArray[np.uint8] | NDArray[np.uint32]:
    """Return [characters] uint8 or uint32, the code points of a text; uint8 if it is ASCII."""
    if text.isascii():
        return np.frombuffer(text.encode(), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def is_white_space(text: str) -> NDArray[np.bool_]:
    """Return [characters] bool: which characters of a text are white space."""
    return _white_space_classes().classify(text).view(np.bool_)


@cache
def _white_space_classes() -> CharacterClasses:
    found = CharacterClasses()
    # No character above U+3000 is white space.
    found.table[[code for code in range(0x3001) if chr(code).isspace()]] = 1
    return found
