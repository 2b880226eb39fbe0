"""What a check is, and what it is given. No torch here: the command that starts checks must outlive all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from launcher.plan.burnin.report import CannotRun, Report

Form = Literal["gpu", "cpu"]


class Request(BaseModel):
    """How checks are carried out.

    Attributes:
        form: on a GPU at full size, or on a CPU with small shapes.
        recipes: whose networks are trained, measured and tried: bundled names or files.
        folder: for what checks write; each has a folder of its own in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: Form
    recipes: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Bench:
    """What a check works with. `folder` is its own, and empty."""

    request: Request
    report: Report
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.request.form == "gpu"


@dataclass(frozen=True)
class Check:
    """One check, carried out in a process of its own.

    Attributes:
        about: what it shows, in one sentence.
        function: `module:name`; it is called with a `Bench` and `arguments`.
        gpu, cpu: seconds that it takes about, in either form.
        figures: it measures speed; such checks come after all others.
        beside: others may run beside it on a GPU: it measures neither time nor memory.
        needs: modules without which it is skipped.
        environment: variables of its process.
    """

    name: str
    about: str
    function: str
    gpu: float
    cpu: float
    arguments: tuple[str, ...] = ()
    figures: bool = False
    beside: bool = False
    needs: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def seconds(self, form: Form) -> float:
        return self.gpu if form == "gpu" else self.cpu

    def limit(self, form: Form) -> float:
        """Seconds after which its process is ended: a kernel that hangs must not take the other checks' time."""
        return (60.0 if form == "gpu" else 180.0) + 4.0 * self.seconds(form)  # a CPU may have other work

    def carry_out(self, bench: Bench) -> None:
        """In the check's own process. Raises CannotRun."""
        for name in self.needs:
            if find_spec(name) is None:
                raise CannotRun(f"{name} is not installed")
        module, _, name = self.function.partition(":")
        function: Any = getattr(import_module(module), name)
        function(bench, *self.arguments)


def named(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """Those of these names. Where no check has one, those whose name begins with it and a dash: `kernel` names all of
    kernel-..."""
    exact = {one.name for one in checks} & set(names)
    begun = tuple(f"{name}-" for name in names if name not in exact)
    return [one for one in checks if one.name in exact or one.name.startswith(begun)]
