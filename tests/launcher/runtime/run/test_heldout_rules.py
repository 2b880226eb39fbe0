"""Sources whose held-out rules differ: refused if one trains on what another holds out, and only then."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_service.corpus.manifest import HeldoutRule
from data_service.corpus.manifest_file import load_manifest
from data_service.errors import CorpusError
from data_service.ingest.heldout import hash_threshold
from data_service.store.open import open_store
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import create_run, reconcile
from launcher.runtime.run.log import OPERATOR_ATTEMPT
from launcher.runtime.run.readiness import pairs_with_differing_rules
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.segments import segment_prefix
from tests.support.data.made_up import write_text
from tests.support.runs.small_runs import SETTINGS, SMALL, build_text

NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def corpora(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`large` holds out 3 % of its documents, `small`, a part of it, more; `like` as `large`; `apart` shares none."""
    folder = tmp_path_factory.mktemp("corpora")
    write_text(folder / "all.jsonl", 300)
    lines = (folder / "all.jsonl").read_text().splitlines(keepends=True)
    few = HeldoutRule("document", hash_threshold(0.03))
    parts = {"large": (lines[:200], few), "small": (lines[:80], None), "like": (lines[:80], few)}
    for name, (chosen, rule) in {**parts, "apart": (lines[200:], None)}.items():
        (folder / f"{name}.jsonl").write_text("".join(chosen))
        text, tokenizer = folder / f"{name}.jsonl", f"{inputs}/tokenizer"
        build_text(text, str(folder / name), tokenizer, heldout_rule=rule)
    return folder


def mixed(corpora: Path, inputs: Path, names: Sequence[str]) -> Recipe:
    sources = ", ".join(f"{name}: {{uri: {corpora / name}}}" for name in names)
    return load(SMALL, (f"corpus.sources={{{sources}}}", f"tokenizer.uri={inputs / 'tokenizer'}", *SETTINGS))


def events(run: Run) -> list[dict[str, object]]:
    stored = [entry.key for entry in run.store.list(segment_prefix("events", OPERATOR_ATTEMPT))]
    lines = [line for key in stored for line in run.store.get(key).splitlines()]
    return [event for event in map(json.loads, lines) if event["kind"] == "heldout_rules"]


def test_a_source_that_trains_on_what_another_holds_out_is_refused(corpora: Path, inputs: Path, tmp_path: Path) -> None:
    for names in (("large", "small"), ("small", "large")):
        recipe = mixed(corpora, inputs, names)
        assert pairs_with_differing_rules(recipe) == [("small", "large")]
        with pytest.raises(CorpusError) as refused:
            create_run(recipe, str(tmp_path / "run"), NOW)
        assert all(str(corpora / name) in str(refused.value) for name in names)
        assert "--heldout-like" in refused.value.remedy
        assert not (tmp_path / "run").exists()


def test_one_rule_or_other_texts_are_no_reason_to_refuse(corpora: Path, inputs: Path, tmp_path: Path) -> None:
    run = create_run(mixed(corpora, inputs, ("large", "apart")), str(tmp_path / "run"), NOW)
    assert [event["compared"] for event in events(run)] == [True]
    assert open_run(run.uri).record == run.record
    if load_manifest(open_store(str(corpora / "like"))).heldout.tokens.sum():
        like = create_run(mixed(corpora, inputs, ("large", "like")), str(tmp_path / "like"), NOW)
        assert events(like) == []


def test_a_run_of_one_source_or_one_that_was_compared_is_not_looked_at_again(
    corpora: Path, inputs: Path, tmp_path: Path
) -> None:
    alone = create_run(mixed(corpora, inputs, ("small",)), str(tmp_path / "alone"), NOW)
    compared = create_run(mixed(corpora, inputs, ("large", "apart")), str(tmp_path / "run"), NOW)
    before = events(compared)
    for run in (alone, compared):
        reconcile(open_run(run.uri), recipe=None, accept_changes=False, now=NOW)
    assert events(alone) == []
    assert events(compared) == before
