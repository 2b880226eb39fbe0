"""Counter-based random numbers: hashes of a token, attention head or table row, independent of batch and device.

A number is a hash of the step (the seed of torch's default generator), of the draw's index in the forward pass, of the
token, head or table row, and of the column. So dropout and sampled tokens of a row do not depend on its microbatch,
rank or device. The hash is splitmix64's (Steele, Lea and Flood, 2014, section 2.3: a counter times an odd constant,
mixed), of 64 bits. On a CPU it costs as much as torch's own generator, 1 ns for a number of 16 bits.

Two int64 keys enter the hash, modulo 2 ** 64: one of the token, head or table row, and one of the draw. The draw's key
comes from the CPU's default generator. A forward pass makes its draws in the same order for any rows, and a pass that
is recomputed for its gradients restores the generator, as for torch's own dropout.

Shapes: T tokens, R rows, C columns.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN_RATIO_64 = -7046029254386353131  # 2 ** 64 / golden ratio, as an odd int64
_HEAD_MULTIPLIER = -4417276706812531889  # odd; sums of small multiples of it and _GOLDEN_RATIO_64 do not collide
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685  # splitmix64's multipliers
_POSITION_BITS = 32  # a token's key has its position in the low bits and its row's number in the high bits
DRAW_VALUES = 1 << 16  # number of different values that `uniform_int16` returns


def token_keys(
    numbers_R: Int[Tensor, " rows"], lengths_R: Int[Tensor, " rows"], positions_T: Int[Tensor, " tokens"]
) -> Int[Tensor, " tokens"]:
    """Return a key for each token, from its row's number in the step's global batch and its position in the row."""
    row_T = numbers_R.long().repeat_interleave(lengths_R, output_size=positions_T.numel())
    return _mix_bits((row_T << _POSITION_BITS) + positions_T)


def fingerprints(
    tokens_T: Int[Tensor, " tokens"], positions_T: Int[Tensor, " tokens"], lengths_R: Int[Tensor, " rows"]
) -> Int[Tensor, " rows"]:
    """Return a 63-bit hash for each row, the sum of its tokens' hashes. Rows with equal tokens have equal hashes."""
    none_R = tokens_T.new_zeros(lengths_R.numel())
    row_T = torch.arange(len(none_R), device=tokens_T.device).repeat_interleave(lengths_R, output_size=tokens_T.numel())
    return none_R.index_add(0, row_T, _mix_bits((positions_T << _POSITION_BITS) + tokens_T)).bitwise_and_((1 << 63) - 1)


def table_keys(first: int, last: int, device: torch.device) -> Int[Tensor, " places"]:
    """Return keys for rows `first` to `last` - 1 of a table that all tokens share. They do not depend on the batch."""
    return _mix_bits(torch.arange(first, last, device=device) - (1 << 62))


def head_keys(keys: Int[Tensor, "*places"], heads: range) -> Int[Tensor, "*places heads"]:
    """Return [..., heads], the key of each token or table row (`keys`) combined with each attention head."""
    at = torch.arange(heads.start, heads.stop, device=keys.device)
    return keys[..., None] + at * _HEAD_MULTIPLIER


def draw_key() -> Int[Tensor, ""]:
    """Return the key of the next draw, a CPU scalar from the CPU's default generator. The batch does not affect it."""
    return torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None)


def uniform_int16(
    keys: Int[Tensor, "*places"], draw: Int[Tensor, ""], columns: range
) -> Int[Tensor, "*places columns"]:
    """Return [..., columns] int16, uniform from -2 ** 15 to 2 ** 15 - 1: one integer for each key and column.

    One 64-bit hash serves four columns.
    """
    if keys.is_meta:  # meta tensors have no values to hash
        return keys.new_empty((*keys.shape, len(columns)), dtype=torch.int16)
    first, last = columns.start // 4, -(-columns.stop // 4)
    counter = _golden_multiples(torch.arange(first, last, device=keys.device))
    # `draw` stays on the host: a copy to the device would make the host wait.
    hashed = _mix_bits(keys[..., None] + (counter + draw))
    if torch.compiler.is_compiling():  # same numbers by shifts: the compiler cannot fuse a view with another dtype
        numbers = ((hashed[..., None] << torch.arange(48, -1, -16, device=keys.device)) >> 48).flatten(-2)
    else:
        numbers = hashed.reshape(-1).view(torch.int16).view(*keys.shape, 4 * (last - first))
    return numbers[..., columns.start - 4 * first : columns.stop - 4 * first]


def uniforms(keys: Int[Tensor, "*places"], draw: Int[Tensor, ""], columns: int) -> Float[Tensor, "*places columns"]:
    """Return [..., columns] float64 in [0, 1), multiples of 2 ** -53: one number for each key and column."""
    counter = torch.arange(columns, device=keys.device) * _GOLDEN_RATIO_64
    hashed = _mix_bits(keys[..., None] + (counter + draw))
    return (hashed >> 11).bitwise_and_((1 << 53) - 1).double() * 2.0**-53


def _golden_multiples(x: Tensor) -> Tensor:
    """Return `x * _GOLDEN_RATIO_64` modulo 2 ** 64, for small nonnegative integers `x`, also in compiled code.

    Signed overflow is undefined in C++, and gcc 12 computes wrong products where it foresees an overflow. For a GPU,
    inductor treats constant multiples of `arange` as indices and computes them in 32 bits, whatever their dtype; after
    a shift it uses 64 bits.
    """
    if not torch.compiler.is_compiling():
        return x * _GOLDEN_RATIO_64
    wide = (x << 32) >> 32
    return ((wide * (_GOLDEN_RATIO_64 >> 32)) << 32) + wide * (_GOLDEN_RATIO_64 & 0xFFFFFFFF)


def _mix_bits(x: Tensor) -> Tensor:
    """Apply splitmix64's mixing in place: every bit of the result depends on every bit of `x`."""
    # `out` is not used with meta tensors, for which it would make torch import its compiler.
    shifted = None if torch.compiler.is_compiling() or x.is_meta else torch.empty_like(x)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x ^= torch.bitwise_right_shift(x, shift, out=shifted).bitwise_and_((1 << (64 - shift)) - 1)
        x *= factor
    x ^= torch.bitwise_right_shift(x, 31, out=shifted).bitwise_and_((1 << 33) - 1)
    return x
