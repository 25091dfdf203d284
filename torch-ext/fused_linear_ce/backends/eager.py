"""The torch backend: any device, any float dtype, no Triton. The default on CPU.

Logits are made by GEMMs in the accumulation dtype (float32, or float64 for float64 inputs) and never rounded below it.
The elementwise work then runs over panels of a few rows that stay in a core's cache, so that main memory sees the
chunk twice (the GEMM's store, the panel's load and store back) however many statistics are wanted.
"""

import torch

from ..loss import Coefficients, target_dlogit
from .base import NUDGE, UPCAST_BYTES, Head, Stats, Wants, lost_by_rounding, target_chain

_PANEL_BYTES = 1 << 20  # elementwise panels: fits in a second-level cache
_GEMM_BYTES = 4 << 20  # of the weight in one logits GEMM on a CPU
_GEMM_MULTIPLE = 64  # classes: whole vectors of the library's kernels
_CONFIDENT = 1 + 2.0**-4  # a sum whose logarithm is taken from all terms but the largest, which is 1
_LOG_ZERO = -1e4  # exp of this or less is 0 in every dtype: stands in for -inf where 0 * -inf must be 0


def _slabs(weight: torch.Tensor, compute_dtype: torch.dtype, dtype: torch.dtype):
    """(start, stop, weight[start:stop] rounded to compute_dtype and held in dtype until the next one); the weight
    itself, whole, if nothing is copied."""
    vocab, hidden_size = weight.shape
    if weight.dtype == dtype and compute_dtype == dtype:
        yield 0, vocab, weight
        return
    step = min(max(1, UPCAST_BYTES // (hidden_size * dtype.itemsize)), vocab)
    slab = weight.new_empty(step, hidden_size, dtype=dtype)  # one for all: the next is made when its user is done
    for start in range(0, vocab, step):
        stop = min(start + step, vocab)
        yield start, stop, slab[: stop - start].copy_(weight[start:stop].to(compute_dtype))


def _panels(rows: int, vocab: int, dtype: torch.dtype):
    step = max(1, _PANEL_BYTES // (vocab * dtype.itemsize))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _gemm_classes(weight: torch.Tensor) -> int:
    """Classes of one logits GEMM. With the whole of a large weight in one, MKL takes up to 1.2 times as long at 160
    rows, more with fewer; in a small one the call itself would count."""
    if weight.device.type != "cpu":
        return len(weight)
    return max(1, _GEMM_BYTES // (weight.shape[1] * weight.dtype.itemsize * _GEMM_MULTIPLE)) * _GEMM_MULTIPLE


def _project(x: torch.Tensor, head: Head, out: torch.Tensor) -> None:
    """out = x W^T + bias."""
    bias = None if head.bias is None else head.bias.to(head.compute_dtype).to(out.dtype)
    for first, last, slab in _slabs(head.weight, head.compute_dtype, out.dtype):
        step = _gemm_classes(slab)
        for start in range(first, last, step):
            stop = min(start + step, last)
            weight = slab[start - first : stop - first].t()
            if bias is None:
                torch.mm(x, weight, out=out[:, start:stop])
            else:
                torch.addmm(bias[start:stop], x, weight, out=out[:, start:stop])


def _transform(z: torch.Tensor, head: Head) -> None:
    """In place: z = softcap * tanh(logit_scale * z / softcap)."""
    if head.logit_scale != 1.0:
        z.mul_(head.logit_scale)
    if head.softcap is not None:
        z.div_(head.softcap).tanh_().mul_(head.softcap)


def _chain(z: torch.Tensor, softcap: float) -> torch.Tensor:
    """chi = 1 - (z / softcap)^2."""
    return torch.square(z / softcap).neg_().add_(1.0)


def _weighted_sum(d: torch.Tensor, class_weight) -> torch.Tensor:
    """sum_j w_j d_j; a class of weight 0 adds nothing, also when its d is -inf."""
    if class_weight is None:
        return d.sum(1)
    weights = class_weight.to(d.dtype)
    return torch.where(weights == 0, 0.0, d * weights).sum(1)


def _first_argmax(z: torch.Tensor, m: torch.Tensor, z_y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whether the target is the first class that reaches the row's maximum."""
    top1 = z_y == m
    if z.device.type != "cpu":
        return top1.logical_and_(z.argmax(1) == targets)
    rows = top1.nonzero().squeeze(1)
    if len(rows):  # few rows need the slower search for an earlier equal
        top1[rows] = z[rows].argmax(1) == targets[rows]
    return top1


def _total(e: torch.Tensor) -> torch.Tensor:
    return e.sum(1)


def _squares(e: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vecdot(e, e)


def _log(total: torch.Tensor, e: torch.Tensor, sum_of) -> torch.Tensor:
    """log(total) of total = sum_of(e), each row's largest e being 1. 1 + 1e-6 has one digit of the 1e-6 in fp32, so a
    confident row sums its other terms: they are below 1, and frac leaves them as they are."""
    value, confident = total.log(), total < _CONFIDENT
    if e.device.type != "cpu":
        return torch.where(confident, sum_of(torch.frac(e)).log1p_(), value)
    rows = confident.nonzero().squeeze(1)  # few rows need the second sum
    if len(rows):
        value[rows] = sum_of(e.index_select(0, rows).frac_()).log1p_()
    return value


def forward(x: torch.Tensor, targets: torch.Tensor, head: Head, wants: Wants, stats: Stats, exps=None) -> None:
    """See base.py. E's reference is the row's maximum, so nothing can overflow."""
    vocab = head.weight.shape[0]
    buffer = x.new_empty(x.shape[0], vocab) if exps is None else exps
    _project(x, head, buffer)
    column = targets.clamp(min=0).unsqueeze(1)
    needs_d = wants.entropy or wants.sum_log_probs  # z - m beside its exponential, which takes the place of z
    d_panel = None
    z_y, total = torch.empty_like(stats.max), torch.empty_like(stats.max)
    for start, stop in _panels(x.shape[0], vocab, buffer.dtype):
        z, rows = buffer[start:stop], slice(start, stop)
        if needs_d and d_panel is None:
            d_panel = torch.empty_like(z)
        _transform(z, head)
        m = torch.amax(z, 1, out=stats.max[rows])
        torch.gather(z, 1, column[rows], out=z_y[rows].unsqueeze(1))
        if wants.is_top1:
            stats.is_top1[rows] = _first_argmax(z, m, z_y[rows], targets[rows])
        chi = _chain(z, head.softcap) if exps is not None and head.softcap is not None else None
        d = torch.sub(z, m.unsqueeze(1), out=d_panel[: stop - start] if needs_d else z)
        e = torch.exp(d, out=z)
        sum_e = torch.sum(e, 1, out=total[rows])
        stats.log_sum[rows] = _log(sum_e, e, _total)
        if wants.sum_log_probs:
            stats.sum_log_probs[rows] = _weighted_sum(d, head.class_weight)
        if wants.entropy:
            if head.bias is not None:  # -inf only comes from it
                d.clamp_(min=_LOG_ZERO)
            torch.sum(d.mul_(e), 1, out=stats.entropy[rows])
        if wants.log_sum_sq:
            stats.log_sum_sq[rows] = _log(_squares(e), e, _squares)
        if chi is not None:
            e.mul_(chi)
    # What is left is a number or two per row: done for the whole chunk.
    torch.sub(z_y, stats.max, out=stats.target)
    if wants.sum_log_probs:
        stats.sum_log_probs.sub_(head.class_weight_sum() * stats.log_sum)
    if wants.entropy:
        torch.sub(stats.log_sum, stats.entropy.div_(total), out=stats.entropy)
    if wants.log_sum_sq:
        stats.log_sum_sq.sub_(2 * stats.log_sum)
    if exps is not None:
        torch.reciprocal(total, out=stats.scale)
    poison = torch.where(targets < 0, torch.nan, 0.0).to(stats.max.dtype)
    for value in (stats.log_sum, stats.entropy, stats.sum_log_probs, stats.log_sum_sq):
        if value is not None:
            value.add_(poison)
    if wants.is_top1:
        stats.is_top1.logical_and_(stats.log_sum.isfinite())
    if exps is not None:
        stats.scale.add_(poison)


def dlogits(
    x: torch.Tensor, targets: torch.Tensor, head: Head, stats: Stats, coefficients: Coefficients, out: torch.Tensor
) -> None:
    """See base.py. A target outside [0, V) of this head has no column here."""
    vocab = head.weight.shape[0]
    _project(x, head, out)
    inside = (targets >= 0) & (targets < vocab)
    column = targets.clamp(0, vocab - 1).unsqueeze(1)
    at_target = target_dlogit(coefficients, stats.log_prob, stats.entropy).unsqueeze(1)
    a, b, _, d = (None if c is None else c.unsqueeze(1) for c in coefficients)
    for start, stop in _panels(x.shape[0], vocab, out.dtype):
        z, at, s = out[start:stop], slice(start, stop), stats.rows(start, stop)
        _transform(z, head)
        chi = None if head.softcap is None else _chain(z, head.softcap)
        log_p = z.sub_(s.max.unsqueeze(1)).sub_(s.log_sum.unsqueeze(1))
        p = torch.exp(log_p)
        if b is None:
            value = p.mul_(a[at])
        else:
            log_p.clamp_(min=_LOG_ZERO)
            value = log_p.add_(s.entropy.unsqueeze(1)).mul_(b[at]).add_(a[at]).mul_(p)
        here = column[at]
        value.scatter_(1, here, torch.where(inside[at].unsqueeze(1), at_target[at], value.gather(1, here)))
        if d is not None:
            weights = 1.0 if head.class_weight is None else head.class_weight.to(value.dtype)
            value.add_(d[at] * weights)
        torch.mul(value, 1.0 if chi is None else chi, out=out[start:stop])


def row_factors(a: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, r / a), such that a p_j, and a ((p_y - 1) + r / a), make the row; see base.NUDGE. 0 if both are 0."""
    tiny = r.abs() * NUDGE[r.dtype]
    a = torch.where(a.abs() < tiny, torch.copysign(tiny, a), a)
    return a, torch.where(a == 0, 0.0, r / a)


def finish(e, x, targets, head: Head, stats: Stats, a: torch.Tensor, r: torch.Tensor, scaled=None) -> torch.Tensor:
    """See base.py. dlogits = a scale E, with ((p_y - 1) + r / a) / scale as the target's element of E. That element
    outweighs the row's others together (for cross-entropy 1 - p_y is their sum), so the factor takes up its rounding:
    what the others lose by that is less than what it gains."""
    a, ratio = row_factors(a, r)
    exact = (torch.expm1(stats.log_prob) + ratio) / stats.scale
    exact = target_chain(exact, stats, head.softcap)
    rounded = exact.to(e.dtype)
    e.scatter_(1, targets.clamp(min=0).unsqueeze(1), rounded.unsqueeze(1))
    factor = a * stats.scale * head.logit_scale * lost_by_rounding(exact, rounded)
    if scaled is not None:
        torch.mul(x, factor.unsqueeze(1), out=scaled)
    return factor


def grad_hidden(e: torch.Tensor, weight: torch.Tensor, compute_dtype, out: torch.Tensor, accumulate: bool) -> None:
    for start, stop, slab in _slabs(weight, compute_dtype, e.dtype):
        torch.addmm(out, e[:, start:stop], slab, beta=int(accumulate or start > 0), out=out)


def grad_weight(e: torch.Tensor, x: torch.Tensor, out: torch.Tensor, accumulate: bool, scale=None, bias=None) -> None:
    torch.addmm(out, e.t(), x, beta=int(accumulate), out=out)
    if bias is not None:
        grad_bias(e, scale, bias)


def grad_bias(e: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    out.addmv_(e.t(), scale)


def scale(source: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Into another dtype on a CPU a panel at a time: torch makes a copy of its own for that."""
    if factor.dim():
        factor = factor.unsqueeze(1)
    elif factor.device.type != "cpu":
        factor = factor.reshape(1)  # with dimensions it keeps its digits beside a half-precision source
    elif out is source and factor.item() == 1:  # what loss.backward() multiplies by; known here without waiting
        return
    if source.dtype == out.dtype or source.device.type != "cpu":
        torch.mul(source, factor, out=out)
        return
    if not factor.dim():
        source, out = source.view(-1), out.view(-1)
    step = max(1, _PANEL_BYTES // max(1, source.element_size() * source.shape[1:].numel()))
    for start in range(0, source.shape[0], step):
        part = slice(start, start + step)
        torch.mul(source[part], factor[part] if factor.dim() else factor, out=out[part])
