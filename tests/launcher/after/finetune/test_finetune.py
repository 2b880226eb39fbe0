"""Fine-tunings of every kind of task: what is exported does what was measured, by transformers alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.backends import cuda

from launcher.after.finetune.model import layerwise_parameter_groups, open_model
from launcher.after.finetune.pretrained import open_pretrained
from launcher.after.finetune.run import finetune
from launcher.after.finetune.settings import FinetuneSettings, TaskMismatch, TrainingDiverged
from launcher.after.finetune.trainer import training_arguments
from launcher.after.tasks.examples import Questions, Sentences, TaggedSentences
from launcher.after.tasks.metrics import compute_metrics
from launcher.after.tasks.task import parse_task
from tests.support.tasks.small_tasks import QUICK, Models, description, model, task

KINDS = ("classification", "pair_classification", "regression", "tagging", "span")
FAMILIES = ("roberta", "albert", "xlnet", "electra", "deberta", "deberta-v3")
LEARNS = FinetuneSettings(lr=3e-3, epochs=4, batch=8)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("bert", kind) for kind in KINDS),
        *(pytest.param(family, kind, marks=pytest.mark.long) for family in FAMILIES for kind in KINDS),
    ],
)
def test_transformers_alone_has_the_figures_from_the_export(
    models: Models, tmp_path: Path, family: str, kind: str
) -> None:
    asked = task(kind, tmp_path, train=64, dev=32)
    outcome = finetune(models(family), asked, LEARNS, 1, tmp_path / "out")
    assert [epoch.epoch for epoch in outcome.curves] == [1, 2, 3, 4]
    assert outcome.metrics == pytest.approx(outcome.curves[outcome.best_epoch - 1].metrics)
    assert next(iter(outcome.metrics.values())) == max(next(iter(epoch.metrics.values())) for epoch in outcome.curves)
    assert outcome.curves[-1].loss < outcome.curves[0].loss
    examples = asked.read("dev")
    found = predictions(tmp_path / "out", kind, examples, outcome.threshold)
    assert compute_metrics(asked, examples, found) == pytest.approx(dict(outcome.metrics), abs=1e-3)
    results = json.loads((tmp_path / "out/results.json").read_bytes())
    assert results["metrics"] == pytest.approx(dict(outcome.metrics))
    assert isinstance(examples, Questions) == (outcome.threshold is not None)


def test_the_seed_decides_and_the_best_epoch_is_kept(models: Models, tmp_path: Path) -> None:
    asked = task("classification", tmp_path)
    one, again, other = (finetune(models("bert"), asked, QUICK, seed) for seed in (1, 1, 2))
    assert one.curves == again.curves != other.curves
    patient = LEARNS.model_copy(update={"epochs": 40, "patience": 1, "lr": 1e-6})
    assert len(finetune(models("bert"), asked, patient, 1).curves) < 40
    last = finetune(models("bert"), asked, LEARNS.model_copy(update={"keep": "last"}), 1)
    assert last.best_epoch == 4
    assert last.metrics == pytest.approx(last.curves[-1].metrics)


def test_a_model_of_another_task_gives_its_encoder_and_no_head(models: Models, tmp_path: Path) -> None:
    pairs, scores = task("pair_classification", tmp_path), task("regression", tmp_path)
    finetune(models("bert"), pairs, QUICK, 0, tmp_path / "first")
    with open_pretrained(str(tmp_path / "first")) as first:
        after = finetune(first, scores, QUICK, 1)
    assert after.curves != finetune(models("bert"), scores, QUICK, 1).curves


def test_a_loss_that_is_no_longer_finite_is_an_error(models: Models, tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged):
        finetune(models("bert"), task("classification", tmp_path), QUICK.model_copy(update={"lr": 1e30}), 1)


def test_microbatches_change_no_more_than_rounding(tmp_path: Path) -> None:
    asked, still = (
        task("classification", tmp_path),
        {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    )
    start = model("bert", tmp_path / "model")
    config = json.loads((start.folder / "config.json").read_bytes())
    (start.folder / "config.json").write_text(json.dumps(config | still))
    whole, parts = (finetune(start, asked, QUICK.model_copy(update={"microbatch": size}), 1) for size in (None, 2))
    for one, other in zip(whole.curves, parts.curves, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_a_head_in_the_folder_is_not_used(models: Models, tmp_path: Path) -> None:
    asked = task("classification", tmp_path)
    finetune(models("bert"), asked, LEARNS, 1, tmp_path / "out")
    again = open_model(tmp_path / "out", "SequenceClassification", ("loses", "wins"))
    trained = load_file(tmp_path / "out/model.safetensors")
    assert not again.classifier.weight.equal(trained["classifier.weight"])
    assert again.bert.pooler.dense.weight.equal(trained["bert.pooler.dense.weight"])


@pytest.mark.parametrize("family", ["bert", "xlnet", "deberta-v3"])
def test_rates_fall_layer_by_layer_to_the_embeddings(models: Models, family: str) -> None:
    network = open_model(models(family).folder, "SequenceClassification", ("no", "yes"))
    groups = layerwise_parameter_groups(network, FinetuneSettings(lr=1.0, layer_decay=0.5, weight_decay=0.1))
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    rates = {names[id(one)]: group["lr"] for group in groups for one in group["params"]}
    decays = {names[id(one)]: group["weight_decay"] for group in groups for one in group["params"]}
    assert len(rates) == len(names) == len(list(network.parameters()))
    layers = {name: rate for name, rate in rates.items() if ".layer." in name}
    assert {rate for name, rate in layers.items() if ".layer.1." in name} == {0.5}
    assert {rate for name, rate in layers.items() if ".layer.0." in name} == {0.25}
    assert {rate for name, rate in rates.items() if "word_embedding" in name} == {0.125}
    assert {rate for name, rate in rates.items() if name.startswith(("classifier", "logits_proj"))} == {1.0}
    assert {bool(value) for name, value in decays.items() if name.endswith("bias")} == {False}


def test_kinds_that_are_measured_are_not_fine_tuned(models: Models, tmp_path: Path) -> None:
    task("regression", tmp_path)
    text = description("regression").replace("kind: regression", "kind: similarity")
    with pytest.raises(TaskMismatch, match="embed"):
        finetune(models("bert"), parse_task(text, "x", str(tmp_path)), QUICK, 1)


def test_other_splits_are_measured_too(models: Models, tmp_path: Path) -> None:
    asked = task("classification", tmp_path)
    more = parse_task(
        description("classification").replace("files: {", "files: {other: classification.train.jsonl, "),
        "x",
        str(tmp_path),
    )
    outcome = finetune(models("bert"), more, QUICK, 1, tmp_path / "out")
    examples = more.read("other")
    assert isinstance(examples, Sentences)
    found = predictions(tmp_path / "out", "classification", examples, None)
    assert outcome.others == {"other": pytest.approx(compute_metrics(asked, examples, found))}


_CLASSES = {
    "tagging": transformers.AutoModelForTokenClassification,
    "span": transformers.AutoModelForQuestionAnswering,
}


@torch.no_grad()
def predictions(folder: Path, kind: str, examples: Any, threshold: float | None) -> Any:
    """As `FinetuneOutcome.predictions`, with nothing but transformers; for examples that fit into the model whole."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    loader = _CLASSES.get(kind, transformers.AutoModelForSequenceClassification)
    model, report = loader.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model.eval()
    match examples:
        case Sentences():
            pairs = () if examples.second is None else (list(examples.second),)
            inputs = tokenizer(list(examples.first), *pairs, truncation=True, padding=True, return_tensors="pt")
            logits = model(**inputs).logits.numpy()
            return logits[:, 0] if kind == "regression" else logits.argmax(-1)
        case TaggedSentences():
            return tuple(_tags(tokenizer, model, " ".join(words), words) for words in examples.words)
        case Questions():
            given = zip(examples.ids, examples.questions, examples.contexts, strict=True)
            return {name: _answer(tokenizer, model, question, context, threshold) for name, question, context in given}


