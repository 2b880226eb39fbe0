"""Fills masks in a text with an exported masked language model: `top_candidates` lists the likeliest tokens for one
mask, and `fill` fills all masks, the most confident predictions first.

Filling all masks is the reverse process of masked diffusion (Nie et al. 2025, LLaDA, arXiv 2502.09992, section 2.4): in
each step all masked tokens are predicted, the most confident predictions stay, and the others are masked again. It
works with any masked language model; only a model trained by masked diffusion has seen rows with many masks.

A BART's mask stands for any number of tokens. Its encoder reads the text with the masks, and its decoder writes the
whole text, from the first token to the last, by transformers' `generate` (Lewis et al. 2019, 2).
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from checkpoints.hf.load import load_pretrained, read_folder_config
from data_service.errors import TokenizerError
from data_service.rng import draw_uint64, stream_key
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.objectives.modules.network import masked_language_model
from launcher.after.finetune.model import load_weights, silence_transformers
from launcher.errors import EVALUATE_EXTRA, import_optional

MASK = "<mask>"  # how a user writes a mask, whatever the tokenizer calls it
_MASK_PATTERN = re.compile(r"<mask(?::(\d{1,6}))?>")  # `<mask:N>` stands for N masked tokens


@dataclass(frozen=True)
class MaskedText:
    """A text as a row of token ids, with the special tokens of a row.

    Attributes:
        ids: ids of the row, with the mask's id at unfilled masks.
        masked: ascending positions of the unfilled masks in the row.
    """

    ids: tuple[int, ...]
    masked: tuple[int, ...]

    def fill_positions(self, ids_by_position: dict[int, int]) -> "MaskedText":
        """Return the text with some of its masks filled. `ids_by_position`: token ids by position in the row."""
        row = list(self.ids)
        for place, token in ids_by_position.items():
            row[place] = token
        return MaskedText(tuple(row), tuple(place for place in self.masked if place not in ids_by_position))

    def to_batch(self) -> Batch:
        """Return a batch of this row, whose targets are the unfilled masks."""
        tokens = torch.tensor(self.ids)
        return Batch(
            tokens=tokens,
            cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
            max_length=len(tokens),
            positions=torch.arange(len(tokens)),
            target_positions=torch.tensor(self.masked, dtype=torch.int64),
            target_ids=tokens[list(self.masked)],
        )

    def text(self, tokenizer: Tokenizer) -> str:
        """Return the text, without the special tokens at the row's ends."""
        return tokenizer.decode(list(self.ids[1:-1]))


def encode_masked_text(text: str, tokenizer: Tokenizer, max_tokens: int) -> MaskedText:
    """Return `text` as a row of ids. `<mask:N>` in the text becomes N masks.

    Raises:
        TokenizerError: `text` has no mask, or the row has more than `max_tokens` tokens.
    """
    special = tokenizer.special
    ids, masked, end = [special.cls], list[int](), 0
    for found in _MASK_PATTERN.finditer(text):
        # One space before a mask belongs to the masked word; further spaces, such as an indent, are text.
        ids += [int(token) for token in tokenizer.encode(text[end : found.start()].removesuffix(" "))]
        count = int(found[1] or 1)
        masked += range(len(ids), len(ids) + count)
        ids += [special.mask] * count
        end = found.end()
    ids += [*(int(token) for token in tokenizer.encode(text[end:])), special.sep]
    if not masked:
        raise TokenizerError(f"{text!r} has no {MASK}", remedy=f"write {MASK} for one token, <mask:20> for 20")
    if len(ids) > max_tokens:
        raise TokenizerError(
            f"the text has {len(ids):,} tokens, but the model's rows have at most {max_tokens:,}",
            remedy="give a shorter text, or fewer masks",
        )
    return MaskedText(tuple(ids), tuple(masked))


@dataclass(frozen=True)
class MaskCandidate:
    """A token that may fill the mask, as text, and its probability among all tokens."""

    text: str
    probability: float


