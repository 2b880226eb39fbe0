"""Starting from a model: the encoder and the heads that are there, rows by piece, and the rest named."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from parity import random_weights
from ragged import make_batch
from s3_server import S3Server
from small_runs import new_run
from torch import Tensor, nn

from checkpoints.attempt import claim
from checkpoints.gather import Alone
from checkpoints.hf.export import export_model
from checkpoints.hf.pair import export_pair
from checkpoints.save import Saver
from data_service.errors import TokenizerError
from data_service.samples.masking import MlmMasking
from data_service.samples.permuted import PermutedPrediction
from data_service.store.open import open_store
from data_service.tokenizers.extend import extend_tokenizer
from data_service.tokenizers.load import load_tokenizer, save_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.tokenizers.train import train_tokenizer
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.build import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.hf.interchange import Heads
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.objectives.replaced import ReplacedTokenConfig, Sharing
from encoder_core.train.fragments import Fragment
from encoder_core.train.zero_state import MASTER
from launcher.errors import RunError
from launcher.objective import ExtraTerm, Objective
from launcher.recipe import TokenizerRef
from launcher.runs import Run, open_run
from launcher.session import build_model
from launcher.start import Start, initial_weights
from launcher.vocabulary import vocabulary_tables

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "feed_forward": 48, "max_length": 64, "dropout": 0.0}
SHAPE |= {"attention_dropout": 0.0}
MLM = MlmMasking.model_validate(
    {"rate": 0.15, "unit": "token", "copies": "dynamic", "replace": {"mask": 0.8, "random": 0.1, "keep": 0.1}}
)
SPANS = MLM.model_copy(update={"unit": "span"})
ONE = ExtraTerm()
BERT, ROBERTA = BertConfig(**SHAPE), RobertaConfig(**SHAPE)
ELECTRA = ElectraConfig(**SHAPE, embedding=16, generator_divisor=2)
DEBERTA_V2 = DebertaV2Config(**SHAPE, buckets=8)
CASES: dict[str, tuple[ModelConfig, Objective, Heads]] = {
    "roberta": (ROBERTA, Objective(mlm=MLM), "mlm"),
    "bert-nsp": (BERT, Objective(mlm=MLM, nsp=ONE), "mlm_pair"),
    "albert-sop": (AlbertConfig(**SHAPE, embedding=16), Objective(mlm=MLM, sop=ONE), "mlm_pair"),
    "deberta": (DebertaConfig(**SHAPE), Objective(mlm=MLM), "mlm"),
    "deberta-v2": (DEBERTA_V2, Objective(mlm=MLM), "mlm"),
    "xlnet": (XlnetConfig(**SHAPE, reuse=0, memory=0), Objective(plm=PermutedPrediction()), "plm"),
}


@dataclass(frozen=True)
class Setting:
    """A run over the shared corpus, and its tokenizer."""

    run: Run
    tokenizer: Tokenizer

    def asks(self, config: ModelConfig, objective: Objective, start: object) -> "Setting":
        update = {"model": config, "objective": objective, "start": str(start)}
        return replace(self, run=replace(self.run, recipe=self.run.recipe.model_copy(update=update)))

    def known(self, config: ModelConfig) -> ModelConfig:
        return config.with_tokenizer(self.tokenizer.vocab_size, self.tokenizer.special.pad)

    def begin(self) -> tuple[nn.Module, Start]:
        """The run's module with its initial weights in place, as the engine puts them."""
        model = build_model(self.run.recipe, self.tokenizer)
        start = initial_weights(self.run, self.tokenizer, model, Alone())
        assert start is not None
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start.read(name, MASTER, 0, p.numel()).view_as(p))
        start.close()
        return model.eval(), start


@pytest.fixture
def setting(fresh_run: str) -> Setting:
    run = open_run(fresh_run)
    return Setting(run, load_tokenizer(run.recipe.tokenizer.uri))