def _tags(tokenizer: Any, model: Any, text: str, words: tuple[str, ...]) -> tuple[int, ...]:
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    labels = model(**encoded).logits[0].argmax(-1).tolist()
    tags, start = [], 0
    for word in words:
        inside = range(start, start + len(word))
        # The piece that holds the word's first character, or the space before it by itself.
        space = [i for i, (a, b) in enumerate(offsets) if (a, b) == (start - 1, start) and start]
        first = [i for i, (a, b) in enumerate(offsets) if a < b and (a in inside or a < start < b)]
        tags.append(labels[(space + first)[0]])
        start += len(word) + 1
    return tuple(tags)


def _answer(tokenizer: Any, model: Any, question: str, context: str, threshold: float | None) -> str:
    encoded = tokenizer(question, context, return_offsets_mapping=True, return_tensors="pt")
    places = encoded.sequence_ids(0)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    null = encoded["input_ids"][0].tolist().index(tokenizer.cls_token_id)
    output: Mapping[str, torch.Tensor] = model(**encoded)
    start, end = (output[name][0].double().numpy() for name in ("start_logits", "end_logits"))
    inside = [index for index, place in enumerate(places) if place == 1]
    spans = [
        (a, b) for a in inside for b in inside if a <= b < a + 30 and context[offsets[a][0] : offsets[b][1]].strip()
    ]
    best = max(spans, key=lambda span: start[span[0]] + end[span[1]])
    score = start[best[0]] + end[best[1]]
    none = np.float32(output["start_logits"][0, null]) + np.float32(output["end_logits"][0, null])
    if threshold is not None and none - score > threshold:
        return ""
    return context[offsets[best[0]][0] : offsets[best[1]][1]].strip()


def test_training_does_without_cudnns_attention(tmp_path: Path) -> None:
    """Its gradients may be NaN on a Hopper GPU (pytorch#196678, since torch 2.11), where torch prefers it."""
    cuda.enable_cudnn_sdp(True)
    try:
        training_arguments(transformers.TrainingArguments, FinetuneSettings(), seed=1, scratch=tmp_path)
        assert not cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(True)
