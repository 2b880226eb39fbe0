#!/usr/bin/env bash
# DeBERTa v2 puts far distances into logarithmic buckets: ceil(log(d / mid) / log((max - 1) / mid) * (mid - 1)) + mid. The result
# is a table index, so rounding before ceil matters. transformers computes in float32: with 512 buckets and 4,096 positions,
# distance 1643 gets bucket 427 where the exact value, slightly above 171, asks for 428. The same formula in float64, as DeBERTa's
# first code has it in numpy, errs elsewhere: with 32 buckets and 129 positions, distances 32 and 64, whose exact values are whole
# numbers, are one bucket too far. So weights that were trained by one implementation are computed with other rows of the relative
# tables by the other one; the published size, 256 buckets and 512 positions, is not among them.
# Seen with torch 2.13.0 and transformers 5.24.0 for Python 3.11, from PyPI, on a CPU:
#   512, 4096: transformers differs at 1643; 32, 129: float64 differs at 32, 64; 256, 512: neither
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/env/bin/python" - <<'P' 2>/dev/null
import math
from decimal import ROUND_CEILING, Decimal, getcontext

import torch
import transformers
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

getcontext().prec = 60


def exact(distance, mid, longest):
    value = (Decimal(distance) / mid).ln() / (Decimal(longest - 1) / mid).ln() * (mid - 1)
    # 60 digits are far more than a border's distance from any value that is not on it.
    return int(value.quantize(Decimal(10) ** -40).to_integral_value(ROUND_CEILING)) + mid


def in_float64(distance, mid, longest):
    return math.ceil(math.log(distance / mid) / math.log((longest - 1) / mid) * (mid - 1)) + mid


found = {}
for buckets, longest in ((512, 4096), (32, 129), (256, 512)):
    mid = buckets // 2
    theirs = make_log_bucket_position(torch.arange(longest), buckets, longest).long().tolist()
    far = range(mid + 1, longest)
    right = {distance: exact(distance, mid, longest) for distance in far}
    found[buckets, longest] = (
        [distance for distance in far if theirs[distance] != right[distance]],
        [distance for distance in far if in_float64(distance, mid, longest) != right[distance]],
    )
print(f"torch {torch.__version__}, transformers {transformers.__version__}")
for size, (single, double) in found.items():
    print(f"{size}: transformers (float32) differs at {single}, float64 at {double}")
raise SystemExit(found != {(512, 4096): ([1643], []), (32, 129): ([], [32, 64]), (256, 512): ([], [])})
P
