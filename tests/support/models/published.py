"""Folders as DeBERTa v3 is published: the discriminator alone, both heads beside the encoder, tables of differences."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.hf.folder import WEIGHTS
from encoder_core.families.deberta import DebertaV2Config
from tests.support.models.parity import random_weights

DETECTION = {
    f"{ours}.{kind}": f"mask_predictions.{theirs}.{kind}"
    for ours, theirs in {"dense": "dense", "norm": "LayerNorm", "score": "classifier"}.items()
    for kind in ("weight", "bias")
}
"""The discriminator's head, by our names of it."""
_PREDICTION = ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias", "bias")
LEFT = (
    *(f"lm_predictions.lm_head.{name}" for name in _PREDICTION),
    "deberta.embeddings.position_embeddings._weight",
    "deberta.embeddings.position_embeddings.weight",
    "deberta.embeddings.word_embeddings._weight",
)
"""What a run of the pair does not read."""


def publish(config: DebertaV2Config, folder: Path, *, seed: int = 0, heads: bool = True) -> Any:
    """transformers' model of random weights, in `folder` as version 3's base model is published, in safetensors."""
    from transformers import DebertaV2Config as Theirs
    from transformers import DebertaV2Model

    fields = described(config)
    model = random_weights(DebertaV2Model(Theirs(**fields)), seed=seed).eval()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    state = {f"deberta.{name}": value for name, value in model.state_dict().items()}
    save_file(state | (_heads(config, seed) if heads else {}), folder / "model.safetensors")
    return model


def gather_pair(pair: Path, folder: Path, *, pickled: bool) -> None:
    """Put an exported pair into one folder, as version 3's large model is published: the generator's configuration says
    nothing of its type, and its weights are pickled."""
    shutil.copytree(pair / "discriminator", folder)
    its = json.loads((pair / "generator/config.json").read_text())
    for key in ("model_type", "architectures", "mask_decoder"):
        its.pop(key, None)
    (folder / "generator_config.json").write_text(json.dumps(its))
    torch.save(load_file(pair / "generator/model.safetensors"), folder / "pytorch_model.generator.bin")
    if pickled:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()


def described(config: DebertaV2Config) -> dict[str, Any]:
    """The fields of a published config.json, which says nothing of a generator or a mask decoder."""
    fields: dict[str, Any] = {
        "model_type": "deberta-v2",
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "intermediate_size": config.feed_forward,
        "max_position_embeddings": config.max_length,
        "relative_attention": True,
        "position_buckets": config.buckets,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "layer_norm_eps": 1e-7,
        "max_relative_positions": -1,
        "position_biased_input": False,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "type_vocab_size": 0,
        "vocab_size": config.vocabulary_size,
    }
    return fields | ({"conv_kernel_size": 3, "conv_act": "gelu"} if config.convolution else {})


def _heads(config: DebertaV2Config, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    hidden, vocab = config.hidden, config.vocabulary_size
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys((*DETECTION.values(), *LEFT), (hidden,))
    sizes |= {name: (hidden, hidden) for name in sizes if name.endswith("dense.weight")}
    sizes |= {"mask_predictions.classifier.weight": (1, hidden), "mask_predictions.classifier.bias": (1,)}
    sizes |= {name: (config.max_length, hidden) for name in LEFT if "position_embeddings" in name}
    sizes |= {LEFT[-1]: (vocab, hidden), "lm_predictions.lm_head.bias": (vocab,)}
    return {name: torch.randn(size, generator=generator) * 0.1 for name, size in sizes.items()}


def pickle_weights(folder: Path, *, zipped: bool = True, shards: int = 1) -> dict[str, Tensor]:
    """Replace a folder's safetensors by the pickles of older transformers; the tensors."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    parts = {"pytorch_model.bin" if shards == 1 else f"pytorch_model-{n}.bin": n for n in range(shards)}
    for name, n in parts.items():
        torch.save(dict(list(tensors.items())[n::shards]), folder / name, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        index = {name: f"pytorch_model-{n % shards}.bin" for n, name in enumerate(tensors)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors
