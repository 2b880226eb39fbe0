"""`Tokenizer` turns text into ids and back, with the same ids that `transformers` gives for the same files.

Tokenizers of every kind run in the `tokenizers` library from one definition, the text of a `tokenizer.json`.
SentencePiece models are converted to it when they are trained or loaded, so there is only one code path.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_service.errors import TokenizerError
from data_service.tokenizers.files import DEFINITION_FILE, Definition, companion_files, library_errors, parse_definition
from data_service.tokenizers.specials import END_OF_DOCUMENT_TOKEN, SpecialIds, SpecialNames, resolve_names
from data_service.tokenizers.words import RULES_VERSION, word_start_table
from data_service.types import Tokens

_ENCODING_FAILURE = "it cannot encode a text"  # what an error of the library while encoding means
_UNUSED_CHARACTER = "\U0010fffe"  # noncharacter code point that no vocabulary contains

Kind = Literal["byte_bpe", "wordpiece", "unigram", "bpe", "wordlevel"]


@dataclass(frozen=True, eq=False)
class PlacedTokens:
    """The n tokens of a text with their character ranges in it.

    Attributes:
        ids: [n] uint16 or uint32.
        starts, ends: [n] int64, each token's first character, and the one after its last. Starts never decrease. Tokens
            that spell one character together have the same range.
        by_word: whether each token has the range of the word that it is in, without the space before the word.
    """

    ids: Tokens
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    by_word: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def equals(self, other: "PlacedTokens") -> bool:
        """Return whether both have the same ids with the same character ranges."""
        return all(map(np.array_equal, self.columns, other.columns))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """The arrays `ids`, `starts` and `ends`."""
        return (self.ids, self.starts, self.ends)

    def slice_tokens(self, first: int, stop: int) -> "PlacedTokens":
        """Return tokens `first` to `stop` - 1."""
        return PlacedTokens(self.ids[first:stop], self.starts[first:stop], self.ends[first:stop])

    def shift_characters(self, characters: int) -> "PlacedTokens":
        """Return the same tokens with all ranges moved right by `characters`."""
        return PlacedTokens(self.ids, self.starts + characters, self.ends + characters)

    @staticmethod
    def concatenate(parts: Sequence["PlacedTokens"]) -> "PlacedTokens":
        """Return the tokens of all `parts` (at least one) in order."""
        ids, starts, ends = zip(*(part.columns for part in parts), strict=True)
        return PlacedTokens(np.concatenate(ids), np.concatenate(starts), np.concatenate(ends))


class Tokenizer:
    """An immutable tokenizer. It is pickled as its definition, so it can be sent to Ray workers.

    Attributes:
        kind: byte_bpe (GPT-2's and RoBERTa's), wordpiece (BERT's), unigram or bpe (SentencePiece's), wordlevel (a list
            of words, as for molecules and proteins).
        special: ids of the special tokens, by role.
        names: text of the special tokens, by role.
        pieces: every piece by id; the empty string for an unused id.
        id_dtype: dtype of ids: uint16, or uint32 if there are more than 65,536.
        hash: sha256 (hex) of the canonical definition and the roles. Tokenizers with equal hashes give equal ids.
    """

    def __init__(
        self,
        definition: str,
        configured: Mapping[str, object] | None = None,
        *,
        model_files: Mapping[str, bytes] | None = None,
        where: str = "tokenizer.json",
    ) -> None:
        """Build the tokenizer from a `tokenizer.json`.

        Args:
            definition: text of a `tokenizer.json`.
            configured: special tokens under the names of `tokenizer_config.json` (`cls_token`, ...).
            model_files: contents of further files to save with the tokenizer, such as a SentencePiece model, by
                name.
            where: name of this tokenizer in errors, such as its URI.

        Raises:
            TokenizerError: the definition cannot be read, is of an unknown kind, or lacks one of the special tokens.
        """
        # A definition may ask for truncation, which would silently cut documents, and for padding, which adds tokens.
        self._definition = parse_definition(definition, where) | {"truncation": None, "padding": None}
        self._where = where
        self._text = json.dumps(self._definition, ensure_ascii=False)
        with library_errors(where):
            self._codec = tokenizers.Tokenizer.from_str(self._text)
        self.kind: Kind = _detect_kind(self._codec, self._definition, where)
        vocabulary = self._codec.get_vocab(with_added_tokens=True)
        self.pieces = _pieces_by_id(vocabulary)
        self.names: SpecialNames = resolve_names(vocabulary, configured or {}, where=where)
        roles = {role: vocabulary[name] for role, name in self.names.by_role().items()}
        self.special = SpecialIds(**roles, eod=vocabulary.get(END_OF_DOCUMENT_TOKEN))
        self._model_files = dict(model_files or {})
        self.id_dtype: np.dtype[Any] = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        with library_errors(where):
            self._encoder = self._text_only_encoder()
        self.encode(_UNUSED_CHARACTER)  # raises if the model has no unknown token

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(Tokenizer, model_files=self._model_files), (self._text, self.names.by_token_key()))

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special tokens: the highest id plus one."""
        return len(self.pieces)

    @cached_property
    def hash(self) -> str:
        content = {"definition": self._definition, "roles": self.names.by_role()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def special_mask(self) -> NDArray[np.bool_]:
        """[vocab_size] bool: which ids are special tokens; these are never masked and never random replacements."""
        mask = np.zeros(self.vocab_size, dtype=np.bool_)
        mask[list(self._special_ids())] = True
        mask.flags.writeable = False
        return mask

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        """[vocab_size] bool: which pieces begin a word, by the rules in `data_service.tokenizers.words`."""
        return self.word_starts_by(RULES_VERSION)

    def word_starts_by(self, rules_version: int) -> NDArray[np.bool_]:
        """Return which pieces begin a word by version `rules_version` of the rules. A corpus keeps the version of its
        build."""
        return word_start_table(self.kind, self.pieces, self.special_mask, rules_version)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, without special tokens: [n] uint16, or uint32 if there are more than 65,536 ids.

        The name of a special token inside a text ("<mask>" in a page about language models) is text like any other, so
        `cls`, `sep`, `pad` and `mask` never occur in the result. Encoding uses all cores unless the environment
        variable TOKENIZERS_PARALLELISM is "false".
        """
        with library_errors(self._where, _ENCODING_FAILURE):
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.id_dtype) for encoding in encodings]

    def encode_placed(self, texts: Sequence[str], place_by_word: bool = False) -> list["PlacedTokens"]:
        """Return the tokens of each text, as `encode_batch` gives them, with their character ranges.

        `place_by_word` is ignored; it exists because `quick.TextEncoder` has the same interface.
        """
        with library_errors(self._where, _ENCODING_FAILURE):
            encodings = self._encoder.encode_batch(list(texts), add_special_tokens=False)
        return [self._to_placed_tokens(encoding) for encoding in encodings]

    def _to_placed_tokens(self, encoding: tokenizers.Encoding) -> "PlacedTokens":
        places = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64, count=2 * len(encoding))
        starts, ends = places.reshape(-1, 2).T
        ids = np.array(encoding.ids, dtype=self.id_dtype)
        # Normalization may reorder combining marks, so that a token begins before the previous one.
        return PlacedTokens(ids, np.maximum.accumulate(starts), ends)

    @property
    def text_definition(self) -> str:
        """A `tokenizer.json` for libraries that can encode special tokens in a text as plain text: in it, only `cls`,
        `sep`, `pad`, `mask` and `<eod>` are special."""
        return str(self._encoder.to_str())

    def normalize(self, text: str) -> str:
        """Return the normalized text, before it is split into words."""
        normalizer = self._encoder.normalizer
        with library_errors(self._where, _ENCODING_FAILURE):
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode(self, text: str) -> Tokens:
        """Return the ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Return the text of `ids`. Special tokens become their names, such as "[CLS]"."""
        return str(self._codec.decode([int(i) for i in ids], skip_special_tokens=False))

    def piece(self, token_id: int) -> str:
        """Return the piece of one id, such as "Ġthe" or "##ing"."""
        return self.pieces[token_id]

    def save_files(self) -> dict[str, bytes]:
        """Return the contents, by name, of the files that `transformers.AutoTokenizer` and `load_tokenizer` read."""
        return dict(self._files)

    @cached_property
    def _files(self) -> dict[str, bytes]:
        written = {DEFINITION_FILE: f"{self._text}\n".encode()}
        return written | companion_files(self._definition, self.pieces, self.names) | self._model_files

    def _special_ids(self) -> set[int]:
        added = self._codec.get_added_tokens_decoder()
        roles = (self.special.cls, self.special.sep, self.special.pad, self.special.mask, self.special.unk)
        return {i for i, token in added.items() if token.special} | set(roles)

    def _text_only_encoder(self) -> tokenizers.Tokenizer:
        """Return an encoder that treats the names of `cls`, `sep`, `pad`, `mask` and `<eod>` in a text as plain text.

        Other special tokens, such as `@user`, get their ids, as in `transformers`.
        """
        special = self.special
        protected = {special.cls, special.sep, special.pad, special.mask, special.eod}
        added = [token | {"special": token["id"] in protected} for token in self._definition.get("added_tokens") or []]
        model = self._definition["model"]
        if self.kind in ("unigram", "wordlevel", "wordpiece"):
            # These kinds match text against the whole vocabulary, "[CLS]" included, so protected tokens are renamed to
            # strings that no text contains. They are not deleted, because the library numbers added tokens in order.
            names = {self.pieces[i]: f"\uffff{i}\uffff" for i in protected if i is not None}
            vocab = model["vocab"]
            renamed: object = (
                [[names.get(piece, piece), score] for piece, score in vocab]
                if self.kind == "unigram"
                else {names.get(piece, piece): i for piece, i in vocab.items()}
            )
            unknown = model.get("unk_token")
            model = model | {"vocab": renamed} | ({"unk_token": names.get(unknown, unknown)} if unknown else {})
            added = [token | {"content": names.get(token["content"], token["content"])} for token in added]
        changed = {"added_tokens": added, "model": model, "post_processor": None}
        encoder = tokenizers.Tokenizer.from_str(json.dumps(self._definition | changed))
        encoder.encode_special_tokens = True
        return encoder


def _detect_kind(codec: tokenizers.Tokenizer, definition: Definition, where: str) -> Kind:
    match type(codec.model).__name__:
        case "WordPiece":
            return "wordpiece"
        case "WordLevel":
            return "wordlevel"
        case "Unigram":
            return "unigram"
        case "BPE":
            # A ByteLevel pre-tokenizer may be nested in a sequence, so its name is looked for in the JSON text.
            return "byte_bpe" if '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")) else "bpe"
        case other:
            raise TokenizerError(
                f"{where} is a tokenizer of the kind {other}, which is not supported",
                remedy="use byte-level BPE, WordPiece, WordLevel, or a SentencePiece unigram or BPE tokenizer",
            )


def _pieces_by_id(vocabulary: Mapping[str, int]) -> tuple[str, ...]:
    pieces = [""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        pieces[token_id] = piece
    return tuple(pieces)
