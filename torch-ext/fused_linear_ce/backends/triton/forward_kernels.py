"""The forward GEMM with the softmax statistics in its epilogue, and the reduction of the statistics over tiles.

    select_kernel      which rows count
    reference_kernel   c_i: the target's logit (only where E is stored)
    forward_kernel     tile of logits -> per-(tile, row) partial statistics, and E = exp(z - c) chi if asked for
    combine_kernel     partial statistics -> the row's statistics; marks rows whose E may have overflowed
    forward_kernel     again for the marked rows, with their maximum, now known, as reference: its programs return at
    combine_kernel     once where nothing is marked, which costs two empty launches and no synchronisation

Why any reference will do: E and the partial sums carry the factor exp(-c_i), which the row's scale exp(c_i - lse_i)
takes out again after the GEMMs. bf16 and fp32 share their exponent range, so nothing is lost while m_i - c_i, with m_i
the row's maximum, stays below about 88 - log V. c_i is the target's logit, so m_i - c_i <= nll_i: a marked row is one
whose loss exceeds LIMIT nats, or whose target has no finite logit.
"""

import triton
import triton.language as tl

from .epilogues import targets_in_tile, tile_bias, tile_statistics
from .logits import (
    LN_2,
    LOG_ZERO,
    PER_CALL,
    column_bias,
    exp,
    exponential,
    in_units,
    reference_error,
    row_scratch,
    tile_order,
    tile_partials,
    tile_product,
    transform,
)

# Nats that a row's maximum may lie above its reference: 2^58, times 2^18 classes, over base.NUDGE, is in range.
LIMIT = tl.constexpr(40.0)
LIMIT_SQUARES = tl.constexpr(30.0)  # the same where exp(z - c)^2 is summed
FAR_BELOW = tl.constexpr(-1e8)  # the reference that marks a row, whatever its maximum is


@triton.jit(do_not_specialize=["N"])
def select_kernel(targets, index, classes, count, N, ignore_index, V, BLOCK: tl.constexpr):
    """Selection of base.py, by one program: N is a few thousand, and this comes before everything else."""
    kept = 0
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        y = tl.load(targets + at, mask=at < N, other=0).to(tl.int64)
        keep = (at < N) & (y != ignore_index)
        position = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(index + position, at.to(tl.int64), mask=keep)
        tl.store(classes + position, tl.where((y >= 0) & (y < V), y, -1), mask=keep)
        kept += tl.sum(keep.to(tl.int32), 0)
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(index + at, tl.zeros((BLOCK,), dtype=tl.int64), mask=(at >= kept) & (at < N))
        tl.store(classes + at, tl.full((BLOCK,), -1, dtype=tl.int64), mask=(at >= kept) & (at < N))
    tl.store(count, kept)


