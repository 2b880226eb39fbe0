#!/usr/bin/env bash
# transformers' DeBERTa (version 1) documents query_states, the queries of DeBERTa's enhanced mask decoder, for its layers and
# their attention, but the branch for it transposes with Tensor.t(), which takes matrices only: states of a batch, which have
# three dimensions, always raise RuntimeError. DeBERTa v2's layer takes the same states, and with queries equal to its input
# returns what it returns without. So the published decoder of version 1 cannot be written with transformers' own layers, and
# whoever compares an implementation of it with theirs has to write the formula out.
# Seen with torch 2.13.0 and transformers 5.24.0 for Python 3.11, from PyPI, on a CPU:
#   deberta: RuntimeError, t() expects a tensor with <= 2 dimensions; deberta-v2: as without queries
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/env/bin/python" - <<'P' 2>/dev/null
import torch
import transformers
from transformers.models.deberta.modeling_deberta import DebertaLayer
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Layer

SHAPE = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}
states, mask = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)), torch.ones(2, 1, 5, 5)


def outcome(layer):
    layer.eval()
    with torch.no_grad():
        plain = layer(states, mask)[0]
        try:
            queried = layer(states, mask, query_states=states.clone())[0]
        except RuntimeError as error:
            return f"RuntimeError, {str(error).split(',')[0]}"
    return "as without queries" if torch.allclose(plain, queried, atol=1e-6) else "other than without queries"


first = outcome(DebertaLayer(transformers.DebertaConfig(**SHAPE)))
second = outcome(DebertaV2Layer(transformers.DebertaV2Config(**SHAPE)))
print(f"torch {torch.__version__}, transformers {transformers.__version__}")
print(f"deberta: {first}; deberta-v2: {second}")
raise SystemExit(not (first.startswith("RuntimeError, t() expects") and second == "as without queries"))
P
