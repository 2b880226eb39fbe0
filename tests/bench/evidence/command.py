"""The program's command line; see `__main__.py`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from data_service.errors import UserError
from data_service.processes import locked
from encoder_core.errors import UserError as ModelError

from .jobs import INTERRUPTED, Job, Lanes, interruptible, jobs_of, parse_job
from .place import Place
from .text import Given, prepare_text

_HERE = Path(__file__).parent
_MISTAKE = 2


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 all done; 1 some jobs failed, which the page names; 2 a mistake in what was given; 75 interrupted:
    start it again to go on."""
    given = _parser().parse_args(arguments)
    place = Place(given.workdir.resolve(), given.comparison.resolve())
    try:
        if given.job is not None:
            return _work(place, parse_job(given.job), given.core)
        return _page(place, given) if given.only_page else _all(place, given)
    except (UserError, ModelError) as error:
        print(f"{error.problem}\n  remedy: {error.remedy}", file=sys.stderr)
        return _MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="evidence", description="Makes the evidence page.")
    parser.add_argument("workdir", type=Path, help="keeps everything")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files and folders of English")
    parser.add_argument("--sst2", type=Path, help="folder of train.tsv, dev.tsv, test.tsv: sentence, label")
    parser.add_argument("--sts", type=Path, nargs="+", default=[], help="files: score, sentence, sentence")
    parser.add_argument("--published", type=Path, help="folder of a published model of sentences")
    parser.add_argument("--comparison", type=Path, default=_HERE / "comparison.yaml", help="what is compared")
    parser.add_argument("--lanes", type=int, default=2, help="jobs side by side, a core each")
    parser.add_argument("--page", type=Path, help="where the page goes (WORKDIR/RESULTS.md)")
    parser.add_argument("--figures", type=Path, help="keeps what the page says (WORKDIR/figures.json)")
    parser.add_argument("--only-page", action="store_true", help="write the page of what is there")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    return parser


def _all(place: Place, given: argparse.Namespace) -> int:
    place.root.mkdir(parents=True, exist_ok=True)
    with locked(place.root / "program.lock"):
        prepare_text(place, Given(tuple(given.text), given.sst2, tuple(given.sts)))
        if given.published is not None:
            from .published import measure_published

            measure_published(place, given.published)
        lanes = Lanes(place, given.lanes)
        failed = lanes.run(jobs_of(place), ["--comparison", str(place.comparison_file)])
        _page(place, given)
    return INTERRUPTED if lanes.stopped else 1 if failed else 0


def _page(place: Place, given: argparse.Namespace) -> int:
    from .figures import keep
    from .found import failures, figures_of
    from .page import render

    target = given.page or place.root / "RESULTS.md"
    figures = keep(figures_of(place), given.figures or place.root / "figures.json")
    target.write_text(render(place.comparison, figures, failures(place)), "utf-8")
    print(f"wrote {target}")
    return 0


def _work(place: Place, job: Job, core: int | None) -> int:
    """One job, in a process that does nothing else, on one core where one is given."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    from . import work

    try:
        work.do(place, job, interruptible())
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
