"""A pair that begins from the discriminator's folder alone, as DeBERTa v3 is published, against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.hf.folder import WEIGHTS
from encoder_core.errors import ModelError
from encoder_core.families.deberta import DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.objectives.modules.detection import ReplacedTokenDetection
from encoder_core.objectives.replaced import ReplacedTokenConfig, Sharing
from launcher.errors import RunError
from launcher.runtime.rank.initial_weights import check_start
from launcher.runtime.recipe.objective import RecipeObjective
from tests.support.models.parity import assert_close, pad
from tests.support.models.published import DETECTION, LEFT, publish
from tests.support.runs.starts import DEBERTA_V2, ELECTRA, MLM, SHAPE, Setting, export, fresh, rows

SHARINGS: tuple[Sharing, ...] = ("gradient_disentangled", "shared")


def pair(sharing: Sharing = "gradient_disentangled") -> RecipeObjective:
    return RecipeObjective(mlm=MLM, rtd=ReplacedTokenConfig(embeddings=sharing))


def known(setting: Setting, config: DebertaV2Config = DEBERTA_V2) -> DebertaV2Config:
    found = setting.known(config)
    assert isinstance(found, DebertaV2Config)
    return found


@pytest.fixture(params=range(4))
def drawn(request: pytest.FixtureRequest) -> tuple[DebertaV2Config, Sharing, int]:
    draw = random.Random(f"pair {request.param}")
    layers = draw.randint(2, 5)
    own: dict[str, Any] = {
        "layers": layers,
        "generator_layers": draw.choice([None, *range(1, layers + 1)]),
        "convolution": draw.choice([None, 3]),
        "mask_decoder": draw.choice(["enhanced", "plain"]),
    }
    return DEBERTA_V2.model_copy(update=own), SHARINGS[request.param % 2], draw.randrange(1 << 30)


@torch.no_grad()
def their_states(theirs: Any, setting: Setting) -> Tensor:
    batch = pad(rows(setting.tokenizer.vocab_size), setting.tokenizer.special.pad)
    states: Tensor = theirs(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return batch.flat(states)


def of_layers(theirs: Any, layers: list[int]) -> Any:
    """A transformers model of these layers of theirs."""
    from transformers import DebertaV2Model

    shallow = DebertaV2Model(type(theirs.config)(**theirs.config.to_dict() | {"num_hidden_layers": len(layers)}))
    state = {name: value for name, value in theirs.state_dict().items() if ".layer." not in name}
    for own, its in enumerate(layers):
        layer = theirs.encoder.layer[its].state_dict()
        state |= {f"encoder.layer.{own}.{name}": value for name, value in layer.items()}
    shallow.load_state_dict(state)
    return shallow.eval()


def test_both_networks_begin_as_the_folders_model(
    setting: Setting, tmp_path: Path, drawn: tuple[DebertaV2Config, Sharing, int]
) -> None:
    config, sharing, seed = drawn
    theirs = publish(known(setting, config), tmp_path, seed=seed)
    model, start = setting.asks(config, pair(sharing), tmp_path).begin()
    assert isinstance(model, ReplacedTokenDetection)
    batch = rows(setting.tokenizer.vocab_size)
    layers = start.record["layers"]
    assert isinstance(layers, list)
    assert layers[0] == 0
    assert len(layers) == config.generator.layers
    generator = of_layers(theirs, [int(str(n)) for n in layers])
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        with torch.no_grad():
            assert_close(model.discriminator.encoder(batch), their_states(theirs.to(dtype), setting))
            assert_close(model.generator.encoder(batch), their_states(generator.to(dtype), setting))


def test_the_discriminators_head_is_read_and_what_was_left_is_named(setting: Setting, tmp_path: Path) -> None:
    publish(known(setting), tmp_path)
    model, start = setting.asks(DEBERTA_V2, pair(), tmp_path).begin()
    stored, found = load_file(tmp_path / WEIGHTS), dict(model.named_parameters())
    for ours, theirs in DETECTION.items():
        assert torch.equal(found[f"discriminator.head.{ours}"], stored[theirs])
    assert not found["discriminator.encoder.embeddings.word.weight"].any()
    assert start.record["left"] == sorted(LEFT)
    assert start.record["network"] == "discriminator"
    missing = start.record["fresh"]
    assert missing == [name for name in found if name.startswith(("generator.head.", "generator.decoder."))]
    assert "layers 0" in start.summary()
    assert "generator.head.dense.weight" in start.summary()


def test_a_head_that_is_not_there_begins_anew(setting: Setting, tmp_path: Path) -> None:
    publish(known(setting), tmp_path, heads=False)
    asked = setting.asks(DEBERTA_V2, pair(), tmp_path)
    model, start = asked.begin()
    initial = fresh(asked)
    for ours in DETECTION:
        name = f"discriminator.head.{ours}"
        assert name in _names(start.record["fresh"])
        assert torch.equal(dict(model.named_parameters())[name], initial[name])


def _names(value: JsonValue) -> list[JsonValue]:
    assert isinstance(value, list)
    return value


def test_the_generators_first_loss_is_that_of_a_guess_by_frequency(setting: Setting, tmp_path: Path) -> None:
    publish(known(setting), tmp_path)
    model, _ = setting.asks(DEBERTA_V2, pair(), tmp_path).begin()
    bias = dict(model.named_parameters())["generator.head.decoder.bias"]
    assert float(bias.detach().exp().sum()) == pytest.approx(1, abs=1e-3)


def test_a_narrow_generator_needs_its_own_folder(setting: Setting, tmp_path: Path) -> None:
    asked = setting.asks(ELECTRA, pair("shared"), tmp_path)
    export(asked, tmp_path)
    alone = setting.asks(ELECTRA, pair("shared"), tmp_path / "discriminator")
    with pytest.raises(RunError, match=r"\bhidden\b.*\b16\b.*\b32\b.*\n.*generator/"):
        check_start(alone.run.recipe)


def test_a_generator_as_wide_can_be_electras_too(setting: Setting, tmp_path: Path) -> None:
    config = ElectraConfig(**SHAPE, embedding=16, generator_divisor=1)
    exported = export(setting.asks(config, pair("shared"), tmp_path), tmp_path)
    model, start = setting.asks(config, pair("shared"), tmp_path / "discriminator").begin()
    assert start.record["layers"] == [0, 1]
    found, stored = dict(model.named_parameters()), dict(exported.named_parameters())
    for name in (name for name in found if name.startswith("generator.encoder.layers.")):
        assert torch.equal(found[name], stored[name.replace("generator", "discriminator", 1)])


def test_a_generator_deeper_than_the_discriminator_is_refused(setting: Setting, tmp_path: Path) -> None:
    publish(known(setting), tmp_path)
    deep = DEBERTA_V2.model_copy(update={"generator_layers": 3})
    with pytest.raises(RunError, match=r"\blayers\b.*\b3\b.*\b2\b"):
        check_start(setting.asks(deep, pair(), tmp_path).run.recipe)


def test_an_unknown_parameter_of_the_encoder_is_refused(setting: Setting, tmp_path: Path) -> None:
    publish(known(setting), tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    save_file(stored | {"deberta.encoder.layer.0.scale": torch.ones(1)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"\bunknown\b.*deberta\.encoder\.layer\.0\.scale"):
        check_start(setting.asks(DEBERTA_V2, pair(), tmp_path).run.recipe)
