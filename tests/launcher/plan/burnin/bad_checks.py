"""Checks that end in every way, for the processes that carry them out."""

import os
import signal
import time
from pathlib import Path

from launcher.plan.burnin.check import Bench
from launcher.plan.burnin.report import CannotRun


def right(bench: Bench) -> None:
    bench.report.at_most("an error", 1e-6, 1e-5)
    bench.report.figure("a figure", 12.0, "GB/s")


def off(bench: Bench) -> None:
    bench.report.at_most("an error", 1.01, 1e-5)
    bench.report.holds("what comes after it", True)


def not_a_number(bench: Bench) -> None:
    bench.report.at_most("an error", float("nan"), 1e-5)


def raises(bench: Bench) -> None:
    bench.report.holds("what came before it", True)
    raise ZeroDivisionError("a kernel that raises")


def raises_inside(bench: Bench) -> None:
    with bench.report.attempt("a launch"):
        raise RuntimeError("no kernel image is available")
    bench.report.holds("the next launch", True)


def deadly(bench: Bench) -> None:
    bench.report.doing("a deadly launch")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(bench: Bench) -> None:
    bench.report.doing("a launch without an end")
    time.sleep(600)


def lacks(bench: Bench) -> None:
    raise CannotRun("no second GPU")


def counts(bench: Bench, path: str) -> None:
    """Says how often it was begun."""
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
