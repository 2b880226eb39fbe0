"""Every command and every piece of code of the guide, run as a reader would, on little text."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checks.guide import GUIDE, Page, document_blocks
from tests.support.data.chinese import made_up_documents
from tests.support.data.made_up import write_text
from tests.support.stores.gcs import FakeGcs
from tests.support.stores.s3 import S3Server
from tests.support.tasks import published_folders

AFTER_IT = (
    "continue.md",
    "runbook.md",
    "operating.md",
    "python.md",
    "recipes.md",
    "records.md",
    "data.md",
    "tokenizers.md",
    "removal.md",
    "after.md",
    "coming_from.md",
)
ALONE = ("prepare.md", "contributing.md", "glossary.md", "keys.md", "README.md", "gpu.md")
PYTHON_TEXT = "maskfleet-demo/text/python.jsonl"
ANSWERS = {
    "sbatch": "echo '4711;cluster'",
    "kubectl": "echo rayjob.ray.io/base",
    "aws": "echo job-1",
    "ray": "echo submitted",
}


def a_reader(folder: Path, text: Path | None = None, *, as_written: bool = False) -> Path:
    """The folder in which a reader of the tutorial has ended, with the files that other pages take for granted."""
    given = folder / PYTHON_TEXT
    given.parent.mkdir(parents=True)
    if text is None:
        write_text(given, documents=300)
    else:
        shutil.copy(text, given)
    Page(GUIDE / "tutorial.md", folder, as_written).run()
    _write_readers_own(folder)
    return folder


def _write_readers_own(folder: Path) -> None:
    draw = random.Random(5)
    words = (
        "a rank reads its rows",
        "every step is the same",
        "nothing lost",
        "the loss falls",
        "workers die",
    )
    for name, rows in (("train", 48), ("dev", 16)):
        lines = (f'"{draw.choice(words)} {draw.choice(words)}",{draw.choice(("good", "bad"))}' for _ in range(rows))
        (folder / f"{name}.csv").write_text("text,stars\n" + "".join(f"{line}\n" for line in lines))
    scored = (f"{draw.choice(words)} {number},{draw.choice(words)},{draw.randint(0, 5)}" for number in range(30))
    (folder / "pairs.csv").write_text("a,b,score\n" + "".join(f"{line}\n" for line in scored))
    pairs = (
        {
            "query": f"{draw.choice(words)} {number}",
            "positive": draw.choice(words),
            "negatives": [draw.choice(words)],
        }
        for number in range(300)
    )
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "lines.txt").write_text("".join(f"{draw.choice(words)} {number}\n" for number in range(60)))
    (folder / "news-zh").mkdir()
    news = ("".join(words) for words in made_up_documents(120))
    (folder / "news-zh/news.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in news))
    (folder / "old-text").mkdir()
    write_text(folder / "old-text/old.jsonl", documents=200, seed=8)
    (folder / "terms.txt").write_text("checkpointing\nmicrobatches\n")
    letters = "".join(f'{number};"{draw.choice(words)}: für Köln;\n"\r\n' for number in range(60))
    (folder / "letters.csv").write_text(f"Nummer;Inhalt\r\n{letters}", encoding="cp1252", newline="")
    publish(folder / "first-model", folder / "published")
    published_folders.glue(folder / "glue")
    published_folders.similarity(folder / "sts")


_CONFIGS = ("config.json", "tokenizer_config.json")


def publish(model: Path, out: Path) -> None:
    """The tutorial's RoBERTa, of 32 positions, as others publish theirs: for rows of 128 tokens, which tasks have."""
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("maskfleet_export.json"))
    config, tokenizer = (json.loads((out / name).read_bytes()) for name in _CONFIGS)
    tokenizer["model_max_length"], positions = 128, 128 + config["pad_token_id"] + 1
    for name, content in zip(_CONFIGS, (config | {"max_position_embeddings": positions}, tokenizer), strict=True):
        (out / name).write_text(json.dumps(content))
    weights, table = load_file(out / "model.safetensors"), "roberta.embeddings.position_embeddings.weight"
    weights[table] = weights[table].repeat(5, 1)[:positions].contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[str]:
    """s3://bucket with some raw text in it."""
    client = s3.client()
    client.create_bucket(Bucket="bucket")
    yield "bucket"
    for entry in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=entry["Key"])
    client.delete_bucket(Bucket="bucket")


@pytest.fixture
def schedulers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the schedulers' own commands come first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in ANSWERS.items():
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.cluster
def test_the_tutorial(tutorial: Path) -> None:
    assert (tutorial / "first-model/model.safetensors").exists()


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("page", AFTER_IT)
def test_a_page_that_goes_on_after_the_tutorial(page: str, tutorial: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(tutorial, folder)
    Page(GUIDE / page, folder).run()


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("page", ALONE)
def test_a_page_that_needs_nothing(page: str, tmp_path: Path) -> None:
    Page(GUIDE / page, tmp_path).run()


@pytest.mark.long
@pytest.mark.usefixtures("schedulers")
def test_the_page_about_clusters(bucket: str, s3: S3Server, tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl", documents=300)
    s3.client().upload_file(str(tmp_path / "text.jsonl"), bucket, "raw/text.jsonl")
    page = Page(GUIDE / "clusters.md", tmp_path)
    page.run()
    for manifest in ("job.yaml", "stack.yaml"):
        assert "s3://bucket/runs/base" in (tmp_path / manifest).read_text("utf-8").replace("\\/", "/")
    assert "--num-cpus=90 --num-gpus=8" in (tmp_path / "cluster.yaml").read_text("utf-8"), "its job is submitted later"
    assert "maskfleet train s3://bucket/runs/base --nodes 4" in (tmp_path / "job.sh").read_text("utf-8")


@pytest.mark.long
def test_the_page_about_object_stores(gs: FakeGcs, tmp_path: Path) -> None:
    gs.new_bucket("bucket")
    Page(GUIDE / "object_stores.md", tmp_path).run()
    assert "gs://bucket/runs" in (tmp_path / "machine.txt").read_text("utf-8")
    assert not gs.buckets["bucket"].objects


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(3600)
def test_every_page_as_it_is_written(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    text = tmp_path / "python.jsonl"
    text.write_text("".join(json.dumps({"text": topic}) + "\n" for topic in topics.values()), encoding="utf-8")
    folder = a_reader(tmp_path / "reader", text, as_written=True)
    for page in AFTER_IT:
        Page(GUIDE / page, folder, as_written=True).run()


def test_every_page_is_run() -> None:
    pages = {path.name for path in GUIDE.glob("*.md")}
    assert pages == {"tutorial.md", "clusters.md", "object_stores.md", *AFTER_IT, *ALONE}


def test_blocks_hold_commands_where_they_are_run() -> None:
    """A command of ours in a block that nobody runs would go stale; but for the loop around one."""
    for path in GUIDE.glob("*.md"):
        for language, text in document_blocks(path):
            loop = language == "bash" and text.startswith("until maskfleet train")
            assert (
                language in ("console", "python", "yaml")
                or loop
                or "maskfleet " not in text.replace("maskfleet train RUN        the parent", "")
            ), f"{path.name}: a block of {language or 'no language'} holds a command"
