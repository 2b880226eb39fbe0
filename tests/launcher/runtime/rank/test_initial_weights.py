"""Starting from a model: the encoder and the heads that are there, and the rest named."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue, TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoints.errors import DamagedCheckpoint, NoGoodCheckpoint
from checkpoints.gather import SingleRank
from checkpoints.hf.folder import WEIGHTS
from checkpoints.hf.load import load_pretrained
from checkpoints.listing import list_committed
from data_service.store.open import open_store
from data_service.tokenizers.load import complete_from_files
from data_service.tokenizers.vocabulary import extend_tokenizer
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.interchange import Heads
from encoder_core.objectives.replaced import ReplacedTokenConfig, Sharing
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from encoder_core.objectives.span_boundary import SboConfig
from launcher.errors import RunError
from launcher.runtime.rank.build import build_model
from launcher.runtime.rank.initial_weights import START_KEY, InitialWeights, check_start, initial_weights
from launcher.runtime.recipe.objective import RecipeObjective
from tests.data_service.tokenizers.test_load import decoder
from tests.support.models.parity import parameters_of
from tests.support.runs.starts import (
    BERT,
    CASES,
    DEBERTA_V2,
    ELECTRA,
    MLM,
    PAIRS,
    ROBERTA,
    SPANS,
    Setting,
    export,
    fresh,
    rows,
    trained,
)
from tests.support.stores.s3 import S3Server

SETTLED = {"boundary_head.second_norm.weight", "boundary_head.decoder.bias"}  # see test_fresh_heads


@torch.no_grad()
def losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    torch.manual_seed(5)  # a generator draws
    return {term.name: term.loss_sum for term in model(batch).terms}


@pytest.mark.parametrize(("config", "objective", "heads"), CASES.values(), ids=CASES)
def test_the_first_evaluation_is_the_exporters(
    setting: Setting, tmp_path: Path, config: ModelConfig, objective: RecipeObjective, heads: Heads
) -> None:
    asked = setting.asks(config, objective, tmp_path / "model")
    exported = export(asked, tmp_path / "model", heads)
    model, start = asked.begin()
    batch = rows(setting.tokenizer.vocab_size)
    assert losses(model, batch) == losses(exported, batch)
    assert start.record["fresh"] == start.record["left"] == []
    assert "copied" not in start.record


@pytest.mark.parametrize(("config", "sharing"), PAIRS.values(), ids=PAIRS)
def test_a_pair_begins_as_it_was(setting: Setting, tmp_path: Path, config: ModelConfig, sharing: Sharing) -> None:
    objective = RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings=sharing))
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
    asked = setting.asks(ELECTRA, RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig()), tmp_path / "pair")
    export(asked, tmp_path / "pair")
    alone = setting.asks(ELECTRA, asked.run.recipe.objective, tmp_path / "pair/discriminator")
    with pytest.raises(RunError, match=r"^start: .*\bboth\b.*\brtd\b.*\n.*generator/"):
        alone.begin()
    with pytest.raises(RunError, match=r"^start: .*\bpair\b"):
        setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path / "pair").begin()


def names(start: InitialWeights, key: str) -> list[str]:
    return TypeAdapter(list[str]).validate_python(start.record[key])


@pytest.mark.parametrize(
    ("config", "objective", "missing"),
    [
        (BERT, RecipeObjective(mlm=MLM, nsp=NspConfig()), "pair_head."),
        (BERT, RecipeObjective(mlm=MLM, sbo=SboConfig()), "boundary_head."),
        (DEBERTA_V2, RecipeObjective(mlm=MLM), "decoder.position."),
        (DEBERTA_V2, RecipeObjective(mlm=MLM, sop=SopConfig()), "pair_head."),
    ],
)
def test_missing_heads_stay_fresh_and_are_named(
    setting: Setting, tmp_path: Path, config: ModelConfig, objective: RecipeObjective, missing: str
) -> None:
    plain = config.model_copy(update={"mask_decoder": "plain"}) if config is DEBERTA_V2 else config
    exported = parameters_of(export(setting.asks(plain, RecipeObjective(mlm=MLM), "scratch"), tmp_path))
    asked = setting.asks(config, objective, tmp_path)
    model, start = asked.begin()
    found, initial = parameters_of(model), fresh(asked)
    assert start.record["fresh"]
    assert start.record["fresh"] == [name for name in found if name not in exported]
    assert any(name.startswith(missing) for name in names(start, "fresh"))
    for name, value in found.items():
        if name not in SETTLED:
            assert torch.equal(value, exported[name] if name in exported else initial[name]), name
    assert "fresh" in start.summary()


def test_heads_of_other_tasks_are_left_and_named(setting: Setting, tmp_path: Path) -> None:
    export(setting.asks(BERT, RecipeObjective(mlm=MLM, nsp=NspConfig()), "scratch"), tmp_path, "mlm_pair")
    _, start = setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path).begin()
    assert start.record["left"] == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    ]


class Differing(SingleRank):
    """A second rank that has read other bytes."""

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        return [value, {"value": "0" * 64}]


def test_ranks_that_read_different_files_stop(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path)
    export(asked, tmp_path)
    model = build_model(asked.run.recipe, setting.tokenizer)
    with pytest.raises(RunError, match=r"^start: .*\bfiles\b.*\bmachines\b"):
        initial_weights(asked.run, setting.tokenizer, model, Differing())


@pytest.mark.long
def test_a_folder_in_a_bucket_whole_or_in_parts(setting: Setting, s3: S3Server, tmp_path: Path) -> None:
    from transformers import RobertaForMaskedLM

    uri = f"s3://{s3.new_bucket()}/model"
    exported = export(setting.asks(ROBERTA, RecipeObjective(mlm=MLM), "scratch"), tmp_path / "whole")
    theirs = RobertaForMaskedLM.from_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for folder in ("whole", "parts"):
        for path in (tmp_path / folder).iterdir():
            open_store(f"{uri}/{folder}").put_file(path.name, path)
        model, start = setting.asks(ROBERTA, RecipeObjective(mlm=MLM), f"{uri}/{folder}").begin()
        assert all(torch.equal(p, parameters_of(exported)[name]) for name, p in parameters_of(model).items())
    assert "none" in str(start.record["tokenizer"])
    open_store(f"{uri}/pickled").put("config.json", (tmp_path / "whole/config.json").read_bytes())
    open_store(f"{uri}/pickled").put("pytorch_model.bin", b"\x80\x04")
    with pytest.raises(ModelError, match=r"s3://.*/pickled\b.*model\.safetensors\n.*\bpickled\b"):
        setting.asks(ROBERTA, RecipeObjective(mlm=MLM), f"{uri}/pickled").begin()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_its_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def without_safetensors(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


def of_another_shape(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("position_embeddings.weight"))
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path, {"format": "pt"})


def without_a_layer(path: Path) -> None:
    save_file({name: value for name, value in load_file(path).items() if ".layer.1." not in name}, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_safetensors, r"has no model\.safetensors\n.*pickled weights"),
        (cut_short, r"model\.safetensors\b.*\btruncated\b.*[\d,]{6,} bytes.*\bheader\b.*[\d,]{6,}"),
        (cut_in_its_header, r"model\.safetensors\b.*\btruncated\b.*\(200 bytes\)"),
        (of_another_shape, r"position_embeddings\.weight is \(63, \d+\), not \(64, \d+\)"),
        (without_a_layer, r"does not hold the expected parameters: missing .*layer\.1\."),
    ],
)
@pytest.mark.parametrize("pair", [False, True])
def test_weights_that_cannot_be_loaded_are_refused_by_init(
    setting: Setting, tmp_path: Path, spoil: Callable[[Path], None], message: str, pair: bool
) -> None:
    objective = RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig()) if pair else RecipeObjective(mlm=MLM)
    asked = setting.asks(ELECTRA if pair else BERT, objective, tmp_path)
    export(asked, tmp_path)
    check_start(asked.run.recipe)
    spoil(tmp_path / "discriminator" / WEIGHTS if pair else tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        check_start(asked.run.recipe)


@pytest.mark.long
def test_the_newest_checkpoint_of_another_run(setting: Setting, other_run: str) -> None:
    with pytest.raises(RunError, match=r"^start: .*\bcheckpoint\b"):
        setting.asks(BERT, RecipeObjective(mlm=MLM), other_run).begin()
    saved = trained(setting, other_run, BERT, RecipeObjective(mlm=SPANS, sbo=SboConfig()))
    asked = setting.asks(BERT, RecipeObjective(mlm=MLM, nsp=NspConfig()), other_run)
    model, start = asked.begin()
    assert start.record["start_step"] == 4
    assert {name.split(".")[0] for name in names(start, "fresh")} == {"pair_head"}
    assert {name.split(".")[0] for name in names(start, "left")} == {"boundary_head"}
    initial = fresh(asked)
    for name, value in parameters_of(model).items():
        assert torch.equal(value, saved[name] if name in saved else initial[name]), name


def test_a_start_that_went_on_is_read_where_the_first_attempt_read_it(setting: Setting, other_run: str) -> None:
    """Nothing of the run itself is saved yet, and the other run trains on; then it loses that checkpoint."""
    objective = RecipeObjective(mlm=MLM)
    trained(setting, other_run, BERT, objective)
    asked = setting.asks(BERT, objective, other_run)
    begun, start = asked.begin()
    trained(setting, other_run, BERT, objective, seed=4)
    again, repeated = asked.begin()
    assert repeated.record == start.record
    for name, value in parameters_of(begun).items():
        assert torch.equal(value, parameters_of(again)[name]), name
    store = open_store(other_run)
    store.delete(list_committed(store)[-1].manifest_key)
    with pytest.raises(NoGoodCheckpoint):
        asked.begin()


def test_a_folder_that_was_replaced_is_refused_by_a_run_that_began_from_it(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(BERT, RecipeObjective(mlm=MLM), tmp_path)
    export(asked, tmp_path)
    asked.begin()
    asked.begin()
    weights = load_file(tmp_path / WEIGHTS)
    name = random.Random(1).choice(sorted(weights))
    weights[name].view(torch.uint8).view(-1)[-1] ^= 1
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(RunError, match=str(tmp_path)):
        asked.begin()
    pin = setting.run.store.get(START_KEY)
    setting.run.store.put(START_KEY, pin[:-9])
    with pytest.raises(DamagedCheckpoint, match=START_KEY):
        asked.begin()
    setting.run.store.delete(START_KEY)


def test_another_runs_model_must_be_ours(setting: Setting, other_run: str) -> None:
    trained(setting, other_run, BERT, RecipeObjective(mlm=MLM))
    with pytest.raises(ModelError, match=r"\bheads\b.*\b2\b.*\b4\b"):
        setting.asks(BERT.model_copy(update={"heads": 2}), RecipeObjective(mlm=MLM), other_run).begin()


@pytest.mark.long
def test_an_encoder_under_another_name_is_missed(setting: Setting, other_run: str) -> None:
    trained(setting, other_run, DEBERTA_V2, RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig()))
    with pytest.raises(RunError, match=r"\blacks\b.*: encoder\.embeddings\.word\.weight"):
        setting.asks(DEBERTA_V2, RecipeObjective(mlm=MLM), other_run).begin()


@pytest.mark.long
def test_a_table_of_differences_is_no_table(setting: Setting, other_run: str) -> None:
    disentangled = RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings="gradient_disentangled"))
    trained(setting, other_run, DEBERTA_V2, disentangled)
    setting.asks(DEBERTA_V2, disentangled, other_run).begin()
    with pytest.raises(RunError, match=r"\bembeddings\b.*\bshared\b.*\bgradient_disentangled\b"):
        setting.asks(DEBERTA_V2, RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig()), other_run).begin()


def test_a_decoder_whose_tokenizer_lacks_special_tokens(setting: Setting, tmp_path: Path) -> None:
    """As a Llama's. The rows that the decoder knows are taken over, those of the new tokens are fresh."""
    files = decoder("<|begin_of_text|>", "<|end_of_text|>", {})
    completed = complete_from_files(files)
    known = completed.vocab_size - 3  # [UNK], [PAD], [MASK]
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=known,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    theirs.save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    config = load_pretrained(tmp_path).config.model_copy(update={"vocab": None})
    its = replace(setting, tokenizer=completed)
    asked = its.asks(config, RecipeObjective(mlm=MLM), tmp_path)
    model, start = asked.begin()
    tables, unseen = dict(model.named_parameters()), fresh(asked)
    for name, table in (
        ("encoder.embeddings.word.weight", theirs.model.embed_tokens.weight),
        ("head.decoder.weight", theirs.lm_head.weight),
    ):
        assert torch.equal(tables[name][:known], table)
        assert len(tables[name]) >= completed.vocab_size
        assert torch.equal(tables[name][known:], unseen[name][known:])
    assert (start.record["copied"], start.record["averaged"]) == (known, 0)


@pytest.mark.long
def test_rows_that_only_special_tokens_may_lack(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(ROBERTA, RecipeObjective(mlm=MLM), tmp_path / "model")
    export(asked, tmp_path / "model")
    wider = extend_tokenizer(setting.tokenizer, ["neurotransmitter"]).tokenizer
    for name, content in wider.save_files().items():
        (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"^start: .*\b{wider.vocab_size} ids"):
        asked.begin()
