"""`maskfleet init`: what it takes from corpora, and what it refuses before any rank starts."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_service.corpus.manifest import make_block_table
from data_service.corpus.manifest_file import load_manifest, save_manifest
from data_service.errors import CorpusError
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
from data_service.store.open import open_store
from launcher.errors import RecipeError
from launcher.runtime.recipe.parts import CorpusOption
from launcher.runtime.run.inputs import recipe_sections
from launcher.runtime.run.record import open_run
from tests.support.checks.command import exit_code
from tests.support.data.made_up import write_text
from tests.support.runs.small_runs import prepare_corpus

SOON = 10.0  # seconds in which a mistake is said, the imports of the process not counted


def maskfleet(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, its lines joined."""
    code = exit_code(*arguments)
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), " ".join(err.split())


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`, of one tokenizer, and `other`, of which another share is held out."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "made").mkdir()
    prepare_corpus(folder / "made", documents=200)
    for name, seed, share in (("one", 5, 0.1), ("two", 6, 0.1), ("other", 7, 0.2)):
        write_text(folder / f"{name}.jsonl", 150, seed)
        build_corpus(
            [str(folder / f"{name}.jsonl")],
            str(folder / name),
            str(folder / "made/tokenizer"),
            BuildOptions(heldout_fraction=share),
            lambda progress: None,
        )
    return folder


def test_a_corpus_option_has_a_name_a_place_and_a_weight() -> None:
    cases = {
        "books": ("books", "books", None),
        "/data/my corpus/": ("my_corpus", "/data/my corpus/", None),
        "s3://bucket/a/news": ("news", "s3://bucket/a/news", None),
        "s3://bucket/key=value/x@0.25": ("x", "s3://bucket/key=value/x", 0.25),
        "web=s3://bucket/web@3": ("web", "s3://bucket/web", 3.0),
        "corpus@v2": ("corpus_v2", "corpus@v2", None),
        "..": ("text", "..", None),
    }
    for text, expected in cases.items():
        found = CorpusOption.parse(text)
        assert (found.name, found.uri, found.weight) == expected


def test_init_takes_share_and_tokenizer_from_corpora_and_settings_come_last(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--corpus", f"a={corpora / 'one'}@3", "--corpus", f"b={corpora / 'two'}@1"]
    options += ["--set", "corpus.sources.b.weight=2"]
    command = ("init", "electra-small", tmp_path / "run", "--tiny", *options)
    code, out, err = maskfleet(*command, capsys=capsys)
    assert (code, err) == (0, "")
    assert "next: maskfleet train" in out
    recipe = open_run(str(tmp_path / "run")).recipe
    assert recipe.corpus.heldout.fraction == 0.1
    sources = {name: (source.uri, source.weight) for name, source in recipe.corpus.sources.items()}
    assert sources == {"a": (f"{corpora}/one", 3), "b": (f"{corpora}/two", 2)}
    assert recipe.tokenizer.uri == f"{corpora}/one/tokenizer"
    own = ("--tokenizer", f"{corpora}/made/tokenizer")
    assert maskfleet("init", "electra-small", tmp_path / "own", *command[3:], *own, capsys=capsys)[0] == 0
    assert open_run(str(tmp_path / "own")).recipe.tokenizer.uri == own[1]


def test_corpora_that_do_not_go_together_are_refused(corpora: Path) -> None:
    with pytest.raises(CorpusError, match=r"\bone 0\.1\b.*\bother 0\.2\b"):
        recipe_sections([str(corpora / "one"), str(corpora / "other")], None)
    with pytest.raises(RecipeError, match=r"\bcorpora\b.*\bone\b"):
        recipe_sections([str(corpora / "one"), str(corpora / "one")], None)
    with pytest.raises(CorpusError, match=r"manifest\.json"):
        recipe_sections([str(corpora / "nothing")], None)


def test_a_placeholder_is_answered_with_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for recipe in ("roberta-base", "albert-base", "electra-small"):
        code, _, err = maskfleet("init", recipe, run, "--tiny", capsys=capsys)
        assert code == 2
        assert ": corpus.sources.books_wiki.uri = s3://your-bucket" in err
        assert f"maskfleet init {recipe} {run} --corpus URI" in err
    assert not run.exists()


SEQUENCES = ("phases.0.length=64", "phases.0.batch.sequences=8192")
XLNETS = ("input.reuse=16", "model.reuse=16", "model.memory=16", "objective.plm.predict=9")
TOKENS = ("phases=[{steps: 9, length: 64, batch: {tokens: 2000000}}]", "schedule.warmup=1")


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("roberta-base", TOKENS),
        pytest.param("roberta-base", SEQUENCES, marks=pytest.mark.long),
        pytest.param("xlnet-base", (*SEQUENCES, *XLNETS), marks=pytest.mark.long),
        pytest.param("deberta-base-sop", SEQUENCES, marks=pytest.mark.long),
    ],
)
def test_a_batch_larger_than_an_epoch_is_refused_with_the_size_that_fits(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, settings: tuple[str, ...]
) -> None:
    given = ["--corpus", corpora / "one", *(part for one in settings for part in ("--set", one))]
    code, _, err = maskfleet("init", recipe, tmp_path / "run", *given, capsys=capsys)
    assert code == 2
    assert re.search(r"\bepoch\b", err), err
    assert not (tmp_path / "run").exists()
    fitting = err.partition("remedy: ")[2].partition(" fits;")[0].split()
    code, out, err = maskfleet("init", recipe, tmp_path / "run", *given, *fitting, capsys=capsys)
    assert (code, err) == (0, ""), err
    assert re.search(r"warning: model\.vocab .*\b320 ids\b", out)


def test_very_many_epochs_are_a_warning(corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--tiny", "--corpus", corpora / "one", "--set", "phases.0.steps=2000000"]
    code, out, _ = maskfleet("init", "roberta-base", tmp_path / "run", *given, capsys=capsys)
    assert code == 0
    assert re.search(r"warning: .*\breads\b.*\btext\b", out)
    assert "model.vocab" not in out


def test_a_corpus_from_before_without_held_out_text_is_refused(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = load_manifest(open_store(corpora / "one"))
    without = replace(
        manifest,
        heldout=make_block_table([], [], []),
        shard_sizes={key: size for key, size in manifest.shard_sizes.items() if key.startswith("train")},
        shard_digests={key: name for key, name in manifest.shard_digests.items() if key.startswith("train")},
    )
    save_manifest(open_store(tmp_path / "old"), without)
    given = ["--tiny", "--corpus", tmp_path / "old", "--tokenizer", corpora / "made/tokenizer"]
    code, _, err = maskfleet("init", "roberta-base", tmp_path / "run", *given, capsys=capsys)
    assert code == 2
    assert re.search(r"\bheld-out text\b", err)


@pytest.mark.long
def test_text_that_cannot_be_used_is_refused_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "short.txt").write_text("Hello.\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG" * 50)
    expected = {
        "missing.txt": "no such file",
        "empty.txt": "no text to train a tokenizer on",
        "binary.txt": "is not UTF-8",
        "short.txt": "too little to hold any of it out",
        "image.png": "unknown kind of file",
    }
    for name, message in expected.items():
        started = time.process_time()
        code, _, err = maskfleet("demo", tmp_path / name, "--out", tmp_path / f"demo-{name}", capsys=capsys)
        assert code == 2
        assert message in err, err
        assert time.process_time() - started < SOON


@pytest.mark.long
def test_a_place_that_cannot_be_written_is_refused_soon(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    text, out = corpora / "one.jsonl", tmp_path / "file/out"
    for command in (
        ["tokenizer", "train", text, "--out", out],
        ["corpus", "build", text, "--tokenizer", corpora / "made/tokenizer", "--out", out],
        ["init", "roberta-base", out, "--tiny", "--corpus", corpora / "one"],
        ["demo", text, "--out", out],
    ):
        started = time.process_time()
        code, _, err = maskfleet(*command, capsys=capsys)
        assert code == 2, command
        assert str(tmp_path / "file") in err
        assert "remedy: " in err
        assert time.process_time() - started < SOON
