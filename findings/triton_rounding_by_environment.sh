#!/usr/bin/env bash
# Triton 3.7.1 and 3.9.0: whether a product and a sum of one kernel are rounded once (fma) or twice is decided by the
# environment variable TRITON_DEFAULT_FP_FUSION wherever the launch does not say it, so that the same source gives other
# bits in another environment. Triton 3.9.0 warns that its own default will change in 3.10 (to twice). Seen, compiled
# for sm_90 without a GPU: "unset fma", "1 fma", "0 mul add"; 3.9.0 warns where the variable is unset. A launch with
# enable_fp_fusion=True or False is independent of it. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/kernel.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def axpy(x, y, a):
    at = tl.arange(0, 128)
    tl.store(y + at, tl.load(x + at) * a + tl.load(y + at))


source = ASTSource(axpy, {"x": "*fp32", "y": "*fp32", "a": "fp32"}, {})
code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
words = ("fma.rn.f32", "mul.f32", "add.f32", "mul.rn.f32", "add.rn.f32")
print(*(word.split(".")[0] for word in words if word in code))
PYTHON
wrong=0
for version in 3.7.1 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -qq --disable-pip-version-check "triton==$version"
    for value in unset 1 0; do
        variable=("TRITON_DEFAULT_FP_FUSION=$value")
        [ "$value" != unset ] || variable=(-u TRITON_DEFAULT_FP_FUSION)
        seen=$(env "${variable[@]}" TRITON_CACHE_DIR="$folder/cache-$version-$value" \
            "$folder/$version/bin/python" "$folder/kernel.py" 2>"$folder/warnings")
        warned=$(grep -c "Triton 3.10" "$folder/warnings" || true)
        echo "triton $version, TRITON_DEFAULT_FP_FUSION $value: $seen, warnings: $warned"
        expected=fma
        [ "$value" != 0 ] || expected="mul add"
        [ "$seen" = "$expected" ] || wrong=1
        [[ "$version $value" = "3.9.0 unset" && "$warned" -eq 0 ]] && wrong=1
    done
done
exit $wrong
