"""The process of one check."""

from pathlib import Path

from encoder_core.trials.trial_process import Line
from encoder_core.trials.trial_process import Report as Message
from launcher.plan.burnin.check import Bench, Request
from launcher.plan.burnin.checks import CHECKS
from launcher.plan.burnin.report import CannotRun, Report, said

TARGET = "launcher.plan.burnin.child:serve"


def serve(request: Message, line: Line) -> None:
    """Carry out one check. The last mark tells how the check ended."""
    check = next(one for one in CHECKS if one.name == request["check"])
    report = Report(lambda what: line.report(**what))
    try:
        check.carry_out(Bench(Request.model_validate(request["request"]), report, Path(request["folder"])))
    except CannotRun as lacking:
        report.mark("skipped", str(lacking))
    except Exception as error:  # of any kind: the check has failed, and the others go on
        report.mark("failed", said(error))
    else:
        report.mark("ended")
