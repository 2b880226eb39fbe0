"""A burn-in's checks in processes of their own: what each end of one is called, going on, and the time it may take."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.plan.burnin import session
from launcher.plan.burnin.check import Check, named
from launcher.plan.burnin.record import PAGE, RECORD, BurninRecord, Machine
from launcher.plan.burnin.session import Burnin, BurninRequest, burn_in

CHECKS = "tests.launcher.plan.burnin.bad_checks"


def check(name: str, function: str, *arguments: str, cpu: float = 0.1, needs: tuple[str, ...] = ()) -> Check:
    return Check(name, "", f"{CHECKS}:{function}", gpu=1, cpu=cpu, arguments=arguments, needs=needs)


EVERY = {
    "right": "passed",
    "off": "failed",
    "not_a_number": "failed",
    "raises": "failed",
    "raises_inside": "failed",
    "deadly": "died",
    "lacks": "skipped",
}


MACHINE = Machine(identity="here", form="cpu", device="a CPU", gpus=0, facts={"torch": "2"})


@pytest.fixture
def own_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Check]:
    """The checks above, known to the processes that carry them out."""
    found = [check(name, name) for name in EVERY]
    found.append(check("counted", "counts", str(tmp_path / "begun")))
    found.append(check("unmet", "right", needs=("no_such_module",)))
    know(monkeypatch, tmp_path, found)
    return found


def know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checks: list[Check]) -> None:
    """Processes import `sitecustomize` first, and it puts these checks in place of the real ones."""
    lines = [
        "import launcher.plan.burnin.checks as checks",
        "from launcher.plan.burnin.check import Check",
        f"checks.CHECKS = {tuple(checks)!r}",
    ]
    place = tmp_path / "site"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setattr(session, "_probe", lambda wanted: MACHINE)
    root = str(Path(__file__).parents[4])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), root]))  # of other commands
    monkeypatch.syspath_prepend(str(place))  # of processes that this one starts


def burnt(tmp_path: Path, checks: list[Check], **settings: Any) -> Burnin:
    return burn_in(
        BurninRequest(checks, ("roberta-base",), tmp_path / "out", form="cpu", **settings), lambda line: None
    )


def record(tmp_path: Path) -> BurninRecord:
    return BurninRecord.model_validate_json((tmp_path / "out" / RECORD).read_text())


@pytest.mark.long
def test_each_end_has_its_name_and_the_others_go_on(tmp_path: Path, own_checks: list[Check]) -> None:
    found = burnt(tmp_path, own_checks)
    assert {name: one.status for name, one in found.outcomes.items()} == EVERY | {
        "counted": "passed",
        "unmet": "skipped",
    }
    assert sorted(found.failed) == sorted(name for name, how in EVERY.items() if how in ("failed", "died"))
    assert [line.right for line in found.outcomes["off"].lines] == [False, True]
    assert [line.right for line in found.outcomes["raises_inside"].lines] == [False, True]
    assert [line.right for line in found.outcomes["raises"].lines] == [True]
    assert "SIGSEGV" in found.outcomes["deadly"].why
    assert "a deadly launch" in found.outcomes["deadly"].why
    assert "no_such_module" in found.outcomes["unmet"].why
    page = (tmp_path / "out" / PAGE).read_text()
    assert all(f'id="{name}"' in page for name in EVERY)
    assert "WRONG" in page
    assert not list((tmp_path / "out" / "work").iterdir())


@pytest.mark.long
def test_several_run_at_a_time_where_none_of_them_measures(
    tmp_path: Path, own_checks: list[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = [replace(one, beside=one.name != "right") for one in own_checks]
    monkeypatch.setattr(session, "_jobs", lambda machine: 3)
    found = burnt(tmp_path, beside)
    assert {name: found.outcomes[name].status for name in EVERY} == EVERY
    assert set(record(tmp_path).outcomes) == {one.name for one in own_checks}
    assert record(tmp_path).running == {}


@pytest.mark.long
def test_an_interrupt_ends_what_is_under_way(
    tmp_path: Path, own_checks: list[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [replace(check(f"hangs{n}", "hangs"), beside=True) for n in range(3)] + [check("right", "right")]
    know(monkeypatch, tmp_path, checks)
    monkeypatch.setattr(session, "_jobs", lambda machine: 2)
    timer = threading.Timer(3.0, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        burnt(tmp_path, checks)
    timer.join()
    assert record(tmp_path).running == {}
    assert record(tmp_path).outcomes == {}
    assert not list((tmp_path / "out" / "work").iterdir())


@pytest.mark.long
def test_a_start_goes_on_with_what_is_left_and_with_what_failed(
    tmp_path: Path, own_checks: list[Check]
) -> None:
    burnt(tmp_path, own_checks)
    before = record(tmp_path).outcomes
    found = burnt(tmp_path, own_checks)
    again = {
        name for name, one in found.outcomes.items() if one.began != before[name].began or one != before[name]
    }
    done_again = {"off", "not_a_number", "raises", "raises_inside", "lacks", "unmet"}
    assert again <= done_again
    assert (tmp_path / "begun").read_text().count("\n") == 1  # what passed is not begun again
    assert found.outcomes["deadly"] == before["deadly"]
    asked = burnt(tmp_path, named(own_checks, ["deadly"]), named=True)
    assert asked.outcomes["deadly"].began >= before["deadly"].began


def test_another_machine_or_other_code_does_all_again(
    tmp_path: Path, own_checks: list[Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = named(own_checks, ["counted"])
    burnt(tmp_path, counted)
    probe = session._probe
    monkeypatch.setattr(
        session, "_probe", lambda wanted: probe(wanted).model_copy(update={"identity": "other"})
    )
    burnt(tmp_path, counted)
    assert (tmp_path / "begun").read_text().count("\n") == 2


@pytest.mark.long
def test_a_check_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_checks: list[Check]
) -> None:
    checks = [check("hangs", "hangs"), check("right", "right")]
    know(monkeypatch, tmp_path, checks)
    monkeypatch.setattr(Check, "limit", lambda self, form: 8.0)
    found = burnt(tmp_path, checks)
    assert found.outcomes["hangs"].status == "late"
    assert "without an end" in found.outcomes["hangs"].why
    assert found.outcomes["right"].status == "passed"


@pytest.mark.long
def test_only_what_fits_into_the_time_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_checks: list[Check]
) -> None:
    checks = [check("long", "right", cpu=3600), check("short", "right", cpu=1), check("cut", "hangs", cpu=1)]
    know(monkeypatch, tmp_path, checks)
    began = time.monotonic()
    found = burnt(tmp_path, checks, minutes=0.2)
    assert time.monotonic() - began < 60
    assert set(found.outcomes) == {"short"}  # one that the end of the time cut off has no fault of its own
    assert set(found.left) == {"long", "cut"}
    assert record(tmp_path).running == {}


@pytest.mark.long
def test_a_check_during_which_two_burn_ins_ended_is_not_begun_a_third_time(
    tmp_path: Path, own_checks: list[Check]
) -> None:
    counted = named(own_checks, ["counted"])
    burnt(tmp_path, counted)
    first = record(tmp_path)
    for starts, status in ((1, "passed"), (2, "died")):
        running = {"running": {"counted": starts}, "outcomes": {}}
        text = json.dumps(first.model_dump(mode="json") | running)
        (tmp_path / "out" / RECORD).write_text(text)
        assert burnt(tmp_path, counted).outcomes["counted"].status == status


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1, "outcomes": {"a": 1}}'])
def test_a_record_that_cannot_be_read_is_put_aside(
    tmp_path: Path, own_checks: list[Check], text: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / RECORD).write_text(text)
    assert burnt(tmp_path, named(own_checks, ["right"])).outcomes["right"].status == "passed"
    assert (tmp_path / "out" / f"unreadable-{RECORD}").read_text() == text


@pytest.mark.long
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.0, 6.0))
def test_killed_at_any_moment_it_goes_on(
    tmp_path: Path, own_checks: list[Check], tmp_path_factory: pytest.TempPathFactory, seconds: float
) -> None:
    """The record is whole at every moment, no process is left, and another start does the rest."""
    out = tmp_path_factory.mktemp("killed")
    names = ["right", "off", "lacks", "counted"]
    program = (
        "import launcher.plan.burnin.checks as c\n"
        "from launcher.plan.burnin.check import named\n"
        "from launcher.plan.burnin.session import Wanted, burn_in\n"
        "from pathlib import Path\n"
        "import launcher.plan.burnin.session as s\n"
        "from launcher.plan.burnin.record import Machine\n"
        f"s._probe = lambda wanted: Machine.model_validate({MACHINE.model_dump()!r})\n"
        f"burn_in(Wanted(named(c.CHECKS, {names}), ('roberta-base',), Path({str(out / 'out')!r}), form='cpu'), print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
    path = out / "out" / RECORD
    before = BurninRecord.model_validate_json(path.read_text()).outcomes if path.exists() else {}
    found = burnt(out, named(own_checks, names))
    assert {name: one.status for name, one in found.outcomes.items()} == {
        "right": "passed",
        "off": "failed",
        "lacks": "skipped",
        "counted": "passed",
    }
    assert all(found.outcomes[name] == one for name, one in before.items() if one.status == "passed")
    assert not _processes(str(out))


def _processes(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and "burnin" in line:
            found.append(line)
    return found
