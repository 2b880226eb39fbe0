"""The cluster YAML by Ray's own schema, and the job for a running cluster."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from launcher.app.schedulers.job import TrainingJob
from launcher.app.schedulers.ray_cluster import RayCluster, render, submission_command

AWS = {"image": "registry/maskfleet:1", "region": "us-east-1", "instance_type": "p4d.24xlarge"}
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text("utf-8"))


def cluster(**settings: object) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(render(RayCluster.from_options(**settings, **AWS)))
    return loaded


@pytest.mark.parametrize(
    "more", [{}, {"spot": True, "ami": "ami-0123abcd", "profile": "arn:aws:iam::1:instance-profile/x"}]
)
def test_rays_own_schema_accepts_the_cluster(
    gpus: dict[str, object], cpus: dict[str, object], more: dict[str, object]
) -> None:
    for settings in (gpus, cpus):
        config = cluster(**settings, **more)
        jsonschema.validate(config, SCHEMA)
        validate_config(prepare_config(config))  # filled with defaults, as `ray up` does first


def test_the_head_is_one_of_the_nodes(gpus: dict[str, object]) -> None:
    config = cluster(**gpus, spot=True)
    types = config["available_node_types"]
    assert (types["worker"]["min_workers"], types["worker"]["max_workers"], config["max_workers"]) == (
        1,
        1,
        1,
    )
    assert types["worker"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]


def test_the_token_is_a_file_that_ray_makes_and_copies(gpus: dict[str, object], secrets: tuple[str, ...]) -> None:
    text = render(RayCluster.from_options(**gpus, **AWS))
    assert not [value for value in secrets if value in text]
    config = cluster(**gpus)
    assert config["file_mounts"] == {"/home/maskfleet/.ray/auth_token": "~/.ray/auth_token"}
    options = config["docker"]["run_options"]
    assert {"--env RAY_AUTH_MODE=token", "--env HF_TOKEN", "--env WANDB_API_KEY"} <= set(options)


def test_a_job_for_a_running_cluster(gpus: dict[str, object]) -> None:
    wanted = TrainingJob.from_options(run=gpus["run"], nodes=2, assignments=gpus["assignments"])
    command = submission_command(wanted, "http://head:8265")
    variables = json.loads(command[command.index("--runtime-env-json") + 1])["env_vars"]
    assert variables == {
        "MASKFLEET_RUN": gpus["run"],
        "MASKFLEET_SETS": "zero=2\nname=it's $(HOME)",
        "MASKFLEET_NODES": "2",
    }
    assert command[-2:] == ["--", "/opt/maskfleet/infra/ray_job"]
