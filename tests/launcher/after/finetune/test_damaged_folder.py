"""Folders of models, damaged at random: a prediction or an error that names the folder, never a traceback."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import UserError as DataError
from encoder_core.errors import UserError as ModelError
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import EncodingSettings
from launcher.after.export.sentence_transformer import write_sentence_transformer
from launcher.after.finetune.model import check_tokenizer_fits_model, open_model, open_tokenizer
from launcher.after.finetune.pretrained import open_pretrained
from tests.support.faults.files import altered, damaged
from tests.support.tasks.small_tasks import Models

ANY = settings(deadline=None, suppress_health_check=list(HealthCheck))
FAMILIES = ("bert", "roberta", "albert", "xlnet", "electra", "deberta-v3")
NONSENSE = ("{}", "null", "{", '{"version": "1.0", "model": {}}')


def predict(folder: Path) -> None:
    """As fine-tuning does before its first update. Raises DataError, ModelError only."""
    with open_pretrained(str(folder)) as found:
        network = open_model(found.folder, "SequenceClassification", ("no", "yes"))
        tokenizer = open_tokenizer(found.folder)
        check_tokenizer_fits_model(tokenizer, network, found.folder, None)
        logits = network(**tokenizer("rank reads its rows", return_tensors="pt")).logits
        assert logits.shape == (1, 2)


def embed(folder: Path) -> None:
    with open_pretrained(str(folder)) as found:
        vector = load_model(found, EncodingSettings()).encode(["rank reads its rows"])
        assert vector.shape[0] == 1


def spoilt(models: Models, family: str, folder: Path, data: st.DataObject) -> Path:
    """A copy of the family's folder, one of its files altered as a record or damaged as bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models(family).folder, folder)
    if data.draw(st.booleans()):
        write_sentence_transformer(folder, pooling="mean", normalize=True, max_length=32)
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    path = data.draw(st.sampled_from(files))
    if path.suffix == ".json" and data.draw(st.booleans()):
        path.write_text(json.dumps(data.draw(altered(json.loads(path.read_bytes())))))
    else:
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    return folder


@pytest.mark.parametrize("use", [predict, embed])
@pytest.mark.parametrize("content", NONSENSE)
def test_a_tokenizer_that_is_json_and_nothing_else(models: Models, tmp_path: Path, content: str, use: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("bert").folder, folder)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises((DataError, ModelError), match=str(folder)):
        use(folder)  # type: ignore[operator]


@pytest.mark.parametrize("use", [predict, embed])
def test_a_panic_of_the_tokenizers_library_is_an_error(models: Models, tmp_path: Path, use: object) -> None:
    """Bytes that are no base64; the library's panics are no `Exception`."""
    folder = tmp_path / "model"
    shutil.copytree(models("bert").folder, folder)
    definition = json.loads((folder / "tokenizer.json").read_bytes())
    definition["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAA=AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises((DataError, ModelError), match=str(folder)):
        use(folder)  # type: ignore[operator]


@pytest.mark.parametrize("use", [predict, embed])
def test_a_tokenizer_without_a_padding_token(models: Models, tmp_path: Path, use: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("bert").folder, folder)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := folder / name).is_file():
            path.write_text(json.dumps(json.loads(path.read_bytes()) | {"pad_token": None}))
    with pytest.raises((DataError, ModelError), match=str(folder)):
        use(folder)  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.parametrize("use", [predict, embed])
@settings(ANY, max_examples=400)
@given(data=st.data())
def test_any_damaged_folder(models: Models, tmp_path: Path, use: object, data: st.DataObject) -> None:
    folder = spoilt(models, data.draw(st.sampled_from(FAMILIES)), tmp_path / "model", data)
    with suppress(DataError, ModelError):
        use(folder)  # type: ignore[operator]
