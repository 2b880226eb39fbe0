#!/usr/bin/env bash
# datatrove splits texts with spaCy in memory zones. The word IS_ALPHA has the id 1 there, which spaCy's table of words cannot
# remove at the end of a zone. So the first text of a process keeps the word, and from the next text with it on spaCy raises,
# and datatrove splits the text without it: what filters count depends on the texts before. One more: a smiley
# whose parts stand on both sides of a space undoes one inside a chunk.
# Seen with datatrove 0.10.1 and spacy 3.8.18 for Python 3.11, from PyPI, for English:
#   "a IS_ALPHA b": a, IS_ALPHA, b; the next text "c IS_ALPHA d": c, d. "= ):=": =, ), :, =; with a line end: =, ):, =
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check datatrove==0.10.1 spacy==3.8.18 regex
"$folder/env/bin/python" - <<'P'
from importlib.metadata import version

from datatrove.utils.text import split_into_words

print("datatrove", version("datatrove"), "spacy", version("spacy"))
first, second = split_into_words("a IS_ALPHA b"), split_into_words("c IS_ALPHA d")
print(first, second)
assert first == ["a", "IS_ALPHA", "b"]
assert second == ["c", "d"]
over_space, over_line = split_into_words("= ):="), split_into_words("=\n):=")
print(over_space, over_line)
assert over_space == ["=", ")", ":", "="]
assert over_line == ["=", "):", "="]
P
