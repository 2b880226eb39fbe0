"""Runs on several languages and translations between them: what is drawn, what is shown, what is refused; killed and
resumed; exported to transformers."""

import json
import random
import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForMaskedLM

from data_service.errors import CorpusError
from data_service.stream.stream import Stream
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.train.zero_state import MASTER
from launcher.after.export.export import export_run
from launcher.errors import RecipeError
from launcher.observe.inspect.show import find_sample
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import open_run
from launcher.runtime.run.streams import heldout_spec, stream_spec
from tests.support.data.made_up import WORDS
from tests.support.data.translated import SOURCES, prepare_translations, source_settings
from tests.support.models.parity import pad
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

MODEL = {
    "family": "xlm",
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "feed_forward": 128,
    "max_length": 32,
    "vocab": None,
    "languages": ["en", "up", "re"],
}
MIXING = {"temperature": 1.428571, "translations": 0.5}
STEPS, KILL = 12, 7


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("languages"), random.Random(1)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(3, 16))) + "." for _ in range(300)]
    prepare_translations(folder, list(dict.fromkeys(sentences)))
    return folder


def settings(root: Path, **changes: Any) -> tuple[str, ...]:
    given = {
        "model": MODEL,
        "input": {"packing": "translations"},
        "mixing": MIXING,
        "phases": [{"steps": STEPS, "length": 32, "batch": {"sequences": 12}}],
        "checkpoint": {"every": {"steps": 3}, "keep_last": 3},
        "evaluation": {"every": {"steps": STEPS}, "samples": 16},
        "zero": 2,
    } | changes
    values = (f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in given.items())
    dropped = tuple(value for value in small_runs.SETTINGS if not value.startswith(("model.", "corpus.", "phases")))
    return (*dropped, source_settings(root), f"tokenizer.uri={root}/tokenizer", *values)


def recipe(root: Path, *further: str, **changes: Any) -> Recipe:
    return load(small_runs.SMALL, (*settings(root, **changes), *further))


def new_run(root: Path, name: str, **changes: Any) -> str:
    """Beside the corpora; `SMALL`'s own sections are replaced whole."""
    uri = str(root / "runs" / name)
    shutil.rmtree(uri, ignore_errors=True)
    create_run(recipe(root, **changes), uri, datetime.now(UTC))
    return uri


def test_half_of_the_rows_are_translations_and_small_languages_come_more_often(root: Path) -> None:
    run = open_run(new_run(root, "shares"))
    stream = Stream(stream_spec(run, run.tokenizer(), 0))
    sizes = [line.rows_per_round for line in stream.plan.lines]  # rows of each source
    drawn = dict(zip(SOURCES, stream.plan.epoch_layout.quotas, strict=True))
    total = sum(drawn.values())
    assert drawn["en-re"] + drawn["en-up"] == pytest.approx(total / 2, abs=1)
    assert drawn["en"] / drawn["re"] == pytest.approx((sizes[0] / sizes[1]) ** 0.7, rel=0.05)
    rows = stream.read(0, 0, total)
    assert rows.languages is not None
    found = Counter(map(tuple, rows.languages.tolist()))
    assert found == {(0, 0): drawn["en"], (2, 2): drawn["re"], (0, 2): drawn["en-re"], (0, 1): drawn["en-up"]}


def test_the_batch_knows_languages_and_begins_positions_again(root: Path) -> None:
    run = open_run(new_run(root, "batch"))
    rows = Stream(heldout_spec(run, run.tokenizer())).read(0, 0, 20)
    batch = to_batch(rows, torch.device("cpu"))
    assert batch.languages is not None
    assert batch.restarted is not None
    assert rows.segment_starts is not None
    assert rows.restarts is not None
    assert rows.languages is not None
    assert 0 < rows.restarts.sum() < rows.rows
    for row, (first, last) in enumerate(zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True)):
        second = int(rows.segment_starts[row])
        one, other = rows.languages[row].tolist()
        length = last - first
        assert batch.languages[first:last].tolist() == [one] * second + [other] * (length - second)
        places = [*range(second), *range(length - second)] if rows.restarts[row] else [*range(length)]
        assert batch.restarted[first:last].tolist() == places
        assert batch.positions[first:last].tolist() == [*range(length)]


