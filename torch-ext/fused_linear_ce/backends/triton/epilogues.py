"""What becomes of a tile of products, in the GEMM kernels' registers: its statistics and E, or dlogits.

A tile comes and goes as a tuple of parts, its columns from left to right, and is worked on part by part, so that few
values live at once: a thread that holds 128 logits has 100 registers for all else. Sums and maxima over the columns
are taken element by element over the parts first, and once over what is left.

    products   tuple of (rows, columns of a part) in fp32, without the bias
    at         the columns of a part, from 0
    column     of the vocabulary, where the tile begins
    y          the column of a row's target in the tile; outside of it, or of the vocabulary, it is elsewhere
"""

import triton
import triton.language as tl

from .logits import (
    LOG_ZERO,
    chain,
    column_bias,
    exponentials,
    gradient,
    row_scratch,
    row_sums,
    target_gradient,
    tile_partials,
    transform,
)


@triton.jit
def targets_in_tile(targets, rows, live, column, COLUMNS: tl.constexpr):
    """(y, here, any_here) of a tile: y as above, whether it is in the tile, and whether that is so in any row."""
    y = tl.load(targets + rows, mask=live, other=-1).to(tl.int32) - column
    here = (y >= 0) & (y < COLUMNS)
    return y, here, tl.max(here.to(tl.int32), 0) > 0


