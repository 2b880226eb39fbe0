#!/usr/bin/env bash
# datatrove 0.10.1: for 59 codes of languages load_word_tokenizer takes the rules of another script than the one that its
# own table marks as the default. The column default_script is read as text, and the text FALSE counts as true, so that
# the last script of the table wins. Seen: "zho" (Chinese) gets the rules for Latin letters and is cut at spaces, so a
# sentence is one word; "zho_Hani" gets the rules for Chinese. "hin" (Hindi) gets Stanza's rules for Kurdish, "msa"
# (Malay) a tokenizer for Thai. Filters of quality that count words take that code. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --disable-pip-version-check datatrove==0.10.1 spacy==3.8.18 regex==2026.11.15
cat >"$folder/show.py" <<'PYTHON'
import csv
from importlib.resources import files

from datatrove.utils.word_tokenizers import load_tokenizer_assignments, load_word_tokenizer

rules = load_tokenizer_assignments()
apart = set()
with (files("datatrove") / "assets/tokenizer_assignment.csv").open(newline="") as table:
    for row in csv.DictReader(table):
        codes = [row["code_3"], row["code_1"] if row["default_code_1"] == "TRUE" else ""]
        for code in filter(None, codes):
            marked = f"{code}_{row['script']}"
            if row["default_script"] == "TRUE" and marked in rules and rules[marked].args != rules[code].args:
                apart.add(code)
print(len(apart), "codes")
print("zho", rules["zho"].args[0], len(load_word_tokenizer("zho").word_tokenize("今天天气很好")), "word")
print("zho_Hani", *rules["zho_Hani"].args)
print("hin", *rules["hin"].args, "msa", rules["msa"].args[0])
PYTHON
"$folder/env/bin/python" "$folder/show.py" | tee "$folder/seen"
diff "$folder/seen" - <<'SEEN'
59 codes
zho WhitespaceTokenizer 1 word
zho_Hani SpaCyTokenizer zh
hin StanzaTokenizer kmr msa ThaiTokenizer
SEEN
