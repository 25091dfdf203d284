"""The GEMM kernels for Hopper (sm_90), in Gluon, the layer of Triton that leaves layouts and scheduling to the author.

All of them are one pipeline. A program is persistent and has three roles, each in warps of its own:

    producer     one warp: bulk tensor copies of the operands' next blocks into a ring of STAGES buffers
    consumers    two warpgroups: matrix instructions on the ring's blocks, and then the tile's epilogue. A tile is cut
                 in two, one half for each, and they share the block of the other operand. They are two PARTITIONS,
                 which drift apart, so that one's epilogue falls into the other's products; or one, with one copy of
                 the code, where two would not fit into the instruction cache.

A consumer stores what became of a tile a quarter at a time between the next tile's first products: the exponentials
need half the registers of the logits, so both fit, and shared memory has the time of a product for each quarter. Of a
tile of dW, in fp32, one half fits beside the next, and waits so; the other goes out before the products begin. A
kernel that goes from the GEMM to the epilogue and back leaves the tensor cores idle meanwhile, and waits for its first
blocks once a tile: 1.3 times the time of the library's GEMM at a hidden size of 1024.

Epilogues are straight-line code, as registers have no index: 2000 to 5000 instructions of 16 bytes for each consumer
and tile. Two copies of a softcap's took 1.4 to 1.8 times the library's GEMM, the more the longer they were, and one
1.3; without a softcap two take 1.05 and one 1.09.

A ring slot's `ready` barrier counts the bytes of its blocks, its `empty` barrier the partitions that have read it;
both flip their phase every time round the ring. What a tile's products become is epilogues.py's, as everywhere.
"""

import functools
from typing import Optional

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .epilogues import row_coefficients, targets_in_tile, tile_bias, tile_gradient, tile_statistics
from .logits import PER_CALL, row_scratch, tile_order

# Renamed between the versions of Triton that are supported (3.6 to 3.9).
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gl._core.builtin
def _add_out(tensor_desc, coord, src, _semantic=None):
    """tma.async_atomic_add of Triton 3.9; 3.6 has the instruction, but no name for it on Hopper."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


add_out = getattr(tma, "async_atomic_add", None) or _add_out

ROWS = gl.constexpr(128)  # a tile of logits; each consumer has 64 of its rows
COLUMNS = gl.constexpr(256)
CONSUMER_WARPS = gl.constexpr(8)
EIGHTH = gl.constexpr(32)  # of COLUMNS: what an epilogue works on at a time, so that few values live at once
PART = gl.constexpr(64)  # columns of a block of E or dlogits that goes out
DEPTH = gl.constexpr(64)  # of a block along the reduction
LOGITS_STEPS = gl.constexpr(2 + COLUMNS // PART)  # of a tile of logits: two, and one for each part of the last tile
STAGES = gl.constexpr(4)  # slots of 48 KiB each; with two blocks on their way out for each consumer, memory is full
PRODUCER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(40), gl.constexpr(232)


@functools.cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix for bulk copies of (rows, columns) blocks; beyond its edges they read zero and write nothing."""
    layout = _shared_layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [rows, columns], layout)


def partitions(softcap: Optional[float]) -> int:
    """PARTITIONS of forward_kernel and dlogits_kernel, which have CONSUMER_WARPS / PARTITIONS warps."""
    return 2 if softcap is None else 1


def logits_descriptors(x: torch.Tensor, weight: torch.Tensor, out: Optional[torch.Tensor], partitions: int) -> tuple:
    """(x, w, exps or out) as forward_kernel and dlogits_kernel take them; without an `out` they won't touch it."""
    rows = ROWS.value // partitions
    a, w = descriptor(x, rows, DEPTH.value), descriptor(weight, COLUMNS.value, DEPTH.value)
    return a, w, a if out is None else descriptor(out, rows, PART.value)


