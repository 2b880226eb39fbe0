"""The CloudFormation stack: linted, and its rights counted."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cfnlint.api import lint
from cfnlint.config import ManualArgs

from data_service.corpus.corpus import open_corpus
from data_service.ingest.append import append_documents, options_from_corpus
from launcher.app.schedulers.aws_batch import BatchJob, input_uris, merged_corpus_uris, render
from launcher.errors import LaunchError
from launcher.runtime.recipe.load import load
from tests.support.data.raw_text import ignore_progress


class Loader(yaml.SafeLoader):
    """Reads CloudFormation's short functions as {function: argument}."""


def _function(loader: Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.SequenceNode):
        return {suffix: loader.construct_sequence(node, deep=True)}
    return {suffix: node.value}


Loader.add_multi_constructor("!", _function)

MACHINES = {
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/maskfleet:1",
    "instance_type": "p4d.24xlarge",
    "vpc": "vpc-0123abcd",
    "subnet": "subnet-0123abcd",
}
READS = ("s3://corpora/books", "s3://corpora/books", "s3://corpora/bpe", "/data/other", "s3://whole")


def stack(**settings: object) -> dict[str, Any]:
    """Its resources."""
    loaded = yaml.load(render(BatchJob.from_options(**settings, **MACHINES)), Loader)
    resources: dict[str, Any] = loaded["Resources"]
    return resources


def legal(gpus: dict[str, object]) -> dict[str, object]:
    """IAM gives `$` and `*` a meaning, so such URIs are refused here."""
    return {**gpus, "run": 's3://bucket/runs/it\'s "a" run'}


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.parametrize("more", [{}, {"efa": 4, "reads": READS}])
def test_the_stack_passes_cfn_lint(gpus: dict[str, object], cpus: dict[str, object], more: dict[str, object]) -> None:
    for settings in (legal(gpus), cpus):
        template = render(BatchJob.from_options(**settings, **MACHINES, **more))
        assert lint(template, config=ManualArgs(regions=["us-east-1"])) == []


def test_only_a_wish_to_go_on_and_a_lost_machine_are_retried(cpus: dict[str, object]) -> None:
    assert stack(**cpus)["Train"]["Properties"]["RetryStrategy"] == {
        "Attempts": 10,
        "EvaluateOnExit": [
            {"OnExitCode": "75", "Action": "RETRY"},
            {"OnStatusReason": "Host EC2*", "Action": "RETRY"},
            {"OnReason": "*", "Action": "EXIT"},
        ],
    }


def test_training_may_write_the_run_and_read_the_corpora(gpus: dict[str, object]) -> None:
    (policy,) = stack(**legal(gpus), reads=READS)["JobRole"]["Properties"]["Policies"]
    rights: dict[str, set[str]] = {}
    for statement in policy["PolicyDocument"]["Statement"]:
        rights.setdefault(statement["Resource"]["Join"][1][-1], set()).update(statement["Action"])
    writing = {"s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"}
    assert rights == {
        "bucket": {"s3:ListBucket", "s3:ListBucketMultipartUploads"},
        'bucket/runs/it\'s "a" run/*': {"s3:GetObject", *writing},
        "corpora": {"s3:ListBucket"},
        "corpora/books/*": {"s3:GetObject"},
        "corpora/bpe/*": {"s3:GetObject"},
        "whole": {"s3:ListBucket"},
        "whole/*": {"s3:GetObject"},
    }


def test_listing_is_bounded_to_the_prefix(cpus: dict[str, object]) -> None:
    (policy,) = stack(**cpus)["JobRole"]["Properties"]["Policies"]
    first = policy["PolicyDocument"]["Statement"][0]
    assert first["Condition"] == {"StringLike": {"s3:prefix": ["runs/base", "runs/base/*"]}}


def test_no_role_may_do_everything(gpus: dict[str, object]) -> None:
    roles = [each for each in stack(**legal(gpus)).values() if each["Type"] == "AWS::IAM::Role"]
    assert len(roles) == 3
    for role in roles:
        for policy in role["Properties"].get("Policies", []):
            for statement in policy["PolicyDocument"]["Statement"]:
                actions = [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
                assert all("*" not in action for action in actions)
                assert statement["Resource"] != "*" or actions == ["ecr:GetAuthorizationToken"]


@pytest.mark.parametrize("uri", ["s3://bucket/runs/*", "s3://bucket/${aws:username}", "s3://bucket/a?"])
def test_a_uri_that_iam_would_expand_is_refused(cpus: dict[str, object], uri: str) -> None:
    with pytest.raises(LaunchError, match="IAM"):
        stack(**{**cpus, "run": uri})


@pytest.mark.parametrize("uri", ["gs://bucket/runs/a", "az://container/runs/a"])
def test_a_run_that_the_roles_do_not_open_is_refused(cpus: dict[str, object], uri: str) -> None:
    with pytest.raises(LaunchError, match=uri):
        stack(**{**cpus, "run": uri})


def test_what_a_recipe_reads() -> None:
    recipe = load("roberta-base", ("tokenizer.uri=s3://c/bpe", "start=s3://c/old"))
    corpora = [source.uri for source in recipe.corpus.sources.values()]
    assert input_uris(recipe) == (*corpora, "s3://c/bpe", "s3://c/old")
    distilled = load("distilbert-base", ("objective.distil.teachers.0.uri=s3://c/teacher",))
    assert "s3://c/teacher" in input_uris(distilled)


def test_a_corpus_that_grew_is_read_where_its_parts_lie(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "new.jsonl").write_text('{"text": "A rank waits for its row, and another one waits, too."}\n')
    corpus = open_corpus(str(inputs / "corpus"))
    options = options_from_corpus(corpus, workers=1, on_bad_records="error", word_files={})
    append_documents(
        str(inputs / "corpus"),
        [str(tmp_path / "new.jsonl")],
        str(tmp_path / "grown"),
        options,
        removed_by="me",
        removed_at=0,
        progress=ignore_progress,
    )
    sources = f"corpus.sources={{a: {{uri: {tmp_path}/grown}}}}"
    recipe = load("roberta-base", (sources, f"tokenizer.uri={inputs}/tokenizer"))
    assert merged_corpus_uris(recipe) == (str(inputs / "corpus"), str(tmp_path / "grown" / "added"))


def test_secrets_are_references(gpus: dict[str, object], secrets: tuple[str, ...]) -> None:
    text = render(BatchJob.from_options(**legal(gpus), **MACHINES))
    assert not [value for value in secrets if value in text]
    (nodes,) = stack(**legal(gpus))["Train"]["Properties"]["NodeProperties"]["NodeRangeProperties"]
    references = {entry["Name"]: entry["ValueFrom"] for entry in nodes["Container"]["Secrets"]}
    assert references["RAY_AUTH_TOKEN"] == {"Ref": "RayToken"}
    assert references["HF_TOKEN"]["Sub"].endswith(":parameter/maskfleet/base/HF_TOKEN")
