"""What a launch may be asked for."""

import tomllib
from pathlib import Path

import pytest

from launcher.app.schedulers import job as templates
from launcher.app.schedulers.job import Launch, TrainingJob, job_name, require_object_storage, run_command
from launcher.errors import LaunchError

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "s3://bucket/a\nb"),
        ("run", ""),
        ("name", "Base"),
        ("name", "a" * 50),
        ("nodes", 0),
        ("gpus", -1),
        ("memory", "much"),
        ("environment", ("HF_TOKEN=value",)),
        ("environment", ("A-B",)),
        ("assignments", ("zero=1\n#SBATCH --uid=0",)),
        ("colour", "red"),
    ],
)
def test_a_bad_value_is_named(cpus: dict[str, object], field: str, value: object) -> None:
    option = {"run": "RUN", "gpus": "--gpus-per-node", "environment": "--env", "assignments": "--set"}
    with pytest.raises(LaunchError) as refused:
        Launch.from_options(**{**cpus, field: value})
    assert option.get(field, f"--{field}") in refused.value.problem
    assert option.get(field, f"--{field}") in refused.value.remedy


def test_every_bad_value_is_named(cpus: dict[str, object]) -> None:
    with pytest.raises(LaunchError, match=r"--nodes.*--cpus-per-node"):
        Launch.from_options(**{**cpus, "nodes": 0, "cpus": 0})


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("s3://bucket/runs/RoBERTa_base.2/", "roberta-base-2"),
        ("/data/runs/7b", "maskfleet-7b"),
        ("s3://bucket/é", "maskfleet"),
        ("s3://bucket/" + "long-" * 20, "long-long-long-long-long-long"),
    ],
)
def test_a_name_from_the_uri(cpus: dict[str, object], run: str, name: str) -> None:
    assert job_name(run) == name
    Launch.from_options(**{**cpus, "name": job_name(run)})


@pytest.mark.parametrize(
    ("run", "taken"),
    [
        *((run, True) for run in ("s3://bucket/run", "gs://bucket/run", "az://container/run", "GS://b/r")),
        *((run, False) for run in ("hf://datasets/org/run", "file:///data/run", "http://host/run")),
    ],
)
def test_a_run_in_any_object_store_is_taken_and_no_other(run: str, taken: bool) -> None:
    job = TrainingJob.from_options(run=run, nodes=1)
    if taken:
        assert require_object_storage(job).run == run
        return
    with pytest.raises(LaunchError, match=run):
        require_object_storage(job)


def test_a_tool_that_is_not_installed() -> None:
    with pytest.raises(LaunchError, match="no-such-scheduler"):
        run_command(["no-such-scheduler"])


def test_a_tool_that_fails_says_why() -> None:
    with pytest.raises(LaunchError, match="code 3: quota exceeded"):
        run_command(["bash", "-c", "echo quota exceeded >&2; exit 3"])


def test_every_template_is_installed_with_the_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["data-files"]
    installed = {
        Path(target).relative_to("share/maskfleet/infra") / Path(file).name
        for target, files in listed.items()
        for file in files
    }
    assert all((templates.template_folder() / path).is_file() for path in installed)
    used = {
        "slurm/job.sh",
        "ray_node.sh",
        "kuberay/rayjob.yaml",
        "aws_batch/stack.yaml",
        "ray_cluster/cluster.yaml",
    }
    assert {str(path) for path in installed} == used | {"constraints.txt"}


def test_the_image_has_what_the_manifests_call() -> None:
    recipe = (ROOT / "infra/Dockerfile").read_text("utf-8")
    copied = [line.split()[1:-1] for line in recipe.splitlines() if line.startswith("COPY")]
    assert all((ROOT / name).exists() for names in copied for name in names)
    called = "".join(path.read_text("utf-8") for path in (ROOT / "infra").rglob("*.yaml"))
    called += (ROOT / "launcher/app/schedulers/ray_cluster.py").read_text("utf-8")
    scripts = {word.strip("\"'[]{},") for word in called.split() if "/opt/maskfleet/" in word}
    assert len(scripts) == 3
    for script in scripts:
        here = ROOT / script.removeprefix("/opt/maskfleet/").rstrip("]}\"'")
        assert here.stat().st_mode & 0o100, script
