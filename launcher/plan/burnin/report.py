"""The findings of a check, line by line, and the marks of its progress."""

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_SAID = 2000  # characters of what went wrong


class Measured(BaseModel):
    """One finding of a check.

    Attributes:
        what: what was measured or compared.
        found: a figure, or words; None if there is no result.
        unit: unit of the figure.
        bound: the largest figure allowed, or with `least` the smallest; None if no bound applies.
        right: whether the finding is as it should be; None if that is unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    what: str
    found: float | str | None = None
    unit: str = ""
    bound: float | None = None
    least: bool = False
    right: bool | None = None


class Mark(BaseModel):
    """A mark that a check's process sends about itself.

    Attributes:
        kind: `doing`: what it does next. `failed`: an error ended the check. `skipped`: this machine lacks what it
            needs. `ended`: it has finished.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["doing", "failed", "skipped", "ended"]
    text: str = ""


class CannotRun(Exception):
    """This machine lacks what a check needs. The message says what."""


class Report:
    """Sends measurements and marks one by one and at once, so that they outlive the check's process."""

    def __init__(self, hand_on: Callable[[dict[str, Any]], None]) -> None:
        self._hand_on = hand_on

    def figure(self, what: str, found: float | str, unit: str = "") -> None:
        """Report a figure without a bound."""
        self._write(Measured(what=what, found=_finite(found), unit=unit))

    def at_most(self, what: str, found: float, bound: float, unit: str = "") -> None:
        """Report a figure that is wrong if it exceeds `bound` or is not a number."""
        right = found <= bound
        self._write(Measured(what=what, found=_finite(found), unit=unit, bound=bound, right=right))

    def at_least(self, what: str, found: float, bound: float) -> None:
        """Report a figure that is wrong if it is below `bound` or is not a number."""
        right = found >= bound
        self._write(Measured(what=what, found=_finite(found), bound=bound, least=True, right=right))

    def holds(self, what: str, right: bool, found: str = "") -> None:
        """Report a statement that is true or false."""
        self._write(Measured(what=what, found=found or ("yes" if right else "no"), right=right))

    def doing(self, text: str) -> None:
        """Report what comes next, so that it is known if the process dies of it."""
        self._write(Mark(kind="doing", text=text))

    def mark(self, kind: Literal["failed", "skipped", "ended"], text: str = "") -> None:
        self._write(Mark(kind=kind, text=text[-_SAID:]))

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Turn an error inside into a finding, so that the check continues."""
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
    """Describe an error in a few words: its kind, its message, and the last line of our code in its traceback."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[: _SAID // 2] + where


def _finite(found: float | str) -> float | str:
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found
