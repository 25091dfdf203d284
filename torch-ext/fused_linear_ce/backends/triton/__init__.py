"""The Triton backend: the seven functions of base.py as launches of the kernels beside this file.

Every launch runs under the guard of its tensors' device and takes 64-bit offsets; nothing here waits for the
device but the count that select() hands out.
"""

import contextlib
from typing import Optional

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...loss import Coefficients
from ..base import NUDGE, Head, Selection, Stats, Wants
from . import forward_kernels as fwd
from . import gradient_kernels as bwd
from . import tuning

_LARGE_SOFTCAP = 100.0
_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _cdiv(size: int, block: int) -> int:
    """triton.cdiv, which takes a microsecond or two on the host: it is made for kernels too."""
    return -(-size // block)


def _guard(tensor: torch.Tensor):
    """Launch on the tensor's device, whatever the current one is."""
    device = tensor.device
    if device.type in ("cuda", "xpu"):
        module = getattr(torch, device.type)
        if module.current_device() != device.index:
            return module.device(device)
    return contextlib.nullcontext()


def _tf32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own switch allows TF32 in fp32 matrix products."""
    if dtype != torch.float32 or device.type != "cuda":
        return False
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # torch >= 2.9
    if precision is None:
        return torch.backends.cuda.matmul.allow_tf32
    if precision == "none":
        precision = torch.backends.fp32_precision
    return precision == "tf32"


def _precision(device: torch.device, dtype: torch.dtype) -> str:
    return "tf32" if _tf32(device, dtype) else "ieee"


def _describable(tensor: torch.Tensor) -> bool:
    """Whether bulk tensor copies can read it: rows of whole 16 bytes, aligned, contiguous within a row."""
    itemsize = tensor.element_size()
    return (
        tensor.stride(1) == 1
        and tensor.stride(0) >= tensor.shape[1]
        and tensor.stride(0) * itemsize % 16 == 0
        and tensor.data_ptr() % 16 == 0
    )


def _softcap_kind(dtype: torch.dtype, softcap: Optional[float]) -> int:
    """HAS_SOFTCAP of logits.transform. Beside half precision's own errors 1e-7 of a softcap of 30 or 50 is nothing."""
    if softcap is None:
        return 0
    return 2 if dtype == torch.float32 or softcap > _LARGE_SOFTCAP else 1


class _Launch:
    """What forward_kernel and dlogits_kernel share: operands, tiles and flags for x (R, H) against a head."""

    def __init__(self, x: torch.Tensor, head: Head, out=None, tiles: Optional[tuning.Tiles] = None):
        weight = head.weight
        self.rows, self.hidden_size = x.shape
        self.vocab = weight.shape[0]
        if tiles is None:
            aligned = weight.dtype == x.dtype and _describable(x) and _describable(weight)
            aligned = aligned and (out is None or _describable(out))
            tiles = tuning.tiles(x.device, x.dtype, self.hidden_size, aligned, out is not None)
        self.tiles = t = tiles
        self.row_tiles = _cdiv(self.rows, t.rows)
        self.column_tiles = _cdiv(self.vocab, t.columns)
        self.grid = (tuning.multiprocessors(x.device),)
        self.bias = x if head.bias is None else head.bias.contiguous()  # x: a pointer that the kernel will not read
        self.class_weight = x if head.class_weight is None else head.class_weight.contiguous()
        softcap = 1.0 if head.softcap is None else head.softcap
        self.sizes = (self.rows, self.vocab, self.hidden_size, self.row_tiles, self.column_tiles)
        self.strides = ()
        self.scalars = (head.logit_scale, softcap)
        self.flags = {
            "GROUP": t.group,
            "SCALED": head.logit_scale != 1.0,
            "HAS_BIAS": head.bias is not None,
            "HAS_SOFTCAP": _softcap_kind(x.dtype, head.softcap),
            "HAS_CLASS_WEIGHT": head.class_weight is not None,
            "num_warps": t.warps,
        }
        if t.loads == "pipeline":
            from . import hopper

            self.forward_kernel, self.dlogits_kernel = hopper.forward_kernel, hopper.dlogits_kernel
            partitions = hopper.partitions(head.softcap)
            self.x, self.weight, self.out = hopper.logits_descriptors(x, weight, out, partitions)
            self.flags |= {"PARTITIONS": partitions, "num_warps": hopper.CONSUMER_WARPS.value // partitions}
            return
        self.forward_kernel, self.dlogits_kernel = fwd.forward_kernel, bwd.dlogits_kernel
        self.x, self.weight, self.out = x, weight, x if out is None else out
        self.strides = (x.stride(0), weight.stride(0), weight.stride(1), 0 if out is None else out.stride(0))
        if t.loads == "descriptors":
            self.x = TensorDescriptor.from_tensor(x, [t.rows, t.depth])
            self.weight = TensorDescriptor.from_tensor(weight, [t.columns, t.depth])
            if out is not None:
                self.out = TensorDescriptor.from_tensor(out, [t.rows, t.columns])
        self.flags |= {
            "ROWS": t.rows,
            "COLUMNS": t.columns,
            "DEPTH": t.depth,
            "DESCRIPTORS": t.loads == "descriptors",
            "PRECISION": _precision(x.device, x.dtype),
            "COMPUTE": _TRITON_DTYPE[x.dtype],
            "num_stages": t.stages,
        }


def select(targets: torch.Tensor, ignore_index: int, vocab: int, early: bool = False) -> Selection:
    """See base.py. With early, the number of rows is copied to the host in the background; reading it waits for that
    copy alone, not for what was launched since."""
    tokens, device = targets.shape[0], targets.device
    # Both begin at whole 16 bytes: Triton compiles a kernel once more for pointers that do not.
    index, classes = (t[:tokens] for t in torch.empty((2, tokens + tokens % 2), dtype=torch.int64, device=device))
    count = torch.empty(1, dtype=torch.int32, device=device)
    with _guard(targets):
        fwd.select_kernel[(1,)](
            targets.contiguous(), index, classes, count, tokens, ignore_index, vocab, BLOCK=4096, num_warps=16
        )
        if not early or device.type == "cpu":
            return Selection(index, classes, count.item)
        on_host = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=True)
        on_host.copy_(count, non_blocking=True)
        copied = getattr(torch, device.type).Event()
        copied.record()

    def read() -> int:
        copied.synchronize()
        return on_host.item()

    return Selection(index, classes, read)


def _reference(x: torch.Tensor, targets: torch.Tensor, head: Head, scratch: torch.Tensor) -> None:
    """Writes c_i of forward_kernels.py into the scratch."""
    rows = 2
    weight = head.weight
    fwd.reference_kernel[(_cdiv(x.shape[0], rows),)](
        x, weight, x if head.bias is None else head.bias.contiguous(), targets, scratch,
        x.shape[0], weight.shape[0], x.shape[1],
        x.stride(0), weight.stride(0), weight.stride(1),
        head.logit_scale, 1.0 if head.softcap is None else head.softcap,
        ROWS=rows, DEPTH=512,
        SCALED=head.logit_scale != 1.0, HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=_softcap_kind(x.dtype, head.softcap), COMPUTE=_TRITON_DTYPE[x.dtype], num_warps=4,
    )  # fmt: skip


def forward(
    x: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    wants: Wants,
    stats: Stats,
    exps: Optional[torch.Tensor] = None,
    tiles: Optional[tuning.Tiles] = None,
) -> None:
    """See base.py. With exps: reference, GEMM, combine, and the two launches that repair rows that overflowed.

    tiles: only for benchmarks/tune.py, in place of the table's.
    """
    if x.shape[0] == 0:
        return
    targets = targets.contiguous()
    with _guard(x):
        launch = _Launch(x, head, exps, tiles)
        store = exps is not None
        rows, device = launch.rows, x.device
        # Pieces of two buffers, see row_scratch and tile_partials in logits.py.
        planes = 2 + wants.entropy + wants.log_sum_sq + wants.sum_log_probs
        plane = rows * launch.column_tiles
        scratch = torch.empty(4 * rows + 1, dtype=torch.float32, device=device)
        partials = torch.empty(planes * plane + launch.column_tiles, dtype=torch.float32, device=device)
        if store:
            _reference(x, targets, head, scratch)
        asked = {"ENTROPY": wants.entropy, "SQUARES": wants.log_sum_sq, "SHIFTED": wants.sum_log_probs}
        unused = stats.max
        outputs = (stats.max, stats.log_sum, stats.target, stats.scale) + tuple(
            unused if s is None else s
            for s in (
                stats.entropy, stats.sum_log_probs, stats.log_sum_sq,
                None if stats.is_top1 is None else stats.is_top1.view(torch.int8),
            )
        )  # fmt: skip
        block = 32
        for repair in (False, True) if store else (False,):
            how, extra = launch, {}
            if how.tiles.loads != "pipeline":
                extra = {"REPAIR": repair}
            elif repair:
                # Rows that overflow are few: the kernel for all devices does them, in the same column tiles.
                how, extra = _Launch(x, head, exps, tuning.REPAIR), {"REPAIR": True}
            how.forward_kernel[how.grid](
                how.x, how.weight, how.bias, targets, how.class_weight, scratch, how.out, partials,
                *how.sizes, plane, *how.strides, *how.scalars, STORE=store, **extra, **asked, **how.flags,
            )  # fmt: skip
            fwd.combine_kernel[(_cdiv(rows, block),)](
                targets, scratch, partials, *outputs, rows, launch.column_tiles, plane, int(repair),
                ROWS=block, TILES=128, COLUMNS=launch.tiles.columns, STORE=store, **asked,
                TOP1=wants.is_top1, COMPUTE=_TRITON_DTYPE[x.dtype], num_warps=4 if planes <= 3 else 8,
            )  # fmt: skip


def finish(e, x, targets, head: Head, stats: Stats, a: torch.Tensor, r: torch.Tensor, scaled=None) -> torch.Tensor:
    """See base.py."""
    rows, hidden_size = x.shape
    factor = torch.empty(rows, dtype=torch.float32, device=e.device)
    block = 4
    if rows:
        with _guard(e):
            bwd.finish_kernel[(_cdiv(rows, block),)](
                e, x, targets, stats.max, stats.log_sum, stats.target, stats.scale, a.contiguous(), r.contiguous(),
                factor, x if scaled is None else scaled, rows, hidden_size, e.stride(0), x.stride(0),
                head.logit_scale, 1.0 if head.softcap is None else head.softcap, NUDGE[torch.float32],
                ROWS=block, COLUMNS=1024, HAS_SOFTCAP=_softcap_kind(x.dtype, head.softcap), SCALE_X=scaled is not None,
                PRECISE=x.dtype == torch.float32, num_warps=4,
            )  # fmt: skip
    return factor


def dlogits(
    x: torch.Tensor, targets: torch.Tensor, head: Head, stats: Stats, coefficients: Coefficients, out: torch.Tensor
) -> None:
    """See base.py."""
    if x.shape[0] == 0:
        return
    with _guard(x):
        launch = _Launch(x, head, out)
        c = Coefficients(*(None if v is None else v.contiguous() for v in coefficients))
        unused = stats.max
        launch.dlogits_kernel[launch.grid](
            launch.x, launch.weight, launch.bias, targets, launch.class_weight,
            stats.max, stats.log_sum, stats.target, unused if c.b is None else stats.entropy,
            c.a, unused if c.b is None else c.b, c.r, unused if c.d is None else c.d, launch.out,
            *launch.sizes, *launch.strides, *launch.scalars,
            HAS_B=c.b is not None, HAS_D=c.d is not None, **launch.flags,
        )  # fmt: skip


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """out (M, N) (+)= a @ b, accumulated in fp32: the vendor's library, where it can give half-precision operands an
    fp32 result or that is not asked of it."""
    if out.dtype == a.dtype != torch.float32:
        torch.mm(a, b, out=out)
        return
    if a.dtype == torch.float32:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
        return
    if a.device.type == "cuda" and torch.version.hip is None:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        return
    (m, k), n = a.shape, b.shape[1]
    size, depth = (16, 16) if a.device.type == "cpu" else (128, 32)
    row_tiles, column_tiles = _cdiv(m, size), _cdiv(n, size)
    with _guard(a):
        bwd.matmul_kernel[(row_tiles * column_tiles,)](
            a, b, out, m, n, k, row_tiles, column_tiles,
            a.stride(0), a.stride(1), b.stride(0), b.stride(1), out.stride(0),
            ROWS=size, COLUMNS=size, DEPTH=depth, GROUP=8, ACCUMULATE=accumulate,
            num_warps=4,
        )  # fmt: skip


def grad_hidden(e: torch.Tensor, weight: torch.Tensor, compute_dtype, out: torch.Tensor, accumulate: bool) -> None:
    _matmul(e, weight, out, accumulate)


def grad_weight(
    e: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
    scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
) -> None:
    """See base.py. Hopper has a kernel that hides the addition; elsewhere it is the library's GEMM."""
    dtypes = e.dtype == torch.bfloat16 and out.dtype == torch.float32
    operands = dtypes and _describable(e) and _describable(x) and _describable(out)
    if not operands or tuning.best_loads(e.device) != "pipeline":
        _matmul(e.t(), x, out, accumulate)
        if bias is not None:
            grad_bias(e, scale, bias)
        return
    from . import hopper

    (rows, vocab), hidden_size = e.shape, x.shape[1]
    classes, width = tuning.weight_tile(hidden_size)
    class_tiles, width_tiles = _cdiv(vocab, classes), _cdiv(hidden_size, width)
    with _guard(e):
        hopper.weight_kernel[(tuning.multiprocessors(e.device),)](
            *hopper.weight_descriptors(e, x, out, classes, width),
            out if bias is None else scale.contiguous(), out if bias is None else bias,
            rows, vocab, class_tiles, width_tiles, int(accumulate),
            CLASSES=classes, WIDTH=width, HAS_BIAS=bias is not None, num_warps=4,
        )  # fmt: skip


def grad_bias(e: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    if e.shape[0] == 0:
        return
    block = 32 if e.device.type == "cpu" else 128
    with _guard(e):
        bwd.column_sum_kernel[(_cdiv(e.shape[1], block),)](
            e, scale, out, e.shape[0], e.shape[1], e.stride(0), ROWS=32, COLUMNS=block, num_warps=4
        )


def scale(source: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    if source.numel() == 0:
        return
    rows = source.shape[0] if factor.dim() else 1  # a scalar is the factor of the only row
    width, block = source.numel() // rows, 2048  # for both: a kernel less to compile
    with _guard(source):
        bwd.scale_kernel[(rows * _cdiv(width, block),)](
            source, factor, out, width, BLOCK=block, IN_PLACE=out is source
        )