def fresh(setting: Setting) -> dict[str, Tensor]:
    return parameters(build_model(setting.run.recipe, setting.tokenizer))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def export(setting: Setting, folder: Path, heads: Heads = "mlm") -> nn.Module:
    """A module of random weights as the recipe asks, exported to `folder`."""
    recipe = setting.run.recipe
    model = random_weights(build_model(recipe, setting.tokenizer)).eval()
    files, config = setting.tokenizer.save_files(), setting.known(recipe.model)
    if recipe.objective.rtd is not None:
        sharing = recipe.objective.rtd.embeddings
        export_pair(parameters(model).__getitem__, config, files, open_store(folder), sharing)
    else:
        export_model(parameters(model).__getitem__, config, files, open_store(folder), heads)
    return model


def rows(vocab: int) -> Batch:
    made = make_batch([9, 40, 17], vocab, segments=True)
    order = torch.zeros_like(made.tokens)
    order[made.target_positions] = 1 + torch.arange(len(made.target_positions))
    return replace(made, order=order)


@torch.no_grad()
def losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    torch.manual_seed(5)  # a generator draws
    return {term.name: term.loss_sum for term in model(batch).terms}


@pytest.mark.parametrize(("config", "objective", "heads"), CASES.values(), ids=CASES)
def test_the_first_evaluation_is_the_exporters(
    setting: Setting, tmp_path: Path, config: ModelConfig, objective: Objective, heads: Heads
) -> None:
    asked = setting.asks(config, objective, tmp_path / "model")
    exported = export(asked, tmp_path / "model", heads)
    model, start = asked.begin()
    batch = rows(setting.tokenizer.vocab_size)
    assert losses(model, batch) == losses(exported, batch)
    assert start.record["fresh"] == start.record["left"] == []
    assert "copied" not in start.record


PAIRS = {
    "electra": (ELECTRA, "shared"),
    "deberta-v3-shared": (DEBERTA_V2, "shared"),
    "deberta-v3": (DEBERTA_V2, "gradient_disentangled"),
}


@pytest.mark.parametrize(("config", "sharing"), PAIRS.values(), ids=PAIRS)
def test_a_pair_begins_as_it_was(
    setting: Setting, tmp_path: Path, config: ModelConfig, sharing: Sharing
) -> None:
    objective = Objective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings=sharing))
    asked = setting.asks(config, objective, tmp_path / "pair")
    exported = export(asked, tmp_path / "pair")
    model, start = asked.begin()
    batch = rows(setting.tokenizer.vocab_size)
    found, expected = losses(model, batch), losses(exported, batch)
    assert found["mlm"] == expected["mlm"]
    # E_delta is read back as a difference: up to rounding.
    torch.testing.assert_close(found["rtd"], expected["rtd"], rtol=1e-5, atol=0)
    assert start.record["fresh"] == []


def test_one_network_is_no_pair_and_a_pair_is_not_one(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(ELECTRA, Objective(mlm=MLM, rtd=ReplacedTokenConfig()), tmp_path / "pair")
    export(asked, tmp_path / "pair")
    alone = setting.asks(ELECTRA, asked.run.recipe.objective, tmp_path / "pair/discriminator")
    with pytest.raises(RunError, match=r"does not hold both networks.*\n.*generator/"):
        alone.begin()
    with pytest.raises(RunError, match="holds a pair of networks"):
        setting.asks(BERT, Objective(mlm=MLM), tmp_path / "pair").begin()


@pytest.mark.parametrize(
    ("config", "objective", "missing"),
    [
        (BERT, Objective(mlm=MLM, nsp=ONE), "pair_head."),
        (BERT, Objective(mlm=MLM, sbo=ONE), "boundary_head."),
        (DEBERTA_V2, Objective(mlm=MLM), "decoder.position."),
        (DEBERTA_V2, Objective(mlm=MLM, sop=ONE), "pair_head."),
    ],
)
def test_missing_heads_stay_fresh_and_are_named(
    setting: Setting, tmp_path: Path, config: ModelConfig, objective: Objective, missing: str
) -> None:
    plain = config.model_copy(update={"mask_decoder": "plain"}) if config is DEBERTA_V2 else config
    exported = parameters(export(setting.asks(plain, Objective(mlm=MLM), "scratch"), tmp_path))
    asked = setting.asks(config, objective, tmp_path)
    model, start = asked.begin()
    found, initial = parameters(model), fresh(asked)
    assert start.record["fresh"]
    assert start.record["fresh"] == [name for name in found if name not in exported]
    assert any(name.startswith(missing) for name in start.record["fresh"])
    for name, value in found.items():
        assert torch.equal(value, exported[name] if name in exported else initial[name]), name
    assert "fresh, since it has none" in start.summary()


def test_heads_of_other_tasks_are_left_and_named(setting: Setting, tmp_path: Path) -> None:
    export(setting.asks(BERT, Objective(mlm=MLM, nsp=ONE), "scratch"), tmp_path, "mlm_pair")
    _, start = setting.asks(BERT, Objective(mlm=MLM), tmp_path).begin()
    assert start.record["left"] == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    ]


