"""Kernels of an MoE layer between its GEMMs and exchanges. Each kernel reads and writes every row once, where torch's functions
read and write it several times. `weft.kernels.expert_order` computes the order of rows.

    gather_kernel      tokens -> their copies, sorted by expert
    gate_kernel        h -> silu(gate) * up, where gate and up are the halves of h
    gate_grad_kernel   its gradient
    sum_kernel         rows -> the weighted sum of each token's rows. Also the gradient of `gather_kernel`, without weights
    spread_kernel      the gradient of `sum_kernel`

Products and results are rounded to the rows' dtype where torch's functions round too. Sums over a token's rows are in fp32, in
the order of top_k.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["width", "copies"])
def gather_kernel(tokens, order, out, width, copies, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Write `out[i] = tokens[order[i] // copies]`. Rows have `width` elements, a multiple of ALIGN. Grid: (rows of out, blocks of
    BLOCK columns).
    """
    row = tl.program_id(0).to(tl.int64)
    width = width // ALIGN * ALIGN  # no change of the value, but it tells the compiler the alignment
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(order + row) // copies
    tl.store(out + row * width + column, tl.load(tokens + token * width + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["width"])
def gate_kernel(h, out, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Write `out = silu(gate) * up`. h `[rows, 2 * width]`: gate and up side by side. out `[rows, width]`. width is a multiple of
    ALIGN. Grid: (rows, blocks of BLOCK columns).
    """
    row = tl.program_id(0).to(tl.int64)
    width = width // ALIGN * ALIGN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(h + row * 2 * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(h + (row * 2 + 1) * width + column, mask=inside, other=0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["width"])
def gate_grad_kernel(h, grad, out, width, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Write to `out` [rows, 2 * width] the gradient of h in `gate_kernel`. grad `[rows, width]`: the gradient of its result.
    The other arguments and the grid are as for `gate_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    width = width // ALIGN * ALIGN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(h + row * 2 * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(h + (row * 2 + 1) * width + column, mask=inside, other=0).to(tl.float32)
    of_out = tl.load(grad + row * width + column, mask=inside, other=0).to(tl.float32)
    dtype = out.dtype.element_ty
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    of_silu = (of_out * up).to(dtype).to(tl.float32)
    of_gate = of_silu * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + row * 2 * width + column, of_gate.to(dtype), mask=inside)
    tl.store(out + (row * 2 + 1) * width + column, (of_out * silu).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["width"])
def sum_kernel(
    rows, place, weights, out, width, COPIES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Write `out[t] = sum over k of rows[place[t, k]] * weights[t, k]`, where k runs from 0 to COPIES - 1.

    rows: matrix with `width` columns, a multiple of ALIGN. place, weights `[tokens, COPIES]`. Without WEIGHTED, weights are 1
    and not read. Grid: (tokens, blocks of BLOCK columns).
    """
    token = tl.program_id(0).to(tl.int64)
    width = width // ALIGN * ALIGN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(COPIES):
        row = tl.load(place + token * COPIES + k)
        part = tl.load(rows + row * width + column, mask=inside, other=0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + token * COPIES + k).to(dtype).to(tl.float32)
            part = (part * weight).to(dtype).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["width", "copies"])
def spread_kernel(
    grad, rows, place, weights, of_rows, of_weights, width, copies, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Write the gradients of `rows` and `weights` in `sum_kernel` with WEIGHTED.

    grad: the gradient of its result. of_rows, of_weights: the gradients, of the shapes of `rows` and `weights`. Grid: one program
    per row.
    """
    number = tl.program_id(0).to(tl.int64)
    width = width // ALIGN * ALIGN
    row, token = tl.load(place + number), number // copies
    dtype = of_rows.dtype.element_ty
    weight = tl.load(weights + number).to(dtype).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        of_sum = tl.load(grad + token * width + column, mask=inside, other=0).to(tl.float32)
        part = tl.load(rows + row * width + column, mask=inside, other=0).to(tl.float32)
        tl.store(of_rows + row * width + column, (of_sum * weight).to(dtype), mask=inside)
        total += of_sum * part
    tl.store(of_weights + number, tl.sum(total, 0).to(of_weights.dtype.element_ty))