def test_show_names_the_languages(root: Path) -> None:
    uri, seen = new_run(root, "shown"), Counter[str]()
    for row in range(12):
        shown = find_sample(open_run(uri), 2, row)
        lines = str(shown).splitlines()
        languages = SOURCES[shown.source.name]
        assert f", {' and '.join(languages)}):" in lines[1]
        text = [line for line in lines[3:] if line.startswith(tuple(f"{name} " for name in languages))]
        assert [line.split()[0] for line in text[:2]] == [*languages]
        seen[shown.source.name] += 1
    assert len(seen) > 2


def refused(root: Path, message: str, *further: str, **changes: Any) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(root, *further, **changes)


def test_what_is_missing_is_refused_with_a_reason(root: Path) -> None:
    refused(root, r"\bsource en\b", "corpus.sources.en.languages=[]")
    refused(root, r"\bno language fr\b.*\ben, up, re\b", "corpus.sources.en.languages=[fr]")
    refused(root, r"source en-re has two languages", input={"packing": "full_sentences"})
    alone = json.dumps({"text": {"uri": str(root / "en"), "languages": ["en"]}})
    refused(root, r"no source has two languages", f"corpus.sources={alone}", "mixing.translations=null")
    refused(root, r"mixing\.translations\b", f"corpus.sources={alone}", input={"packing": "contiguous"})
    weights = [f"corpus.sources.{name}.weight=1" for name in SOURCES]
    refused(root, r"weights of their own .*, which decide", *weights)
    refused(root, r"must differ", model=MODEL | {"languages": ["en", "up", "re", "en"]})


def test_corpora_that_do_not_hold_what_the_recipe_says_are_refused(root: Path) -> None:
    text = {"one": {"uri": f"{root}/en", "languages": ["en", "re"]}}
    pairs = {
        "one": {"uri": f"{root}/en-re", "languages": ["en"]},
        "other": {"uri": f"{root}/en-up", "languages": ["en", "up"]},
    }
    for sources, message in (
        (text, "is a corpus of running text"),
        (pairs, "does not name its two languages"),
    ):
        wanted = recipe(root, f"corpus.sources={json.dumps(sources)}", "mixing.translations=null")
        with pytest.raises(CorpusError, match=message):
            create_run(wanted, f"{root}/refused", datetime.now(UTC))


def test_a_source_keeps_the_languages_of_the_recipes_own(root: Path) -> None:
    given = {
        "corpus": {
            "sources": {"en": {"uri": "x"}, "en-fr": {"uri": "y"}, "zz": {"uri": "z", "languages": ["zh"]}},
            "heldout": {"fraction": 0.1},
        }
    }
    found = load("xlm-mlm-tlm-base", (), given).corpus.sources
    assert {name: source.languages for name, source in found.items()} == {
        "en": ("en",),
        "en-fr": ("en", "fr"),
        "zz": ("zh",),
    }
    assert found["en"].uri == "x"


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_killed_and_resumed_bit_for_bit_and_the_export_is_the_same_model(root: Path, tmp_path: Path) -> None:
    undisturbed = finish(new_run(root, "whole"), 2)
    run = new_run(root, "killed")
    assert KILLED in run_group(run, 2, kill={1: KILL}).codes
    finish(run, 2)
    small_runs.ensure_same(run, undisturbed, STEPS)

    export_run(open_run(run), None, str(tmp_path / "model"))
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    assert theirs.config.lang2id == {"en": 0, "up": 1, "re": 2}
    ours = trained(run)
    opened = open_run(run)
    batch = to_batch(Stream(heldout_spec(opened, opened.tokenizer())).read(0, 0, 9), torch.device("cpu"))
    padded, lengths = pad(batch, theirs.config.pad_index), batch.cu_seqlens.diff().tolist()
    assert batch.languages is not None
    langs, places = (
        torch.nn.utils.rnn.pad_sequence(column.split(lengths), batch_first=True)
        for column in (batch.languages, batch.absolute_positions)
    )
    with torch.no_grad():
        found = theirs(padded.input_ids, attention_mask=padded.attention_mask, langs=langs, position_ids=places)
        torch.testing.assert_close(ours.logits(batch), padded.flat(found.logits)[batch.target_positions])


def trained(uri: str) -> MultitaskModel:
    """The model of the run's last checkpoint."""
    run = open_run(uri)
    tokenizer = run.tokenizer()
    config = run.recipe.model.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    model = masked_language_model(config).eval()
    state = small_runs.final_state(uri, STEPS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = np.frombuffer(state[name, MASTER], dtype=np.float32)
            parameter.copy_(torch.from_numpy(values.copy()).view_as(parameter))
    return model
