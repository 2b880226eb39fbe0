"""A published DeBERTa v3 through real runs: the same weights on any ranks, continued, killed, and exported again."""

import json
import math
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launcher.after.export.export import export_run
from launcher.runtime.rank.kept_start import keep_start
from launcher.runtime.recipe.continued import commented_yaml, continued_recipe
from launcher.runtime.recipe.load import load
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import open_run
from tests.support.data.made_up import write_text
from tests.support.data.published_tokenizers import published_folder
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

PAIR = (
    "model={family: deberta_v2, layers: 4, hidden: 32, heads: 2, feed_forward: 64, max_length: 64, dropout: 0.0,"
    " attention_dropout: 0.0, activation: gelu, layer_norm_eps: 1.0e-7, initializer_range: 0.05,"
    " initializer: normal, vocab: null, mask_decoder: enhanced, buckets: 8}",
    "objective.rtd={weight: 50.0, embeddings: gradient_disentangled}",
    "objective.mlm.replace={mask: 1.0, random: 0.0, keep: 0.0, random_from: vocabulary}",
    "optimizer.adamw.lr=3.0e-3",
    "schedule.warmup=5",
)


def phase(steps: int, every: int, saved: int) -> tuple[str, ...]:
    return (
        f"phases=[{{steps: {steps}, length: 32, batch: {{sequences: 24}}}}]",
        f"checkpoint={{every: {{steps: {saved}}}, keep_last: 9}}",
        f"evaluation={{every: {{steps: {every}}}, samples: 64}}",
        "microbatch=12",
    )


def prepare(folder: Path) -> None:
    """A corpus built with the tokenizer of a published folder, which has an spm.model alone."""
    write_text(folder / "text.jsonl", 60)
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    published_folder("deberta-v3", texts, folder / "tokenizer", 50)
    small_runs.build_text(folder / "text.jsonl", f"{folder}/corpus", f"{folder}/tokenizer")


def new_run(folder: Path, name: str, start: Path | str, *settings: str) -> str:
    """As `maskfleet init` makes it."""
    places = (
        f"corpus.sources.text.uri={folder}/corpus",
        f"tokenizer.uri={folder}/tokenizer",
        f"start={start}",
    )
    recipe = load(small_runs.SMALL, (*places, *small_runs.SETTINGS[:1], *small_runs.SETTINGS[11:], *PAIR, *settings))
    uri = f"{folder}/{name}"
    create_run(keep_start(recipe, uri), uri, datetime.now(UTC))
    return uri


def publish(exported: Path, folder: Path) -> None:
    """The discriminator of a pair's export as DeBERTa v3 is published: pytorch_model.bin, spm.model, config.json."""
    from transformers import DebertaV2Model

    theirs = DebertaV2Model.from_pretrained(exported)
    state = {f"deberta.{name}": value for name, value in theirs.state_dict().items()}
    heads = {n: v for n, v in load_file(exported / "model.safetensors").items() if n.startswith("mask_")}
    theirs.config.save_pretrained(folder)
    torch.save({name: value.half() for name, value in (state | heads).items()}, folder / "pytorch_model.bin")


def heldout(uri: str, figure: str) -> dict[int, float]:
    return {e["step"]: e[figure] for e in small_runs.history(uri).evaluations}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and `published`: a small model, trained a little."""
    folder = tmp_path_factory.mktemp("published")
    prepare(folder)
    first = new_run(folder, "first", "scratch", *phase(60, 60, 60))
    finish(first, 2)
    export_run(open_run(first), None, f"{folder}/exported")
    published = folder / "published"
    published.mkdir()
    for name in ("spm.model", "tokenizer_config.json"):
        (published / name).write_bytes((folder / "tokenizer" / name).read_bytes())
    publish(folder / "exported/discriminator", published)
    return folder


@pytest.mark.long
def test_any_ranks_begin_alike(folder: Path) -> None:
    draw, found = random.Random("ranks"), []
    for stage in range(4):
        uri = new_run(
            folder,
            f"stage{stage}",
            folder / "published",
            *phase(2, 2, 2),
            "schedule.warmup=1",
            f"zero={stage}",
        )
        finish(uri, draw.choice([1, 2]))
        found.append((heldout(uri, "loss")[0], small_runs.losses(uri)[0]))
    for figures in found[1:]:
        assert figures == pytest.approx(found[0], rel=1e-5)


@pytest.mark.long
def test_the_printed_recipe_trains_the_published_folder(folder: Path) -> None:
    """As `recipe from` prints it, but for the corpus and for how long."""
    own = folder / "own.yaml"
    own.write_text(commented_yaml(continued_recipe(str(folder / "published"))))
    corpus = f"corpus={{sources: {{text: {{uri: {folder}/corpus}}}}, heldout: {{fraction: 0.1}}}}"
    few = ("phases=[{steps: 2, length: 32, batch: {sequences: 24}}]", "schedule.warmup=1", "microbatch=12")
    recipe = load(str(own), (corpus, *few, "precision=fp32"))
    uri = f"{folder}/printed"
    create_run(keep_start(recipe, uri), uri, datetime.now(UTC))
    finish(uri, 1)
    start = _start(uri)
    assert start["network"] == "discriminator"
    assert start["layers"] == [0, 3]
    assert all(math.isfinite(loss) for loss in small_runs.losses(uri))
    assert len(small_runs.losses(uri)) == 2


@pytest.mark.long
def test_continued_killed_and_exported_again(folder: Path, tmp_path: Path) -> None:
    from transformers import DebertaV2Model

    settings = (*phase(40, 20, 10), "zero=2")
    undisturbed = finish(new_run(folder, "undisturbed", folder / "published", *settings), 2)
    disturbed = new_run(folder, "disturbed", folder / "published", *settings)
    assert KILLED in run_group(disturbed, 2, kill={1: 17}).codes
    finish(disturbed, 2)
    small_runs.ensure_same(disturbed, undisturbed, 40)
    start = _start(undisturbed)
    assert start["layers"] == [0, 3]
    assert start["left"] == []
    export_run(open_run(disturbed), None, f"{tmp_path}/again")
    theirs, info = DebertaV2Model.from_pretrained(tmp_path / "again/discriminator", output_loading_info=True)
    assert not info["missing_keys"]
    assert isinstance(theirs, DebertaV2Model)


def _start(uri: str) -> dict[str, Any]:
    return small_runs.events(uri, "start")[0]
