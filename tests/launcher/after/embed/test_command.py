"""`maskfleet embed` from text to vectors, and what is refused: each with a message and a remedy."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer

from data_service.store.base import Store
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import EncodingSettings
from launcher.after.export.sentence_transformer import write_sentence_transformer
from launcher.after.finetune.pretrained import folder_digest, open_pretrained
from tests.support.checks.command import exit_code
from tests.support.models.exports import FAMILIES, export
from tests.support.tasks.small_tasks import scored, triplets, write_rows

Said = tuple[int, str, str]
Command = Callable[..., Said]
TASK = """name: topics
kind: similarity
published: here
files: {dev: dev.jsonl}
format: jsonl
fields: {first: a, second: b, label: score}
score_range: [0, 5]
metrics: [spearman, pearson]
"""


@pytest.fixture
def maskfleet(capfd: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str) -> Said:
        code = exit_code(*words)
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embed")
    export(FAMILIES["bert"], root / "bert")
    write_rows(root / "pairs.jsonl", scored(64))
    write_rows(root / "dev.jsonl", scored(40, seed=5))
    write_rows(root / "triplets.jsonl", triplets(64))
    (root / "topics.yaml").write_text(TASK)
    (root / "nli.yaml").write_text(
        "train: {files: [pairs.jsonl], texts: [a, b], label: relation, classes: [same, other]}\n"
        "loss: {kind: softmax}\nlr: 1e-3\nmax_length: 20\npooling: mean\nevery: 3\n"
    )
    (root / "sts.yaml").write_text(
        "train: {files: [pairs.jsonl], texts: [a, b], label: score, scores: [0, 5], prompts: [about, null]}\n"
        "dev: {files: [triplets.jsonl], texts: [a, p, n]}\n"
        "loss: {kind: cosent}\nlr: 5e-3\nepochs: 3\nnormalize: true\nprompts: {about: 'a rank '}\n"
    )
    return root


@pytest.mark.long
def test_two_commands_as_sentence_bert_did(place: Path, tmp_path: Path, maskfleet: Command) -> None:
    """A classifier of pairs, then regression from it; the second folder has what the settings say, from S3 too."""
    first, second = tmp_path / "nli", tmp_path / "sts"
    train = ("embed", "train")
    code, out, err = maskfleet(*train, str(place / "bert"), str(place / "nli.yaml"), "--out", str(first))
    assert code == 0, err
    assert "trained 4 steps on 64 rows" in out
    code, out, err = maskfleet(
        *train,
        str(first),
        str(place / "sts.yaml"),
        "--out",
        str(second),
        "--set",
        "seed=3",
        "--licence",
        "CC0-1.0",
    )
    assert code == 0, err
    assert "dev cosine accuracy" in out
    with open_pretrained(str(second)) as pretrained:
        model = load_model(pretrained, EncodingSettings())
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
    assert model.max_seq_length == 20
    assert model.prompts["about"] == "a rank "
    card = (second / "README.md").read_text()
    assert "license: cc0-1.0" in card
    assert "kind: cosent" in card
    code, out, _ = maskfleet("embed", "eval", str(second), str(place / "topics.yaml"), "--json")
    (record,) = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert set(record) == {"model", "step", "task", "split", "metrics"}
    assert record["metrics"]["spearman"] > 0.5


@pytest.mark.long
def test_a_folder_in_a_bucket_is_the_same_model(place: Path, tmp_path: Path, any_store: Store) -> None:
    """Modules in folders of their own come along, and decide the digest."""
    local = tmp_path / "model"
    with open_pretrained(str(place / "bert")) as pretrained:
        load_model(pretrained, EncodingSettings(pooling="max", normalize=True)).save_pretrained(str(local))
    for path in sorted(path for path in local.rglob("*") if path.is_file()):
        any_store.put(path.relative_to(local).as_posix(), path.read_bytes())
    with open_pretrained(any_store.uri) as there:
        model = load_model(there, EncodingSettings())
        assert model[1].pooling_mode == "max"
        assert there.digest == folder_digest(local)
    config = local / "1_Pooling/config.json"
    config.write_text(config.read_text().replace('"max"', '"mean"'))
    assert folder_digest(local) != there.digest


def test_what_a_folder_says_of_prompts_stays(place: Path, tmp_path: Path) -> None:
    """The one that is always put before, too: without it the vectors are others."""
    folder = tmp_path / "model"
    shutil.copytree(place / "bert", folder)
    prompts = {"query": "every step ", "document": ""}
    write_sentence_transformer(folder, pooling="mean", normalize=True, max_length=16, prompts=prompts)
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"default_prompt_name": "query"}))
    with open_pretrained(str(folder)) as pretrained:
        ours = load_model(pretrained, EncodingSettings()).encode(["a rank reads"])
        told = load_model(pretrained, EncodingSettings(prompts={"query": ""})).encode(["every step a rank reads"])
    np.testing.assert_array_equal(ours, SentenceTransformer(str(folder), device="cpu").encode(["a rank reads"]))
    np.testing.assert_allclose(ours, told, rtol=1e-5)


def test_an_export_is_not_put_on_top_of_something_else(place: Path, tmp_path: Path, maskfleet: Command) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    code, _, err = maskfleet("embed", "train", str(place / "bert"), str(place / "nli.yaml"), "--out", str(tmp_path))
    assert code == 2
    assert "thesis.txt" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def broken(place: Path, tmp_path: Path, what: str) -> Path:
    """The model's folder with one thing wrong."""
    folder = tmp_path / "broken"
    shutil.copytree(place / "bert", folder)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    match what:
        case "tokenizer":
            for path in folder.glob("*token*"):
                path.unlink()
            for path in folder.glob("vocab*"):
                path.unlink()
        case "weights":
            weights = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").unlink()
            (folder / "pytorch_model.bin").write_bytes(next(iter(weights.values())).tobytes())
        case "foreign":
            (folder / "modules.json").write_text(json.dumps([*modules, {"path": "1", "type": "os.path.join"}]))
        case "dense":
            dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
            (folder / "2_Dense").mkdir()
            (folder / "2_Dense/pytorch_model.bin").write_bytes(b"pickled")
            (folder / "modules.json").write_text(json.dumps([*modules, dense]))
        case "outside":
            (folder / "modules.json").write_text(json.dumps([*modules, {"path": "../x", "type": "y"}]))
        case "damaged":
            (folder / "model.safetensors").write_bytes(b"\0" * 100)
        case "list":
            (folder / "modules.json").write_text("{}x")
    return folder


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("tokenizer", "has no tokenizer"),
        ("weights", "has no model.safetensors"),
        ("foreign", "names the module os.path.join, which maskfleet does not load"),
        ("dense", "2_Dense has no model.safetensors"),
        ("outside", "names a folder outside the model's"),
        ("damaged", "cannot be loaded"),
        ("list", "does not list modules"),
    ],
)
def test_a_model_that_cannot_be_used(place: Path, tmp_path: Path, maskfleet: Command, what: str, problem: str) -> None:
    folder = broken(place, tmp_path, what)
    code, _, err = maskfleet("embed", "eval", str(folder), str(place / "topics.yaml"))
    assert code == 2
    assert problem in err
    assert "remedy" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-length", "4000"], "max_length is 4000"),
        (["--split", "train"], "no split 'train'"),
        (["--step", "3"], "has no steps"),
    ],
)
def test_options_that_cannot_be(place: Path, maskfleet: Command, words: list[str], problem: str) -> None:
    code, _, err = maskfleet("embed", "eval", str(place / "bert"), str(place / "topics.yaml"), *words)
    assert code == 2
    assert problem in err


def test_without_the_extra_it_is_named(
    place: Path, tmp_path: Path, maskfleet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for words in (
        ("eval", str(place / "bert"), str(place / "topics.yaml")),
        ("train", str(place / "bert"), "nli", "--out", str(tmp_path / "out")),
    ):
        code, _, err = maskfleet("embed", *words)
        assert code == 2
        assert "pip install 'maskfleet[evaluate]'" in err
