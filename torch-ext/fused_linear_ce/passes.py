"""The loops over chunks of tokens: what is computed from what, and where it goes. No kernels, autograd or options."""

import math
from typing import NamedTuple, Optional

import torch

from . import backends, validation
from .backends.base import Head, Stats, Wants, accumulation_dtype, lost_by_rounding, target_chain
from .loss import (
    Coefficients,
    LossOptions,
    Upstream,
    coefficients,
    mean_divisor,
    target_dlogit,
    token_loss,
    token_loss_upstream,
)
from .plan import GEMM_ROWS, ROW_MULTIPLE, WAVE_ROWS, Call, Needs, Plan, known_plan
from .rows import Rows, capturing, cut, select_rows

_LEAST_EARLY_ROWS, _MOST_EARLY_ROWS = 512, 4096


def _selects_on_device(plan: Plan, targets: torch.Tensor) -> bool:
    return plan.backend == "triton" and targets.device.type != "cpu"


def resolved(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Kernels read memory, where a lazily negated view (of a conjugate) still has the other sign."""
    return tensor.resolve_neg() if tensor is not None and tensor.is_neg() else tensor


class Problem:
    """One call's tensors, head and plan, and the backend that runs it."""

    def __init__(
        self,
        hidden: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        ignore_index: int,
        call: Call,
        in_forward: bool,
        rows: Optional[Rows] = None,
        masked: Optional[bool] = None,
    ):
        """rows, masked: of a backward, what the forward has selected, or whether it masked them; else the rows are
        selected here, and masked while a CUDA graph is captured."""
        hidden, weight, bias, class_weight = map(resolved, (hidden, head.weight, head.bias, head.class_weight))
        head = head._replace(weight=weight, bias=bias, class_weight=class_weight)
        compute_dtype = head.compute_dtype
        self.call = call
        self.plan: Plan = known_plan(call, hidden.shape[0], in_forward)
        self.backend = backends.load(self.plan.backend)
        self.x_dtype = backends.operand_dtype(self.plan.backend, compute_dtype)
        self.e_dtype = backends.exps_dtype(self.plan.backend, compute_dtype)
        self.acc = accumulation_dtype(compute_dtype)
        self.hidden, self.compute_dtype, self.weight_dtype = hidden, compute_dtype, weight.dtype
        vocab = weight.shape[0]
        self.selection, self._rows = None, rows
        self.early_rows = 0
        if rows is None:
            if masked is False and capturing(targets):
                raise validation.captured_alone()
            masked = capturing(targets) if masked is None else masked
            if not masked and _selects_on_device(self.plan, targets):
                self.early_rows = self._most_early_rows()
                self.selection = self.backend.select(targets, ignore_index, vocab, self.early_rows > 0)
            else:
                self._rows = select_rows(targets, ignore_index, vocab, masked)
        copy = self.plan.copies_weight and (self.early_rows or len(self.rows) > 0)
        self.head = head._replace(weight=weight.to(compute_dtype)) if copy else head
        self._gradient_weight = None

    @property
    def rows(self) -> Rows:
        """The rows that run; waits for their number, the first time."""
        if self._rows is None:
            index, targets, count = self.selection
            kept = count()
            self._rows = Rows(None if kept == len(targets) else index[:kept], None, targets[:kept])
        return self._rows

    def _most_early_rows(self) -> int:
        """Rows whose forward is launched before their number is known: in vain where fewer count, so a quarter of the
        tokens at most, and no more than keep the device busy meanwhile; none where that would be few anyway."""
        quarter = self.hidden.shape[0] // (4 * ROW_MULTIPLE) * ROW_MULTIPLE
        most = min(_MOST_EARLY_ROWS, self.plan.kept_rows or self.plan.statistics_rows)
        return 0 if quarter < _LEAST_EARLY_ROWS else min(quarter, most)

    @property
    def gradient_weight(self) -> torch.Tensor:
        """The weight as the gradient GEMMs take it: the head's own, but for fp16 beside bf16 exponentials."""
        if self._gradient_weight is None:
            self._gradient_weight = self.gemm_weight(self.head.weight)
        return self._gradient_weight

    def gemm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.compute_dtype).to(self.e_dtype) if self.plan.backend == "triton" else weight

    def chunks(self, start: int = 0, stop: Optional[int] = None, step: Optional[int] = None):
        step, stop = step or self.plan.chunk_rows, len(self.rows) if stop is None else stop
        return ((i, min(i + step, stop)) for i in range(start, stop, step))

    def x(self, start: int, stop: int) -> torch.Tensor:
        """The hidden states of a chunk, contiguous, rounded to the compute dtype."""
        return self._operand(self.rows.take(self.hidden, start, stop))

    def start(self, wants: Wants, exps: Optional[torch.Tensor]) -> Stats:
        """Statistics of all rows, to be filled by forward(), and with exps the E of the first ones; the early rows
        have begun. Those of them that there turn out not to be have no class."""
        early = self.early_rows
        most = self.hidden.shape[0] if early else len(self.rows)
        stats = Stats.empty(most, wants, self.acc, self.hidden.device)
        if early:
            index, targets, _ = self.selection
            x = self._operand(self.hidden.index_select(0, index[:early]))
            part = None if exps is None else exps[:early]
            self.backend.forward(x, targets[:early], self.head, wants, stats.rows(0, early), part)
        return stats.rows(0, len(self.rows))

    def forward(self, start: int, stop: int, wants: Wants, stats: Stats, exps=None, x=None) -> None:
        """Statistics of the rows [start, stop), and with exps their E; the early ones have both. x: theirs, if it is
        there."""
        new = max(start, min(self.early_rows, stop))
        if new < stop:
            x = self.x(new, stop) if x is None else cut(x, new - start, stop - start)
            part = None if exps is None else cut(exps, new - start, stop - start)
            self.backend.forward(x, self.rows.cut_targets(new, stop), self.head, wants, stats.rows(new, stop), part)

    def _operand(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(self.compute_dtype).to(self.x_dtype).contiguous()

    def in_units(self, x: torch.Tensor, unit: Optional[torch.Tensor]) -> torch.Tensor:
        """x * unit per row, in E's dtype, rounded once; over x, if that is a copy that x() made and has the dtype."""
        if unit is None:
            return x.to(self.e_dtype)
        copied = x.untyped_storage().data_ptr() != self.hidden.untyped_storage().data_ptr()
        out = x if copied and x.dtype == self.e_dtype else torch.empty_like(x, dtype=self.e_dtype)
        self.backend.scale(x, unit, out)
        return out

    def new_exps(self, rows: int, vocab: Optional[int] = None) -> torch.Tensor:
        """An (rows, V) buffer for E, with the backend's row stride."""
        vocab = vocab or self.head.weight.shape[0]
        stride = backends.padded_vocab(self.plan.backend, vocab)
        return torch.empty(rows, stride, dtype=self.e_dtype, device=self.hidden.device)[:, :vocab]

    def new_accumulator(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.acc, device=self.hidden.device)

    def weighted_row_sum(self) -> torch.Tensor:
        """sum_j w_j W_j, (H,), by the GEMM of dX: without a copy of the weight in the accumulation dtype. Of weights w
        that E's dtype can't hold, what rounding took off is a row of its own, twice."""
        (vocab, width), class_weight = self.head.weight.shape, self.head.class_weight
        rest = self.new_accumulator(vocab).fill_(1.0) if class_weight is None else class_weight.to(self.acc)
        exact = class_weight is None or self.e_dtype == self.acc
        parts = self.new_exps(1 if exact else 3)
        for part in parts:
            rest = rest - part.copy_(rest)
        out = self.new_accumulator(len(parts), width)
        self.backend.grad_hidden(parts, self.gradient_weight, self.compute_dtype, out, accumulate=False)
        return out.sum(0)


def _head_gradients(problem: Problem, needs: Needs, e, x, scale, weight, accumulate: bool, bias) -> None:
    """weight (+)= e^T x and bias += e^T scale, what is needed of them. scale: None stands for 1."""
    if not needs.bias:
        scale = bias = None
    elif scale is None:
        scale = torch.ones(e.shape[0], dtype=problem.acc, device=e.device)
    if needs.weight:
        problem.backend.grad_weight(e, x, weight, accumulate, scale, bias)
    elif needs.bias:
        problem.backend.grad_bias(e, scale, bias)


class GradientSink:
    """Takes dX of one chunk after the other and accumulates dW and db over them; the first write to an accumulator
    overwrites it."""

    def __init__(self, problem: Problem, needs: Needs, hidden: torch.Tensor, weight, bias):
        self.problem, self.needs = problem, needs
        # Output and accumulators; those that are not wanted have no elements.
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.weight_started = False
        self.constant = None  # sum_i d_i x_i and sum_i d_i of the rank-1 term
        self.row_sum = None

    def _add_head(self, e: torch.Tensor, x: Optional[torch.Tensor], scale: Optional[torch.Tensor]) -> None:
        _head_gradients(self.problem, self.needs, e, x, scale, self.weight, self.weight_started, self.bias)
        self.weight_started = True

    def _add_hidden(self, e: torch.Tensor, factor: Optional[torch.Tensor], constant, start: int, stop: int) -> None:
        """dX of a chunk: factor * (e @ weight) + constant * (sum_j w_j W_j), rounded where it ends up."""
        first = start
        while first < stop:
            last = first + GEMM_ROWS if stop - first >= GEMM_ROWS + WAVE_ROWS else stop
            parts = (None if t is None else cut(t, first - start, last - start) for t in (e, factor, constant))
            self._add_hidden_rows(*parts, first, last)
            first = last

    def _add_hidden_rows(self, e, factor, constant, start: int, stop: int) -> None:
        """_add_hidden of what one GEMM takes."""
        p, width = self.problem, self.hidden.shape[1]
        place = cut(self.hidden, start, stop) if p.rows.index is None else None
        in_place = place is not None and place.dtype == p.acc
        out = place if in_place else p.new_accumulator(stop - start, width)
        p.backend.grad_hidden(e, p.gradient_weight, p.compute_dtype, out, accumulate=False)
        if factor is not None:
            scaled = place if constant is None and place is not None else out
            p.backend.scale(out, factor, scaled)
            out = scaled
        if constant is not None:
            self.row_sum = p.weighted_row_sum() if self.row_sum is None else self.row_sum
            out.addr_(constant, self.row_sum)
        if out is not place:
            p.rows.put(out, self.hidden, start, stop)

    def add_scaled(self, start: int, stop: int, x, e: torch.Tensor, stats: Stats, c: Coefficients) -> None:
        """A chunk given as E: dlogits = factor * E, once it is finished, + the constant term."""
        p, head = self.problem, self.problem.head
        scaled = torch.empty(x.shape, dtype=e.dtype, device=x.device) if self.needs.weight else None
        factor = p.backend.finish(e, x, p.rows.cut_targets(start, stop), head, stats, c.a, c.r, scaled)
        constant = None if c.d is None else c.d * head.logit_scale
        self._add_head(e, scaled, factor)
        del scaled  # before dX needs the memory
        if self.needs.hidden:
            self._add_hidden(e, factor, constant, start, stop)
        if constant is not None and (self.needs.weight or self.needs.bias):
            part = (constant @ x.to(p.acc), constant.sum())
            self.constant = part if self.constant is None else tuple(map(torch.add, self.constant, part))

    def add_exact(self, start: int, stop: int, x, e: torch.Tensor, unit: Optional[torch.Tensor]) -> None:
        """A chunk given as finished dlogits, in _exact_coefficients' unit per row; x may be written over."""
        if self.needs.hidden:
            self._add_hidden(e, unit, None, start, stop)
        self._add_head(e, self.problem.in_units(x, unit) if self.needs.weight else None, unit)

    def finish_constant(self) -> None:
        """dW_j += w_j sum_i d_i x_i and db_j += w_j sum_i d_i."""
        if self.constant is None:
            return
        x_sum, d_sum = self.constant
        weights = self.problem.head.class_weight
        weights = x_sum.new_ones(self.problem.head.weight.shape[0]) if weights is None else weights.to(x_sum.dtype)
        if self.needs.weight:
            self.weight.addr_(weights, x_sum)
        if self.needs.bias:
            self.bias.add_(weights * d_sum)


def row_scaled(c: Coefficients, softcap: Optional[float]) -> bool:
    """Whether dlogits is E times a factor per row plus a rank-1 term: not with b, nor with d under a softcap."""
    return c.b is None and (c.d is None or softcap is None)


class LossResult(NamedTuple):
    """Over the rows that count; gradients of the loss in the accumulation dtype; 0-element where not wanted."""

    loss: torch.Tensor  # summed, or the mean
    weight_sum: torch.Tensor  # sum of class_weight[target]; 0-element where there are no class weights
    num_valid: torch.Tensor  # int64
    num_correct: torch.Tensor  # int64
    entropy_sum: torch.Tensor
    nll_sum: torch.Tensor
    grad_hidden: torch.Tensor  # (N, H)
    grad_weight: torch.Tensor  # (V, H)
    grad_bias: torch.Tensor  # (V,)


def _zeros_without_storage(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def loss_and_gradients(
    problem: Problem,
    needs: Needs,
    options: LossOptions,
    token_weight: Optional[torch.Tensor],
    num_items: Optional[torch.Tensor],
    metrics: bool,
    mean: bool,
    dense: bool,
) -> LossResult:
    """The summed or mean loss and its gradients in one pass over the tokens (3 G).

    dense: a compiled graph expects contiguous outputs; else the (V, H) zeros of a batch without valid tokens are made
    only in the backward, in the weight's dtype.
    """
    p, acc, device = problem, problem.acc, problem.hidden.device
    n_tokens, hidden_size = p.hidden.shape
    vocab = p.head.weight.shape[0]
    wants = Wants(entropy=metrics, is_top1=metrics, sum_log_probs=options.label_smoothing > 0)
    buffer = p.new_exps(min(p.plan.chunk_rows, n_tokens if p.early_rows else len(p.rows)))
    stats = p.start(wants, buffer)
    rows = p.rows
    token_weight = None if token_weight is None else rows.take(token_weight).to(acc)
    target_weight = _target_weight(p.head.class_weight, rows, acc)

    def output(wanted: bool, *shape: int, zero: bool):
        shape, zero = (shape, zero) if wanted else ((0,), False)
        return (torch.zeros if zero else torch.empty)(shape, dtype=acc, device=device)

    sink = GradientSink(
        p,
        needs,
        output(needs.hidden, n_tokens, hidden_size, zero=rows.index is not None),
        _zeros_without_storage(acc, device, vocab, hidden_size)
        if needs.weight and len(rows) == 0 and not dense
        else output(needs.weight, vocab, hidden_size, zero=len(rows) == 0),
        output(needs.bias, vocab, zero=True),
    )
    weight_sum = p.head.class_weight_sum() if wants.sum_log_probs else None
    target_weight_sum = None if target_weight is None else rows.mask(target_weight).sum()
    count = len(rows) if rows.live is None else rows.live.sum()
    divisor = mean_divisor(num_items, count, target_weight_sum, device, acc) if mean else 1
    # 0 in masked rows, and so are their coefficients
    upstream_of_rows = rows.mask(torch.ones(len(rows), dtype=acc, device=device) / divisor)

    def row_coefficients(lse: Optional[torch.Tensor], start: int, stop: int) -> Coefficients:
        parts = (upstream_of_rows, target_weight, token_weight)
        grad, *weights = (None if v is None else cut(v, start, stop) for v in parts)
        upstream = token_loss_upstream(grad, lse, *weights, options)
        return coefficients(upstream, weight_sum, grad)

    fixed = None  # the coefficients of all rows: only z-loss's depend on the statistics
    for start, stop in p.chunks():
        x, s, e = p.x(start, stop), stats.rows(start, stop), cut(buffer, 0, stop - start)
        p.forward(start, stop, wants, stats, e, x)
        if options.z_loss:
            c = row_coefficients(s.lse, start, stop)
        else:  # made when the device has its first work
            fixed = row_coefficients(None, 0, len(rows)) if fixed is None else fixed
            c = _cut(fixed, start, stop)
        sink.add_scaled(start, stop, x, e, s, c)
        del x  # before the next chunk's
    sink.finish_constant()
    log_prob = rows.mask(stats.log_prob)
    lse = rows.mask(stats.lse) if options.z_loss else None
    sum_log_probs = rows.mask(stats.sum_log_probs) if wants.sum_log_probs else None
    losses = token_loss(log_prob, lse, sum_log_probs, target_weight, token_weight, options)

    def unwanted(dtype: torch.dtype = acc) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    return LossResult(
        losses.sum() / divisor,
        unwanted() if target_weight_sum is None else target_weight_sum,
        torch.full((), count, dtype=torch.int64, device=device) if rows.live is None else count,
        rows.mask(stats.is_top1).sum() if metrics else unwanted(torch.int64),
        rows.mask(stats.entropy).sum() if metrics else unwanted(),
        -log_prob.sum() if metrics else unwanted(),
        sink.hidden,
        sink.weight,
        sink.bias,
    )


def _target_weight(class_weight: Optional[torch.Tensor], rows: Rows, dtype: torch.dtype):
    return None if class_weight is None else class_weight.to(dtype)[rows.targets.clamp(min=0)]


class TokenResult(NamedTuple):
    """Per token, (N,), zero where ignored; 0-element where not wanted. The last two are for the backward, and have the
    rows that run in front."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor
    sum_log_probs: torch.Tensor
    log_sum_sq: torch.Tensor
    is_top1: torch.Tensor
    saved: torch.Tensor  # Stats.saved: (4, R), or (4, N) with zeros behind those
    exps: torch.Tensor  # (kept rows, padded V)


def kept_exps_shape(call: Call, n_tokens: int) -> tuple[int, int]:
    kept = call.kept_rows(n_tokens)
    return (kept, backends.padded_vocab(call.backend, call.vocab))


def token_statistics(problem: Problem, wants: Wants, dense: bool) -> TokenResult:
    """Forward of everything per token: 1 G, and E of the plan's kept rows.

    dense: an operator's outputs are to be determined, and of shapes that do not depend on the number of rows that run;
    else what belongs to no row of E is whatever memory held.
    """
    p, device = problem, problem.hidden.device
    n_tokens, vocab = p.hidden.shape[0], p.head.weight.shape[0]
    kept_buffer = torch.empty(kept_exps_shape(p.call, n_tokens), dtype=p.e_dtype, device=device)
    exps = kept_buffer[:, :vocab] if p.plan.kept_rows else None
    stats = p.start(wants, exps)
    rows = p.rows
    kept = min(p.plan.kept_rows, len(rows))
    if kept:
        p.forward(0, kept, wants, stats, cut(exps, 0, kept))
    for start, stop in p.chunks(kept, step=p.plan.statistics_rows):
        p.forward(start, stop, wants, stats)

    def per_token(values: Optional[torch.Tensor], kind: torch.dtype = p.acc) -> torch.Tensor:
        return torch.empty(0, dtype=kind, device=device) if values is None else rows.scatter(values, n_tokens)

    saved = stats.saved
    if dense:
        saved = saved.new_zeros(4, n_tokens)
        saved[:, : len(rows)] = stats.saved
        saved[3, kept:] = 0.0
        kept_buffer[kept:] = 0.0
        kept_buffer[:, vocab:] = 0.0
    return TokenResult(
        per_token(stats.log_prob),
        per_token(stats.entropy),
        per_token(stats.lse),
        per_token(stats.sum_log_probs),
        per_token(stats.log_sum_sq),
        per_token(stats.is_top1, torch.bool),
        saved,
        kept_buffer,
    )


def token_gradients(
    problem: Problem,
    needs: Needs,
    upstream: Upstream,
    entropy: torch.Tensor,
    saved: torch.Tensor,
    exps: torch.Tensor,
    restore: bool,
):
    """(dX, dW, db) in the dtypes of hidden, weight and bias for per-token upstream gradients; 0-element if not wanted.

    entropy, saved, exps: TokenResult's. Rows whose E was kept need two GEMMs, the others three. restore: leave exps as
    they were found.
    """
    p, rows, plan, head = problem, problem.rows, problem.plan, problem.head
    vocab = head.weight.shape[0]
    upstream = Upstream(*(None if u is None else rows.take(resolved(u)).to(p.acc) for u in upstream))
    stats = Stats(saved, None, None, None, None).rows(0, len(rows))
    stats.entropy = rows.take(entropy) if upstream.entropy is not None else None
    weight_sum = head.class_weight_sum() if upstream.sum_log_probs is not None else None
    c = coefficients(upstream, weight_sum, stats.log_sum)
    hidden_size, device, empty = p.hidden.shape[1], p.hidden.device, len(rows) == 0

    def output(wanted: bool, zero: bool, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        shape, zero = (shape, zero) if wanted else ((0,), False)
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)

    dx = output(needs.hidden, empty or rows.index is not None, p.hidden.dtype, *p.hidden.shape)
    dw = output(needs.weight, empty, p.weight_dtype, vocab, hidden_size)
    db = output(needs.bias, True, p.acc, vocab)
    if empty:
        return dx, dw, db
    if plan.slab < vocab:
        _gradients_by_slab(p, needs, stats, c, dx, dw, db)
    else:
        _gradients_by_row(p, needs, stats, c, exps, restore, dx, dw, db)
    return dx, dw, db


def _gradients_by_row(p, needs, stats, c, kept_exps, restore, dx, dw, db) -> None:
    """Chunks of rows over the whole vocabulary: kept rows from their E, the others recomputed."""
    rows, head, vocab = p.rows, p.head, p.head.weight.shape[0]
    kept = min(p.plan.kept_rows, len(rows)) if row_scaled(c, head.softcap) else 0
    one_gemm = kept == len(rows) and p.call.gemm_rounds(kept) and c.d is None
    accumulator = dw if one_gemm or dw.dtype == p.acc or not needs.weight else p.new_accumulator(*dw.shape)
    sink = GradientSink(p, needs, dx, accumulator, db)
    for start, stop in [(0, kept)] if one_gemm else p.chunks(0, kept):
        # finish() writes the target elements, which it never reads: a second backward needs nothing of what was there.
        # (.data: the version counter must not see this.)
        e = kept_exps.data[start:stop, :vocab]
        if restore:
            column = rows.cut_targets(start, stop).clamp(min=0).unsqueeze(1)
            before = e.gather(1, column)
        sink.add_scaled(start, stop, p.x(start, stop), e, stats.rows(start, stop), _cut(c, start, stop))
        if restore:
            e.scatter_(1, column, before)
    if kept < len(rows):
        buffer = p.new_exps(min(p.plan.chunk_rows, len(rows) - kept))
        exact, unit = _exact_coefficients(p, stats, c)
        for start, stop in p.chunks(kept):
            x, e = p.x(start, stop), buffer[: stop - start]
            targets, s = rows.targets[start:stop], stats.rows(start, stop)
            p.backend.dlogits(x, targets, head, s, _cut(exact, start, stop), e)
            sink.add_exact(start, stop, x, e, None if unit is None else unit[start:stop])
            del x  # before the next chunk's
    sink.finish_constant()
    if accumulator is not dw:
        dw.copy_(accumulator)


def _gradients_by_slab(p, needs, stats, c, dx, dw, db) -> None:
    """Slabs of classes, each over all chunks of rows: dX accumulates over the slabs, no (V, H) accumulator exists. The
    rows that run are in front meanwhile, also in a dX that is its own accumulator."""
    rows, vocab, slab = p.rows, p.head.weight.shape[0], p.plan.slab
    dx_sum = dx
    if needs.hidden and dx.dtype != p.acc:
        dx_sum = p.new_accumulator(len(rows), dx.shape[1])
    exps = p.new_exps(min(p.plan.chunk_rows, len(rows)), slab)
    dw_slab = p.new_accumulator(slab, dw.shape[1]) if needs.weight and dw.dtype != p.acc else None
    exact, unit = _exact_coefficients(p, stats, c)
    # What every slab wants of a chunk, cut once: with many slabs the device would wait for the host.
    chunks = [
        (start, stop, stats.rows(start, stop), _cut(exact, start, stop), None if unit is None else unit[start:stop])
        for start, stop in p.chunks()
    ]
    for first in range(0, vocab, slab):
        last = min(first + slab, vocab)
        head = p.head.columns(first, last)
        if p.plan.backend == "triton":
            head = head._replace(weight=head.weight.to(p.compute_dtype))
        gemm_weight = p.gemm_weight(head.weight)
        total = None if not needs.weight else dw[first:last] if dw_slab is None else dw_slab[: last - first]
        targets = rows.targets - first
        for start, stop, s, chunk_c, chunk_unit in chunks:
            x, e = p.x(start, stop), exps[: stop - start, : last - first]
            p.backend.dlogits(x, targets[start:stop], head, s, chunk_c, e)
            if needs.hidden:
                p.backend.grad_hidden(e, gemm_weight, p.compute_dtype, dx_sum[start:stop], accumulate=first > 0)
            if needs.weight:
                x = p.in_units(x, chunk_unit)
            _head_gradients(p, needs, e, x, chunk_unit, total, start > 0, db[first:last])
            del x  # before the next chunk's
        if dw_slab is not None:
            dw[first:last] = total
        del head, gemm_weight  # copies, before the next slab's
    if needs.hidden and unit is not None:
        dx_rows = dx_sum[: len(rows)]
        p.backend.scale(dx_rows, unit, dx_rows)
    if dx_sum is not dx:
        for start, stop in p.chunks():
            rows.put(dx_sum[start:stop], dx, start, stop)
    elif needs.hidden and rows.index is not None:
        # From the last chunk on: no row lies before its place in front.
        for start, stop in reversed(list(p.chunks())):
            part = dx[start:stop].clone()
            dx[start:stop] = 0
            rows.put(part, dx, start, stop)


def _exact_coefficients(p: Problem, stats: Stats, c: Coefficients) -> tuple[Coefficients, Optional[torch.Tensor]]:
    """(coefficients, unit) for dlogits(): coefficients * unit = logit_scale * c, such that the target's dlogit loses
    nothing to rounding.

    bf16 rounds p_y - 1 to -1 wherever p_y < 2^-9: the same way in every row, while its errors in the other elements
    cancel in sums over rows. The unit, (R,), within [1/2, 2] or so, is given back to dX, to the x of dW and to db's
    sum. Were it 1 - p_y itself, rounding x * unit would lose p_y as well: hence a mantissa that varies from row to
    row, that of exp(lse). None where dlogits are not rounded.
    """
    # A row without a class has NaN statistics, and a NaN gradient whatever its upstream is.
    c = c._replace(a=c.a + torch.where(p.rows.targets < 0, torch.nan, 0.0).to(p.acc))
    if p.head.logit_scale != 1.0:
        c = Coefficients(*(None if v is None else v * p.head.logit_scale for v in c))
    if p.e_dtype == p.acc:
        return c, None
    exact = target_dlogit(c, stats.log_prob, stats.entropy)
    if c.d is not None:
        weight = _target_weight(p.head.class_weight, p.rows, p.acc)
        exact += c.d if weight is None else c.d * weight
    exact = target_chain(exact, stats, p.head.softcap)
    mantissa = torch.exp2(torch.frac(stats.lse / math.log(2)))
    unit = lost_by_rounding(exact, (exact * mantissa).to(p.e_dtype))
    return Coefficients(*(None if v is None else v / unit for v in c)), unit


def _cut(c: Coefficients, start: int, stop: int) -> Coefficients:
    return Coefficients(*(None if v is None else cut(v, start, stop) for v in c))
