"""What `transformers` puts around one or two texts, per family. Training packs rows itself, without it."""

from typing import assert_never

from tokenizers import AddedToken, processors

from data_service.tokenizers.specials import Layout, SpecialStyle


def post_processor(style: SpecialStyle) -> processors.TemplateProcessing:
    """The template of a family whose special pieces have the ids of `style`."""
    cls, sep = style.names.cls, style.names.sep
    return row_template(style.layout, (cls, style.pieces.index(cls)), (sep, style.pieces.index(sep)))


def row_template(
    layout: Layout, cls_token: tuple[str, int], sep_token: tuple[str, int]
) -> processors.TemplateProcessing:
    """The template of a layout, with the family's token types after the colons; tokens are (piece, id)."""
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


def added_tokens(style: SpecialStyle) -> list[AddedToken]:
    """The special tokens in id order. The mask takes the space before it: "a <mask>" is like "a word"."""
    return [
        AddedToken(piece, special=True, normalized=False, lstrip=piece == style.names.mask)
        for piece in style.pieces
    ]


def role_config(style: SpecialStyle) -> dict[str, object]:
    """The roles as `tokenizer_config.json` names them: {"cls_token": "[CLS]", ...}."""
    return {f"{role}_token": name for role, name in style.names.by_role().items()}
