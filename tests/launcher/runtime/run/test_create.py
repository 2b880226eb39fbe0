"""Runs: created once, opened never by accident, and refused when they are no longer what they were."""

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_service.corpus.manifest_file import load_manifest, save_manifest
from data_service.errors import CorpusError, TokenizerError, UserError
from data_service.store.errors import AccessDenied, StoreError
from data_service.store.open import open_store
from launcher.errors import RecipeError, RunChanged, RunError, TransientRunError
from launcher.runtime.recipe.load import load, with_assignments
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run.create import create_run, reconcile, store_changes
from launcher.runtime.run.history import read_history
from launcher.runtime.run.outline import open_outline
from launcher.runtime.run.record import RECIPE_FILE, RECORD_FILE, open_run
from tests.support.data.made_up import write_text
from tests.support.runs.small_runs import SETTINGS, build_text, new_run, prepare_corpus, reconciled

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def recipe(inputs: Path, *settings: str) -> Recipe:
    places = (f"corpus.sources.text.uri={inputs / 'corpus'}", f"tokenizer.uri={inputs / 'tokenizer'}")
    return load("quickstart", (*places, *SETTINGS, *settings))


def test_init_records_what_the_run_is(inputs: Path, tmp_path: Path) -> None:
    run = create_run(recipe(inputs), str(tmp_path / "run"), NOW)
    again = open_run(str(tmp_path / "run"))
    assert (again.recipe, again.record) == (run.recipe, run.record)
    assert run.record.created == "2026-11-20T12:00:00+00:00"
    assert set(run.record.inputs.corpora) == {"text"}
    assert run.record.versions["torch"].startswith("2.")


def test_init_refuses_an_existing_run(fresh_run: str, inputs: Path) -> None:
    before = Path(fresh_run, RECORD_FILE).read_bytes()
    with pytest.raises(RunError, match=r"\ba run\b"):
        create_run(recipe(inputs, "seed=9"), fresh_run, NOW)
    assert Path(fresh_run, RECORD_FILE).read_bytes() == before


def test_of_many_inits_at_once_one_wins(inputs: Path, tmp_path: Path) -> None:
    def attempt(seed: int) -> int | None:
        try:
            return create_run(recipe(inputs, f"seed={seed}"), str(tmp_path / "run"), NOW).recipe.seed
        except RunError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [seed for seed in pool.map(attempt, range(8)) if seed is not None]
    assert len(winners) == 1
    run = open_run(str(tmp_path / "run"))
    assert run.recipe.seed == run.record.identity["seed"] == winners[0]


def test_an_interrupted_init_can_be_repeated(inputs: Path, tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    create_run(recipe(inputs), uri, NOW)
    Path(uri, RECORD_FILE).unlink()
    with pytest.raises(RunError, match=r"\bmaskfleet init\b"):
        open_run(uri)
    with pytest.raises(RunError, match=r"recipe\.yaml\b.*run\.json\b"):
        create_run(recipe(inputs, "seed=4"), uri, NOW)
    assert create_run(recipe(inputs), uri, NOW).recipe.seed == 1


def test_opening_never_creates(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"\bmaskfleet init\b") as caught:
        open_run(str(tmp_path / "rnu"))
    assert "maskfleet init" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 0}', b"\xff"])
def test_a_damaged_record_is_refused(fresh_run: str, content: bytes) -> None:
    Path(fresh_run, RECORD_FILE).write_bytes(content)
    with pytest.raises(RunError, match="damaged"):
        open_run(fresh_run)


@pytest.mark.parametrize("change", [{"format": 3}, {"format": 99, "inputs": []}, {"later": True}])
def test_a_record_of_a_newer_version_is_refused_and_kept(fresh_run: str, change: dict[str, object]) -> None:
    record = Path(fresh_run, RECORD_FILE)
    record.write_text(newer := json.dumps(json.loads(record.read_text()) | change))
    with pytest.raises(RunError, match="newer"):
        open_run(fresh_run)
    if "format" in change:
        with pytest.raises(RunError, match="newer"):
            open_outline(fresh_run)
    assert record.read_text() == newer


