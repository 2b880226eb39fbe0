"""Converts a SentencePiece model to a tokenizer of the `tokenizers` library that gives the same ids.

SentencePiece (Kudo & Richardson 2018) applies its character map to a text, trims and collapses spaces, puts a space
mark before each word, and then finds a Viterbi path over piece scores (unigram) or merges pieces in score order
(BPE).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from data_service.errors import TokenizerError
from data_service.tokenizers.specials import added_token
from data_service.tokenizers.words import SPACE_MARK

if TYPE_CHECKING:  # imported at run time only to parse a model; most folders hold a tokenizer.json
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

_UNIGRAM_TYPE, _BPE_TYPE = 1, 2  # TrainerSpec.ModelType
_NORMAL_PIECE, _CONTROL_PIECE, _USER_PIECE = 1, 3, 4  # ModelProto.SentencePiece.Type


def parse_model(model: bytes, where: str) -> "ModelProto":
    """Return the parsed .model file. Raises TokenizerError: it is not a SentencePiece model of type unigram or BPE."""
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    proto = ModelProto()
    try:
        proto.ParseFromString(model)
    except DecodeError as error:
        raise TokenizerError(
            f"{where}: not a SentencePiece model: {error}",
            remedy="give the .model file that SentencePiece wrote",
        ) from error
    if not proto.pieces or proto.trainer_spec.model_type not in (_UNIGRAM_TYPE, _BPE_TYPE):
        raise TokenizerError(
            f"{where}: not a unigram or BPE SentencePiece model ({len(proto.pieces)} pieces)",
            remedy="train the model with model_type unigram or bpe",
        )
    return proto


def append_pieces(proto: "ModelProto", scored_pieces: Iterable[tuple[str, float]]) -> bytes:
    """Return the bytes of the .model file of `proto` with these (piece, score) pairs appended as ordinary pieces."""
    extended = type(proto)()
    extended.CopyFrom(proto)
    for piece, score in scored_pieces:
        extended.pieces.add(piece=piece, score=score, type=_NORMAL_PIECE)
    extended.trainer_spec.vocab_size = len(extended.pieces)
    content: bytes = extended.SerializeToString(deterministic=True)
    return content


def convert_model(
    proto: "ModelProto", mask: str | None, character_normalizer: normalizers.Normalizer | None = None
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a parsed model.

    `mask`: mask token, which absorbs a space before it; None: there is none. `character_normalizer`: normalizer to use
    instead of the model's character map; None: the character map.
    """
    tokenizer = tokenizers.Tokenizer(piece_model(proto, byte_fallback=proto.trainer_spec.byte_fallback))
    tokenizer.normalizer = _normalizer(proto, character_normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE_MARK, prepend_scheme=_space_prefix(proto), split=True
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Metaspace(replacement=SPACE_MARK, prepend_scheme=_space_prefix(proto)),
            decoders.Fuse(),
        ]
    )
    tokenizer.add_tokens(
        [added_token(piece.piece, special=False) for piece in proto.pieces if piece.type == _USER_PIECE]
    )
    controls = [piece.piece for piece in proto.pieces if piece.type == _CONTROL_PIECE]
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    tokenizer.add_special_tokens([added_token(name, lstrip=name == mask) for name in [unknown, *controls]])
    return tokenizer


def pieces_matched_first(proto: "ModelProto") -> list[AddedToken]:
    """Return the tokens that are matched in text before all other pieces: control pieces, which are special tokens, and
    user-defined symbols."""
    return [
        added_token(piece.piece, special=piece.type == _CONTROL_PIECE)
        for piece in proto.pieces
        if piece.type in (_CONTROL_PIECE, _USER_PIECE)
    ]


def piece_model(proto: "ModelProto", *, byte_fallback: bool) -> models.Unigram | models.BPE:
    """Return the unigram or BPE model of the pieces. `byte_fallback`: whether unknown characters become byte pieces."""
    if proto.trainer_spec.model_type == _UNIGRAM_TYPE:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scored, unk_id=proto.trainer_spec.unk_id, byte_fallback=byte_fallback)
    return models.BPE(
        {piece.piece: i for i, piece in enumerate(proto.pieces)},
        _ranked_merges(proto),
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _ranked_merges(proto: "ModelProto") -> list[tuple[str, str]]:
    """Return every pair of pieces whose concatenation is a piece, in order of that piece's score, best first."""
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == _NORMAL_PIECE}
    ranked = sorted(ids, key=lambda piece: (-proto.pieces[ids[piece]].score, ids[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]


def _normalizer(proto: "ModelProto", mapping: normalizers.Normalizer | None) -> normalizers.Sequence:
    steps: list[normalizers.Normalizer] = [] if mapping is None else [mapping]
    if mapping is None and proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if proto.normalizer_spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def _space_prefix(proto: "ModelProto") -> str:
    return "always" if proto.normalizer_spec.add_dummy_prefix else "never"
