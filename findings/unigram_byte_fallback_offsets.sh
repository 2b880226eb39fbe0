#!/usr/bin/env bash
# Characters without a piece are spelt in bytes by SentencePiece-like models with byte fallback. In `tokenizers` the offsets
# of such byte tokens depend on the model: BPE gives each byte the place of its own character, Unigram gives every byte of a
# run of such characters the place of the whole run. So offsets of a Unigram tokenizer (trained by SentencePiece with byte
# fallback) do not say which character a byte belongs to: answers, entities and sentence bounds that are found by offsets
# cover the run. Seen with tokenizers 0.23.3 for Python 3.11, from PyPI, without special options:
#   unigram (1, 3) six times; bpe (1, 2) three times, (2, 3) three times, for the text "a日本a"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/env/bin/python" - <<'P'
import tokenizers
from tokenizers import Tokenizer, models

pieces = [f"<0x{byte:02X}>" for byte in range(256)]
unigram = Tokenizer(
    models.Unigram([("<unk>", 0.0), ("a", -1.0), *((piece, -5.0) for piece in pieces)], unk_id=0, byte_fallback=True)
)
ids = {piece: i for i, piece in enumerate(["<unk>", "a", *pieces])}
bpe = Tokenizer(models.BPE(ids, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
print("tokenizers", tokenizers.__version__)
found = {name: model.encode("a日本a") for name, model in (("unigram", unigram), ("bpe", bpe))}
for name, encoding in found.items():
    print(name, encoding.tokens, encoding.offsets)
assert found["unigram"].tokens == found["bpe"].tokens
assert found["unigram"].offsets[1:-1] == [(1, 3)] * 6
assert found["bpe"].offsets[1:-1] == [(1, 2)] * 3 + [(2, 3)] * 3
P
