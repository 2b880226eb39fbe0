"""Writes a text whole from one with masks, with an exported encoder and decoder (BART), by transformers' `generate`.

A mask stands for any number of tokens, so nothing of the text is taken over as it is: the encoder reads the text with
its masks, and the decoder writes it from the first token to the last (Lewis et al. 2019, section 2).
"""

from pathlib import Path

import torch

from checkpoints.hf.load import read_folder_config
from data_service.errors import TokenizerError
from data_service.tokenizers.load import load_tokenizer
from encoder_core.errors import ModelError
from launcher.after.fill.masked_text import MASK, read_masks
from launcher.after.finetune.model import load_weights, silenced
from launcher.errors import EVALUATE, optional


class TextWriter:
    """The encoder and decoder in a folder in the transformers format, on the CPU.

    Raises:
        ModelError, TaskMismatch: the folder holds no such model, or not all of it.
        TokenizerError: it has no tokenizer.
        MissingPackage: transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        config = read_folder_config(folder)
        if not config.decodes:
            raise ModelError(f"{folder} has no decoder, which writes text", remedy="give a BART model")
        self._longest = config.max_length
        self._transformers = optional("transformers", "writing a text", EVALUATE)
        with silenced(self._transformers):
            self._model, lacking = load_weights("AutoModelForSeq2SeqLM", folder)
        if lacking:
            raise ModelError(
                f"the weights in {folder} lack {', '.join(lacking[:3])}", remedy="fetch the whole model again"
            )

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
        read = torch.tensor([read_masks(sentence, self._tokenizer, self._longest).ids])
        first = torch.tensor([[special.sep, special.cls]])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            (ids,) = self._model.generate(read, decoder_input_ids=first, generation_config=settings).tolist()
        written = ids[first.shape[1] :]
        return self._tokenizer.decode(written[:-1] if written[-1:] == [special.sep] else written)
