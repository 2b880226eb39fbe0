#!/usr/bin/env bash
# Triton 3.7.1, 3.8.0 and 3.9.0, which torch's wheels for CUDA 13.0 to 13.2 require: each wheel holds two assemblers, and
# the GPU decides which one makes machine code, whatever CUDA torch was built with. Up to 3.8.0 Hopper (sm_90) gets one of
# CUDA 12 as Ampere (sm_80) does, and Blackwell (sm_100) one of CUDA 13. So what CUDA's release notes say of torch's version
# or later ones (13.3 mends products of warp groups on Hopper whose operands are in registers) holds for Triton's kernels
# there from 3.9.0 on only. Seen without a GPU, for sm_80, sm_90, sm_100: 12.8 12.8 13.1; 12.9 12.9 13.3; 12.9 13.4 13.4.
# Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/assemblers.py" <<'PYTHON'
from triton.backends.nvidia.compiler import get_ptxas

print(*(get_ptxas(architecture).version for architecture in (80, 90, 100)))
PYTHON
wrong=0
while read -r version expected; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -qq --disable-pip-version-check "triton==$version"
    seen=$("$folder/$version/bin/python" "$folder/assemblers.py")
    echo "triton $version: ptxas for sm_80, sm_90, sm_100: $seen"
    [ "$seen" = "$expected" ] || wrong=1
    rm -rf "${folder:?}/$version"
done <<'VERSIONS'
3.7.1 12.8 12.8 13.1
3.8.0 12.9 12.9 13.3
3.9.0 12.9 13.4 13.4
VERSIONS
exit $wrong
