#!/usr/bin/env bash
# transformers 5.23.0 (accelerate 1.15.0, torch 2.13.0): with gradient_accumulation_steps=n, Trainer adds up the losses of n
# microbatches and leaves the division by n to the model, which is told the number of items of the whole batch
# (num_items_in_batch). BertForSequenceClassification takes the argument and ignores it: its loss is the mean of its microbatch. So
# the gradient is n times that of the same batch in one piece, and the norm at which gradients are clipped is another one.
# Four rows in one microbatch and in four, no dropout, plain SGD, one step:
#   ratio of the change of the classifier's weights: 4.0
#   with trainer.model_accepts_loss_kwargs = False: 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/env/bin/python" - <<'P' 2>/dev/null
import accelerate
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

ROWS = [{"input_ids": [1, 5 + row, 9, 2], "attention_mask": [1] * 4, "labels": row % 2} for row in range(4)]
CONFIG = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
)


def change(microbatches, accepts=None):
    torch.manual_seed(1)
    model = BertForSequenceClassification(CONFIG)
    before = model.classifier.weight.detach().clone()
    arguments = TrainingArguments(
        output_dir="out", max_steps=1, per_device_train_batch_size=4 // microbatches,
        gradient_accumulation_steps=microbatches, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd",
        max_grad_norm=0.0, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=ROWS)
    if accepts is not None:
        trainer.model_accepts_loss_kwargs = accepts
    trainer.train()
    return (model.classifier.weight.detach() - before).norm().item()


ratio = change(4) / change(1)
mended = change(4, accepts=False) / change(1)
print("transformers", transformers.__version__, "accelerate", accelerate.__version__, "torch", torch.__version__)
print(f"ratio of the change of the classifier's weights: {ratio:.1f}")
print(f"with trainer.model_accepts_loss_kwargs = False: {mended:.1f}")
assert abs(ratio - 4) < 0.05, ratio
assert abs(mended - 1) < 0.05, mended
P
