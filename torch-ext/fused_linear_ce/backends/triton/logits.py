"""Device functions that every kernel shares: a tile of logits, and the transform that makes z of it."""

import triton
import triton.language as tl

# Arguments that depend on the number of rows, which changes from call to call. Triton compiles a kernel once more for
# an integer that is 1 or a multiple of 16, unless it is told not to.
PER_CALL = ("R", "row_tiles", "column_tiles", "plane")


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
LN_2 = tl.constexpr(0.6931471805599453)
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
        e += e * tl.where(tl.abs(d) < 1e3, remainder * LN_2, 0.0)
    return e


@triton.jit
def capped(y, softcap, SERIES: tl.constexpr):
    """softcap * tanh(y / softcap) without a library call: tanh is 1 - 2 / (exp(2 y / softcap) + 1), which saturates at
    +-1 and keeps NaN.

    Its absolute error is below 6e-7, with the reciprocal as the square of an approximate root: two instructions where
    a division is eight. SERIES, for fp32 inputs and large softcaps: 2e-7, and as much relative to tanh, which up to
    0.75 is y times a polynomial in (y / softcap)^2 that interpolates tanh(u) / u at Chebyshev points.

    An element's value is its own: equal products stay equal logits wherever they stand, and which class is the highest
    depends on that.
    """
    e = tl.exp2(y * (2.0 * LOG2_E / softcap))
    if SERIES:
        ratio = y * (1.0 / softcap)
        s = ratio * ratio
        p = tl.fma(s, -0.00471152226, 0.0195762161)
        p = tl.fma(p, s, -0.0533411168)
        p = tl.fma(p, s, 0.133253396)
        p = tl.fma(p, s, -0.333329529)
        p = tl.fma(p, s, 1.0)
        value = tl.where(tl.abs(ratio) <= 0.75, y * p, softcap * (1.0 - 2.0 / (e + 1.0)))
    else:
        root = tl.rsqrt(e + 1.0)
        value = tl.fma(root * root, -2.0 * softcap, softcap)
    return value


@triton.jit
def column_bias(bias, columns, V, compute_type: tl.constexpr):
    """The bias of `columns`, rounded to the compute dtype as the GEMM's operands are, in fp32."""
    return tl.load(bias + columns, mask=columns < V, other=0.0).to(compute_type).to(tl.float32)


