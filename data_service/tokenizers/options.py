"""How a tokenizer is trained."""

from pydantic import BaseModel, ConfigDict, Field

from data_service.tokenizers.specials import STYLES, SpecialStyle, Style
from data_service.tokenizers.tokenizer import Kind

_DEFAULT_STYLE: dict[Kind, Style] = {
    "byte_bpe": "roberta",
    "wordpiece": "bert",
    "unigram": "albert",
    "bpe": "albert",
}


class TokenizerOptions(BaseModel):
    """Settings of `train_tokenizer`. The kinds that use a setting are named in brackets.

    Attributes:
        specials: special tokens as a family has them; None for the kind's usual: roberta for byte_bpe,
            bert for wordpiece, albert for unigram and bpe.
        lowercase: fold case (wordpiece: and strip accents, as BERT's uncased models do). Refused by
            byte_bpe, which keeps every byte.
        min_frequency: pairs seen less often are not merged (byte_bpe, wordpiece).
        alphabet: the most frequent characters kept; rarer ones become the unknown token (wordpiece).
        coverage: share of characters, by frequency, that get a piece of their own (unigram, bpe).
        byte_fallback: spell what is not covered in 256 byte pieces, not as the unknown token (unigram, bpe).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    specials: Style | None = None
    lowercase: bool = False
    min_frequency: int = Field(default=2, ge=1)
    alphabet: int = Field(default=1000, ge=1)
    coverage: float = Field(default=0.9995, gt=0.9, le=1.0)
    byte_fallback: bool = True

    def style(self, kind: Kind) -> SpecialStyle:
        """The special tokens to use for `kind`."""
        return STYLES[self.specials or _DEFAULT_STYLE[kind]]
