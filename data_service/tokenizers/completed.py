"""A decoder's tokenizer with the special tokens that an encoder needs.

A decoder's vocabulary (Llama's, say) has a token that begins a text and one that ends it, and often neither a mask nor
padding. Both are appended here, so every id that the decoder knows stays. What begins and ends a text encloses rows.
"""

from collections.abc import Mapping

import tokenizers
from tokenizers import AddedToken

from data_service.errors import TokenizerError
from data_service.store.open import open_store
from data_service.tokenizers.files import TokenizerRules, library_errors
from data_service.tokenizers.load import choose_definition, configured_special_tokens, from_files, read_files
from data_service.tokenizers.specials import find_known_name, row_template, token_name
from data_service.tokenizers.tokenizer import Tokenizer

_ENCLOSING_ROLE_KEYS = {"cls": "bos_token", "sep": "eos_token"}
_APPENDED_TOKENS = {"unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}


def load_with_all_special_tokens(uri: str, rules: TokenizerRules = "file") -> Tokenizer:
    """Return the tokenizer in a folder, with special tokens appended if it lacks some. Raises as
    `load_tokenizer`, and TokenizerError if nothing says what begins and ends a text.
    """
    store = open_store(uri)
    return complete_from_files(read_files(store), where=store.uri, rules=rules)


def complete_from_files(
    files: Mapping[str, bytes], *, where: str = "tokenizer", rules: TokenizerRules = "file"
) -> Tokenizer:
    """Return the tokenizer that is described by file contents, with special tokens appended if it lacks some.

    A tokenizer that lacks none is that of `from_files`. Else [UNK], [PAD] and [MASK] follow the last id, those that are
    missing, in this order; cls and sep are the configured `bos_token` and `eos_token`; and a row is cls, text, sep.

    Raises:
        TokenizerError: as `from_files`, or nothing says what begins and ends a text.
    """
    text, configured = choose_definition(files, where, rules), configured_special_tokens(files, where)
    with library_errors(where):
        codec = tokenizers.Tokenizer.from_str(text)
    vocabulary = codec.get_vocab(with_added_tokens=True)
    roles = {
        role: _special_token_name(role, vocabulary, configured) for role in (*_ENCLOSING_ROLE_KEYS, *_APPENDED_TOKENS)
    }
    if None not in roles.values():
        return from_files(files, where=where, rules=rules)
    for role, key in _ENCLOSING_ROLE_KEYS.items():
        roles[role] = roles[role] or token_name(configured.get(key))
        if roles[role] not in vocabulary:
            raise TokenizerError(
                f"{where}: nothing says which token encloses a row: neither {role}_token nor {key} is configured",
                remedy=f"name one of its tokens as {key} in tokenizer_config.json",
            )
    missing = [role for role, name in roles.items() if name is None]
    codec.add_special_tokens([AddedToken(_APPENDED_TOKENS[role], special=True, normalized=False) for role in missing])
    roles |= {role: _APPENDED_TOKENS[role] for role in missing}
    cls, sep = str(roles["cls"]), str(roles["sep"])
    codec.post_processor = row_template("bert", (cls, vocabulary[cls]), (sep, vocabulary[sep]))
    return Tokenizer(codec.to_str(), {f"{role}_token": name for role, name in roles.items()}, where=where)


def _special_token_name(role: str, vocabulary: Mapping[str, int], configured: Mapping[str, object]) -> str | None:
    name = token_name(configured.get(f"{role}_token"))
    return name if name is not None else find_known_name(role, vocabulary)