@triton.jit
def transform(product, logit_scale, softcap, SCALED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """z = softcap * tanh(logit_scale * product / softcap), of a product that has its bias.

    HAS_SOFTCAP: 0 none; 1 with tanh's absolute error, times the softcap; 2 with its relative error.
    """
    z = product
    if SCALED:
        z = z * logit_scale
    if HAS_SOFTCAP:
        z = capped(z, softcap, HAS_SOFTCAP == 2)
    return z


@triton.jit
def chain(value, z, softcap, HAS_SOFTCAP: tl.constexpr):
    """value * chi with chi = 1 - (z / softcap)^2, the softcap's derivative; logit_scale stays a factor of the row."""
    if HAS_SOFTCAP:
        ratio = z * (1.0 / softcap)
        value = value * (1.0 - ratio * ratio)
    return value


@triton.jit
def reference_error(c, PRECISE: tl.constexpr):
    """By how much the reference that exponentials() really uses lies below c: what rounding took off c log2 e. 0 for
    the maximum -inf of a tile without a finite logit, whose reference is 0."""
    finite = tl.where(c == float("-inf"), 0.0, c)
    return 0.0 if PRECISE else LN_2 * tl.fma(finite, LOG2_E, -(finite * LOG2_E))


@triton.jit
def in_units(c, PRECISE: tl.constexpr):
    """A reference in exponential()'s units."""
    return c if PRECISE else c * LOG2_E


@triton.jit
def exponential(z, c, PRECISE: tl.constexpr):
    """(d, e): z - c in nats if PRECISE, else in units of log 2 by one fused multiplication and addition; and its exp.
    c is in the same units."""
    if PRECISE:
        d = z - c
        e = exp(d, True)
    else:
        d = tl.fma(z, LOG2_E, -c)
        e = tl.exp2(d)
    return d, e


@triton.jit
def exponentials(
    z, c, class_w, sums, FIRST: tl.constexpr, INFINITE: tl.constexpr, ENTROPY: tl.constexpr, SQUARES: tl.constexpr,
    SHIFTED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """e = exp(z - c), and `sums`, element by element, of e, e (z - c), e^2 and w (z - c) over the parts that a tile's
    columns are worked on in, this one added (FIRST: there is none before it). INFINITE: z may be -inf where c is
    finite.

    Unless PRECISE, c is c - reference_error(c): one for the whole row, so that only a sum's meaning depends on it.
    """
    total, dot, squares, shifted = sums
    d, e = exponential(z, in_units(c, PRECISE)[:, None], PRECISE)
    total = e if FIRST else total + e
    if SHIFTED:
        # A class of weight 0 adds nothing, also when its logit is -inf.
        term = tl.where((class_w == 0.0)[None, :], 0.0, d * class_w[None, :])
        shifted = term if FIRST else shifted + term
    if SQUARES:
        squares = e * e if FIRST else tl.fma(e, e, squares)
    if ENTROPY:
        if INFINITE:
            d = tl.maximum(d, LOG_ZERO)
        dot = e * d if FIRST else tl.fma(e, d, dot)
    return e, (total, dot, squares, shifted)


@triton.jit
def row_sums(sums, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, SHIFTED: tl.constexpr, PRECISE: tl.constexpr):
    """The row sums of what exponentials() has left, in nats; what is not asked for is the first sum."""
    UNIT: tl.constexpr = 1.0 if PRECISE else LN_2
    total = tl.sum(sums[0], 1)
    dot, squares, shifted = total, total, total
    if ENTROPY:
        dot = tl.sum(sums[1], 1) * UNIT
    if SQUARES:
        squares = tl.sum(sums[2], 1)
    if SHIFTED:
        shifted = tl.sum(sums[3], 1) * UNIT
    return total, dot, squares, shifted


@triton.jit
def gradient(z, m, log_sum, entropy, a, b, HAS_B: tl.constexpr, PRECISE: tl.constexpr):
    """p (a + b (log p + entropy)), what every class has of the gradient family of loss.py; m to b are per row."""
    log_p = (z - m[:, None]) - log_sum[:, None]
    value = exp(log_p, PRECISE)
    if HAS_B:
        log_p = tl.maximum(log_p, LOG_ZERO)
        return value * (a[:, None] + b[:, None] * (log_p + entropy[:, None]))
    return value * a[:, None]


@triton.jit
def expm1(x, PRECISE: tl.constexpr):
    """exp(x) - 1 for x <= 0, by its series where exp would cancel."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0))))
    return tl.where(x > -0.05, series, exp(x, PRECISE) - 1.0)


@triton.jit
def target_gradient(log_prob, entropy, a, b, r, HAS_B: tl.constexpr, PRECISE: tl.constexpr):
    """The same at the target, with r: loss.py's target_dlogit."""
    value = a * expm1(log_prob, PRECISE) + r
    if HAS_B:
        value += b * exp(log_prob, PRECISE) * (tl.maximum(log_prob, LOG_ZERO) + entropy)
    return value


@triton.jit
def row_scratch(scratch, R):
    """What a chunk's kernels leave for each other about a row: its reference, the target's z, whether another
    class of the target's tile is above it or is equal and earlier, and whether E overflowed; then whether any did."""
    return scratch, scratch + R, scratch + 2 * R, scratch + 3 * R, scratch + 4 * R


@triton.jit
def tile_partials(partials, plane, ENTROPY: tl.constexpr, SQUARES: tl.constexpr, SHIFTED: tl.constexpr):
    """Planes of (column tiles, rows): the maximum, and the sums of e, e (z - c), e^2 and w (z - c) where asked for;
    then the sum of w over each column tile."""
    total = partials + plane
    dot = total + plane
    squares = dot + plane if ENTROPY else dot
    shifted = squares + plane if SQUARES else squares
    weight = shifted + plane if SHIFTED else shifted
    return partials, total, dot, squares, shifted, weight