@triton.jit
def tile_bias(bias, at, column, V, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr):
    """The bias of a tile's columns, in parts; nothing without one."""
    parts = ()
    if HAS_BIAS:
        for i in tl.static_range(COLUMNS // at.shape[0]):
            parts = parts + (column_bias(bias, column + i * at.shape[0] + at, V, COMPUTE),)
    return parts


@triton.jit
def tile_logits(
    products, biases, logit_scale, softcap, PARTS: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """z of a tile, in parts."""
    z = ()
    for i in tl.static_range(PARTS):
        part = products[i]
        if HAS_BIAS:
            part += biases[i][None, :]
        z = z + (transform(part, logit_scale, softcap, SCALED, HAS_SOFTCAP),)
    return z


@triton.jit
def tile_maximum(z, PARTS: tl.constexpr):
    """The largest z of each row of a tile."""
    highest = z[0]
    for i in tl.static_range(1, PARTS):
        highest = tl.maximum(highest, z[i])
    return tl.max(highest, 1)


@triton.jit
def one_half(parts, right, HALF: tl.constexpr):
    """Of each row the left or the right half of the parts."""
    chosen = ()
    for i in tl.static_range(HALF):
        chosen = chosen + (tl.where(right[:, None], parts[i + HALF], parts[i]),)
    return chosen


@triton.jit
def at_target(z, at, y, PARTS: tl.constexpr):
    """z at column y of each row, by halves of the parts and then within one: only what is left of a tile by then is
    compared with anything. Of no meaning where y is outside."""
    WIDTH: tl.constexpr = at.shape[0]
    left = z
    for level in tl.static_range(1, 6):
        if PARTS >> level > 0:
            left = one_half(left, (y // WIDTH & PARTS >> level) != 0, PARTS >> level)
    return tl.sum(tl.where(at[None, :] == (y % WIDTH)[:, None], left[0], 0.0), 1)


@triton.jit
def before_target(z, at, y, PARTS: tl.constexpr):
    """The largest z of each row among the columns before y; -inf where there is none."""
    highest = tl.where(at[None, :] < y[:, None], z[0], float("-inf"))
    for i in tl.static_range(1, PARTS):
        earlier = at[None, :] < (y - i * at.shape[0])[:, None]
        highest = tl.maximum(highest, tl.where(earlier, z[i], float("-inf")))
    return tl.max(highest, 1)


@triton.jit
def tile_statistics(
    products, at, column_tile, rows, live, y, here, any_here, c, biases, class_weight, scratch, partials,
    R, V, plane, logit_scale, softcap, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, SHIFTED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Leaves a tile's part of the statistics behind, as forward_kernels.forward_kernel says; returns its E chi in
    DTYPE, which means nothing unless STORE, as c does."""
    _, target_z, target_beaten, _, _ = row_scratch(scratch, R)
    tile_max, tile_sum, tile_dot, tile_squares, tile_shifted, tile_weight = tile_partials(
        partials, plane, ENTROPY, SQUARES, SHIFTED
    )
    WIDTH: tl.constexpr = at.shape[0]
    PARTS: tl.constexpr = COLUMNS // WIDTH
    PRECISE: tl.constexpr = COMPUTE == tl.float32
    INFINITE: tl.constexpr = not STORE or (HAS_BIAS and not HAS_SOFTCAP)  # z may be -inf where its reference is not
    column = column_tile * COLUMNS
    z = tile_logits(products, biases, logit_scale, softcap, PARTS, SCALED, HAS_BIAS, HAS_SOFTCAP)
    inside = ()
    for i in tl.static_range(PARTS):
        part = z[i]
        if column + (i + 1) * WIDTH > V:
            # Far below a reference that no row's maximum is far below: counts for nothing in any sum.
            outside = c[:, None] + LOG_ZERO if STORE else float("-inf")
            part = tl.where((column + i * WIDTH + at < V)[None, :], part, outside)
        inside = inside + (part,)
    z = inside
    if not STORE:
        m = tile_maximum(z, PARTS)
        c = tl.where(m == float("-inf"), 0.0, m)
    if any_here:
        z_y = at_target(z, at, y, PARTS)
        # Whether an earlier class has as much only matters where nothing has more.
        highest_here = here & (z_y >= (tile_maximum(z, PARTS) if STORE else m))
        beaten = 1.0 - highest_here.to(tl.float32)
        if tl.max(highest_here.to(tl.int32), 0) > 0:
            beaten = tl.where(highest_here & (before_target(z, at, y, PARTS) < z_y), 0.0, 1.0)
        tl.store(target_z + rows, z_y, mask=here)
        tl.store(target_beaten + rows, beaten, mask=here)
    sums, weight, exps = (0.0, 0.0, 0.0, 0.0), 0.0, ()
    highest = z[0]
    for i in tl.static_range(PARTS):
        columns = column + i * WIDTH + at
        class_w = (columns < V).to(tl.float32)
        if HAS_CLASS_WEIGHT:
            class_w = tl.load(class_weight + columns, mask=columns < V, other=0.0).to(tl.float32)
        weight += class_w
        if STORE:
            highest = tl.maximum(highest, z[i])
        e, sums = exponentials(z[i], c, class_w, sums, i == 0, INFINITE, ENTROPY, SQUARES, SHIFTED, PRECISE)
        exps = exps + (chain(e, z[i], softcap, HAS_SOFTCAP).to(DTYPE),)
    total, dot, squares, shifted = row_sums(sums, ENTROPY, SQUARES, SHIFTED, PRECISE)
    if STORE:
        m = tl.max(highest, 1)
    partial = column_tile.to(tl.int64) * R + rows
    tl.store(tile_max + partial, m, mask=live)
    tl.store(tile_sum + partial, total, mask=live)
    if ENTROPY:
        tl.store(tile_dot + partial, dot, mask=live)
    if SQUARES:
        tl.store(tile_squares + partial, squares, mask=live)
    if SHIFTED:
        tl.store(tile_shifted + partial, shifted, mask=live)
        tl.store(tile_weight + column_tile, tl.sum(weight, 0))  # the same from every row tile
    return exps


@triton.jit
def row_coefficients(
    row_max, row_log_sum, row_entropy, row_a, row_b, row_d, rows, live, HAS_B: tl.constexpr, HAS_D: tl.constexpr
):
    """What tile_gradient wants of each row: (m, log_sum, entropy, a, b, d)."""
    m = tl.load(row_max + rows, mask=live, other=0.0)
    log_sum = tl.load(row_log_sum + rows, mask=live, other=0.0)
    a = tl.load(row_a + rows, mask=live, other=0.0)
    entropy, b, d = a, a, a
    if HAS_B:
        entropy = tl.load(row_entropy + rows, mask=live, other=0.0)
        b = tl.load(row_b + rows, mask=live, other=0.0)
    if HAS_D:
        d = tl.load(row_d + rows, mask=live, other=0.0)
    return m, log_sum, entropy, a, b, d


@triton.jit
def tile_gradient(
    products, at, column, rows, live, y, here, any_here, coefficients, row_target, row_r, biases, class_weight,
    V, logit_scale, softcap, DTYPE: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_B: tl.constexpr, HAS_D: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """A tile's chi (p (a + b (log p + entropy)) + (r - a) [j = y] + d w_j) in DTYPE: loss.py's family."""
    m, log_sum, entropy, a, b, d = coefficients
    WIDTH: tl.constexpr = at.shape[0]
    PARTS: tl.constexpr = COLUMNS // WIDTH
    PRECISE: tl.constexpr = COMPUTE == tl.float32
    values = ()
    logits = tile_logits(products, biases, logit_scale, softcap, PARTS, SCALED, HAS_BIAS, HAS_SOFTCAP)
    for i in tl.static_range(PARTS):
        z, columns = logits[i], column + i * WIDTH + at
        value = gradient(z, m, log_sum, entropy, a, b, HAS_B, PRECISE)
        if HAS_D:
            if HAS_CLASS_WEIGHT:
                w = tl.load(class_weight + columns, mask=columns < V, other=0.0).to(tl.float32)
                value += d[:, None] * w[None, :]
            else:
                value += d[:, None]
        values = values + (chain(value, z, softcap, HAS_SOFTCAP).to(DTYPE),)
    if any_here:
        # At the target by its own formula, from the row's statistics.
        r = tl.load(row_r + rows, mask=live, other=0.0)
        z_y = tl.load(row_target + rows, mask=live, other=0.0)  # less m
        log_prob = z_y - log_sum
        value_y = target_gradient(log_prob, entropy, a, b, r, HAS_B, PRECISE)
        if HAS_D:
            if HAS_CLASS_WEIGHT:
                known = here & (column + y < V)
                value_y += d * tl.load(class_weight + (column + y), mask=known, other=0.0).to(tl.float32)
            else:
                value_y += d
        value_y = chain(value_y, z_y + m, softcap, HAS_SOFTCAP).to(DTYPE)
        replaced = ()
        for i in tl.static_range(PARTS):
            is_target = at[None, :] == (y - i * WIDTH)[:, None]
            replaced = replaced + (tl.where(is_target, value_y[:, None], values[i]),)
        values = replaced
    return values
