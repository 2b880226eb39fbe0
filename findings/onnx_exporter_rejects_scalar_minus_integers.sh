#!/usr/bin/env bash
# torch.onnx.export (dynamo) makes no graph of `1.0 - mask` if the mask holds integers: the pass that makes the types of
# operands explicit takes the scalar for the first tensor ("Cannot find a compatible OpOverload for aten.sub"). The same
# written as `-mask + 1.0` is exported, and so is `1.0 - mask.float()`. transformers' XLNetModel has the first form, so it is
# not exported with the int64 attention mask that its tokenizer gives.
# Seen with torch 2.13.0, onnxscript 0.7.2 and onnx 1.23.2 for Python 3.11, from PyPI:
#   1.0 - mask: refused; -mask + 1.0: exported; 1.0 - mask.float(): exported
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2
"$folder/env/bin/python" - <<'P' 2>/dev/null
import torch


class Inverted(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, mask):
        return self.form(mask)


FORMS = {
    "1.0 - mask": lambda mask: 1.0 - mask,
    "-mask + 1.0": lambda mask: -mask + 1.0,
    "1.0 - mask.float()": lambda mask: 1.0 - mask.float(),
}
print("torch", torch.__version__)
found = {}
for name, form in FORMS.items():
    try:
        torch.onnx.export(Inverted(form).eval(), (torch.ones(2, dtype=torch.int64),), dynamo=True, verbose=False)
        found[name] = "exported"
    except torch.onnx.errors.OnnxExporterError:
        found[name] = "refused"
print("; ".join(f"{name}: {what}" for name, what in found.items()))
assert list(found.values()) == ["refused", "exported", "exported"]
P
