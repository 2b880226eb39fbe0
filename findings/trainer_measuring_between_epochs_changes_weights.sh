#!/usr/bin/env bash
# A Trainer of transformers that measures after each epoch (eval_strategy="epoch") ends in other weights than one of the same
# seed and data that does not, if its model has dropout. To begin a pass over the evaluation data, torch's DataLoader draws a
# seed from torch's global generator, from which dropout draws, too. So the choice whether and how often to measure is one of
# the draws of a run, and two programs with one seed agree only if they measure at the same steps. Without dropout the
# weights are the same. Within the first epoch nothing differs.
# Seen with torch 2.13.0, transformers 5.23.0 and accelerate 1.15.0 for Python 3.11, from PyPI, on a CPU:
#   dropout 0.1, 1 epoch: same; dropout 0.1, 2 epochs: other; dropout 0, 2 epochs: same
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cd "$folder"
"$folder/env/bin/python" - <<'P' 2>/dev/null
import accelerate
import torch
import transformers


def weights(measures, dropout, epochs):
    transformers.set_seed(7)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2,
    )
    draw = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(1, 50, (8,), generator=draw).tolist(), "attention_mask": [1] * 8, "labels": n % 2}
        for n in range(32)
    ]
    arguments = transformers.TrainingArguments(
        output_dir="run", num_train_epochs=epochs, per_device_train_batch_size=8, learning_rate=1e-3, seed=3,
        eval_strategy="epoch" if measures else "no", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )
    model = transformers.BertForSequenceClassification(config)
    transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
    return torch.cat([weight.flatten() for weight in model.parameters()])


def compared(dropout, epochs):
    return "same" if torch.equal(weights(True, dropout, epochs), weights(False, dropout, epochs)) else "other"


print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__)
found = [compared(0.1, 1), compared(0.1, 2), compared(0.0, 2)]
print(f"dropout 0.1, 1 epoch: {found[0]}; dropout 0.1, 2 epochs: {found[1]}; dropout 0, 2 epochs: {found[2]}")
assert found == ["same", "other", "same"]
P
