"""Arithmetic of the update of embedding rows: stochastic rounding, and division by a square root."""

from __future__ import annotations

import triton
import triton.language as tl

_SMALL = tl.constexpr(2.0**-48)
_LARGE = tl.constexpr(2.0**48)


@triton.jit
def mixed(word):
    """Return a hash of an int64, as uint64: the finalizer of the random number generator splitmix64."""
    z = word.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def at_random(x, random, DTYPE: tl.constexpr):
    """Round fp32 `x` stochastically to DTYPE (fp16 or bf16), using the 24 lowest bits of `random`.

    The probability of the upper neighbour is `(x - lower) / (upper - lower)`, as in `narrow_at_random` of
    csrc/embedding_backward.cpp.
    """
    bits = x.to(tl.uint32, bitcast=True)
    LOW: tl.constexpr = 0xFFFF if tl.bfloat16 == DTYPE else 0x1FFF
    finite = (bits & 0x7F800000) != 0x7F800000
    moved = ((bits + (random & LOW).to(tl.uint32)) & (0xFFFFFFFF - LOW)).to(tl.float32, bitcast=True)
    found = tl.where(finite, moved, x)
    if tl.float16 == DTYPE:  # subnormals are multiples of 2**-24
        scaled = tl.abs(x) * 16777216.0
        below = tl.floor(scaled)
        up = (random & 0xFFFFFF).to(tl.int32).to(tl.float32) < (scaled - below) * 16777216.0
        size = (below + tl.where(up, 1.0, 0.0)) * 5.9604644775390625e-08
        found = tl.where(tl.abs(x) < 6.103515625e-05, tl.where(x < 0, -size, size), found)
    return found.to(DTYPE)


@triton.jit
def over_root(g, s, eps, inside, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, PTX: tl.constexpr):
    """Return g / (sqrt(s) + eps), fp32 `[GROUP, BLOCK_D]`, with both operations rounded to nearest.

    The GPU's square root and division have a branch for each element, for numbers that over- or underflow. So with PTX this
    function runs the instructions of the usual case for all elements, with one reciprocal for each row. If an element is not usual,
    it divides all elements again.

    s: at least the mean of g * g in a row, fp32 `[GROUP]`. inside: False for elements whose result is not used.
    """
    if not PTX:
        return tl.div_rn(g, (tl.sqrt_rn(s) + eps)[:, None])
    half = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1
    )
    root = s * half
    root = tl.fma(tl.fma(-root, root, s), 0.5 * half, root)
    d = root + eps
    over = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
    over = tl.fma(over, tl.fma(-d, over, 1.0), over)
    each, minus = tl.broadcast_to(over[:, None], [GROUP, BLOCK_D]), tl.broadcast_to(-d[:, None], [GROUP, BLOCK_D])
    q = g * each
    q = tl.fma(tl.fma(minus, q, g), each, q)
    is_usual = (s >= _SMALL * _SMALL) & (s <= _LARGE * _LARGE) & (d >= _SMALL) & (d <= _LARGE)
    least = tl.min(tl.reshape(tl.where(inside, tl.abs(g), 1.0), [GROUP * BLOCK_D], can_reorder=True), axis=0)
    if (least < _SMALL) | (tl.min(is_usual.to(tl.int32), axis=0) == 0):
        q = tl.div_rn(g, (tl.sqrt_rn(s) + eps)[:, None])
    return q
