#!/usr/bin/env bash
# The BPE trainer of tokenizers 0.23.3 counts words in 64 bits, but adds up the occurrences of a pair of symbols in 32 bits with a
# sign. A pair that occurs 2^31 times or more wraps round to a negative number and is never merged, without a word, though it is
# the most frequent of all. 2 GB of one letter show it (PyPI, one thread):
#   1 MB of "aaaa..." and three words "xy": the first merge is a a
#   2,200 MB of "aaaa..." and three words "xy": the only merge is x y
# In English "th", "he" or "in" occur so often in some 100 GB of text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
TOKENIZERS_PARALLELISM=false "$folder/env/bin/python" - <<'P'
import json
from itertools import chain, repeat

import tokenizers
from tokenizers import models, pre_tokenizers, trainers


def merges(megabytes):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=4, min_frequency=2, show_progress=False)
    megabyte = " ".join(["a" * 9_999] * 100)
    tokenizer.train_from_iterator(chain(["xy xy xy"], repeat(megabyte, megabytes)), trainer)
    return json.loads(tokenizer.to_str())["model"]["merges"]


few, many = merges(1), merges(2_200)
print("tokenizers", tokenizers.__version__)
print("1 MB:", few)
print("2,200 MB:", many)
assert few[0] == ["a", "a"]
assert many[0] == ["x", "y"]
assert ["a", "a"] not in many
P
