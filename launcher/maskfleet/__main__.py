"""The command `maskfleet`, also as `python -m maskfleet`. The package, imported first, has cleared its way."""

import signal
import sys

from launcher.command import look_after
from launcher.signals import as_python_has_them, ended_when_asked, heeded

_TRAINING = ("train", "demo", "evaluate")  # the commands whose process tree is looked after


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in _TRAINING and not {"-h", "--help"} & set(sys.argv):
        signal.pthread_sigmask(signal.SIG_BLOCK, {*heeded(), signal.SIGCHLD})  # from here on none is lost
        as_python_has_them()
        sys.exit(look_after(_run))
    with ended_when_asked():
        _run()


def _run() -> None:
    from launcher.app.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