class Differing(Alone):
    """A second rank that has read other bytes."""

    def all_gather(self, value: object) -> list[object]:
        return [value, {"value": "0" * 64}]


def test_ranks_that_read_different_files_stop(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(BERT, Objective(mlm=MLM), tmp_path)
    export(asked, tmp_path)
    model = build_model(asked.run.recipe, setting.tokenizer)
    with pytest.raises(RunError, match="different files on different machines"):
        initial_weights(asked.run, setting.tokenizer, model, Differing())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ROBERTA, "family is roberta here and bert there"),
        (BERT.model_copy(update={"heads": 2}), "heads is 2 here and 4 there"),
        (BERT.model_copy(update={"max_length": 96}), "max_length is 96 here and 64 there"),
    ],
)
def test_another_model_is_refused(
    setting: Setting, tmp_path: Path, config: ModelConfig, message: str
) -> None:
    export(setting.asks(BERT, Objective(mlm=MLM), "scratch"), tmp_path)
    with pytest.raises(ModelError, match=message):
        setting.asks(config, Objective(mlm=MLM), tmp_path).begin()


def test_dropout_and_the_place_of_the_file_do_not_matter(setting: Setting, tmp_path: Path) -> None:
    exported = export(setting.asks(ROBERTA, Objective(mlm=MLM), "scratch"), tmp_path)
    other = ROBERTA.model_copy(update={"dropout": 0.3})
    model, _ = setting.asks(other, Objective(mlm=MLM), f"file://{tmp_path}").begin()
    assert all(torch.equal(p, parameters(exported)[name]) for name, p in parameters(model).items())


def test_a_folder_in_a_bucket_whole_or_in_parts(setting: Setting, s3: S3Server, tmp_path: Path) -> None:
    from transformers import RobertaForMaskedLM

    uri = f"s3://{s3.new_bucket()}/model"
    exported = export(setting.asks(ROBERTA, Objective(mlm=MLM), "scratch"), tmp_path / "whole")
    theirs = RobertaForMaskedLM.from_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for folder in ("whole", "parts"):
        for path in (tmp_path / folder).iterdir():
            open_store(f"{uri}/{folder}").put_file(path.name, path)
        model, start = setting.asks(ROBERTA, Objective(mlm=MLM), f"{uri}/{folder}").begin()
        assert all(torch.equal(p, parameters(exported)[name]) for name, p in parameters(model).items())
    assert "none in the folder" in str(start.record["tokenizer"])
    open_store(f"{uri}/pickled").put("config.json", (tmp_path / "whole/config.json").read_bytes())
    open_store(f"{uri}/pickled").put("pytorch_model.bin", b"\x80\x04")
    with pytest.raises(ModelError, match=r"s3://.*/pickled has no model\.safetensors\n.*pickled weights"):
        setting.asks(ROBERTA, Objective(mlm=MLM), f"{uri}/pickled").begin()