class MaskFiller:
    """The masked language model in a folder in the transformers format, on the CPU.

    Attributes:
        max_tokens: largest number of tokens of a text, including the special tokens at its ends.

    Raises:
        ModelError: the folder holds no model, or a model that does not predict masked tokens.
        TokenizerError: the folder holds no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        pretrained = load_pretrained(folder)
        self.max_tokens = pretrained.config.max_length
        self._model = masked_language_model(pretrained.config)
        self._model.load_state_dict(pretrained.tensors | _tied_tensors(pretrained.tensors, self._model), strict=True)
        self._model.eval()

    def top_candidates(self, sentence: str, count: int) -> list[MaskCandidate]:
        """Return the `count` likeliest tokens (at most the whole vocabulary) for the one mask in `sentence`. Raises
        TokenizerError if `sentence` does not have exactly one mask."""
        text = encode_masked_text(sentence, self._tokenizer, self.max_tokens) if MASK in sentence else None
        if text is None or len(text.masked) != 1:
            raise TokenizerError(f"{sentence!r} does not have exactly one {MASK}", remedy=f"write {MASK} once")
        (logits_V,) = self._logits(text)
        best = torch.topk(logits_V.softmax(-1), min(count, len(logits_V)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [MaskCandidate(self._tokenizer.decode([token]), probability) for token, probability in pairs]

    def fill(self, sentence: str, *, steps: int | None = None, temperature: float = 0.0, seed: int = 0) -> str:
        """Return `sentence` with all masks filled. Equal arguments give equal text.

        Args:
            sentence: text with masks.
            steps: number of forward passes, each of which fills about the same number of masks, and at least one mask;
                None: each fills one mask.
            temperature: temperature at which ids are drawn; 0: the likeliest.
            seed: seed of the draws.

        Raises TokenizerError as `encode_masked_text`.
        """
        text = encode_masked_text(sentence, self._tokenizer, self.max_tokens)
        steps = min(steps or len(text.masked), len(text.masked))
        total, never = len(text.masked), torch.from_numpy(self._tokenizer.special_mask.nonzero()[0])
        for step in range(steps):
            keep = total // steps + (step < total % steps)
            draws = draw_uint64(stream_key("unmask", seed, step), 0, len(text.ids))
            draws_M = torch.from_numpy((draws[list(text.masked)] >> np.uint64(11)) / 2.0**53)
            ids_M, confidence_M = predict_masks(self._logits(text), never, temperature, draws_M)
            surest = torch.sort(confidence_M, descending=True, stable=True).indices[:keep].tolist()
            text = text.fill_positions({text.masked[mask]: int(ids_M[mask]) for mask in surest})
        return text.text(self._tokenizer)

    @torch.no_grad()
    def _logits(self, text: MaskedText) -> Float[Tensor, "masks vocab"]:
        return self._model.logits(text.to_batch())


def predict_masks(
    logits_MV: Float[Tensor, "masks vocab"],
    excluded_ids: Int[Tensor, " special"],
    temperature: float,
    uniform_M: Float[Tensor, " masks"],
) -> tuple[Int[Tensor, " masks"], Float[Tensor, " masks"]]:
    """Return an id for each mask, and its probability at temperature 1, in fp64.

    Args:
        logits_MV: scores of all ids.
        excluded_ids: ids that are not predicted.
        temperature: 0: the likeliest id; else an id is drawn from softmax(logits / temperature), by inversion.
        uniform_M: uniform numbers from 0 to 1, fp64.
    """
    scores_MV = logits_MV.double().index_fill(1, excluded_ids, float("-inf"))
    if temperature > 0:
        cumulated_MV = (scores_MV / temperature).softmax(-1).cumsum(-1)
        wanted_M1 = uniform_M[:, None] * cumulated_MV[:, -1:]
        ids_M = torch.searchsorted(cumulated_MV, wanted_M1, right=True)[:, 0].clamp(max=logits_MV.shape[1] - 1)
    else:
        ids_M = scores_MV.argmax(-1)
    return ids_M, scores_MV.softmax(-1).gather(1, ids_M[:, None])[:, 0]


def _tied_tensors(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the parameters that `tensors` lacks because they are tied to a parameter that it has."""
    stored = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: stored[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: tensors[first] for name, first in names.items() if name not in tensors}


class TextWriter:
    """The encoder and decoder (BART) in a folder in the transformers format, on the CPU.

    Raises:
        ModelError, TaskMismatch: the folder holds no such model, or some of its weights are missing.
        TokenizerError: the folder holds no tokenizer.
        MissingPackage: transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        config = read_folder_config(folder)
        if not config.has_decoder:
            raise ModelError(f"{folder} has no decoder to write a text", remedy="give a BART model")
        self._longest = config.max_length
        self._transformers = import_optional("transformers", "writing a text", EVALUATE_EXTRA)
        with silence_transformers():
            self._model, lacking = load_weights("AutoModelForSeq2SeqLM", folder)
        if lacking:
            raise ModelError(
                f"the weights in {folder} lack {', '.join(lacking[:3])}", remedy="fetch the whole model again"
            )

    def write(self, sentence: str, temperature: float = 0.0, seed: int = 0) -> str:
        """Return the text that the decoder writes for `sentence`, up to a separator or the model's longest row.

        Args:
            sentence: text with at least one mask.
            temperature: temperature at which ids are drawn; 0: the likeliest.
            seed: seed of the draws. Equal arguments give equal text.

        Raises:
            TokenizerError: `sentence` has no mask, a mask of several tokens (`<mask:N>`), or too many tokens.
        """
        if f"{MASK[:-1]}:" in sentence:
            raise TokenizerError(
                f"{sentence!r} gives a mask's number of tokens, but this model chooses that number itself",
                remedy=f"write {MASK}",
            )
        special = self._tokenizer.special
        never = set(self._tokenizer.special_mask.nonzero()[0].tolist()) - {special.sep}
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
        settings = self._transformers.GenerationConfig(
            max_length=self._longest,
            suppress_tokens=sorted(never),
            eos_token_id=special.sep,
            pad_token_id=special.pad,
            **drawn,
        )
        read = torch.tensor([encode_masked_text(sentence, self._tokenizer, self._longest).ids])
        first = torch.tensor([[special.sep, special.cls]])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            (ids,) = self._model.generate(read, decoder_input_ids=first, generation_config=settings).tolist()
        written = ids[first.shape[1] :]
        return self._tokenizer.decode(written[:-1] if written[-1:] == [special.sep] else written)
