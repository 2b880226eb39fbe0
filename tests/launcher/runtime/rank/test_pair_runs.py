"""Contrastive runs up to their first step: corpora of pairs made, taken or refused, and every example shown."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_service.stream.stream import Stream
from launcher.app.api.stream import StepDataset
from launcher.errors import RecipeError
from launcher.observe.inspect.show import find_sample
from launcher.runtime.recipe.checks import combination_issues
from launcher.runtime.recipe.identity import identity_fields
from launcher.runtime.recipe.load import load
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import stream_spec
from tests.support.checks.command import exit_code

BATCH = 8


def records(source: str, count: int, negatives: int) -> list[dict[str, object]]:
    """Texts of a few words, each with its source's name."""
    draw = random.Random(source)

    def text() -> str:
        return f"{source} " + " ".join(draw.choices(["rank", "reads", "rows", "step", "loss"], k=draw.randint(2, 6)))

    return [
        {"query": f"{text()} {n}", "positive": text(), "negatives": [text() for _ in range(negatives)]}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def corpora(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`news`, of pairs with two negatives, and `web`, with one; by the command."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, count, negatives in (("news", 90, 2), ("web", 40, 1)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records(name, count, negatives)))
        arguments = ("--texts", "pairs", "--negatives", negatives, "--heldout", 0.1, "--workers", 1)
        out = ("--tokenizer", inputs / "tokenizer", "--out", folder / name)
        assert exit_code("corpus", "build", path, *out, *arguments) == 0
    return folder


def init(recipe: str, uri: Path, corpora: list[Path], *settings: str) -> int:
    chosen = [
        part
        for setting in (f"phases.0.batch.sequences={BATCH}", "microbatch=4", *settings)
        for part in ("--set", setting)
    ]
    places = [part for corpus in corpora for part in ("--corpus", corpus)]
    return exit_code("init", recipe, uri, "--tiny", *places, *chosen)


@pytest.fixture(scope="module")
def run(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    uri = tmp_path_factory.mktemp("runs") / "run"
    assert init("contrastive-base", uri, [corpora / "news", corpora / "web"], "input.negatives=1") == 0
    return open_run(str(uri))


@pytest.mark.long
def test_every_example_of_a_step_is_shown_and_is_of_one_source(run: Run) -> None:
    texts = {
        record["query"]: [record["query"], record["positive"], record["negatives"][0]]  # type: ignore[index]
        for name, count, negatives in (("news", 90, 2), ("web", 40, 1))
        for record in records(name, count, negatives)
    }
    seen = []
    for step in (0, 1, 2, 3, 40):
        names = set()
        for row in range(BATCH):
            shown = find_sample(run, step, row)
            assert shown.rows == BATCH
            names.add(shown.source.name)
            lines = str(shown).splitlines()
            assert " 3 texts" in lines[2]
            titles, found = zip(*(line.split(" tokens) ") for line in lines[4:]), strict=True)
            assert [title.rpartition(" (")[0] for title in titles] == ["query", "positive", "negative 1"]
            plain = [text.removeprefix("<s>").removesuffix("</s>").strip() for text in found]
            assert plain == texts[plain[0]]
            seen.append(plain[0])
        assert len(names) == 1
    assert len(set(seen[: 4 * BATCH])) == 4 * BATCH


def test_xlnets_texts_end_with_their_classification_token(run: Run) -> None:
    recipe = run.recipe.model_copy(update={"model": load("xlnet-base").model})
    tokenizer = run.tokenizer()
    for layout, chosen in (("cls_first", run), ("cls_last", replace(run, recipe=recipe))):
        spec = stream_spec(chosen, tokenizer, 0)
        assert spec.layout == layout
        samples = Stream(spec).read(0, 0, 1)
        assert samples.text_starts is not None
        starts = [*samples.text_starts[0].tolist(), len(samples.tokens)]
        places = starts[:-1] if layout == "cls_first" else [end - 1 for end in starts[1:]]
        assert np.flatnonzero(samples.tokens == tokenizer.special.cls).tolist() == places


def test_loops_of_users_get_texts_as_rows_and_how_many_make_an_example(run: Run) -> None:
    item = next(iter(StepDataset(run.uri, start=2, stop=3)))
    assert item["group"].item() == 3
    assert len(item["input_ids"]) == 3 * BATCH
    shown = find_sample(run, 2, 1)
    length = int(item["attention_mask"][3:6].sum())
    assert length == len(shown.samples.tokens)
    np.testing.assert_array_equal(item["input_ids"][3:6][item["attention_mask"][3:6] > 0], shown.samples.tokens)


@pytest.mark.parametrize(
    ("recipe", "names", "settings", "problem"),
    [
        ("contrastive-base", ["text"], (), r"/corpus\b.*\binput\.packing pairs\b"),
        ("simcse-base", ["news"], (), r"/news\b.*\binput\.packing sentences\b"),
        ("bert-base", ["web"], (), r"/web\b.*\binput\.packing segment_pair\b"),
        (
            "contrastive-base",
            ["web"],
            ("input.negatives=2",),
            r"/web\b.*\b1 negatives\b.*\binput\.negatives\b",
        ),
        ("contrastive-base", ["news", "web"], ("phases.0.batch.sequences=48",), "source web"),
        (
            "contrastive-base",
            ["web"],
            ("phases.0.batch.sequences=80",),
            r"\b80 rows\b",
        ),
    ],
)
def test_corpora_that_will_not_do_are_refused_before_there_is_a_run(
    inputs: Path,
    corpora: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    names: list[str],
    settings: tuple[str, ...],
    problem: str,
) -> None:
    places = [inputs / "corpus" if name == "text" else corpora / name for name in names]
    assert init(recipe, tmp_path / "run", places, *settings) == 2
    assert re.search(problem, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_plain_text_makes_sentences_twice(inputs: Path, tmp_path: Path) -> None:
    assert init("simcse-base", tmp_path / "run", [inputs / "corpus"], "input.shortest=4") == 0
    shown = find_sample(open_run(str(tmp_path / "run")), 3, 2)
    first, second = str(shown).splitlines()[4:]
    assert first.startswith("sentence (")
    assert " same (" in second
    assert first.partition(") ")[2] == second.partition(") ")[2]


def test_settings_of_pairs_without_pairs_are_a_mistake(inputs: Path, tmp_path: Path) -> None:
    out = ("--tokenizer", inputs / "tokenizer", "--out", tmp_path / "corpus")
    assert exit_code("corpus", "build", inputs / "text.jsonl", *out, "--negatives", 1) == 2


@pytest.mark.parametrize(
    ("name", "settings", "place"),
    [
        ("contrastive-base", ("phases.0.batch={tokens: 4096}",), "phases.0.batch"),
        ("roberta-base", ("mixing.batches=one_source", "phases.0.batch={tokens: 4096}"), "phases.0.batch"),
        ("xlnet-base", ("mixing.batches=one_source",), "mixing.batches"),
        (
            "contrastive-base",
            ("corpus.sources.web.weight=1", "corpus.sources.questions.weight=2"),
            "mixing.temperature",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, settings: tuple[str, ...], place: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load(name, settings)
    assert f"{place}: " in raised.value.problem


def test_how_sources_are_mixed_is_part_of_a_runs_identity() -> None:
    recipe = load("roberta-base")
    assert identity_fields(load("roberta-base", ("mixing={batches: mixed, temperature: 1.0}",))) == identity_fields(
        recipe
    )
    changed = load("roberta-base", ("mixing={batches: one_source, temperature: 2.0}",))
    assert {path for path in identity_fields(changed) if path.startswith("mixing")} == {
        "mixing.batches",
        "mixing.temperature",
    }
    assert not combination_issues(changed)
