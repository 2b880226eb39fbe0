"""The RayJob manifest: pods by Kubernetes' own schema, the rest by what KubeRay does with it."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from launcher.app.schedulers.kuberay import KubeRayJob, render


def manifest(**settings: object) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(render(KubeRayJob.from_options(**settings, image="registry/maskfleet:1")))
    return loaded


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Specifications of submitter, head and workers."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [job["spec"]["submitterPodTemplate"]["spec"], *(group["template"]["spec"] for group in groups)]


@pytest.mark.parametrize("setting", ["gpus", "cpus"])
def test_pods_are_valid_kubernetes(setting: str, request: pytest.FixtureRequest) -> None:
    job = manifest(**request.getfixturevalue(setting), node_selector={"pool": "a100"}, head_selector={"pool": "cpu"})
    for spec in pods(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_a_retry_is_a_new_cluster_and_the_cluster_ends_with_the_job(gpus: dict[str, object]) -> None:
    spec = manifest(**gpus, retries=7)["spec"]
    assert spec["backoffLimit"] == 7
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_the_head_saves_before_its_pod_ends(gpus: dict[str, object]) -> None:
    _, head, workers = pods(manifest(**gpus))
    assert head["terminationGracePeriodSeconds"] == 120 == workers["terminationGracePeriodSeconds"]
    (container,) = head["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["/opt/maskfleet/infra/kuberay/pre_stop"]


def test_workers_get_what_was_asked_for(gpus: dict[str, object], cpus: dict[str, object]) -> None:
    job = manifest(**gpus)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    assert group["rayStartParams"] == {"num-cpus": "64", "object-store-memory": str(48 << 30)}
    (container,) = group["template"]["spec"]["containers"]
    asked = {"cpu": "64", "memory": str(900 << 30), "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert group["template"]["spec"]["volumes"][0]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": str(64 << 30),
    }
    plain = pods(manifest(**cpus))[2]
    assert "tolerations" not in plain
    assert "nvidia.com/gpu" not in plain["containers"][0]["resources"]["limits"]


def test_the_uri_and_the_assignments_arrive_as_they_are(gpus: dict[str, object]) -> None:
    head = pods(manifest(**gpus))[1]
    variables = {entry["name"]: entry.get("value") for entry in head["containers"][0]["env"]}
    assert variables["MASKFLEET_RUN"].replace("$$(", "$(") == gpus["run"]  # Kubernetes makes $( of $$(
    assert "$(" not in variables["MASKFLEET_RUN"].replace("$$(", "")
    assert variables["MASKFLEET_SETS"] == "zero=2\nname=it's $$(HOME)"


def test_secrets_are_references(gpus: dict[str, object], secrets: tuple[str, ...]) -> None:
    text = render(KubeRayJob.from_options(**gpus, image="i", secret="keys"))
    assert not [value for value in secrets if value in text]
    for pod in pods(yaml.safe_load(text))[1:]:
        variables = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        for name in ("HF_TOKEN", "WANDB_API_KEY"):
            assert variables[name]["valueFrom"] == {"secretKeyRef": {"name": "keys", "key": name}}
