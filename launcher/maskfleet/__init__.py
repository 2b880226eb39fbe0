"""Maskfleet from notebooks and scripts.

    import maskfleet

    run = maskfleet.open_run("runs/first")       # or an s3:// URI; never creates one
    run.metrics()                                # a pandas frame, a row for each step
    print(run.sample(1000))                      # what a step saw or will see, masks marked
    run.stream(rank=0, world=4)                  # its data as a torch IterableDataset
    run.module(), run.transformers_model()       # a checkpoint as a model
    maskfleet.train("runs/first")                # what the command does; returns how it ended

User mistakes raise subclasses of `maskfleet.UserError`, or of `maskfleet.ModelError` if a model is wrong; both state
problem and remedy. Maskfleet's internal packages have common names. If Python would import foreign packages of these
names, importing raises `InTheWay` and names the folder; the command `maskfleet` ignores such folders instead.
"""

import os
import signal
import sys
from types import FrameType

REPEATED_COMMANDS = (
    *("train", "demo", "corpus build", "corpus prepare", "corpus append"),  # these continue interrupted work
    *("evaluate", "finetune", "embed"),
)
"""Commands that a signal ends with code 75 (`launcher.exit_codes.REPEAT`), so that schedulers repeat them."""


def is_repeated_command() -> bool:
    """Return whether this process's command is one of `REPEATED_COMMANDS`."""
    return not {*sys.argv[1:2], " ".join(sys.argv[1:3])}.isdisjoint(REPEATED_COMMANDS)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    os._exit(75 if is_repeated_command() else 128 + number)


def _is_maskfleet_command() -> bool:
    """Whether this process is `maskfleet ...` or `python -m maskfleet ...`."""
    after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
    return after[:1] == [__name__] or os.path.basename(sys.argv[0]) == __name__


if _is_maskfleet_command():  # during imports, a signal exits silently; later see `launcher.signals`
    for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(_number) != signal.SIG_IGN:
            signal.signal(_number, _exit_on_signal)

from importlib import import_module  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from data_service.errors import UserError as UserError
    from encoder_core.errors import ModelError as ModelError
    from launcher.app.api.run import Run as Run
    from launcher.app.api.run import open_run as open_run
    from launcher.app.api.stream import StepDataset as StepDataset
    from launcher.observe.inspect.show import Shown as Shown
    from launcher.runtime.cluster.train_subprocess import Ending as Ending
    from launcher.runtime.cluster.train_subprocess import train as train

_MODULE_BY_EXPORT = {  # modules of the exported names, which are imported at their first use
    "Ending": "launcher.runtime.cluster.train_subprocess",
    "ModelError": "encoder_core.errors",
    "Run": "launcher.app.api.run",
    "Shown": "launcher.observe.inspect.show",
    "StepDataset": "launcher.app.api.stream",
    "UserError": "data_service.errors",
    "open_run": "launcher.app.api.run",
    "train": "launcher.runtime.cluster.train_subprocess",
}
__all__ = sorted(["InTheWay", *_MODULE_BY_EXPORT])
_PACKAGES = ("launcher", "checkpoints", "data_service", "encoder_core")  # our packages with common names
# The folders that may hold Maskfleet's packages: the parent of this folder, or in a checkout its parent.
_PACKAGE_FOLDERS = Path(__file__).resolve().parents[1:3]


class InTheWay(ImportError):
    """Python finds a foreign package under the name of one of Maskfleet's packages."""


def _shadowing_path(name: str) -> Path | None:
    """Return the foreign file or folder that Python imports as our package `name`; None if there is none."""
    loaded = sys.modules.get(name)
    spec = find_spec(name) if loaded is None else loaded.__spec__
    # A folder without __init__.py does not shadow a package further down the path.
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).resolve()
    found = found.parent if found.name == "__init__.py" else found
    return None if found.parent in _PACKAGE_FOLDERS else found


def _refuse_shadowing() -> None:
    for name in _PACKAGES:
        if (other := _shadowing_path(name)) is not None:
            raise InTheWay(
                f"{other} is in the way: Python takes it for Maskfleet's own package {name!r}. Start Python in another "
                "folder, or rename that one. (The command `maskfleet` works here; `python -P` does not look into the "
                "working directory.)"
            )


def _remove_shadowing_paths() -> None:
    """Remove folders with packages of our names from `sys.path` and from PYTHONPATH."""
    while others := [other for name in _PACKAGES if (other := _shadowing_path(name)) is not None]:
        holding = {other.parent for other in others}
        kept = [entry for entry in sys.path if Path(entry).resolve() not in holding]
        if len(kept) == len(sys.path):
            return _refuse_shadowing()  # the foreign package is not found through `sys.path`
        sys.path[:] = kept
        if "PYTHONPATH" in os.environ:
            entries = os.environ["PYTHONPATH"].split(os.pathsep)
            os.environ["PYTHONPATH"] = os.pathsep.join(e for e in entries if Path(e).resolve() not in holding)


if _is_maskfleet_command():
    _remove_shadowing_paths()
else:
    _refuse_shadowing()


def __getattr__(name: str) -> object:
    """Import an exported name at its first use, so that `import maskfleet` itself is fast."""
    if name not in _MODULE_BY_EXPORT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_EXPORT[name]), name)
