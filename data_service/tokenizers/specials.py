"""Special tokens by role (cls, sep, pad, mask, unk); their names, order and layout in each model family; and the
templates with which `transformers` puts them around one or two texts. Training packs rows itself, without templates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, assert_never

from tokenizers import AddedToken, processors

from data_service.errors import TokenizerError

Style = Literal["roberta", "bert", "albert", "xlnet", "deberta"]
TemplateLayout = Literal["bert", "roberta", "xlnet"]


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the special tokens, by role. RoBERTa's `<s>` and `</s>` are `cls` and `sep`.

    `eod`: id of `<eod>`, which ends a document inside a row (XLNet); None if the vocabulary lacks it.
    """

    cls: int
    sep: int
    pad: int
    mask: int
    unk: int
    eod: int | None = None


@dataclass(frozen=True)
class SpecialNames:
    """The special tokens as text, by role."""

    cls: str
    sep: str
    pad: str
    mask: str
    unk: str

    def by_role(self) -> dict[str, str]:
        """Return {"cls": "[CLS]", ...}, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def by_token_key(self) -> dict[str, str]:
        """Return {"cls_token": "[CLS]", ...}, with the keys of `tokenizer_config.json`."""
        return {f"{role}_token": name for role, name in self.by_role().items()}


@dataclass(frozen=True)
class SpecialStyle:
    """The special tokens of a model family.

    Attributes:
        pieces: special tokens in the order of their ids, from 0.
        names: special tokens by role.
        layout: special tokens that `transformers` puts around one or two texts: bert `[CLS] a [SEP] b [SEP]`, roberta
            `<s> a </s></s> b </s>`, xlnet `a <sep> b <sep> <cls>`.
    """

    pieces: tuple[str, ...]
    names: SpecialNames
    layout: TemplateLayout


_BERT_NAMES = SpecialNames(cls="[CLS]", sep="[SEP]", pad="[PAD]", mask="[MASK]", unk="[UNK]")
_ALBERT_NAMES = SpecialNames(cls="[CLS]", sep="[SEP]", pad="<pad>", mask="[MASK]", unk="<unk>")
_ROBERTA_NAMES = SpecialNames(cls="<s>", sep="</s>", pad="<pad>", mask="<mask>", unk="<unk>")
_XLNET_NAMES = SpecialNames(cls="<cls>", sep="<sep>", pad="<pad>", mask="<mask>", unk="<unk>")

STYLES: Mapping[Style, SpecialStyle] = {
    "roberta": SpecialStyle(("<s>", "<pad>", "</s>", "<unk>", "<mask>"), _ROBERTA_NAMES, "roberta"),
    "bert": SpecialStyle(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), _BERT_NAMES, "bert"),
    "albert": SpecialStyle(("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), _ALBERT_NAMES, "bert"),
    "deberta": SpecialStyle(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"), _BERT_NAMES, "bert"),
    "xlnet": SpecialStyle(
        ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"), _XLNET_NAMES, "xlnet"
    ),
}

END_OF_DOCUMENT_TOKEN = "<eod>"

# Tokens to look for in a vocabulary, in this order, if the configuration does not name the token of a role.
_KNOWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}


def resolve_names(
    vocabulary: Mapping[str, int], configured_tokens: Mapping[str, object], *, where: str
) -> SpecialNames:
    """Return the special token of each role: the configured one (`cls_token`, ...), else a usual one in the vocabulary.

    Raises:
        TokenizerError: a role has no token, or its configured token is not in the vocabulary.
    """
    return SpecialNames(
        **{
            role: _resolve_special_name(role, vocabulary, configured_tokens.get(f"{role}_token"), where)
            for role in _KNOWN_NAMES
        }
    )


def token_name(configured: object) -> str | None:
    """Return the token text of a setting, which is text or an object with `content`; None if it is neither."""
    name = configured.get("content") if isinstance(configured, Mapping) else configured
    return name if isinstance(name, str) else None


def _resolve_special_name(role: str, vocabulary: Mapping[str, int], configured: object, where: str) -> str:
    name = token_name(configured)
    if name is not None:
        if name not in vocabulary:
            raise TokenizerError(
                f"{where}: {role}_token is {name!r}, which is not in the vocabulary",
                remedy="correct tokenizer_config.json, or add the token to the vocabulary",
            )
        return name
    found = find_known_name(role, vocabulary)
    if found is None:
        raise TokenizerError(
            f"{where}: no {role} token: {role}_token is not configured and none of "
            f"{', '.join(_KNOWN_NAMES[role])} is in the vocabulary",
            remedy=f"name it as {role}_token in tokenizer_config.json, or add missing tokens with `maskfleet "
            f"tokenizer extend --specials`: masked training needs all of {', '.join(_KNOWN_NAMES)}",
        )
    return found


def find_known_name(role: str, vocabulary: Mapping[str, int]) -> str | None:
    """Return the first usual token of a role that is in the vocabulary; None if none is."""
    return next((known for known in _KNOWN_NAMES[role] if known in vocabulary), None)


def post_processor(style: SpecialStyle) -> processors.TemplateProcessing:
    """Return the template of special tokens for a vocabulary that begins with the special tokens of `style`."""
    cls, sep = style.names.cls, style.names.sep
    return row_template(style.layout, (cls, style.pieces.index(cls)), (sep, style.pieces.index(sep)))


def row_template(
    layout: TemplateLayout, cls_token: tuple[str, int], sep_token: tuple[str, int]
) -> processors.TemplateProcessing:
    """Return the template of a layout, with its token types. `cls_token` and `sep_token`: (text, id)."""
    cls, sep = cls_token[0], sep_token[0]
    match layout:
        case "bert":
            single, pair = f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"
        case "roberta":
            single, pair = f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0"
        case "xlnet":
            single, pair = f"$A:0 {sep}:0 {cls}:2", f"$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2"
        case _ as never:
            assert_never(never)
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[cls_token, sep_token])


def added_token(piece: str, *, special: bool = True, lstrip: bool = False) -> AddedToken:
    """Return a token that is matched in text before normalization. `lstrip`: whether it absorbs spaces before it."""
    return AddedToken(piece, special=special, normalized=False, lstrip=lstrip)


def added_tokens(style: SpecialStyle) -> list[AddedToken]:
    """Return the special tokens in id order. The mask token absorbs a space before it: "a <mask>" is like "a word"."""
    return [added_token(piece, lstrip=piece == style.names.mask) for piece in style.pieces]
