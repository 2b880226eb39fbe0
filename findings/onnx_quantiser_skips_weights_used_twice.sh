#!/usr/bin/env bash
# A Linear that a network calls once is a constant of the graph that torch.onnx.export (dynamo) writes, already transposed, and
# onnxruntime's quantize_dynamic puts it into 8 bits. One of 256 x 256 called twice stays as it lies, behind a Transpose node: the
# quantiser takes that for no constant, says nothing, and leaves its weight in fp32. ALBERT's layers and DeBERTa v2's
# projections of queries and keys are called so, and their int8 graphs stay large. quant_pre_process, which folds constants
# first, mends it.
# Seen with torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2 and onnxruntime 1.32.0 for Python 3.11, from PyPI, by the type of the
# weight in the quantised graph:
#   called once: INT8; called twice: FLOAT; called twice, quant_pre_process before: INT8
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cd "$folder"
"$folder/env/bin/python" - <<'P' 2>/dev/null
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process


class Called(torch.nn.Module):
    def __init__(self, times):
        super().__init__()
        self.linear, self.times = torch.nn.Linear(256, 256, bias=False), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.relu(self.linear(x))
        return x


def weight_type(times, folded=False):
    example, options = (torch.ones(2, 3, 256),), {"dynamo": True, "verbose": False, "external_data": False}
    torch.onnx.export(Called(times).eval(), example, "graph.onnx", **options)
    if folded:
        quant_pre_process("graph.onnx", "folded.onnx", skip_symbolic_shape=True)
    quantize_dynamic("folded.onnx" if folded else "graph.onnx", "small.onnx", weight_type=QuantType.QInt8)
    (weight,) = (one for one in onnx.load("small.onnx").graph.initializer if list(one.dims) == [256, 256])
    return onnx.TensorProto.DataType.Name(weight.data_type)


print("torch", torch.__version__, "onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
found = [weight_type(1), weight_type(2), weight_type(2, folded=True)]
print(f"called once: {found[0]}; called twice: {found[1]}; called twice, quant_pre_process before: {found[2]}")
assert found == ["INT8", "FLOAT", "INT8"]
P
