"""The interface of a check, and the request that it receives.

This module does not import torch: the command that starts checks must survive a torch that crashes.
"""

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
        form: "gpu": on a GPU at full size; "cpu": on a CPU with small shapes.
        recipes: bundled names or files of recipes whose networks are trained, measured and tried.
        folder: folder of the check's files; every check gets one of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    form: Form
    recipes: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Bench:
    """The request, the report and the folder of one check. The folder is empty and belongs to this check alone."""

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
        function: `module:name` of a function that is called with a `Bench` and `arguments`.
        gpu, cpu: expected seconds in either form.
        figures: whether it measures speed; such checks come after all others.
        beside: whether other checks may run at the same time on a GPU, because it measures neither time nor memory.
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
        """Return the seconds after which its process is killed, so that a kernel that hangs does not use up the other
        checks' time.
        """
        return (60.0 if form == "gpu" else 180.0) + 4.0 * self.seconds(form)  # a CPU may have other work

    def carry_out(self, bench: Bench) -> None:
        """Carry the check out in the current process.

        Raises:
            CannotRun: a module that the check needs is not installed, or the machine lacks something else.
        """
        for name in self.needs:
            if find_spec(name) is None:
                raise CannotRun(f"{name} is not installed")
        module, _, name = self.function.partition(":")
        function: Any = getattr(import_module(module), name)
        function(bench, *self.arguments)


def named(checks: Sequence[Check], names: Sequence[str]) -> list[Check]:
    """Return the checks with these names. A name that no check has selects the checks whose names begin with it and a
    dash: `kernel` selects all of kernel-...
    """
    exact = {one.name for one in checks} & set(names)
    begun = tuple(f"{name}-" for name in names if name not in exact)
    return [one for one in checks if one.name in exact or one.name.startswith(begun)]
