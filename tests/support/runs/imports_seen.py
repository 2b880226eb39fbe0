"""Which processes of a command import a module, from a hook that Python runs in each of them before anything else."""

import os
from collections.abc import Sequence
from pathlib import Path

_HOOK = """
import os, sys

def hook(event, args, names=frozenset({names!r}), folder={folder!r}):
    if event == "import" and args[0] in names:
        open(os.path.join(folder, f"{{os.getpid()}} {{args[0]}}"), "w").close()

sys.addaudithook(hook)
"""


class ImportsSeen:
    """Watches for imports of `modules`.

    Attributes:
        environment: what a command is given to be watched.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self._found = folder / "found"
        self._found.mkdir(parents=True)
        hook = _HOOK.format(names=tuple(modules), folder=str(self._found))
        (folder / "sitecustomize.py").write_text(hook, "utf-8")
        inherited = os.environ.get("PYTHONPATH")
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), inherited)))}

    def processes(self, module: str) -> set[int]:
        """Return the ids of the processes that have imported `module`, or have tried to."""
        pairs = (path.name.split(" ", 1) for path in self._found.iterdir())
        return {int(pid) for pid, name in pairs if name == module}
