"""Hidden states of every layer: those that transformers computes from the same folder; the same however batched."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.after.diagnose.states import (
    FrozenEncoder,
    encode_text_rows,
    open_checkpoint,
    open_frozen_encoder,
    pooled_states,
)
from launcher.after.export.export import export_run
from launcher.runtime.recipe.parts import Pooling
from launcher.runtime.run.record import open_run
from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, LENGTH, export
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import Models

TEXTS = ["every rank reads its rows", "a", "the loss falls while nothing is lost and workers die"]
POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "max")


def theirs(folder: Path, rows: list[np.ndarray], frozen: FrozenEncoder) -> dict[Pooling, np.ndarray]:
    """[D, N, H] by pooling, one row at a time."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found: dict[Pooling, list[np.ndarray]] = {"cls": [], "mean": [], "max": []}
    for row in rows:
        kinds = torch.zeros(1, len(row), dtype=torch.long)
        if frozen.class_token_last:
            kinds[0, -1] = 2
        with torch.no_grad():
            states = model(
                input_ids=torch.from_numpy(row)[None],
                attention_mask=torch.ones(1, len(row)),
                token_type_ids=None if model.config.model_type == "xlm" else kinds,  # XLM takes them for words
                output_hidden_states=True,
            ).hidden_states
        layers = torch.stack([state[0] for state in states])
        found["cls"].append(layers[:, -1 if frozen.class_token_last else 0].numpy())
        found["mean"].append(layers.mean(1).numpy())
        found["max"].append(layers.amax(1).numpy())
    return {pooling: np.stack(parts, axis=1) for pooling, parts in found.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_s_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    export(family, tmp_path)
    frozen = open_frozen_encoder(str(tmp_path))
    rows = encode_text_rows(frozen, [*TEXTS, " ".join(WORDS * 3)])
    assert max(map(len, rows)) == LENGTH, "what is too long is cut"
    ours = pooled_states(frozen, rows, POOLINGS)
    for pooling, expected in theirs(tmp_path / family.folders[-1], rows, frozen).items():
        assert ours[pooling].shape == expected.shape
        np.testing.assert_allclose(ours[pooling], expected, atol=2e-5)


@pytest.fixture(scope="module")
def small(models: Models) -> FrozenEncoder:
    return open_frozen_encoder(str(models("bert").folder))


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=8))
def test_a_text_s_states_do_not_depend_on_the_others(small: FrozenEncoder, texts: list[str]) -> None:
    together = pooled_states(small, encode_text_rows(small, texts), POOLINGS)
    for place, text in enumerate(texts):
        alone = pooled_states(small, encode_text_rows(small, [text]), POOLINGS)
        for pooling in POOLINGS:
            np.testing.assert_allclose(together[pooling][:, place], alone[pooling][:, 0], atol=2e-6)


def test_a_run_and_its_export_give_the_same(fresh_run: str, tmp_path: Path) -> None:
    Committing(fresh_run).commit(3)
    export_run(open_run(fresh_run), None, str(tmp_path / "out"))
    of_run, of_folder = (
        open_checkpoint(open_run(fresh_run)).frozen,
        open_frozen_encoder(str(tmp_path / "out")),
    )
    states = [pooled_states(one, encode_text_rows(one, TEXTS), POOLINGS) for one in (of_run, of_folder)]
    for pooling in POOLINGS:
        np.testing.assert_array_equal(states[0][pooling], states[1][pooling])
