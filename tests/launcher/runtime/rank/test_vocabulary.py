"""Starting with another tokenizer: rows follow their pieces, and new ones get the mean of theirs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from data_service.errors import TokenizerError
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from data_service.tokenizers.vocabulary import extend_tokenizer
from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.permuted import PermutedLanguageModel
from encoder_core.objectives.replaced import ReplacedTokenConfig, Sharing
from encoder_core.objectives.span_boundary import SboConfig
from launcher.errors import RunError
from launcher.runtime.rank.initial_weights import vocabulary_tables
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.recipe.schema import TokenizerRef
from launcher.runtime.run.record import open_run
from tests.support.models.parity import parameters_of
from tests.support.runs.starts import BERT, CASES, MLM, PAIRS, SPANS, Setting, export, fresh, rows, trained


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_extended_rows_are_the_mean_of_their_pieces(setting: Setting, tmp_path: Path, name: str) -> None:
    config, objective, heads = CASES[name]
    exported = export(setting.asks(config, objective, "scratch"), tmp_path, heads)
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, start = longer.asks(config, objective, tmp_path).begin()
    old, found = parameters_of(exported), parameters_of(model)
    size = setting.tokenizer.vocab_size
    assert (start.record["copied"], start.record["averaged"]) == (size, 2)
    tables = {"encoder.embeddings.word.weight", "head.decoder.bias"}
    assert vocabulary_tables(longer.known(config), objective) == tables
    for name, value in found.items():
        if name not in tables:
            assert torch.equal(value, old[name])
            continue
        assert torch.equal(value[:size], old[name])
        for row, text in ((size, "neurotransmitter"), (size + 1, " neurotransmitter")):
            pieces = setting.tokenizer.encode(text).tolist()
            assert len(pieces) > 3
            by_hand = sum(old[name][piece] for piece in pieces) / len(pieces)
            torch.testing.assert_close(value[row], by_hand, rtol=1e-6, atol=1e-7)
    batch = rows(size)
    assert isinstance(model, MultitaskModel | PermutedLanguageModel)
    assert isinstance(exported, MultitaskModel | PermutedLanguageModel)
    assert torch.equal(model.logits(batch)[:, :size], exported.logits(batch))


@pytest.mark.long
@pytest.mark.parametrize(("config", "sharing"), PAIRS.values(), ids=PAIRS)
def test_both_networks_of_a_pair_get_the_new_rows(
    setting: Setting, tmp_path: Path, config: ModelConfig, sharing: Sharing
) -> None:
    objective = RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings=sharing))
    exported = parameters_of(export(setting.asks(config, objective, "scratch"), tmp_path))
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, start = longer.asks(config, objective, tmp_path).begin()
    assert start.record["averaged"] == 2
    tables = {"generator.encoder.embeddings.word.weight", "generator.head.decoder.bias"}
    if sharing == "gradient_disentangled":
        tables |= {"discriminator.encoder.embeddings.word.weight"}
    assert vocabulary_tables(longer.known(config), objective) == tables
    pieces = setting.tokenizer.encode("neurotransmitter").tolist()
    for name in tables:
        by_hand = exported[name][pieces].mean(0)
        torch.testing.assert_close(parameters_of(model)[name][-2], by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_rows_follow_their_pieces_to_other_ids(setting: Setting, tmp_path: Path) -> None:
    exported = parameters_of(export(setting.asks(BERT, RecipeObjective(mlm=MLM), "scratch"), tmp_path))
    text = ["every rank reads its rows and nothing is lost while workers die and come back"] * 30
    other = replace(setting, tokenizer=train_tokenizer("byte_bpe", text, 300))
    assert other.tokenizer.pieces[261:] != setting.tokenizer.pieces[261:300]
    model, start = other.asks(BERT, RecipeObjective(mlm=MLM), tmp_path).begin()
    assert sum(TypeAdapter(int).validate_python(start.record[how]) for how in ("copied", "averaged")) == 300
    word = "encoder.embeddings.word.weight"
    for i, piece in enumerate(other.tokenizer.pieces):
        if piece in setting.tokenizer.pieces:
            expected = exported[word][setting.tokenizer.pieces.index(piece)]
            assert torch.equal(parameters_of(model)[word][i], expected)


@pytest.mark.long
def test_a_filled_up_vocabulary_keeps_its_spare_rows(setting: Setting, tmp_path: Path) -> None:
    size = setting.tokenizer.vocab_size
    filled = BERT.model_copy(update={"vocab": size + 10})
    exported = parameters_of(export(setting.asks(filled, RecipeObjective(mlm=MLM), "scratch"), tmp_path))
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, _ = longer.asks(filled, RecipeObjective(mlm=MLM), tmp_path).begin()
    word = "encoder.embeddings.word.weight"
    assert torch.equal(parameters_of(model)[word][size + 2 :], exported[word][size + 2 :])
    with pytest.raises(RunError, match=rf"word\.weight\b.*\({size + 10}, 32\).*\({size}, 32\)"):
        setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path).begin()


@pytest.mark.long
def test_a_run_with_another_tokenizer(setting: Setting, other_run: str) -> None:
    saved = trained(setting, other_run, BERT, RecipeObjective(mlm=SPANS, sbo=SboConfig()))
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, start = longer.asks(BERT, RecipeObjective(mlm=MLM, sbo=SboConfig()), other_run).begin()
    assert start.record["averaged"] == 2
    for name in ("encoder.embeddings.word.weight", "head.decoder.bias", "boundary_head.decoder.bias"):
        found = parameters_of(model)[name]
        assert torch.equal(found[:-2], saved[name])
        assert not torch.equal(
            found[-1],
            fresh(longer.asks(BERT, RecipeObjective(mlm=MLM, sbo=SboConfig()), "scratch"))[name][-1],
        )


@pytest.mark.long
def test_a_runs_own_tokenizer_counts_whatever_lies_where_it_came_from(setting: Setting, other_run: str) -> None:
    saved = trained(setting, other_run, BERT, RecipeObjective(mlm=MLM))
    run = open_run(other_run)
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    save_tokenizer(longer.tokenizer, f"{other_run}/replaced")
    moved = run.recipe.model_copy(update={"tokenizer": TokenizerRef(uri=f"{other_run}/replaced")})
    run.store.put("recipe.yaml", moved.to_yaml().encode())
    model, start = longer.asks(BERT, RecipeObjective(mlm=MLM), other_run).begin()
    assert start.record["averaged"] == 2
    name = "encoder.embeddings.word.weight"
    assert torch.equal(parameters_of(model)[name][:-2], saved[name])


@pytest.mark.long
def test_a_stranger_tokenizer_is_refused(setting: Setting, tmp_path: Path) -> None:
    export(setting.asks(BERT, RecipeObjective(mlm=MLM), "scratch"), tmp_path)
    other = replace(setting, tokenizer=train_tokenizer("wordpiece", ["some text of words"] * 9, 36))
    with pytest.raises(TokenizerError, match=r"\bwordpiece\b.*\n.*\bextend\b"):
        other.asks(BERT, RecipeObjective(mlm=MLM), tmp_path).begin()
