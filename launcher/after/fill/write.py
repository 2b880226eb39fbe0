"""Writes a text whole from one with masks, with an exported encoder and decoder (BART).

A mask stands for any number of tokens, so nothing of the text is taken over as it is: the encoder reads the text with
its masks, and the decoder writes it from the first token to the last (Lewis et al. 2019, section 2), with the keys and
values of those before kept (`encoder_core/layers/incremental.py`).
"""

from pathlib import Path

import numpy as np
import torch

from checkpoints.hf.load import load_pretrained
from data_service.errors import TokenizerError
from data_service.rng import draws64, stream_key
from data_service.tokenizers.load import load_tokenizer
from encoder_core.batch import untargeted
from encoder_core.errors import ModelError
from encoder_core.families.bart import BartConfig
from encoder_core.layers.incremental import IncrementalDecoder
from encoder_core.objectives.denoise import denoising_model
from launcher.after.fill.fill import predict, tied
from launcher.after.fill.masked_text import MASK, read_masks


class TextWriter:
    """The encoder and decoder in a folder in the transformers format, on the CPU.

    Raises:
        ModelError: the folder holds no such model.
        TokenizerError: it has no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        pretrained = load_pretrained(folder, "denoise")
        if not isinstance(pretrained.config, BartConfig):
            raise ModelError(f"{folder} holds no decoder", remedy="give a BART")
        self._longest = pretrained.config.max_length
        self._model = denoising_model(pretrained.config)
        self._model.load_state_dict(pretrained.tensors | tied(pretrained.tensors, self._model), strict=True)
        self._model.eval()

    def write(self, sentence: str, temperature: float = 0.0, seed: int = 0) -> str:
        """Return the text that the decoder writes for `sentence`, which ends with a separator or at the longest row.

        Args:
            sentence: text with at least one mask.
            temperature: temperature at which ids are drawn; 0: the likeliest.
            seed: seed of the draws. Equal arguments give equal text.

        Raises:
            TokenizerError: there is no mask in it, or one of several tokens, or too many tokens.
        """
        if f"{MASK[:-1]}:" in sentence:
            raise TokenizerError(
                f"{sentence!r} says how many tokens a mask stands for, which this model finds itself",
                remedy=f"write {MASK}",
            )
        return self._tokenizer.decode(self._written(sentence, temperature, seed)[1:])

    @torch.no_grad()
    def _written(self, sentence: str, temperature: float, seed: int) -> list[int]:
        """Return the ids that the decoder writes, the first special one included, the last not."""
        special = self._tokenizer.special
        ids_S = torch.tensor(read_masks(sentence, self._tokenizer, self._longest).ids)
        read = untargeted(ids_S, [len(ids_S)])
        decoder = IncrementalDecoder(self._model.decoder, self._model.encoder(read), read)
        never = self._tokenizer.special_mask.copy()
        never[special.sep] = False
        never_V = torch.from_numpy(never.nonzero()[0])
        draws = draws64(stream_key("write", seed), 0, self._longest)
        uniform = torch.from_numpy((draws >> np.uint64(11)) / 2.0**53)
        decoder.step(torch.tensor([special.sep]))  # what it predicts is known
        written = [special.cls]
        while len(written) < self._longest - 1:
            logits_1V = self._model.head.logits(decoder.step(torch.tensor(written[-1:])))
            ids, _ = predict(logits_1V, never_V, temperature, uniform[len(written)][None])
            if int(ids) == special.sep:
                break
            written.append(int(ids))
        return written
