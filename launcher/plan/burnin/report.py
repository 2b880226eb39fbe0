"""What a check finds, line by line, and what it says of itself."""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_SAID = 2000  # characters of what went wrong


class Measured(BaseModel):
    """One line of what a check found.

    Attributes:
        what: was measured or compared.
        found: a figure, or words; None where nothing came of it.
        unit: of the figure.
        bound: what the figure may be at most, or with `least` at least; None where nothing is held against it.
        right: whether it is what it should be; None where nobody can say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    what: str
    found: float | str | None = None
    unit: str = ""
    bound: float | None = None
    least: bool = False
    right: bool | None = None


class Mark(BaseModel):
    """What a check's process says of itself.

    Attributes:
        kind: `doing`: what comes next; `failed`: an error ended the check; `skipped`: this machine lacks what it needs;
            `ended`: it came to its end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["doing", "failed", "skipped", "ended"]
    text: str = ""


class CannotRun(Exception):
    """This machine lacks what a check needs. The message says what."""


class Report:
    """Hands measurements and marks on, one by one and at once, so that they outlive the check's process."""

    def __init__(self, hand_on: Callable[[dict[str, Any]], None]) -> None:
        self._hand_on = hand_on

    def figure(self, what: str, found: float | str, unit: str = "") -> None:
        """A figure that nothing is held against."""
        self._write(Measured(what=what, found=_finite(found), unit=unit))

    def at_most(self, what: str, found: float, bound: float, unit: str = "") -> None:
        """A figure that is wrong if it is larger than `bound`, or no number."""
        right = found <= bound
        self._write(Measured(what=what, found=_finite(found), unit=unit, bound=bound, right=right))

    def at_least(self, what: str, found: float, bound: float, unit: str = "") -> None:
        right = found >= bound
        self._write(
            Measured(what=what, found=_finite(found), unit=unit, bound=bound, least=True, right=right)
        )

    def holds(self, what: str, right: bool, found: str = "") -> None:
        """Something that is true or false."""
        self._write(Measured(what=what, found=found or ("yes" if right else "no"), right=right))

    def doing(self, text: str) -> None:
        """What comes next: if the process dies of it, this is known."""
        self._write(Mark(kind="doing", text=text))

    def mark(self, kind: Literal["failed", "skipped", "ended"], text: str = "") -> None:
        self._write(Mark(kind=kind, text=text[-_SAID:]))

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An error inside is a finding of its own, and the check goes on."""
        self.doing(what)
        try:
            yield
        except CannotRun:
            raise
        except Exception as error:  # whatever a compiler, a driver or a library raises
            self._write(Measured(what=what, found=said(error), right=False))

    def _write(self, what: Measured | Mark) -> None:
        kind = "measured" if isinstance(what, Measured) else "mark"
        self._hand_on({kind: what.model_dump(mode="json")})


def said(error: BaseException) -> str:
    """An error in few words: its kind, its message, and the last place of ours."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[: _SAID // 2] + where


def _finite(found: float | str) -> float | str:
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found
