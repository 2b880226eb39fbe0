"""Text with masks as a person writes it, as token ids and back: `<mask>` is one token, `<mask:20>` twenty."""

import re
from dataclasses import dataclass

import torch

from data_service.errors import TokenizerError
from data_service.tokenizers.tokenizer import Tokenizer
from encoder_core.batch import Batch

MASK = "<mask>"
_MASKS = re.compile(r"<mask(?::(\d{1,6}))?>")


@dataclass(frozen=True)
class MaskedText:
    """A text as ids, with the special tokens of a row.

    Attributes:
        ids: ids of the row; the mask's where nothing is known.
        masked: ascending places in the row that are masked.
    """

    ids: tuple[int, ...]
    masked: tuple[int, ...]

    def filled(self, ids: dict[int, int]) -> "MaskedText":
        """Return the text with `ids`, by place, at some of its masks."""
        row = list(self.ids)
        for place, token in ids.items():
            row[place] = token
        return MaskedText(tuple(row), tuple(place for place in self.masked if place not in ids))

    def batch(self) -> Batch:
        """Return a batch of this row; its targets are the masks."""
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


def read_masks(text: str, tokenizer: Tokenizer, longest: int) -> MaskedText:
    """Return `text` as ids.

    Raises:
        TokenizerError: there is no mask in it, or the row has more than `longest` tokens.
    """
    special = tokenizer.special
    ids, masked, end = [special.cls], list[int](), 0
    for found in _MASKS.finditer(text):
        # The space before a mask belongs to the masked word; more of it, as before an indented one, is text.
        ids += [int(token) for token in tokenizer.encode(text[end : found.start()].removesuffix(" "))]
        count = int(found[1] or 1)
        masked += range(len(ids), len(ids) + count)
        ids += [special.mask] * count
        end = found.end()
    ids += [*(int(token) for token in tokenizer.encode(text[end:])), special.sep]
    if not masked:
        raise TokenizerError(
            f"{text!r} has no {MASK}", remedy=f"write {MASK} where a token is wanted, or <mask:20>"
        )
    if len(ids) > longest:
        raise TokenizerError(
            f"the text has {len(ids):,} tokens, and the model's rows at most {longest:,}",
            remedy="give a shorter text, or fewer masks",
        )
    return MaskedText(tuple(ids), tuple(masked))