@pytest.mark.parametrize("former", [{"format": 1}, {}])
def test_a_record_of_a_former_version_names_it_and_is_kept(fresh_run: str, former: dict[str, object]) -> None:
    """The first version wrote no number of the format."""
    record = Path(fresh_run, RECORD_FILE)
    fields = {name: value for name, value in json.loads(record.read_text()).items() if name != "format"}
    versions = fields["versions"] | {"maskfleet": "0.1.0"}
    record.write_text(written := json.dumps(former | fields | {"versions": versions}))
    for read in (open_run, open_outline):
        with pytest.raises(RunError, match=r"run\.json .*\b0\.1\.0\b") as caught:
            read(fresh_run)
        assert "0.1.0" in caught.value.remedy
    assert record.read_text() == written


def test_a_run_without_its_recipe_is_refused(fresh_run: str) -> None:
    Path(fresh_run, RECIPE_FILE).unlink()
    with pytest.raises(RunError, match=r"no recipe\.yaml"):
        open_run(fresh_run)


def test_local_paths_become_absolute(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    run = create_run(load("quickstart", SETTINGS), str(tmp_path / "run"), NOW)
    assert run.recipe.corpus.sources["text"].uri == str(inputs / "corpus")
    assert run.recipe.tokenizer.uri == str(inputs / "tokenizer")


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ("corpus.sources.text.uri=/nowhere", CorpusError, "no corpus at"),
        ("tokenizer.uri=/nowhere", UserError, "/nowhere"),
        ("corpus.heldout.fraction=0.2", CorpusError, " 0.1 of its documents"),
        ("model.vocab=100", RecipeError, "320 ids, the model's vocabulary only 100"),
    ],
)
def test_inputs_that_do_not_fit_leave_no_run(
    inputs: Path, tmp_path: Path, setting: str, kind: type[UserError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        create_run(recipe(inputs, setting), str(tmp_path / "run"), NOW)
    assert not (tmp_path / "run").exists()


def test_sentences_must_follow_each_other_where_that_is_asked(inputs: Path, tmp_path: Path) -> None:
    """The shared corpus has documents of one sentence: no second one ever follows."""
    pairs = ("input={packing: segment_pair}", "objective.nsp={weight: 1}")
    with pytest.raises(CorpusError, match=r"\bobjective\.nsp\b"):
        new_run(inputs, str(tmp_path / "run"), *pairs)


def test_a_corpus_of_another_tokenizer_is_refused(inputs: Path, tmp_path: Path) -> None:
    from data_service.tokenizers.load import save_tokenizer
    from data_service.tokenizers.train import train_tokenizer

    save_tokenizer(train_tokenizer("byte_bpe", iter(["other words " * 50]), 270), str(tmp_path / "other"))
    with pytest.raises(TokenizerError, match=r"\btokenizer \([0-9a-f]{12}\)"):
        create_run(recipe(inputs, f"tokenizer.uri={tmp_path / 'other'}"), str(tmp_path / "run"), NOW)


def test_a_place_without_permission_is_named(inputs: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises((StoreError, AccessDenied), match="file"):
        create_run(recipe(inputs), str(blocked / "run"), NOW)


def test_a_manifest_that_was_edited_is_noticed(inputs: Path, tmp_path: Path) -> None:
    """Though its own hash is right, and the samples are the same."""
    shutil.copytree(inputs, tmp_path / "inputs")
    run = create_run(recipe(tmp_path / "inputs"), str(tmp_path / "run"), NOW)
    store = open_store(tmp_path / "inputs" / "corpus")
    manifest = load_manifest(store)
    assert run.record.inputs.manifests == {"text": manifest.digest}
    save_manifest(store, replace(manifest, counts=manifest.counts | {"duplicates": 10**6}))
    assert load_manifest(store).fingerprint == manifest.fingerprint
    with pytest.raises(RunChanged, match=r"corpus\.sources\.text \(manifest\)"):
        reconciled(run, recipe=None, accept_changes=False, now=NOW)
    reconciled(run, recipe=None, accept_changes=True, now=NOW)
    accepted = open_run(run.uri)
    assert accepted.record.fingerprint == run.record.fingerprint
    assert accepted.record.inputs.manifests == {"text": load_manifest(store).digest}
    reconciled(accepted, recipe=None, accept_changes=False, now=NOW)


def test_operation_may_change_and_is_recorded(fresh_run: str) -> None:
    run = open_run(fresh_run)
    changed = reconciled(
        run, recipe=with_assignments(run.recipe, ("zero=2", "trainers=4")), accept_changes=False, now=NOW
    )
    assert (changed.recipe.zero, open_run(fresh_run).recipe.trainers) == (2, 4)
    assert changed.record == run.record
    (event,) = read_history(run.store).events
    assert (event["kind"], event["changes"]) == ("recipe_changed", ["- trainers: 2 -> 4", "- zero: 1 -> 2"])


def test_nothing_changed_writes_nothing(fresh_run: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(fresh_run).rglob("*")}
    reconciled(open_run(fresh_run), recipe=None, accept_changes=False, now=NOW)
    assert {path: path.stat().st_mtime_ns for path in Path(fresh_run).rglob("*")} == before


CHANGES = ("zero=2", "zero=3", "seed=5", "trainers=4", "phases.0.steps=999", "checkpoint.keep_last=9")


@pytest.mark.parametrize("seed", range(6))
def test_of_starts_at_once_the_first_to_claim_changes_the_run_and_the_others_change_nothing(
    fresh_run: str, seed: int
) -> None:
    """A start that only checks, since it is refused later or loses, leaves the files as they are."""
    draw, run = random.Random(seed), open_run(fresh_run)
    starts = [
        reconcile(
            run, recipe=with_assignments(run.recipe, tuple(draw.sample(CHANGES, 2))), accept_changes=True, now=NOW
        )
        for _ in range(3)
    ]
    assert (open_run(fresh_run).recipe, open_run(fresh_run).record) == (run.recipe, run.record)
    assert not read_history(run.store).events
    first, *others = [one for one in starts if one.recipe != run.recipe]
    store_changes(first, NOW)
    assert (open_run(fresh_run).recipe, open_run(fresh_run).record) == (first.recipe, first.record)
    events = read_history(run.store).events
    for other in (*others, run):
        with pytest.raises(TransientRunError):
            store_changes(other, NOW)
    assert (open_run(fresh_run).recipe, open_run(fresh_run).record) == (first.recipe, first.record)
    assert read_history(run.store).events == events


@pytest.mark.parametrize(
    ("change", "told"), [("seed=5", "- seed: 1 -> 5"), ("phases.0.steps=999", r"steps: \d+ -> 999")]
)
def test_a_change_of_identity_is_refused_with_a_diff(fresh_run: str, change: str, told: str) -> None:
    run = open_run(fresh_run)
    wanted = with_assignments(run.recipe, (change, "zero=3"))
    with pytest.raises(RunChanged, match=told) as caught:
        reconciled(run, recipe=wanted, accept_changes=False, now=NOW)
    assert "maskfleet runs fork" in caught.value.remedy
    assert "zero" not in caught.value.problem
    assert open_run(fresh_run).recipe == run.recipe


def test_another_order_of_sources_is_a_change(inputs: Path, tmp_path: Path) -> None:
    """Their blocks are numbered by it, so rows would come in another order."""
    shutil.copytree(inputs / "corpus", tmp_path / "copy")
    sources = {
        name: f"{name}: {{uri: {place}}}" for name, place in (("a", inputs / "corpus"), ("b", tmp_path / "copy"))
    }
    orders = [f"corpus.sources={{{', '.join(sources[name] for name in order)}}}" for order in ("ab", "ba")]
    run = create_run(with_assignments(recipe(inputs), (orders[0],)), str(tmp_path / "run"), NOW)
    wanted = with_assignments(run.recipe, (orders[1],))
    with pytest.raises(RunChanged, match="a, b -> b, a"):
        reconciled(run, recipe=wanted, accept_changes=False, now=NOW)
    reconciled(run, recipe=wanted, accept_changes=True, now=NOW)
    assert list(open_run(run.uri).recipe.corpus.sources) == ["b", "a"]
    reconciled(open_run(run.uri), recipe=None, accept_changes=False, now=NOW)


def test_a_forced_change_of_identity_is_on_record(fresh_run: str) -> None:
    run = open_run(fresh_run)
    reconciled(run, recipe=with_assignments(run.recipe, ("seed=5",)), accept_changes=True, now=NOW)
    again = open_run(fresh_run)
    assert (again.recipe.seed, again.record.identity["seed"]) == (5, 5)
    assert again.record.fingerprint != run.record.fingerprint
    assert [event["kind"] for event in read_history(again.store).events] == [
        "identity_changed",
        "recipe_changed",
    ]
    reconciled(again, recipe=None, accept_changes=False, now=NOW)


def test_an_edited_recipe_file_does_not_slip_through(fresh_run: str) -> None:
    path = Path(fresh_run, RECIPE_FILE)
    path.write_text(path.read_text().replace("seed: 1", "seed: 2"))
    with pytest.raises(RunChanged, match="- seed: 1 -> 2"):
        reconciled(open_run(fresh_run), recipe=None, accept_changes=False, now=NOW)


def test_another_corpus_in_its_place_is_refused(tmp_path: Path) -> None:
    prepare_corpus(tmp_path)
    uri = new_run(tmp_path, "run")
    write_text(tmp_path / "text.jsonl", seed=99)
    build_text(tmp_path / "text.jsonl", str(tmp_path / "other"), str(tmp_path / "tokenizer"))
    run = open_run(uri)
    moved = with_assignments(run.recipe, (f"corpus.sources.text.uri={tmp_path / 'other'}",))
    with pytest.raises(RunChanged, match=r"corpus\.sources\.text \(content\)"):
        reconciled(run, recipe=moved, accept_changes=False, now=NOW)


def test_the_same_corpus_elsewhere_is_the_same(fresh_run: str, inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "corpus", tmp_path / "copy")
    run = open_run(fresh_run)
    moved = with_assignments(run.recipe, (f"corpus.sources.text.uri={tmp_path / 'copy'}",))
    assert reconciled(run, recipe=moved, accept_changes=False, now=NOW).recipe == moved


def test_a_source_that_would_never_be_read_is_refused_with_the_weight_that_is_enough(
    inputs: Path, tmp_path: Path
) -> None:
    rare = f"{{uri: {inputs}/corpus, weight: %s}}"
    settings = f"corpus.sources={{text: {rare % 1}, rare: {rare}}}"
    with pytest.raises(CorpusError, match=r"corpus\.sources\.rare .*\bphase 0\b.*\brows\b") as raised:
        new_run(inputs, str(tmp_path / "refused"), settings % "1.0e-7")
    assert "set corpus.sources.rare.weight to 0.0" in raised.value.remedy
    new_run(inputs, str(tmp_path / "run"), settings % "0.5")


@pytest.mark.parametrize("counted", [True, False])
def test_a_source_that_would_be_read_too_often_is_refused(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """By its rows where these are soon counted, else by the tokens of full rows; the limit that is named is enough."""
    if not counted:
        monkeypatch.setattr("launcher.runtime.run.readiness.MAX_COUNTED", 0)
    phase = "{steps: 20, length: 32, batch: {sequences: 12}, mixture: {weights: {text: 1}, most_readings: %s}}"
    with pytest.raises(UserError, match=r"\btext\b.* [\d,]+ tokens\b.*\bread\b") as raised:
        new_run(inputs, str(tmp_path / "refused"), f"phases=[{phase % 2}]")
    enough = raised.value.remedy.split("most_readings to ")[1].split()[0]
    new_run(inputs, str(tmp_path / "run"), f"phases=[{phase % enough}]")
