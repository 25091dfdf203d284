"""What the backward needs beyond the forward's E: recomputed dlogits, the two gradient GEMMs, and column sums."""

import triton
import triton.language as tl

from .epilogues import row_coefficients, targets_in_tile, tile_bias, tile_gradient
from .logits import PER_CALL, chain, expm1, tile_order, tile_product


@triton.jit(do_not_specialize=PER_CALL)
def dlogits_kernel(
    x, w, bias, targets, class_weight,
    row_max, row_log_sum, row_target, row_entropy, row_a, row_b, row_r, row_d, out,
    R, V, H, row_tiles, column_tiles,
    stride_xr, stride_wv, stride_wh, stride_or, logit_scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_B: tl.constexpr, HAS_D: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """out = the gradient family of loss.py, see tile_gradient, with the logits recomputed tile by tile as in
    forward_kernel."""
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_order(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * ROWS
        column = column_tile * COLUMNS
        rows = row + tl.arange(0, ROWS)
        live = rows < R
        product = tile_product(
            x, w, row, column, R, V, H, stride_xr, stride_wv, stride_wh, ROWS, COLUMNS, DEPTH, DESCRIPTORS, PRECISION
        )
        y, here, any_here = targets_in_tile(targets, rows, live, column, COLUMNS)
        coefficients = row_coefficients(
            row_max, row_log_sum, row_entropy, row_a, row_b, row_d, rows, live, HAS_B, HAS_D
        )
        at = tl.arange(0, COLUMNS)
        (value,) = tile_gradient(
            (product,), at, column, rows, live, y, here, any_here, coefficients, row_target, row_r,
            tile_bias(bias, at, column, V, COLUMNS, HAS_BIAS, COMPUTE), class_weight, V, logit_scale, softcap,
            out.dtype if DESCRIPTORS else out.dtype.element_ty, COLUMNS,
            SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, HAS_B, HAS_D, COMPUTE,
        )  # fmt: skip
        if DESCRIPTORS:
            out.store([row, column], value)
        else:
            columns = column + tl.arange(0, COLUMNS)
            at = out + rows.to(tl.int64)[:, None] * stride_or + columns[None, :]
            tl.store(at, value, mask=live[:, None] & (columns < V)[None, :])


@triton.jit(do_not_specialize=["R"])
def finish_kernel(
    e, x, targets, row_max, row_log_sum, row_target, row_scale, row_a, row_r, factor, scaled,
    R, H, stride_er, stride_xr, logit_scale, softcap, nudge,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SCALE_X: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """The torch backend's finish() and row_factors(), for ROWS rows a program; nudge is base.NUDGE."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < R
    y = tl.load(targets + rows, mask=live, other=-1)
    z_y = tl.load(row_target + rows, mask=live, other=0.0)
    log_prob = z_y - tl.load(row_log_sum + rows, mask=live, other=0.0)
    scale = tl.load(row_scale + rows, mask=live, other=1.0)
    a = tl.load(row_a + rows, mask=live, other=0.0)
    r = tl.load(row_r + rows, mask=live, other=0.0)
    tiny = tl.abs(r) * nudge
    a = tl.where(tl.abs(a) < tiny, tl.where(a < 0.0, -tiny, tiny), a)
    ratio = tl.where(a == 0.0, 0.0, r / a)
    exact = (expm1(log_prob, PRECISE) + ratio) / scale
    exact = chain(exact, z_y + tl.load(row_max + rows, mask=live, other=0.0), softcap, HAS_SOFTCAP)
    rounded = exact.to(e.dtype.element_ty)
    tl.store(e + rows.to(tl.int64) * stride_er + y, rounded, mask=live & (y >= 0))
    lost = tl.where(rounded.to(tl.float32) == 0.0, 1.0, exact / rounded.to(tl.float32))
    f = a * scale * logit_scale * lost
    tl.store(factor + rows, f, mask=live)
    if SCALE_X:
        for k in range(0, H, COLUMNS):
            columns = k + tl.arange(0, COLUMNS)
            mask = live[:, None] & (columns < H)[None, :]
            value = tl.load(x + rows.to(tl.int64)[:, None] * stride_xr + columns[None, :], mask=mask, other=0.0)
            at = scaled + rows.to(tl.int64)[:, None] * H + columns[None, :]
            tl.store(at, (value.to(tl.float32) * f[:, None]).to(scaled.dtype.element_ty), mask=mask)


@triton.jit
def matmul_kernel(
    a, b, out, M, N, K, row_tiles, column_tiles,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """out (M, N) fp32 (+)= a (M, K) @ b (K, N), any strides: where the vendor's library has no half-precision GEMM
    with an fp32 result (ROCm, XPU)."""
    row_tile, column_tile = tile_order(tl.program_id(0), row_tiles, column_tiles, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, K, DEPTH):
        at = (k + depth).to(tl.int64)
        inside = k + depth < K
        left = tl.load(
            a + rows.to(tl.int64)[:, None] * stride_am + at[None, :] * stride_ak,
            mask=(rows < M)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + at[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn,
            mask=inside[:, None] & (columns < N)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total)
    at_out = out + rows.to(tl.int64)[:, None] * stride_om + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if ACCUMULATE:
        total += tl.load(at_out, mask=mask, other=0.0)
    tl.store(at_out, total, mask=mask)


@triton.jit(do_not_specialize=["R"])
def column_sum_kernel(e, scale, out, R, V, stride_er, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out_j += sum_i scale_i e_ij, in fp32, rows in order: one program for COLUMNS columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, R, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < R)[:, None] & (columns < V)[None, :]
        value = tl.load(e + rows.to(tl.int64)[:, None] * stride_er + columns[None, :], mask=mask, other=0.0)
        factor = tl.load(scale + rows, mask=rows < R, other=0.0)
        total += tl.sum(value.to(tl.float32) * factor[:, None], 0)
    tl.store(out + columns, tl.load(out + columns, mask=columns < V, other=0.0) + total, mask=columns < V)


@triton.jit
def scale_kernel(source, factor, out, width, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    """out = factor * source, rounded once to out's dtype: (rows, width), a factor a row. IN_PLACE: out is source, and
    rows whose factor is 1 are left alone."""
    blocks = (width - 1) // BLOCK + 1  # cdiv(), of a width that may be close to 2^31
    row = (tl.program_id(0) // blocks).to(tl.int64)
    scale = tl.load(factor + row).to(tl.float32)
    if IN_PLACE:
        if scale == 1.0:
            return
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row * width + column
    value = tl.load(source + at, mask=column < width).to(tl.float32) * scale
    tl.store(out + at, value.to(out.dtype.element_ty), mask=column < width)
