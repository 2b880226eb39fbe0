"""A graph of every family computes what our network does, on rows of any number and length; a bad one is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints.hf.load import load_pretrained, read_folder_config
from encoder_core.batch import batch_without_targets
from encoder_core.errors import ModelError
from encoder_core.objectives.modules.network import build_network
from launcher.after.export.sentence_transformer import write_sentence_transformer
from launcher.after.onnx.graph import GRAPH_FILE, INT8_GRAPH_FILE, OPSET, write_graph
from launcher.after.onnx.network import open_network
from launcher.after.onnx.parity import (
    OnnxSession,
    RandomBatch,
    ReferenceEncoder,
    check_parity,
    random_batches,
    relative_difference,
)
from launcher.errors import MissingPackage
from launcher.runtime.recipe.objective import RecipeObjective, exported_heads
from launcher.runtime.run.record import open_run
from tests.support.checks.command import exit_code, maskfleet
from tests.support.models.exports import MLM, SERVED, Family, export
from tests.support.runs.starts import BERT, Setting, trained

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

BATCHES, WIDER = 200, 3


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_a_graph_computes_what_our_network_does(name: str, tmp_path: Path) -> None:
    family = SERVED[name]
    export(family, tmp_path)
    folder = tmp_path / family.folders[-1]
    made = write_graph(folder, int8=True)
    session, own, config = (
        OnnxSession(folder / GRAPH_FILE),
        ReferenceEncoder(folder),
        read_folder_config(folder),
    )
    scores = _scores(family, folder) if "logits" in made.outputs else None
    pairs = []
    for sample in random_batches(config, made.inputs, BATCHES, seed=1):
        found = session(sample)
        assert relative_difference(found["last_hidden_state"], own(sample)) < 1e-5
        if sample.token_mask.shape[1] + WIDER <= config.max_length:
            wider = session(_wider(sample, config.pad_id, left=config.class_token_last))
            assert relative_difference(wider["last_hidden_state"], found["last_hidden_state"]) < 1e-5
        if scores is not None:
            wanted = scores(sample)
            pairs.append((found["logits"], wanted))
            assert (found["logits"].argmax(-1) == wanted.argmax(-1)).all()
    if pairs:  # over all samples: the score of one token may be as small as the rounding of its sum
        assert relative_difference(*map(np.concatenate, zip(*pairs, strict=True))) < 1e-5
    assert made.int8_cosine is not None
    assert made.int8_cosine > 0.95
    assert (folder / INT8_GRAPH_FILE).stat().st_size < (folder / GRAPH_FILE).stat().st_size
    assert f"opset {OPSET}" in (folder / "README.md").read_text()


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.long)])
def test_weights_that_several_products_share_are_quantised_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    """All layers of an ALBERT are one layer's weights. Small ones are constants of the exporter's graph anyway.
    `split`: as graphs above 1.9 GB, whose weights lie in a file beside them."""
    if split:
        monkeypatch.setattr("launcher.after.onnx.graph._MAX_FILE_BYTES", 10_000)
    small = SERVED["albert"]
    wider = small.config.model_copy(update={"hidden": 256, "feed_forward": 512})
    export(replace(small, config=wider), tmp_path)
    write_graph(tmp_path, int8=True)
    assert (tmp_path / f"{INT8_GRAPH_FILE}.data").exists() == split
    graph = onnx.load(tmp_path / INT8_GRAPH_FILE).graph
    floats = {one.name for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT and len(one.dims) == 2}
    products = ("MatMul", "Gemm", "Transpose")
    assert not floats & {name for node in graph.node if node.op_type in products for name in node.input}
    assert not list((tmp_path / "onnx").glob("*/")), "nothing temporary is left"


def _scores(family: Family, folder: Path) -> Any:
    """Our head's scores of all tokens, by the encoder's last states: transformers has no enhanced mask decoder."""
    heads = "rtd" if family.objective.rtd else exported_heads(family.config, family.objective)
    pretrained = load_pretrained(folder, heads)
    plain = {"mask_decoder": "plain"} if hasattr(pretrained.config, "mask_decoder") else {}
    model: Any = build_network(pretrained.config.model_copy(update=plain), heads)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(pretrained.tensors[name])
    model.eval()

    @torch.no_grad()
    def scores(sample: RandomBatch) -> np.ndarray[Any, Any]:
        mask = torch.from_numpy(sample.token_mask)
        batch = batch_without_targets(sample.inputs["input_ids"][mask], sample.lengths)
        types, langs = (sample.inputs.get(key) for key in ("token_type_ids", "langs"))
        every = torch.arange(len(batch.tokens))
        batch = replace(
            batch,
            segments=torch.zeros_like(batch.tokens) if types is None else types[mask],
            languages=None if langs is None else langs[mask],
            target_positions=every,
            target_ids=batch.tokens,
        )
        found: np.ndarray[Any, Any] = model.logits(batch).numpy()
        return found

    return scores


def _wider(sample: RandomBatch, pad: int, *, left: bool) -> RandomBatch:
    """The same rows with more padding, of which the model knows nothing."""
    added = {name: torch.zeros(len(sample.lengths), WIDER, dtype=torch.int64) for name in sample.inputs}
    added["input_ids"] += pad
    parts = {name: [added[name], tensor] if left else [tensor, added[name]] for name, tensor in sample.inputs.items()}
    return replace(sample, inputs={name: torch.cat(pair, 1) for name, pair in parts.items()})


@pytest.mark.long
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("cls", False), ("weighted_mean", True)])
def test_a_sentence_transformer_has_its_vectors(tmp_path: Path, pooling: str, normalize: bool) -> None:
    library = pytest.importorskip("sentence_transformers")
    export(SERVED["roberta"], tmp_path)
    write_sentence_transformer(tmp_path, pooling=pooling, normalize=normalize, max_length=24)
    assert write_graph(tmp_path).outputs == ("last_hidden_state", "sentence_embedding")
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    texts = ["one text", "another text that is longer", "x"]
    wanted, given = model.encode(texts), model.tokenizer(texts, padding=True, return_tensors="pt")
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
    lengths = tuple(inputs["attention_mask"].sum(1).tolist())
    found = OnnxSession(tmp_path / GRAPH_FILE)(RandomBatch(inputs, lengths))["sentence_embedding"]
    assert relative_difference(found, wanted) < 1e-5


def test_the_command_adds_a_graph_and_a_changed_one_is_refused(fresh_run: str, tmp_path: Path) -> None:
    run = open_run(fresh_run)
    trained(Setting(run, run.tokenizer()), fresh_run, BERT, RecipeObjective(mlm=MLM))
    out = tmp_path / "out"
    said = maskfleet("checkpoints", "export", fresh_run, "--out", out, "--onnx")
    assert f"opset {OPSET}" in said
    graph = onnx.load(out / GRAPH_FILE)
    assert [one.version for one in graph.opset_import if one.domain == ""] == [OPSET]
    dimensions = graph.graph.input[0].type.tensor_type.shape.dim
    assert [dimension.dim_param for dimension in dimensions] == ["batch", "length"]

    served = open_network(out)
    assert check_parity(out, OnnxSession(out / GRAPH_FILE), served) < 1e-5
    weight = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[len(values.flat) // 2 :] *= 1.01
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(graph, tmp_path / "changed.onnx")
    with pytest.raises(ModelError, match=r"\b(last_hidden_state|logits)\b"):
        check_parity(out, OnnxSession(tmp_path / "changed.onnx"), served)


def test_what_is_missing_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fresh_run: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingPackage, match=r"onnxscript"):
        write_graph(tmp_path)
    assert exit_code("checkpoints", "export", fresh_run, "--out", tmp_path / "out", "--onnx") == 2
    assert "pip install 'maskfleet[onnx]'" in capfd.readouterr().err
    assert exit_code("checkpoints", "export", fresh_run, "--out", tmp_path / "out", "--int8") == 2
    assert "--onnx" in capfd.readouterr().err
