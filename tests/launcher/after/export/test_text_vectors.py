"""A SentenceTransformer folder that is continued stays one: pooling, length, prompts and further modules."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from launcher.after.export.export import export_run
from launcher.after.export.sentence_transformer import write_sentence_transformer
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.text_vectors import read_kept_modules, store_modules
from tests.support.runs.starts import BERT, MLM, Setting, export, trained

TEXTS = ["One text.", "Another text that is longer.", "x"]
OBJECTIVE = RecipeObjective(mlm=MLM)


def started(source: Run, uri: Path, start: object) -> str:
    """A run like `source` that starts from elsewhere."""
    recipe = source.recipe.model_copy(update={"start": str(start)})
    return create_run(recipe, str(uri), datetime.now(UTC)).uri


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved_by", "pooling", "normalize"),
    [
        ("us", "mean", True),
        ("us", "cls", False),
        ("them", "max", False),
        ("them", "weighted_mean", True),
        ("them with a projection", "cls", True),
        ("them with a projection", "mean", False),
    ],
)
def test_vectors_are_made_as_before_with_the_new_weights(
    fresh_run: str, tmp_path: Path, pooling: str, normalize: bool, saved_by: str
) -> None:
    library = pytest.importorskip("sentence_transformers")
    source = open_run(fresh_run)
    setting = Setting(source, source.tokenizer())
    start = tmp_path / "start"
    export(setting.asks(BERT, OBJECTIVE, "scratch"), start)
    prompts = {"query": "query: ", "document": ""}
    write_sentence_transformer(start, pooling=pooling, normalize=normalize, max_length=24, prompts=prompts)
    if saved_by != "us":
        model = library.SentenceTransformer(str(start), device="cpu")
        if "projection" in saved_by:
            model.append(library.models.Dense(32, 12))
        model.save(str(tmp_path / "theirs"))
        start = tmp_path / "theirs"

    uri = started(source, tmp_path / "continued", start)
    trained(setting, uri, BERT, OBJECTIVE)
    before = library.SentenceTransformer(str(start), device="cpu")
    shutil.rmtree(start)  # the run has a copy of what it needs
    export_run(open_run(uri), None, str(tmp_path / "out"))
    after = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")

    assert [type(module) for module in after] == [type(module) for module in before]
    assert after.prompts == before.prompts
    assert after.max_seq_length == before.max_seq_length
    old = before.encode(TEXTS, prompt_name="query")
    encoder = before[0].auto_model
    assert not encoder.load_state_dict(
        AutoModel.from_pretrained(tmp_path / "out").state_dict(), strict=False
    ).unexpected_keys
    expected = before.encode(TEXTS, prompt_name="query")
    assert not torch.allclose(torch.tensor(old), torch.tensor(expected), atol=1e-3)
    torch.testing.assert_close(
        torch.tensor(after.encode(TEXTS, prompt_name="query")), torch.tensor(expected), atol=1e-5, rtol=1e-5
    )
    other = started(source, tmp_path / "further", uri)
    assert read_kept_modules(open_run(other).store) == read_kept_modules(open_run(uri).store)
    store_modules(open_run(fresh_run).store, read_kept_modules(open_run(uri).store))
    assert read_kept_modules(open_run(fresh_run).store) == read_kept_modules(open_run(uri).store)


@pytest.mark.long
def test_a_folder_without_modules_gives_none(fresh_run: str, tmp_path: Path) -> None:
    source = open_run(fresh_run)
    export(Setting(source, source.tokenizer()).asks(BERT, OBJECTIVE, "scratch"), tmp_path / "plain")
    uri = started(source, tmp_path / "run", tmp_path / "plain")
    trained(Setting(source, source.tokenizer()), uri, BERT, OBJECTIVE)
    export_run(open_run(uri), None, str(tmp_path / "out"))
    assert not (tmp_path / "out/modules.json").exists()
