"""This machine really measured, for a run that exists; stores that fail, hang or are somewhere else."""

import resource
import shutil
import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from launcher.app.cli.main import app
from launcher.runtime.preflight.findings import Finding, worst_verdict
from launcher.runtime.preflight.measure import (
    PreflightSubject,
    clock_skew,
    open_files_finding,
    raise_open_files,
    read_subject,
    run_checks,
)
from launcher.runtime.recipe.load import with_assignments

LIMIT_S = 3.0


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in found}


def test_a_run_that_could_be_trained_here(fresh_run: str) -> None:
    started = time.monotonic()
    found = by_name(run_checks(read_subject(fresh_run)))
    assert time.monotonic() - started < LIMIT_S
    assert worst_verdict(found.values()) != "failure", found
    names = {"memory", "/dev/shm", "open files", "temporary disk", "corpus text", "run's store", "clock"}
    assert found.keys() >= names | {"checkpoints' disk"}
    assert not list(open_store(fresh_run).list("preflight/")), "the probe is gone"


def test_a_limit_that_we_may_raise_is_nothing_to_warn_of() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        assert open_files_finding().verdict == "failure"
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
        assert open_files_finding().verdict == "ok"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_is_not_mounted_here_is_refused(fresh_run: str, tmp_path: Path) -> None:
    here = read_subject(fresh_run)
    assert here.run is not None
    elsewhere = tmp_path / "not-mounted"
    found = by_name(run_checks(PreflightSubject(here.recipe, str(elsewhere))))
    assert found["run's store"].verdict == "failure"
    assert "run.json" in found["run's store"].found
    assert not elsewhere.exists(), "nothing was written to the wrong disk"


def test_a_corpus_that_is_not_mounted_here_is_refused(fresh_run: str, tmp_path: Path) -> None:
    recipe = with_assignments(read_subject(fresh_run).recipe, (f"corpus.sources.text.uri={tmp_path}/nowhere",))
    found = by_name(run_checks(PreflightSubject(recipe, fresh_run)))
    assert found["corpus text"].verdict == "failure"


def test_a_store_that_never_answers_is_a_warning_in_time(fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for a store; the preflight does not."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        recipe = with_assignments(read_subject(fresh_run).recipe, ("corpus.sources.text.uri=s3://bucket/corpus",))
        started = time.monotonic()
        found = by_name(run_checks(PreflightSubject(recipe, None)))
        assert time.monotonic() - started < LIMIT_S
    assert found["corpus text"].verdict == "warning"


def test_the_ray_cluster_must_be_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert by_name(run_checks(None))["Ray cluster"].verdict == "ok"
    assert by_name(run_checks(None))["Ray cluster"].verdict == "failure"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert by_name(run_checks(None))["Ray cluster"].verdict == "ok"


def test_a_store_with_a_clock_tells_how_far_ours_is_off(any_store: Store) -> None:
    began = time.monotonic()
    found = clock_skew(any_store)
    if isinstance(any_store, LocalStore):
        assert found is None
    else:
        assert found is not None
        assert abs(found) < 2 + time.monotonic() - began  # the store's clock counts whole seconds


class Elsewhen(LocalStore):
    """A store whose clock is five minutes ahead of ours."""

    def clock(self) -> float:
        return float(int(time.time()) + 300)


def test_a_clock_behind_the_stores_is_negative(tmp_path: Path) -> None:
    assert clock_skew(Elsewhen(tmp_path)) == pytest.approx(-300, abs=1.5)


def test_the_command_fails_where_the_run_cannot_be_opened(fresh_run: str) -> None:
    well = CliRunner().invoke(app, ["preflight", fresh_run])
    assert well.exit_code == 0, well.output
    assert "run's store" in well.output
    assert CliRunner().invoke(app, ["preflight"]).exit_code == 0
    shutil.rmtree(Path(fresh_run) / "checkpoints", ignore_errors=True)
    (Path(fresh_run) / "run.json").rename(Path(fresh_run) / "moved.json")
    assert CliRunner().invoke(app, ["preflight", fresh_run]).exit_code != 0
    assert CliRunner().invoke(app, ["preflight", "quickstart"]).exit_code in (0, 1)