def trained(setting: Setting, uri: str, config: ModelConfig, objective: Objective) -> dict[str, Tensor]:
    """Commit a checkpoint of random weights to the run at `uri`, whose recipe asks for this model."""
    run = open_run(uri)
    recipe = run.recipe.model_copy(update={"model": config, "objective": objective})
    run.store.put("recipe.yaml", recipe.to_yaml().encode())
    model = random_weights(build_model(recipe, setting.tokenizer), seed=3)
    values = parameters(model)
    saver = Saver(run.store, claim(run.store), Alone(), resumed=None)
    saver.begin(
        4,
        [
            Fragment(name, 0, dict.fromkeys((MASTER, "exp_avg", "exp_avg_sq"), value.flatten()))
            for name, value in values.items()
        ],
        {name: tuple(value.shape) for name, value in values.items()},
        {},
    )
    saver.wait()
    saver.commit()
    saver.close()
    return values


@pytest.fixture
def other_run(inputs: Path, tmp_path: Path) -> str:
    return new_run(inputs, str(tmp_path / "other"))


def test_the_newest_checkpoint_of_another_run(setting: Setting, other_run: str) -> None:
    with pytest.raises(RunError, match="a run without a checkpoint"):
        setting.asks(BERT, Objective(mlm=MLM), other_run).begin()
    saved = trained(setting, other_run, BERT, Objective(mlm=SPANS, sbo=ONE))
    asked = setting.asks(BERT, Objective(mlm=MLM, nsp=ONE), other_run)
    model, start = asked.begin()
    assert start.record["start_step"] == 4
    assert {name.split(".")[0] for name in start.record["fresh"]} == {"pair_head"}
    assert {name.split(".")[0] for name in start.record["left"]} == {"boundary_head"}
    initial = fresh(asked)
    for name, value in parameters(model).items():
        assert torch.equal(value, saved[name] if name in saved else initial[name]), name


def test_another_runs_model_must_be_ours(setting: Setting, other_run: str) -> None:
    trained(setting, other_run, BERT, Objective(mlm=MLM))
    with pytest.raises(ModelError, match="heads is 2 here and 4 there"):
        setting.asks(BERT.model_copy(update={"heads": 2}), Objective(mlm=MLM), other_run).begin()


def test_an_encoder_under_another_name_is_missed(setting: Setting, other_run: str) -> None:
    trained(setting, other_run, DEBERTA_V2, Objective(mlm=MLM, rtd=ReplacedTokenConfig()))
    with pytest.raises(RunError, match=r"lacks parameters of the encoder: encoder\.embeddings\.word\.weight"):
        setting.asks(DEBERTA_V2, Objective(mlm=MLM), other_run).begin()


def test_a_table_of_differences_is_no_table(setting: Setting, other_run: str) -> None:
    disentangled = Objective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings="gradient_disentangled"))
    trained(setting, other_run, DEBERTA_V2, disentangled)
    setting.asks(DEBERTA_V2, disentangled, other_run).begin()
    with pytest.raises(RunError, match="embeddings is shared here and gradient_disentangled"):
        setting.asks(DEBERTA_V2, Objective(mlm=MLM, rtd=ReplacedTokenConfig()), other_run).begin()


# Vocabularies.


@pytest.mark.parametrize("name", CASES)
def test_extended_rows_are_the_mean_of_their_pieces(setting: Setting, tmp_path: Path, name: str) -> None:
    config, objective, heads = CASES[name]
    exported = export(setting.asks(config, objective, "scratch"), tmp_path, heads)
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, start = longer.asks(config, objective, tmp_path).begin()
    old, found = parameters(exported), parameters(model)
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
    assert torch.equal(model.logits(batch)[:, :size], exported.logits(batch))


