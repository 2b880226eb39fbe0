"""The command `maskfleet`, also as `python -m maskfleet`. The package, imported first, has cleared its way."""

import signal
import sys

from data_service.errors import EnvironmentUnusable
from data_service.limits import ensure_threads
from launcher.command import SAVING_COMMANDS, is_supervised, supervise
from launcher.exit_codes import MISTAKE, REPEAT
from launcher.signals import answering, as_python_has_them, ended_when_asked, heeded


def main() -> None:
    try:
        ensure_threads()
    except EnvironmentUnusable as error:
        print(f"error: {error.problem}\nremedy: {error.remedy}", file=sys.stderr)
        sys.exit(MISTAKE)
    if is_supervised(sys.argv[1:]):
        signal.pthread_sigmask(signal.SIG_BLOCK, {*heeded(), signal.SIGCHLD})  # from here on none is lost
        as_python_has_them()
        sys.exit(supervise(_run if sys.argv[1] in SAVING_COMMANDS else _build))
    with ended_when_asked():
        _run()


def _build() -> None:
    with ended_when_asked(), answering(REPEAT, "the same command continues what is begun"):
        _run()


def _run() -> None:
    from launcher.app.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
