"""The command `maskfleet`, also as `python -m maskfleet`. Folders that shadow our packages leave the import path."""

import signal
import sys
from contextlib import nullcontext

from data_service.errors import EnvironmentUnusable
from data_service.limits import check_thread_limit
from launcher.command import COMMANDS_WITH_SIGNAL_HANDLERS, needs_supervision, run_supervised
from launcher.exit_codes import MISTAKE, REPEAT
from launcher.signals import end_on_signal, handled_signals, restore_default_handlers, signal_response
from maskfleet import is_repeated_command


def main() -> None:
    try:
        check_thread_limit()
    except EnvironmentUnusable as error:
        print(f"error: {error.problem}\nremedy: {error.remedy}", file=sys.stderr)
        sys.exit(MISTAKE)
    if needs_supervision(sys.argv[1:]):
        # Blocked signals stay pending until they are handled, so none is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*handled_signals(), signal.SIGCHLD})
        restore_default_handlers()
        sys.exit(run_supervised(_run_cli if sys.argv[1] in COMMANDS_WITH_SIGNAL_HANDLERS else _run_corpus_command))
    again = signal_response(REPEAT, "run the same command to start again") if is_repeated_command() else nullcontext()
    with end_on_signal(), again:
        _run_cli()


def _run_corpus_command() -> None:
    with end_on_signal(), signal_response(REPEAT, "run the same command to continue"):
        _run_cli()


def _run_cli() -> None:
    from launcher.app.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