def weight_descriptors(e: torch.Tensor, x: torch.Tensor, out: torch.Tensor, classes: int, width: int) -> tuple:
    """(e, x, out) as weight_kernel takes them for its tile of classes x width."""
    depth = DEPTH.value
    return descriptor(e, depth, classes // 2), descriptor(x, depth, width), descriptor(out, classes // 2, width // 8)


@gl._core.builtin
def _specialize(partitions, consumer, consumed, producer, produced, _semantic=None, _generator=None):
    """Runs the consumer's partitions, each with its number before its arguments, and the producer. A list of
    partitions can't be put together in compiled code."""
    count = gl._core._unwrap_if_constexpr(partitions)
    consumers = [(consumer, gl.tuple([gl.constexpr(i), *consumed])) for i in range(count)]
    warps = [CONSUMER_WARPS.value // count] * (count - 1)  # the first has the kernel's own
    registers = [CONSUMER_REGISTERS.value] * (count - 1)
    gl.warp_specialize(
        [*consumers, (producer, produced)],
        [*warps, 1],
        [*registers, PRODUCER_REGISTERS.value],
        _semantic=_semantic,
        _generator=_generator,
    )


@gluon.jit
def _ring(PARTITIONS: gl.constexpr):
    """(ready, empty): the barriers of a ring's slots."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTITIONS)
    fence_async_shared()
    return ready, empty


@gluon.jit
def _steps(K, LEAST: gl.constexpr):
    """Blocks along a reduction over K, LEAST of them at least: blocks beyond K read zero."""
    return gl.maximum(gl.cdiv(K, DEPTH), LEAST)


@gluon.jit
def _slot(step, ring):
    """The ring's slot of a step, waited for until all consumers have read what it held, and its `ready` barrier."""
    ready, empty = ring
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    return stage, ready.index(stage)


@gluon.jit
def _multiply(
    half: gl.constexpr, a, b, ring, step, accumulator, FIRST: gl.constexpr, ROW_MAJOR: gl.constexpr
):
    """accumulator (+)= a consumer's half of a step's blocks, in the background. ROW_MAJOR: blocks are (rows, depth),
    else (depth, rows)."""
    ready, _ = ring
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    left, right = a.index(a.shape[0] // STAGES * stage + half), b.index(stage)
    if ROW_MAJOR:
        right = right.permute([1, 0])
    else:
        left = left.permute([1, 0])
    return warpgroup_mma(left, right, accumulator, use_acc=not FIRST, is_async=True)


@gluon.jit
def _release(step, ring):
    _, empty = ring
    mbarrier.arrive(empty.index(step % STAGES), count=1)


@gluon.jit
def _begin(half: gl.constexpr, a, b, ring, step, accumulator, ROW_MAJOR: gl.constexpr):
    """The first two products of a tile, issued."""
    accumulator = _multiply(half, a, b, ring, step, accumulator, True, ROW_MAJOR)
    return _multiply(half, a, b, ring, step + 1, accumulator, False, ROW_MAJOR)


@gluon.jit
def _advance(half: gl.constexpr, a, b, ring, step, accumulator, ROW_MAJOR: gl.constexpr):
    """One product more: of the two in flight the first, of `step`, is waited for, and its blocks are released."""
    accumulator = warpgroup_mma_wait(1, deps=[accumulator])
    _release(step, ring)
    return _multiply(half, a, b, ring, step + 2, accumulator, False, ROW_MAJOR)


@gluon.jit
def _last(end, ring, accumulator):
    """The last two products of a tile have been issued: waits for them."""
    accumulator = warpgroup_mma_wait(1, deps=[accumulator])
    _release(end - 2, ring)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    _release(end - 1, ring)
    return accumulator


@gluon.jit
def _finish(half: gl.constexpr, a, b, ring, step, accumulator, steps, ISSUED: gl.constexpr, ROW_MAJOR: gl.constexpr):
    """All products of a tile but the first ISSUED."""
    for i in range(ISSUED - 2, steps - 2):
        accumulator = _advance(half, a, b, ring, step + i, accumulator, ROW_MAJOR)
    return _last(step + steps, ring, accumulator)


@gluon.constexpr_function
def _registers(columns, warps=4):
    """The layout of a consumer's (rows, columns), of a whole tile or a part of its columns."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 16])


@gluon.jit
def _halves(tile):
    """(m, 2 n) -> two of (m, n): the left and the right columns. Register names only, nothing moves."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _eighths(tile, WARPS: gl.constexpr = 4):
    """(m, 8 n) -> eight of (m, n), from left to right. As _halves."""
    parts = ()
    for i in gl.static_range(8):
        part = _halves(_halves(_halves(tile)[i // 4])[i // 2 % 2])[i % 2]
        parts = parts + (gl.convert_layout(part, _registers(tile.shape[1] // 8, WARPS)),)
    return parts


@gluon.jit
def _load_logits(x, w, x_blocks, w_blocks, ring, H, row_tiles, column_tiles, GROUP: gl.constexpr):
    """Producer of x (rows, H) and w (classes, H)."""
    SIZE: gl.constexpr = x_blocks.shape[1]
    PARTITIONS: gl.constexpr = ROWS // SIZE
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_order(tile, row_tiles, column_tiles, GROUP)
        for i in range(_steps(H, LOGITS_STEPS)):
            stage, full = _slot(step, ring)
            k = i * DEPTH
            mbarrier.expect(full, (ROWS + COLUMNS) * DEPTH * 2)
            for half in gl.static_range(PARTITIONS):
                copy_in(x, [row_tile * ROWS + half * SIZE, k], full, x_blocks.index(PARTITIONS * stage + half))
            copy_in(w, [column_tile * COLUMNS, k], full, w_blocks.index(stage))
            step += 1


@gluon.jit
def _store_part(values, out, row, column, staging, slot: gl.constexpr, add):
    """out[row :, column :] (+)= values: through shared memory, in the background; waits for the last but one before.
    The addition happens in the second-level cache: nothing is read here."""
    tma.store_wait(1)
    block = staging.index(slot)
    block.store(values.to(staging.dtype))
    fence_async_shared()
    if add:
        add_out(out, [row, column], block)
    else:
        copy_out(out, [row, column], block)


@gluon.jit
def _store_pair(
    half: gl.constexpr, i: gl.constexpr, parts, out, row, column, staging, WARPS: gl.constexpr
):  # fmt: skip
    """Two eighths of a consumer's tile, through one of its two blocks of staging."""
    pair = gl.join(parts[2 * i], parts[2 * i + 1]).permute([0, 2, 1]).reshape([parts[0].shape[0], PART])
    values = gl.convert_layout(pair, _registers(PART, WARPS))
    _store_part(values, out, row, column + i * PART, staging, 2 * half + i % 2, False)


@gluon.jit
def _store_eighth(half: gl.constexpr, i: gl.constexpr, parts, out, row, column, staging, accumulate):
    """One eighth of a consumer's tile of dW, through one of its two blocks of staging."""
    part = parts[i]
    _store_part(part, out, row, column + i * part.shape[1], staging, 2 * half + i % 2, accumulate != 0)


@gluon.jit
def _forward_tiles(
    half: gl.constexpr, operands, GROUP: gl.constexpr, STORE: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_CLASS_WEIGHT: gl.constexpr,
    ENTROPY: gl.constexpr, SQUARES: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Consumer of forward_kernel: what forward_kernels.forward_kernel does with a tile."""
    (
        x_blocks, w_blocks, ring, staging, exps, bias, targets, class_weight, scratch, partials,
        R, V, H, row_tiles, column_tiles, plane, logit_scale, softcap,
    ) = operands  # fmt: skip
    reference, _, _, _, _ = row_scratch(scratch, R)
    size: gl.constexpr = x_blocks.shape[1]
    WARPS: gl.constexpr = CONSUMER_WARPS * size // ROWS
    rows_of: gl.constexpr = gl.SliceLayout(1, _registers(EIGHTH, WARPS))
    columns_of: gl.constexpr = gl.SliceLayout(0, _registers(EIGHTH, WARPS))
    step, steps = 0, _steps(H, LOGITS_STEPS)
    # The last tile's E, which is not stored yet. At first there is none, and what lies beyond the rows isn't written.
    stored = _eighths(gl.zeros([size, COLUMNS], exps.dtype, _registers(COLUMNS, WARPS)), WARPS)
    stored_row, stored_column = row_tiles * ROWS, 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_order(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * ROWS + half * size
        column = column_tile * COLUMNS
        product = gl.zeros([size, COLUMNS], gl.float32, _registers(COLUMNS, WARPS))
        product = _begin(half, x_blocks, w_blocks, ring, step, product, True)
        for i in gl.static_range(COLUMNS // PART):
            if STORE:
                _store_pair(half, i, stored, exps, stored_row, stored_column, staging, WARPS)
            product = _advance(half, x_blocks, w_blocks, ring, step + i, product, True)
        rows = row + gl.arange(0, size, layout=rows_of)
        live = rows < R
        y, here, any_here = targets_in_tile(targets, rows, live, column, COLUMNS)
        c = gl.zeros([size], gl.float32, rows_of)
        if STORE:
            c = gl.load(reference + rows, mask=live, other=0.0)
        at = gl.arange(0, EIGHTH, layout=columns_of)
        biases = tile_bias(bias, at, column, V, COLUMNS, HAS_BIAS, x_blocks.dtype)
        product = _finish(half, x_blocks, w_blocks, ring, step, product, steps, LOGITS_STEPS, True)
        step += steps

        stored = tile_statistics(
            _eighths(product, WARPS), at, column_tile, rows, live, y, here, any_here, c,
            biases, class_weight, scratch, partials, R, V, plane, logit_scale, softcap, exps.dtype, COLUMNS, STORE,
            SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, ENTROPY, SQUARES, SHIFTED, x_blocks.dtype,
        )  # fmt: skip
        stored_row, stored_column = row, column
    if STORE:
        for i in gl.static_range(COLUMNS // PART):
            _store_pair(half, i, stored, exps, stored_row, stored_column, staging, WARPS)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=PER_CALL)
def forward_kernel(
    x, w, bias, targets, class_weight, scratch, exps, partials,
    R, V, H, row_tiles, column_tiles, plane, logit_scale, softcap,
    GROUP: gl.constexpr, PARTITIONS: gl.constexpr, STORE: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_CLASS_WEIGHT: gl.constexpr,
    ENTROPY: gl.constexpr, SQUARES: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """forward_kernels.forward_kernel without its repair: the same partial statistics and the same E, from x and w as
    tensor descriptors of (128 / PARTITIONS, 64) and (256, 64) blocks and exps of (128 / PARTITIONS, 64)."""
    size: gl.constexpr = ROWS // PARTITIONS
    x_blocks = gl.allocate_shared_memory(x.dtype, [PARTITIONS * STAGES, size, DEPTH], x.layout)
    w_blocks = gl.allocate_shared_memory(w.dtype, [STAGES, COLUMNS, DEPTH], w.layout)
    staging = x_blocks
    if STORE:
        staging = gl.allocate_shared_memory(exps.dtype, [2 * PARTITIONS, size, PART], exps.layout)
    ring = _ring(PARTITIONS)
    operands = (
        x_blocks, w_blocks, ring, staging, exps, bias, targets, class_weight, scratch, partials,
        R, V, H, row_tiles, column_tiles, plane, logit_scale, softcap,
    )  # fmt: skip
    _specialize(
        PARTITIONS,
        _forward_tiles, (
            operands, GROUP, STORE, SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, ENTROPY, SQUARES, SHIFTED
        ),
        _load_logits, (x, w, x_blocks, w_blocks, ring, H, row_tiles, column_tiles, GROUP),
    )  # fmt: skip


@gluon.jit
def _dlogits_tiles(
    half: gl.constexpr, operands, GROUP: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_CLASS_WEIGHT: gl.constexpr,
    HAS_B: gl.constexpr, HAS_D: gl.constexpr,
):  # fmt: skip
    """Consumer of dlogits_kernel."""
    (
        x_blocks, w_blocks, ring, staging, out, bias, targets, class_weight,
        row_max, row_log_sum, row_target, row_entropy, row_a, row_b, row_r, row_d,
        R, V, H, row_tiles, column_tiles, logit_scale, softcap,
    ) = operands  # fmt: skip
    size: gl.constexpr = x_blocks.shape[1]
    WARPS: gl.constexpr = CONSUMER_WARPS * size // ROWS
    rows_of: gl.constexpr = gl.SliceLayout(1, _registers(EIGHTH, WARPS))
    columns_of: gl.constexpr = gl.SliceLayout(0, _registers(EIGHTH, WARPS))
    step, steps = 0, _steps(H, LOGITS_STEPS)
    stored = _eighths(gl.zeros([size, COLUMNS], out.dtype, _registers(COLUMNS, WARPS)), WARPS)  # as in _forward_tiles
    stored_row, stored_column = row_tiles * ROWS, 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_order(tile, row_tiles, column_tiles, GROUP)
        row = row_tile * ROWS + half * size
        column = column_tile * COLUMNS
        product = gl.zeros([size, COLUMNS], gl.float32, _registers(COLUMNS, WARPS))
        product = _begin(half, x_blocks, w_blocks, ring, step, product, True)
        for i in gl.static_range(COLUMNS // PART):
            _store_pair(half, i, stored, out, stored_row, stored_column, staging, WARPS)
            product = _advance(half, x_blocks, w_blocks, ring, step + i, product, True)
        rows = row + gl.arange(0, size, layout=rows_of)
        live = rows < R
        y, here, any_here = targets_in_tile(targets, rows, live, column, COLUMNS)
        coefficients = row_coefficients(
            row_max, row_log_sum, row_entropy, row_a, row_b, row_d, rows, live, HAS_B, HAS_D
        )
        at = gl.arange(0, EIGHTH, layout=columns_of)
        biases = tile_bias(bias, at, column, V, COLUMNS, HAS_BIAS, x_blocks.dtype)
        product = _finish(half, x_blocks, w_blocks, ring, step, product, steps, LOGITS_STEPS, True)
        step += steps

        stored = tile_gradient(
            _eighths(product, WARPS), at, column, rows, live, y, here, any_here,
            coefficients, row_target, row_r, biases, class_weight, V, logit_scale, softcap, out.dtype, COLUMNS,
            SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, HAS_B, HAS_D, x_blocks.dtype,
        )  # fmt: skip
        stored_row, stored_column = row, column
    for i in gl.static_range(COLUMNS // PART):
        _store_pair(half, i, stored, out, stored_row, stored_column, staging, WARPS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=PER_CALL)
def dlogits_kernel(
    x, w, bias, targets, class_weight,
    row_max, row_log_sum, row_target, row_entropy, row_a, row_b, row_r, row_d, out,
    R, V, H, row_tiles, column_tiles, logit_scale, softcap, GROUP: gl.constexpr, PARTITIONS: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_CLASS_WEIGHT: gl.constexpr,
    HAS_B: gl.constexpr, HAS_D: gl.constexpr,
):  # fmt: skip
    """gradient_kernels.dlogits_kernel: the gradient family of loss.py, with the logits recomputed."""
    size: gl.constexpr = ROWS // PARTITIONS
    x_blocks = gl.allocate_shared_memory(x.dtype, [PARTITIONS * STAGES, size, DEPTH], x.layout)
    w_blocks = gl.allocate_shared_memory(w.dtype, [STAGES, COLUMNS, DEPTH], w.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2 * PARTITIONS, size, PART], out.layout)
    ring = _ring(PARTITIONS)
    operands = (
        x_blocks, w_blocks, ring, staging, out, bias, targets, class_weight,
        row_max, row_log_sum, row_target, row_entropy, row_a, row_b, row_r, row_d,
        R, V, H, row_tiles, column_tiles, logit_scale, softcap,
    )  # fmt: skip
    _specialize(
        PARTITIONS,
        _dlogits_tiles, (operands, GROUP, SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, HAS_B, HAS_D),
        _load_logits, (x, w, x_blocks, w_blocks, ring, H, row_tiles, column_tiles, GROUP),
    )  # fmt: skip


@gluon.constexpr_function
def _later(has_bias):
    """Eighths of a tile of dW that are stored between the next tile's first products: half, which its registers have
    room for beside the accumulator; none beside the sums of db."""
    return 0 if has_bias else 4


@gluon.jit
def _load_transposed(
    e, x, e_blocks, x_blocks, ring, R, class_tiles, width_tiles,
    CLASSES: gl.constexpr, WIDTH: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Producer of e (rows, V) and x (rows, H), in blocks of DEPTH rows."""
    half: gl.constexpr = CLASSES // 2
    step = 0
    for tile in range(gl.program_id(0), class_tiles * width_tiles, gl.num_programs(0)):
        first, column = tile // width_tiles * CLASSES, tile % width_tiles * WIDTH
        for i in range(_steps(R, 2 + _later(HAS_BIAS))):
            stage, full = _slot(step, ring)
            k = i * DEPTH
            mbarrier.expect(full, (CLASSES + WIDTH) * DEPTH * 2)
            copy_in(e, [k, first], full, e_blocks.index(2 * stage))
            copy_in(e, [k, first + half], full, e_blocks.index(2 * stage + 1))
            copy_in(x, [k, column], full, x_blocks.index(stage))
            step += 1


@gluon.jit
def _factors(factor, row, R, layout: gl.constexpr):
    """Of a block of e whose rows begin at `row`."""
    rows = row + gl.arange(0, DEPTH, layout=gl.SliceLayout(1, layout))
    return gl.load(factor + rows, mask=rows < R, other=0.0)


@gluon.jit
def _add_columns(half: gl.constexpr, e_blocks, step, i, factor, factors, R, sums):
    """sums += factors_j e_j, element by element, over a consumer's half of a tile's block i of e: each thread adds up
    what it reads. Returns the next block's factors as well, loaded in time for it."""
    layout: gl.constexpr = sums.type.layout
    following = _factors(factor, (i + 1) * DEPTH, R, layout)
    block = e_blocks.index(2 * ((step + i) % STAGES) + half).load(layout)
    return sums + block.to(gl.float32) * factors[:, None], following


@gluon.jit
def _weight_tiles(
    half: gl.constexpr, operands, CLASSES: gl.constexpr, WIDTH: gl.constexpr, HAS_BIAS: gl.constexpr
):  # fmt: skip
    """Consumer of weight_kernel."""
    e_blocks, x_blocks, ring, staging, out, factor, bias, R, V, class_tiles, width_tiles, accumulate = operands
    size: gl.constexpr = CLASSES // 2
    # A warp has all rows of its columns: their sum needs no shared memory, of which there is none left.
    by_columns: gl.constexpr = gl.BlockedLayout([1, 8], [1024 // size, size // 32], [1, 4], [1, 0])
    LATER: gl.constexpr = _later(HAS_BIAS)
    step, steps = 0, _steps(R, 2 + LATER)
    # Of the last tile the eighths that are not stored yet; at first there are none, as in _forward_tiles.
    stored = _eighths(gl.zeros([size, WIDTH], gl.float32, _registers(WIDTH)))
    stored_class, stored_column = class_tiles * CLASSES, 0
    for tile in range(gl.program_id(0), class_tiles * width_tiles, gl.num_programs(0)):
        class_tile, width_tile = tile // width_tiles, tile % width_tiles
        # One tile of a class tile's adds up db, another every round: a program would always have the same one.
        sums_bias = width_tile == class_tile * width_tiles // gl.num_programs(0) % width_tiles
        accumulator = gl.zeros([size, WIDTH], gl.float32, _registers(WIDTH))
        accumulator = _begin(half, e_blocks, x_blocks, ring, step, accumulator, False)
        if HAS_BIAS:
            sums = gl.zeros([DEPTH, size], gl.float32, by_columns)
            factors = _factors(factor, 0, R, by_columns)
        for i in gl.static_range(LATER):
            _store_eighth(half, 8 - LATER + i, stored, out, stored_class, stored_column, staging, accumulate)
            accumulator = _advance(half, e_blocks, x_blocks, ring, step + i, accumulator, False)
        for i in range(LATER, steps - 2):
            if HAS_BIAS:
                if sums_bias:
                    sums, factors = _add_columns(half, e_blocks, step, i, factor, factors, R, sums)
            accumulator = _advance(half, e_blocks, x_blocks, ring, step + i, accumulator, False)
        if HAS_BIAS:
            if sums_bias:
                sums, factors = _add_columns(half, e_blocks, step, steps - 2, factor, factors, R, sums)
                sums, factors = _add_columns(half, e_blocks, step, steps - 1, factor, factors, R, sums)
        accumulator = _last(step + steps, ring, accumulator)
        step += steps
        stored_class, stored_column = class_tile * CLASSES + half * size, width_tile * WIDTH
        if HAS_BIAS:
            if sums_bias:
                classes = stored_class + gl.arange(0, size, layout=gl.SliceLayout(0, by_columns))
                known = gl.load(bias + classes, mask=classes < V, other=0.0)
                gl.store(bias + classes, known + gl.sum(sums, 0), mask=classes < V)
        stored = _eighths(accumulator)
        for i in gl.static_range(8 - LATER):
            _store_eighth(half, i, stored, out, stored_class, stored_column, staging, accumulate)
    for i in gl.static_range(8 - LATER, 8):
        _store_eighth(half, i, stored, out, stored_class, stored_column, staging, accumulate)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R", "V", "class_tiles", "width_tiles", "accumulate"])
def weight_kernel(
    e, x, out, factor, bias, R, V, class_tiles, width_tiles, accumulate,
    CLASSES: gl.constexpr, WIDTH: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """out (V, H) fp32 = e^T x, += unless accumulate is 0, in tiles of CLASSES x WIDTH, for e (R, V) and x (R, H) as
    tensor descriptors of (64, CLASSES / 2) and (64, WIDTH) blocks, and out of (CLASSES / 2, WIDTH / 8). HAS_BIAS: also
    bias (V,) += e^T factor, from the blocks of e that pass by, for which a kernel of its own would read e again.

    The tiles of a class tile run side by side, so e is read from memory once. What the library's GEMM with an addition
    pays for reading and writing `out` at the end of each tile is hidden here behind the other consumer's product and,
    for half of the tile, behind the next one's own.
    """
    e_blocks = gl.allocate_shared_memory(e.dtype, [2 * STAGES, DEPTH, CLASSES // 2], e.layout)
    x_blocks = gl.allocate_shared_memory(x.dtype, [STAGES, DEPTH, WIDTH], x.layout)
    staging = gl.allocate_shared_memory(out.dtype, [4, CLASSES // 2, WIDTH // 8], out.layout)
    ring = _ring(2)
    operands = (e_blocks, x_blocks, ring, staging, out, factor, bias, R, V, class_tiles, width_tiles, accumulate)
    _specialize(
        2,
        _weight_tiles, (operands, CLASSES, WIDTH, HAS_BIAS),
        _load_transposed, (e, x, e_blocks, x_blocks, ring, R, class_tiles, width_tiles, CLASSES, WIDTH, HAS_BIAS),
    )  # fmt: skip
