"""Device functions that every kernel shares: a tile of logits, and the transform that makes z of it."""

import triton
import triton.language as tl


@triton.jit
def tile_order(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a linear index: GROUP row tiles go down a column before the next column is taken, so
    that the programs in flight share their weight tiles in the second-level cache."""
    per_group = GROUP * column_tiles
    group = tile // per_group
    first = group * GROUP
    size = min(row_tiles - first, GROUP)
    return first + (tile % per_group) % size, (tile % per_group) // size


@triton.jit
def tile_product(
    x, w, row, column, R, V, H,
    stride_xr, stride_wv, stride_wh,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[row : row + ROWS] @ w[column : column + COLUMNS].T in fp32; rows and columns beyond R and V read as zero.

    DESCRIPTORS: x and w are tensor descriptors (bulk tensor copies, sm_90 and later); else pointers with any strides,
    and w may have another dtype than x (it is rounded to x's on the way in).
    """
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DESCRIPTORS:
        for k in range(0, H, DEPTH):
            product = tl.dot(x.load([row, k]), w.load([column, k]).T, product, input_precision=PRECISION)
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        x_rows = x + rows.to(tl.int64)[:, None] * stride_xr
        w_rows = w + columns.to(tl.int64)[:, None] * stride_wv
        for k in range(0, H, DEPTH):
            inside = k + depth < H
            a = tl.load(x_rows + (k + depth)[None, :], mask=(rows < R)[:, None] & inside[None, :], other=0.0)
            offset = (k + depth).to(tl.int64) * stride_wh
            b = tl.load(w_rows + offset[None, :], mask=(columns < V)[:, None] & inside[None, :], other=0.0)
            product = tl.dot(a, b.to(a.dtype).T, product, input_precision=PRECISION)
    return product


LOG_ZERO = tl.constexpr(-1e4)  # exp of this is 0: stands in for -inf where 0 * -inf must be 0
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_LOW = tl.constexpr(1.9259629911266175e-8)  # log2(e) minus its fp32 value


@triton.jit
def exp(d, PRECISE: tl.constexpr):
    """exp(d) as exp2(d log2 e): one multiplication and one special-function instruction that flushes denormals.

    The rounded product alone leaves a relative error of 1e-7 |d|; PRECISE (fp32 inputs) carries its remainder along.
    """
    t = d * LOG2_E
    e = tl.exp2(t)
    if PRECISE:
        remainder = tl.fma(d, LOG2_E, -t) + d * LOG2_E_LOW
        # exp2(remainder) - 1 to first order; |d| is large only where e is 0, and inf - inf must not make NaN of it
        e += e * tl.where(tl.abs(d) < 1e3, remainder * 0.6931471805599453, 0.0)
    return e


@triton.jit
def tanh(x, SERIES: tl.constexpr):
    """tanh without a library call: 1 - 2 / (exp(2x) + 1), which saturates at +-1 and keeps NaN. Its absolute error is
    1e-7; SERIES takes the odd series near 0, where fp32 inputs deserve a relative one."""
    value = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    if SERIES:
        s = x * x
        series = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
        value = tl.where((x < 0.15) & (x > -0.15), series, value)
    return value


@triton.jit
def transform(
    product, bias, column, V, logit_scale, softcap, compute_type: tl.constexpr,
    COLUMNS: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """z = softcap * tanh(logit_scale * (product + bias) / softcap)."""
    z = product
    if HAS_BIAS:
        columns = column + tl.arange(0, COLUMNS)
        b = tl.load(bias + columns, mask=columns < V, other=0.0)
        z += b.to(compute_type).to(tl.float32)[None, :]
    if SCALED:
        z = z * logit_scale
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap, compute_type == tl.float32)
    return z


@triton.jit
def chain(value, z, softcap, HAS_SOFTCAP: tl.constexpr):
    """value * chi with chi = 1 - (z / softcap)^2, the softcap's derivative; logit_scale stays a factor of the row."""
    if HAS_SOFTCAP:
        ratio = z / softcap
        value = value * (1.0 - ratio * ratio)
    return value
