"""Folders of random weights as others publish them: continued by the recipe that `recipe from` prints, trained for some
steps, exported, and read again by the others' formulas, which give our logits."""

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.ultrabert.modeling_ultrabert import UltrabertRMSNorm

from checkpoints.hf.load import load_pretrained
from data_service.tokenizers.load import load_tokenizer
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.objectives.modules.network import masked_language_model
from launcher.after.export.export import export_run
from launcher.runtime.recipe.continued import commented_yaml, continued_recipe
from launcher.runtime.recipe.load import parse_recipe, with_assignments
from launcher.runtime.run.create import create_run
from launcher.runtime.run.record import open_run
from tests.parity.test_neobert import Written, published
from tests.support.models.parity import make_batch, random_weights
from tests.support.models.peers import unrounded_norm
from tests.support.ranks.run_group import finish
from tests.support.runs.small_runs import prepare_corpus

SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3, 4)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("published")
    prepare_corpus(place)
    return place


def continue_and_export(place: Path, folder: Path, out: Path) -> None:
    recipe = parse_recipe(commented_yaml(continued_recipe(str(folder))), "printed")
    changes = (
        f"corpus.sources.text.uri={place}/corpus",
        "corpus.heldout.fraction=0.1",
        "phases=[{steps: 4, length: 32, batch: {sequences: 8}}]",
        "schedule.warmup=1",
        "microbatch=4",
        "precision=fp32",
        "data_service={workers: 1, memory: 64MiB}",
        "recovery.spares=0",
    )
    create_run(with_assignments(recipe, changes), f"{folder}-run", datetime.now(UTC))
    finish(f"{folder}-run", 1)
    export_run(open_run(f"{folder}-run"), None, str(out))


def assert_same_logits(out: Path, theirs: Any) -> None:
    """`theirs`: from one row's tokens to logits [length, vocab] in fp64."""
    read = load_pretrained(out)
    ours = masked_language_model(read.config).double().eval()
    batch = make_batch([40, 1, 9], read.config.vocabulary_size)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():  # a tied one stands once
            parameter.copy_(read.tensors[name])
        rows = batch.tokens.tensor_split(batch.cu_seqlens[1:-1].long())
        expected = torch.cat([theirs(row) for row in rows])[batch.target_positions]
        assert (ours.logits(batch) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_neobert_comes_back_as_its_authors_have_it(place: Path, tmp_path: Path, seed: int) -> None:
    draw, tokenizer = random.Random(seed), load_tokenizer(f"{place}/tokenizer")
    heads = draw.randint(1, 4)
    config = NeoBertConfig(
        layers=draw.randint(1, 4),
        hidden=heads * 2 * draw.randint(2, 8),
        heads=heads,
        feed_forward=8 * draw.randint(1, 6),
        max_length=64,
        vocab=tokenizer.vocab_size,
    )
    theirs, folder = random_weights(Written(config), seed), tmp_path / "theirs"
    folder.mkdir()
    for name, content in tokenizer.save_files().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(published(config, config.feed_forward * 3 // 2)))
    save_file(dict(theirs.state_dict()), folder / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}

    continue_and_export(place, folder, tmp_path / "out")

    fields = json.loads((tmp_path / "out/config.json").read_bytes())
    of_their_own = {"architectures", "pad_token_id"}  # the class; the tokenizer's
    wanted = published(config, config.feed_forward * 3 // 2)
    assert all(fields[name] == value for name, value in wanted.items() if name not in of_their_own)
    theirs.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    assert not any(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())
    theirs.double().eval()
    assert_same_logits(tmp_path / "out", lambda row: theirs(make_row(row))[1])


def make_row(tokens: Tensor) -> Any:
    batch = make_batch([len(tokens)], 99)
    batch.tokens.copy_(tokens)
    return batch


@pytest.mark.parametrize("seed", SEEDS)
def test_an_ultrabert_comes_back_as_transformers_has_it(place: Path, tmp_path: Path, seed: int) -> None:
    draw, tokenizer = random.Random(seed), load_tokenizer(f"{place}/tokenizer")
    shared, times = draw.randint(1, 2), draw.randint(1, 2)
    described = transformers.AutoConfig.for_model(
        "ultrabert",
        num_hidden_layers=draw.randint(1, 4),
        hidden_size=shared * times * 2 * draw.randint(2, 8),
        num_attention_heads=shared * times,
        num_key_value_heads=shared,
        intermediate_size=draw.randint(8, 48),
        prediction_head_size=draw.randint(8, 48),
        sliding_window=draw.randint(1, 20),
        max_position_embeddings=64,
        vocab_size=tokenizer.vocab_size,
        pad_token_id=tokenizer.special.pad,
        tie_word_embeddings=seed % 2 == 0,
    )
    model, folder = (
        random_weights(transformers.AutoModelForMaskedLM.from_config(described), seed),
        tmp_path / "theirs",
    )
    model.save_pretrained(folder)
    for name, content in tokenizer.save_files().items():
        (folder / name).write_bytes(content)

    continue_and_export(place, folder, tmp_path / "out")

    again, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert not torch.equal(again.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight)
    with unrounded_norm(UltrabertRMSNorm):
        assert_same_logits(tmp_path / "out", lambda row: again.double().eval()(row[None]).logits[0])
