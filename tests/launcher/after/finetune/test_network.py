"""What begins anew, what moves how fast, and what is refused before training."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from launcher.after.finetune.inputs import open_pieces
from launcher.after.finetune.loop import make_optimizer, rate_share
from launcher.after.finetune.network import HeadSpec, TaskNetwork, open_config, open_network
from launcher.after.finetune.pretrained import LocalModel, folder_digest, open_pretrained
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch
from tests.support.tasks.small_tasks import QUICK, Models

TEXTS = HeadSpec("SequenceClassification", 2, ("no", "yes"))
WORDS = HeadSpec("TokenClassification", 3, ("O", "B-X", "I-X"))
SPANS = HeadSpec("QuestionAnswering", 2, ())


def opened(given: LocalModel, wanted: HeadSpec, seed: int = 1, **changes: Any) -> TaskNetwork:
    settings = FinetuneSettings.model_validate({**QUICK.model_dump(), **changes})
    return open_network(given.folder, open_config(given.folder), wanted, settings, seed)


def rates(network: TaskNetwork, **changes: object) -> dict[str, float]:
    optimizer = make_optimizer(network, FinetuneSettings.model_validate({"lr": 1.0, **changes}))
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


EXPECTED = {  # depth by a part of the name: 0 embeddings, then layers, then what is above
    "bert": {"embeddings": 0, "layer.0.": 1, "layer.1.": 2, "pooler": 3, "classifier": 3},
    "albert": {"embeddings": 0, "hidden_mapping_in": 0, "layer_groups": 1, "pooler": 2, "classifier": 2},
    "xlnet": {"word_embedding": 0, "mask_emb": 0, "layer.0.": 1, "layer.1.": 2, "summary": 3, "logits": 3},
    "electra": {"embeddings": 0, "layer.0.": 1, "layer.1.": 2, "classifier": 3},
    "deberta": {"embeddings": 0, "layer.0.": 1, "layer.1.": 2, "pooler": 3, "classifier": 3},
    "deberta-v3": {"embeddings": 0, "encoder.LayerNorm": 0, "layer.0.": 1, "layer.1.": 2, "pooler": 3},
    "modernbert": {
        "embeddings": 0,
        "layers.0.": 1,
        "layers.1.": 2,
        "final_norm": 3,
        "head": 3,
        "classifier": 3,
    },
    "xlm": {"embeddings": 0, "layer_norm_emb": 0, "attentions.0.": 1, "ffns.1.": 2, "sequence_summary": 3},
    "eurobert": {"embed_tokens": 0, "layers.0.": 1, "layers.1.": 2, "dense": 3, "classifier": 3},
}


@pytest.mark.parametrize("family", EXPECTED)
def test_rates_fall_layer_by_layer_to_the_embeddings(models: Models, family: str) -> None:
    network = opened(models(family), TEXTS)
    found = rates(network, layer_decay=0.5)
    assert set(found) == {name for name, _ in network.named_parameters()}
    top = max(EXPECTED[family].values())
    for part, depth in EXPECTED[family].items():
        matching = {name: rate for name, rate in found.items() if part in name}
        assert matching, part
        assert set(matching.values()) == {0.5 ** (top - depth)}, part


def test_deberta_v2s_convolution_moves_with_its_first_layer(tmp_path: Path) -> None:
    config = transformers.DebertaV2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_kernel_size=3,
    )
    network = TaskNetwork(transformers.DebertaV2ForTokenClassification(config), None, frozen=False)
    found = rates(network, layer_decay=0.5)
    assert {rate for name, rate in found.items() if "encoder.conv." in name} == {0.25}


@pytest.mark.parametrize("steps", [1, 7, 100])
@pytest.mark.parametrize("share", [0.0, 0.06, 0.5, 1.0])
def test_the_schedule_is_transformers_own(steps: int, share: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, math.ceil(steps * share), steps)
    for step in range(steps):
        assert rate_share(step, steps, share) == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


def test_weights_decay_and_biases_and_norms_do_not(models: Models) -> None:
    network = opened(models("xlnet"), TEXTS)
    optimizer = make_optimizer(network, FinetuneSettings(weight_decay=0.1))
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = "bias" in names[id(parameter)] or "norm" in names[id(parameter)]
            assert group["weight_decay"] == (0.0 if kept else 0.1), names[id(parameter)]


@pytest.mark.parametrize(("family", "wanted"), [("bert", WORDS), ("electra", TEXTS), ("deberta-v3", SPANS)])
def test_the_encoder_is_the_checkpoints_and_the_head_is_drawn_from_the_seed(
    models: Models, family: str, wanted: HeadSpec
) -> None:
    one, same, other = (dict(opened(models(family), wanted, seed).named_parameters()) for seed in (1, 1, 2))
    stored = load_file(models(family).folder / "model.safetensors")
    kept = 0
    for name, value in one.items():
        assert torch.equal(value, same[name])
        found = [tensor for key, tensor in stored.items() if name.endswith(key) and "embeddings" in key]
        kept += any(torch.equal(value, tensor) for tensor in found)
    assert kept >= 2
    drawn = {name for name, value in one.items() if not torch.equal(value, other[name])}
    assert drawn
    assert not any(".layer." in name or "embeddings" in name for name in drawn)


def test_top_layers_begin_anew_where_asked(models: Models) -> None:
    usual, anew = (
        dict(opened(models("bert"), TEXTS, reinit_layers=count).named_parameters()) for count in (0, 1)
    )
    changed = {name for name in usual if not torch.equal(usual[name], anew[name])}
    assert any("layer.1." in name for name in changed)
    assert any("pooler" in name for name in changed)  # pretrained by next-sentence prediction here
    assert not any("layer.0." in name or "embeddings" in name for name in changed)
    for family, problem in (("albert", "share their parameters"), ("bert", "more than the 2 layers")):
        with pytest.raises(TaskMismatch, match=problem):
            opened(models(family), TEXTS, reinit_layers=3)


def test_dropout_is_set_where_it_is_asked(models: Models) -> None:
    for family in ("bert", "albert", "xlnet", "electra", "deberta-v3"):
        network = opened(models(family), TEXTS, dropout=0.25, task_dropout=0.5)
        inside = {id(module) for module in network.encoder.modules()}
        found = [(id(m) in inside, m.p) for m in network.modules() if isinstance(m, torch.nn.Dropout)]
        assert {rate for encoder, rate in found if encoder} == {0.25}, family
        assert [rate for encoder, rate in found if not encoder][-1] == 0.5, family


@pytest.mark.parametrize(
    ("wanted", "changes", "problem"),
    [
        (SPANS, {"task_dropout": 0.1}, "no dropout before its output"),
        (WORDS, {"pooling": "mean"}, "labels of pieces have no pooling"),
        (TEXTS, {"layers": "weighted"}, "needs a pooling"),
        (WORDS, {"layers": "last_four"}, "last_four: the encoder has 2"),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(
    models: Models, wanted: HeadSpec, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TaskMismatch, match=problem):
        opened(models("bert"), wanted, **changes)


def edited(given: LocalModel, folder: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(given.folder, folder)
    change(folder)
    return folder


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(fields | values))

    return change


def without_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layer.1.attention" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("config.json"), "no configuration"),
        (with_config(model_type="nobody"), "no configuration"),
        (without("model.safetensors"), "cannot load"),
        (cut_short, "cannot load"),
        (without_a_layer, "lack parameters of BertModel"),
        (with_config(intermediate_size=64), "lack parameters of BertModel"),
        (with_config(vocab_size=20), "lack parameters|does not fit"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    models: Models, tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    folder = edited(models("bert"), tmp_path / "model", change)
    with pytest.raises(TaskMismatch, match=problem):
        opened(LocalModel("x", None, folder, ""), TEXTS)


def test_a_tokenizer_that_does_not_fit_is_refused(models: Models, tmp_path: Path) -> None:
    bert = models("bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copytree(bert.folder, tmp_path / name)
    foreign = models("roberta").folder
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (foreign / name).exists():
            shutil.copyfile(foreign / name, tmp_path / "tokenizer.json" / name)
    config = open_config(bert.folder)
    with pytest.raises(TaskMismatch, match=r"\btokenizer\b.*\bid\b.*\b[\d,]+"):
        open_pieces(tmp_path / "tokenizer.json", config, None)
    fields = json.loads((bert.folder / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer_config.json/tokenizer_config.json").write_text(
        json.dumps(fields | {"cls_token": None})
    )
    (tmp_path / "tokenizer_config.json/special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(TaskMismatch, match="no cls_token"):
        open_pieces(tmp_path / "tokenizer_config.json", config, None)
    (tmp_path / "none").mkdir()
    with pytest.raises(TaskMismatch, match="tokenizer"):
        open_pieces(tmp_path / "none", config, None)
    with pytest.raises(TaskMismatch, match=r"\b96 tokens\b"):
        open_pieces(bert.folder, config, 97)


def test_the_digest_is_that_of_what_decides_a_prediction(models: Models, tmp_path: Path) -> None:
    with open_pretrained(str(models("bert").folder)) as given:
        assert (given.digest, given.step) == (models("bert").digest, None)
    folder = edited(models("bert"), tmp_path / "model", lambda f: (f / "README.md").write_text("other words"))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, which nobody opens")
    (folder / "maskfleet_export.json").unlink()
    assert folder_digest(folder) == models("bert").digest
    with_config(hidden_dropout_prob=0.3)(folder)
    assert folder_digest(folder) != models("bert").digest
