#!/usr/bin/env bash
# splintr reads a Unigram tokenizer.json and finds its unknown piece by the name <unk>, not by the model's unk_id. In a folder whose
# unknown piece has another name, such as [UNK] of DeBERTa v2 and v3, a character without a piece is left out of the ids
# without a word, where tokenizers gives the id of the unknown piece. With the piece renamed to <unk> both give the same.
# Seen with splintr-rs 0.22.0 and tokenizers 0.23.3 for Python 3.11, from PyPI, for "a☃b":
#   tokenizers ▁ a [UNK] b; splintr ▁ a b
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3 splintr-rs==0.22.0
"$folder/env/bin/python" - <<'P'
from importlib.metadata import version

import splintr
from tokenizers import Tokenizer, models, pre_tokenizers

print("tokenizers", version("tokenizers"), "splintr-rs", version("splintr-rs"))
found = {}
for unknown in ("[UNK]", "<unk>"):
    pieces = [(unknown, 0.0), ("\u2581", -1.0), ("a", -1.0), ("b", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    other = splintr.from_json_bytes(tokenizer.to_str().encode())
    own, theirs = tokenizer.encode("a\u2603b").ids, list(other.encode_ordinary("a\u2603b"))
    print(unknown, "tokenizers", [pieces[i][0] for i in own], "splintr", [pieces[i][0] for i in theirs])
    found[unknown] = own == theirs
assert found == {"[UNK]": False, "<unk>": True}
P
