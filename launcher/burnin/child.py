"""The process of one check: `python -m launcher.burnin.child NAME REQUEST REPORT FOLDER`."""

import sys
from pathlib import Path

from launcher.burnin.check import Bench, Request
from launcher.burnin.checks import CHECKS
from launcher.burnin.processes import die_with_parent
from launcher.burnin.report import CannotRun, Report, said


def main(name: str, request: str, report: str, folder: str) -> None:
    """The report tells how the check ended; the exit code is 0 wherever this process came to its end."""
    die_with_parent()
    check = next(one for one in CHECKS if one.name == name)
    told = Report(Path(report))
    try:
        check.carry_out(Bench(Request.model_validate_json(request), told, Path(folder)))
    except CannotRun as lacking:
        told.mark("skipped", str(lacking))
    except Exception as error:  # of any kind: the check has failed, and the others go on
        told.mark("failed", said(error))
    else:
        told.mark("ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