@pytest.mark.parametrize(("config", "sharing"), PAIRS.values(), ids=PAIRS)
def test_both_networks_of_a_pair_get_the_new_rows(
    setting: Setting, tmp_path: Path, config: ModelConfig, sharing: Sharing
) -> None:
    objective = Objective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings=sharing))
    exported = parameters(export(setting.asks(config, objective, "scratch"), tmp_path))
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
        torch.testing.assert_close(parameters(model)[name][-2], by_hand, rtol=1e-5, atol=1e-6)


def test_rows_follow_their_pieces_to_other_ids(setting: Setting, tmp_path: Path) -> None:
    exported = parameters(export(setting.asks(BERT, Objective(mlm=MLM), "scratch"), tmp_path))
    text = ["every rank reads its rows and nothing is lost while workers die and come back"] * 30
    other = replace(setting, tokenizer=train_tokenizer("byte_bpe", text, 300))
    assert other.tokenizer.pieces[261:] != setting.tokenizer.pieces[261:300]
    model, start = other.asks(BERT, Objective(mlm=MLM), tmp_path).begin()
    assert start.record["copied"] + start.record["averaged"] == 300
    word = "encoder.embeddings.word.weight"
    for i, piece in enumerate(other.tokenizer.pieces):
        if piece in setting.tokenizer.pieces:
            expected = exported[word][setting.tokenizer.pieces.index(piece)]
            assert torch.equal(parameters(model)[word][i], expected)


def test_a_filled_up_vocabulary_keeps_its_spare_rows(setting: Setting, tmp_path: Path) -> None:
    size = setting.tokenizer.vocab_size
    filled = BERT.model_copy(update={"vocab": size + 10})
    exported = parameters(export(setting.asks(filled, Objective(mlm=MLM), "scratch"), tmp_path))
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, _ = longer.asks(filled, Objective(mlm=MLM), tmp_path).begin()
    word = "encoder.embeddings.word.weight"
    assert torch.equal(parameters(model)[word][size + 2 :], exported[word][size + 2 :])
    with pytest.raises(RunError, match=rf"word\.weight is \({size + 10}, 32\) there and \({size}, 32\) here"):
        setting.asks(BERT, Objective(mlm=MLM), tmp_path).begin()


def test_a_run_with_another_tokenizer(setting: Setting, other_run: str) -> None:
    saved = trained(setting, other_run, BERT, Objective(mlm=SPANS, sbo=ONE))
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    model, start = longer.asks(BERT, Objective(mlm=MLM, sbo=ONE), other_run).begin()
    assert start.record["averaged"] == 2
    for name in ("encoder.embeddings.word.weight", "head.decoder.bias", "boundary_head.decoder.bias"):
        found = parameters(model)[name]
        assert torch.equal(found[:-2], saved[name])
        assert not torch.equal(
            found[-1], fresh(longer.asks(BERT, Objective(mlm=MLM, sbo=ONE), "scratch"))[name][-1]
        )


def test_a_runs_tokenizer_must_be_the_one_it_was_trained_with(setting: Setting, other_run: str) -> None:
    trained(setting, other_run, BERT, Objective(mlm=MLM))
    run = open_run(other_run)
    longer = replace(setting, tokenizer=extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer)
    save_tokenizer(longer.tokenizer, f"{other_run}/replaced")
    moved = run.recipe.model_copy(update={"tokenizer": TokenizerRef(uri=f"{other_run}/replaced")})
    run.store.put("recipe.yaml", moved.to_yaml().encode())
    with pytest.raises(RunError, match="is not the one that"):
        longer.asks(BERT, Objective(mlm=MLM), other_run).begin()


def test_a_stranger_tokenizer_is_refused(setting: Setting, tmp_path: Path) -> None:
    export(setting.asks(BERT, Objective(mlm=MLM), "scratch"), tmp_path)
    other = replace(setting, tokenizer=train_tokenizer("wordpiece", ["some text of words"] * 9, 36))
    with pytest.raises(TokenizerError, match=r"write words in different ways\n.*tokenizer extend"):
        other.asks(BERT, Objective(mlm=MLM), tmp_path).begin()
