"""`maskfleet launch` from the command line, with stand-ins for the schedulers' own commands."""

import os
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.app.cli.main import app
from launcher.errors import LaunchError, RecipeError, RunError

NODES = ("--nodes", "2", "--cpus-per-node", "4", "--memory", "8GiB", "--shared-memory", "1GiB")
KUBERAY = ("--image", "registry/maskfleet:1")


@pytest.fixture(autouse=True)
def shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest gives lies in /tmp, which the nodes of a job do not share."""
    monkeypatch.setattr("launcher.app.schedulers.slurm.NODE_LOCAL_FOLDERS", ("/var/tmp",))


def launch(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["launch", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that holds what `sbatch` was given; it comes first in PATH."""
    given, command = tmp_path / "given", tmp_path / "sbatch"
    command.write_text(f'#!/bin/bash\n[ "$*" = --parsable ] && cat >"{given}" && echo "4711;cluster"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return given


def test_a_script_to_standard_output_or_to_a_file(fresh_run: str, tmp_path: Path) -> None:
    printed = launch("slurm", fresh_run, *NODES)
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=run\n")
    assert f"maskfleet train {Path(fresh_run)} --nodes 2 &\n" in printed
    assert launch("slurm", fresh_run, *NODES, "--out", str(tmp_path / "job.sh")) == ""
    assert (tmp_path / "job.sh").read_text() == printed


def test_what_is_submitted_is_what_is_printed(fresh_run: str, scheduler: Path) -> None:
    assert launch("slurm", fresh_run, *NODES, "--submit") == "submitted job 4711\n"
    assert scheduler.read_text() == launch("slurm", fresh_run, *NODES)


def test_a_relative_path_becomes_absolute(fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's folder is not the one it was submitted from."""
    monkeypatch.chdir(Path(fresh_run).parent)
    assert f"maskfleet train {Path(fresh_run)} " in launch("slurm", Path(fresh_run).name, *NODES)


def test_a_run_that_is_not_there_is_known_before_the_queue(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\bmaskfleet init\b"):
        launch("slurm", str(tmp_path), *NODES)


def test_an_assignment_that_the_run_cannot_take_is_known_before_the_queue(fresh_run: str) -> None:
    with pytest.raises(RecipeError, match="zero"):
        launch("slurm", fresh_run, *NODES, "--set", "zero=7")


def test_a_run_on_a_disk_is_no_run_for_pods(fresh_run: str) -> None:
    with pytest.raises(LaunchError, match="disk"):
        launch("kuberay", fresh_run, *NODES, *KUBERAY)


def test_a_label_without_a_value_is_refused(fresh_run: str) -> None:
    with pytest.raises(LaunchError, match="--node-selector"):
        launch("kuberay", fresh_run, *NODES, *KUBERAY, "--node-selector", "pool=gpu", "--node-selector", "zone")


def test_a_job_for_a_running_cluster(fresh_run: str) -> None:
    printed = launch("ray-job", fresh_run, "--address", "http://head:8265", "--nodes", "3")
    assert printed.startswith("ray job submit --address http://head:8265 --no-wait --runtime-env-json ")
    with pytest.raises(LaunchError, match="disk"):
        launch("ray-job", fresh_run, "--address", "http://head:8265", "--submit")


def test_a_run_on_a_nodes_own_disk_is_for_one_node(fresh_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.app.schedulers.slurm.NODE_LOCAL_FOLDERS", (str(Path(fresh_run).parent),))
    with pytest.raises(LaunchError, match="2 nodes"):
        launch("slurm", fresh_run, *NODES)
    assert launch("slurm", fresh_run, *NODES, "--nodes", "1").startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--time", "tomorrow"),
        ("--time", "24h"),
        ("--time", "1-"),
        ("--name", "A Name"),
        ("--sbatch", "exclusive"),
        ("--sbatch", "--exclusive\n#SBATCH --uid=0"),
        ("--sbatch", "--comment=a b"),
        ("--sbatch", "--time=1:00:00"),
        ("--sbatch", "--signal=KILL"),
        ("--setup", "true\nfalse"),
    ],
)
def test_mistakes_in_options_are_told_before_the_run_is_looked_for(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runtime.run.record.open_run", lambda *_: pytest.fail("the run was looked for"))
    with pytest.raises(LaunchError) as refused:
        launch("slurm", "s3://bucket/run", *NODES, option, value)
    assert option in refused.value.problem
    assert option in refused.value.remedy


def test_further_options_and_lines_of_setup(fresh_run: str) -> None:
    further = ("--sbatch=--exclusive", "--sbatch=--gres=shard:2", "--setup", "module load 'cuda'")
    printed = launch("slurm", fresh_run, *NODES, "--time", "2-12", *further).splitlines()
    assert {"#SBATCH --exclusive", "#SBATCH --gres=shard:2", "#SBATCH --time=2-12"} <= set(printed)
    (line,) = [line for line in printed if line.startswith("eval ")]
    assert shlex.split(line)[1] == "module load 'cuda'"
    assert printed.index(line) < next(n for n, text in enumerate(printed) if text.startswith("RAY_AUTH_TOKEN"))
