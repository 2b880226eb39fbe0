#!/usr/bin/env bash
# A folder with nothing but a SentencePiece model, and the plain class TokenizersBackend named in tokenizer_config.json, is read
# by transformers 5.23.0 without SentencePiece's dummy prefix: the model asks for a space mark before the first word
# (add_dummy_prefix, SentencePiece's default), transformers puts none. So the first word of every text has other ids than
# those with which the model was trained, in every language; the rest is equal. Seen with transformers 5.23.0,
# tokenizers 0.23.3 and sentencepiece 0.2.3, from PyPI, for "the boat came back":
#   SentencePiece ▁the ▁boat ▁came ▁back, transformers t h e ▁boat ▁came ▁back
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.23.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'P'
import json
from pathlib import Path

import sentencepiece
import tokenizers
import transformers

words = "the boat came back to the pier in the evening and the old watchman looked at the water".split()
lines = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(200)]
Path("plain").mkdir()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_prefix="plain/tokenizer", vocab_size=60, hard_vocab_limit=False, minloglevel=2
)
Path("plain/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
text = "the boat came back"
own = sentencepiece.SentencePieceProcessor(model_file="plain/tokenizer.model").encode(text, out_type=str)
read = transformers.AutoTokenizer.from_pretrained("plain").tokenize(text)
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__, "sentencepiece", sentencepiece.__version__)
print("SentencePiece", own)
print("transformers ", read)
assert own[0].startswith("\u2581")
assert not read[0].startswith("\u2581")
assert "".join(own) == "\u2581" + "".join(read)
P
