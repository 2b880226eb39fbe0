#!/usr/bin/env bash
# BertPreTokenizer of tokenizers splits words at punctuation by a table that ends about 2016: punctuation that Unicode got
# later (U+2E43 to U+2E5D among it: DASH WITH LEFT UPTURN, MEDIEVAL COMMA, TIRONIAN SIGN CAPITAL ET, ...) is a letter to it, as
# are the signs of a dozen scripts. transformers' Python class of the same name asked Python's unicodedata, which calls
# them punctuation; splintr, a quicker encoder, too. And of the Han characters of extension E, of which the original code of
# BERT makes one word each (U+2B820 to U+2CEAF), BertNormalizer leaves the first 256 (to U+2B91F) joined.
# So a quicker encoder that is right by Unicode gives other ids than the definition of published models.
# Seen with tokenizers 0.23.3, splintr-rs 0.22.0 and unicodedata of Python 3.11 (Unicode 14), from PyPI:
#   a⹃b: tokenizers one word, splintr three; two characters U+2B820 one word, two U+2B920 two words
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 splintr-rs==0.22.0
"$folder/env/bin/python" - <<'P'
import unicodedata
from importlib.metadata import version

import splintr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

letters = ["a", "b", "\u2e43", "\u2e4c", ",", "\U0002b820", "\U0002b920"]
vocab = {piece: i for i, piece in enumerate(["[UNK]", *letters, *("##" + letter for letter in letters)])}
tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
other = splintr.from_json_bytes(tokenizer.to_str().encode())
names = {i: piece for piece, i in vocab.items()}
print("tokenizers", version("tokenizers"), "splintr-rs", version("splintr-rs"), "Unicode", unicodedata.unidata_version)
found = {}
for text in ("a,b", "a\u2e43b", "a\u2e4cb", "\U0002b820" * 2, "\U0002b920" * 2):
    own, theirs = tokenizer.encode(text).tokens, [names[i] for i in other.encode_ordinary(text)]
    print(ascii(text), unicodedata.category(text[1]), "tokenizers", ascii(own), "splintr", ascii(theirs))
    found[text] = [sum(not piece.startswith("##") for piece in pieces) for pieces in (own, theirs)]
assert found["a,b"] == [3, 3]
assert all(unicodedata.category(mark) in ("Pd", "Po") for mark in "\u2e43\u2e4c") or unicodedata.unidata_version < "10"
assert found["a\u2e43b"] == found["a\u2e4cb"] == [1, 3]
assert found["\U0002b820" * 2][0] == 1 and found["\U0002b920" * 2][0] == 2
P