@triton.jit(do_not_specialize=["R"])
def reference_kernel(
    x, w, bias, targets, scratch, R, V, H,
    stride_xr, stride_wv, stride_wh, logit_scale, softcap,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """reference = z of the target; 0 where there is no target, FAR_BELOW where its z is not finite. One program for
    ROWS rows; the first one clears the mark of rows that overflowed.

    It need not agree with forward_kernel to the last bit, only to a few nats. No row's maximum may lie far below it:
    the columns beyond V are given a z of LOG_ZERO from it, and are to be neither the maximum nor all that is left.
    """
    reference, _, _, _, any_marked = row_scratch(scratch, R)
    if tl.program_id(0) == 0:
        tl.store(any_marked, 0.0)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = tl.load(targets + rows, mask=rows < R, other=-1)
    known = y >= 0
    depth = tl.arange(0, DEPTH)
    x_rows = x + rows.to(tl.int64)[:, None] * stride_xr
    w_rows = w + y.to(tl.int64)[:, None] * stride_wv
    dot = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for k in range(0, H, DEPTH):
        mask = known[:, None] & (k + depth < H)[None, :]
        a = tl.load(x_rows + (k + depth)[None, :], mask=mask, other=0.0)
        b = tl.load(w_rows + (k + depth).to(tl.int64)[None, :] * stride_wh, mask=mask, other=0.0)
        dot += a.to(tl.float32) * b.to(COMPUTE).to(tl.float32)
    z = tl.sum(dot, 1)
    if HAS_BIAS:
        z += column_bias(bias, tl.where(known, y, 0), V, COMPUTE)
    z = transform(z, logit_scale, softcap, SCALED, HAS_SOFTCAP)
    z = tl.where((z > float("-inf")) & (z < float("inf")), z, FAR_BELOW)
    z = tl.where(known, z, 0.0)
    tl.store(reference + rows, z, mask=rows < R)


@triton.jit(do_not_specialize=PER_CALL)
def forward_kernel(
    x, w, bias, targets, class_weight, scratch, exps, partials,
    R, V, H, row_tiles, column_tiles, plane,
    stride_xr, stride_wv, stride_wh, stride_er, logit_scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    STORE: tl.constexpr, REPAIR: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, SHIFTED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Persistent: each program walks over tiles of ROWS x COLUMNS logits. Per tile and row it leaves behind, at
    [column tile, row]: the maximum, sum exp(z - c), sum exp(z - c)(z - c), sum exp(z - c)^2 and sum w_j (z_j - c) (the
    last three if asked for), with c the row's reference where E is stored and the tile's own maximum elsewhere. The
    tile that holds a row's target writes its logit, and whether another class of it is higher, or equal and earlier.
    """
    reference, _, _, marked, any_marked = row_scratch(scratch, R)
    if REPAIR:
        if tl.load(any_marked) == 0.0:
            return
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_order(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * ROWS
        column = column_tile * COLUMNS
        rows = row + tl.arange(0, ROWS)
        live = rows < R
        run = True
        if REPAIR:
            run = tl.max(tl.load(marked + rows, mask=live, other=0.0), 0) > 0.0
        if run:
            product = tile_product(
                x, w, row, column, R, V, H, stride_xr, stride_wv, stride_wh, ROWS, COLUMNS, DEPTH, DESCRIPTORS,
                PRECISION,
            )  # fmt: skip
            y, here, any_here = targets_in_tile(targets, rows, live, column, COLUMNS)
            c = tl.load(reference + rows, mask=live, other=0.0) if STORE else tl.zeros((ROWS,), dtype=tl.float32)
            at = tl.arange(0, COLUMNS)
            biases = tile_bias(bias, at, column, V, COLUMNS, HAS_BIAS, COMPUTE)
            (e,) = tile_statistics(
                (product,), at, column_tile, rows, live, y, here, any_here,
                c, biases, class_weight, scratch, partials, R, V, plane, logit_scale, softcap,
                exps.dtype if DESCRIPTORS and STORE else exps.dtype.element_ty, COLUMNS, STORE,
                SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, ENTROPY, SQUARES, SHIFTED, COMPUTE,
            )  # fmt: skip
            if STORE:
                if DESCRIPTORS:
                    exps.store([row, column], e)
                else:
                    columns = column + tl.arange(0, COLUMNS)
                    at_e = exps + rows.to(tl.int64)[:, None] * stride_er + columns[None, :]
                    tl.store(at_e, e, mask=live[:, None] & (columns < V)[None, :])


@triton.jit(do_not_specialize=["column_tiles", "plane", "repair"])  # rows by 16: wide loads
def combine_kernel(
    targets, scratch, partials,
    out_max, out_log_sum, out_target, out_scale, out_entropy, out_sum_log_probs, out_squares, out_top1,
    R, column_tiles, plane, repair,
    ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, SHIFTED: tl.constexpr, TOP1: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program for ROWS rows: the partial statistics of all column tiles, in one order, to the row's statistics.

    STORE: every tile used the same reference, sums just add up, and scale = exp(c - lse) = 1 / sum exp(z - c). A row
    whose maximum lies more than LIMIT from c is marked and gets its maximum as new reference. With `repair` not 0 the
    rows that were marked are done again, and no others; none is marked then.
    Without STORE each tile used its own maximum and is rescaled to the row's; there is no repair.
    """
    reference, target_z, target_beaten, marked, any_marked = row_scratch(scratch, R)
    tile_max, tile_sum, tile_dot, tile_squares, tile_shifted, tile_weight = tile_partials(
        partials, plane, ENTROPY, SQUARES, SHIFTED
    )
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < R  # the mask of all loads: one that depends on what is loaded would make them narrow
    written = live
    if STORE:
        if tl.where(repair != 0, tl.load(any_marked), 1.0) == 0.0:
            return
        written = live & (tl.where(repair != 0, tl.load(marked + rows, mask=live, other=0.0), 1.0) > 0.0)
    y = tl.load(targets + rows, mask=live, other=-1)
    target_tile = y // COLUMNS
    tiles = tl.arange(0, TILES)
    # Kept per lane and summed up once, at the end: a sum over lanes costs more than the loads.
    lanes = tl.zeros((TILES, ROWS), dtype=tl.float32)
    m, earlier = lanes + float("-inf"), lanes + float("-inf")
    total, dot, squares, shifted, weight = lanes, lanes, lanes, lanes, tl.zeros((TILES, 1), dtype=tl.float32)
    for first in range(0, column_tiles, TILES):
        tile = first + tiles
        mask = (tile < column_tiles)[:, None] & live[None, :]
        at = tile.to(tl.int64)[:, None] * R + rows[None, :]
        t_max = tl.load(tile_max + at, mask=mask, other=float("-inf"))
        m = tl.maximum(m, t_max)
        if TOP1:
            earlier = tl.maximum(earlier, tl.where(tile[:, None] < target_tile[None, :], t_max, float("-inf")))
        if STORE:
            total += tl.load(tile_sum + at, mask=mask, other=0.0)
            if ENTROPY:
                dot += tl.load(tile_dot + at, mask=mask, other=0.0)
            if SQUARES:
                squares += tl.load(tile_squares + at, mask=mask, other=0.0)
            if SHIFTED:
                shifted += tl.load(tile_shifted + at, mask=mask, other=0.0)
        if SHIFTED:
            weight += tl.load(tile_weight + tile, mask=tile < column_tiles, other=0.0)[:, None]
    m, earlier, weight = tl.max(m, 0), tl.max(earlier, 0), tl.sum(weight, 0)
    if STORE:
        c = tl.load(reference + rows, mask=live, other=0.0)
    else:
        c = tl.where(m == float("-inf"), 0.0, m)
    PRECISE: tl.constexpr = COMPUTE == tl.float32
    if not STORE:  # each tile's sums are relative to its own maximum
        for first in range(0, column_tiles, TILES):
            tile = first + tiles
            mask = (tile < column_tiles)[:, None] & live[None, :]
            at = tile.to(tl.int64)[:, None] * R + rows[None, :]
            t_max = tl.load(tile_max + at, mask=mask, other=float("-inf"))
            t_sum = tl.load(tile_sum + at, mask=mask, other=0.0)
            # A tile of -inf used the reference 0 and has the sum 0: its factor must not be exp(0 - m).
            shift = tl.maximum(t_max - c[None, :] - reference_error(t_max, PRECISE), LOG_ZERO)
            factor = exp(shift, PRECISE)
            total += t_sum * factor
            if ENTROPY:
                dot += factor * (tl.load(tile_dot + at, mask=mask, other=0.0) + t_sum * shift)
            if SQUARES:
                squares += tl.load(tile_squares + at, mask=mask, other=0.0) * factor * factor
            if SHIFTED:
                t_weight = tl.load(tile_weight + tile, mask=tile < column_tiles, other=0.0)[:, None]
                t_c = tl.where(t_max == float("-inf"), 0.0, t_max)
                t_shifted = tl.load(tile_shifted + at, mask=mask, other=0.0)
                t_shifted += t_weight * (t_c - m[None, :] - reference_error(t_c, PRECISE))
                shifted += tl.where(mask, t_shifted, 0.0)
    total, dot, squares, shifted = tl.sum(total, 0), tl.sum(dot, 0), tl.sum(squares, 0), tl.sum(shifted, 0)
    if SHIFTED and STORE:
        shifted += weight * (c - m - reference_error(c, PRECISE))
    if STORE:
        limit = tl.where(repair != 0, float("inf"), LIMIT_SQUARES if SQUARES else LIMIT)
        over = written & (tl.abs(m - c) > limit) & (m > float("-inf"))
        tl.store(marked + rows, over.to(tl.float32), mask=written)
        tl.store(reference + rows, m, mask=over)
        if tl.max(over.to(tl.int32), 0) > 0:
            tl.store(any_marked, 1.0)
    z_y = tl.load(target_z + rows, mask=live, other=0.0)
    # The sums are divided by the maximum's own element, rounded as its tile (and, without STORE, the loop above) did:
    # where it is all there is, log_sum is 0, although c is computed by itself and the element is not quite exp(m - c).
    above, highest = exponential(m, in_units(c, PRECISE), PRECISE)
    highest_squared = highest * highest
    mean = dot / total  # of z under p, less c or m
    if STORE:
        mean -= above if PRECISE else above * LN_2  # less m
    elif not PRECISE:
        factor = exp(-reference_error(c, PRECISE), PRECISE)
        highest *= factor
        highest_squared = highest_squared * factor * factor
    log_sum = tl.log(tl.div_rn(total, highest))
    # No class, and a row of -inf only: NaN, as the softmax of such a row is.
    log_sum = tl.where((y < 0) | (m == float("-inf")), float("nan"), log_sum)
    poison = log_sum - log_sum
    tl.store(out_max + rows, m, mask=written)
    tl.store(out_log_sum + rows, log_sum, mask=written)
    tl.store(out_target + rows, z_y - m, mask=written)
    if STORE:
        tl.store(out_scale + rows, 1.0 / total + poison, mask=written)
    if ENTROPY:
        entropy = log_sum - mean
        tl.store(out_entropy + rows, tl.where(entropy < 0.0, 0.0, entropy) + poison, mask=written)
    if SQUARES:
        log_squares = tl.log(tl.div_rn(squares, highest_squared)) - 2.0 * log_sum
        tl.store(out_squares + rows, tl.where(log_squares > 0.0, 0.0, log_squares) + poison, mask=written)
    if SHIFTED:
        tl.store(out_sum_log_probs + rows, shifted - weight * log_sum + poison, mask=written)
    if TOP1:
        beaten = tl.load(target_beaten + rows, mask=live, other=1.0)
        top1 = (z_y == m) & (earlier < z_y) & (beaten == 0.0) & (log_sum == log_sum)
        tl.store(out_top1 + rows, top1.to(tl.int8), mask=written)
