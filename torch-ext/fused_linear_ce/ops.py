"""The torch.library operators: what torch.compile, autograd and CUDA graphs see of the package.

    loss_forward    summed or mean loss, metrics, and the loss's gradients in the accumulation dtype
    loss_backward   those gradients times the upstream scalar, rounded once to the parameters' dtypes
    token_forward   per-token statistics (log-probability, entropy, log-sum-exp, ...) and the kept exponentials
    token_backward  gradients for per-token upstream gradients

Shapes of all outputs follow from the inputs' shapes and the options alone, so compiled graphs neither break nor
specialise on the number of tokens. The backward operators have no autograd formula: differentiating a second time
raises instead of being silently wrong.
"""

import contextlib
from typing import Optional

import torch
from torch import Tensor

from . import backends, passes
from ._ops import add_op_namespace_prefix
from .backends.base import Head, Wants, accumulation_dtype
from .loss import LossOptions, Upstream
from .plan import Call, Needs, known_call


def make_call(hidden, weight, compute_dtype, needs, row_scaled, workspace) -> Call:
    traced = torch.compiler.is_compiling() or any(type(size) is not int for size in weight.shape)
    return (Call if traced else known_call)(
        weight.shape[0], weight.shape[1], compute_dtype, hidden.dtype, weight.dtype, hidden.device,
        Needs(*needs), row_scaled, workspace,
    )  # fmt: skip


def is_capturing(tensor: Tensor) -> Optional[bool]:
    """Whether a CUDA graph is being captured on its device; None while tracing: what is traced is captured when it
    runs, or never."""
    return None if torch.compiler.is_compiling() or _watched() else passes.capturing(tensor)


def _isolated(device_type: str):
    """Operators inside must not be autocast again."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _loss_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    num_items: Optional[Tensor],
    ignore_index: int,
    logit_scale: float,
    softcap: Optional[float],
    label_smoothing: float,
    z_loss: float,
    metrics: bool,
    mean: bool,
    compute_dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    workspace: Optional[int],
    dense: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """passes.LossResult for hidden (N, H), weight (V, H), targets (N,)."""
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    call = make_call(hidden, weight, compute_dtype, needs, True, workspace)
    options = LossOptions(label_smoothing, z_loss, weight.shape[0])
    with _isolated(hidden.device.type):
        head = Head(weight, bias, logit_scale, softcap, class_weight, compute_dtype)
        problem = passes.Problem(hidden, head, targets, ignore_index, call, in_forward=True)
        return tuple(passes.loss_and_gradients(problem, needs, options, token_weight, num_items, metrics, mean, dense))


loss_forward = torch.library.custom_op(add_op_namespace_prefix("loss_forward"), _loss_forward, mutates_args=())


@loss_forward.register_fake
def _(
    hidden, weight, targets, bias, class_weight, token_weight, num_items, ignore_index, logit_scale, softcap,
    label_smoothing, z_loss, metrics, mean, compute_dtype, needs_hidden, needs_weight, needs_bias, workspace,
    dense=True,
):  # fmt: skip
    acc = accumulation_dtype(compute_dtype)

    def new(*shape, dtype=acc):
        return hidden.new_empty(shape, dtype=dtype)

    def scalar(wanted):
        return () if wanted else (0,)

    return (
        new(), new(*scalar(class_weight is not None)), new(dtype=torch.int64),
        new(*scalar(metrics), dtype=torch.int64), new(*scalar(metrics)), new(*scalar(metrics)),
        new(*hidden.shape) if needs_hidden else new(0),
        new(*weight.shape) if needs_weight else new(0),
        new(weight.shape[0]) if needs_bias else new(0),
    )  # fmt: skip


def _loss_backward(
    grad: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Each saved gradient times the scalar `grad`, in its parameter's dtype; out of place, rounded once.

    The parameters' values are not read. They are arguments so that a second derivative finds its way to this operator,
    which has none, and does not pass for zero.
    """
    gradients = (grad_hidden, grad_weight, grad_bias)
    outs = tuple(map(_like, gradients, _gradient_dtypes(hidden, weight, bias)))
    _scale(grad, gradients, outs)
    return outs


def _like(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, to be filled by _scale(); zeros already if so is the gradient."""
    if gradient.is_contiguous():
        return torch.empty_like(gradient, dtype=dtype)
    return torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)  # without storage: no token was valid


def _scale(grad: Tensor, gradients: tuple, outs: tuple) -> None:
    """outs = the gradients times the scalar `grad`."""
    grad = passes.resolved(grad)
    backend = backends.load(backends.choose(grad.device, grad.dtype == torch.float64))
    for gradient, out in zip(gradients, outs):
        if gradient.is_contiguous():
            backend.scale(gradient, grad, out)


def _gradient_dtypes(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> tuple:
    return hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype


loss_backward = torch.library.custom_op(add_op_namespace_prefix("loss_backward"), _loss_backward, mutates_args=())


@loss_backward.register_fake
def _(grad, grad_hidden, grad_weight, grad_bias, hidden, weight, bias):
    pairs = zip((grad_hidden, grad_weight, grad_bias), _gradient_dtypes(hidden, weight, bias))
    return tuple(torch.empty_like(saved, dtype=dtype, memory_format=torch.contiguous_format) for saved, dtype in pairs)


def _loss_setup(ctx, inputs, output) -> None:
    hidden, weight, _, bias = inputs[:4]
    ctx.needs = inputs[15:18]
    ctx.save_for_backward(*output[6:], hidden, weight, bias)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _batched(grad: Optional[Tensor]) -> bool:
    """Whether it stands for several upstream gradients: torch.autograd.grad(..., is_grads_batched=True)."""
    if grad is None or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def _recorded(*grads: Optional[Tensor]) -> bool:
    """Whether a backward has to be an operator: to be traced, to be batched, or (create_graph) to be found by a second
    derivative, which the operator refuses."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or any(_batched(g) for g in grads)


def _graph_is_kept() -> bool:
    """Whether the running backward may be followed by another over the same graph (retain_graph, create_graph)."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()


def _loss_gradients(ctx, grad, recorded: bool) -> tuple:
    """The backward of loss_forward. recorded: by the operator."""
    if grad is None:
        return (None,) * 20
    tensors = ctx.saved_tensors  # once: activation checkpointing allows no second look
    if getattr(ctx, "scaled", False):
        raise RuntimeError("a backward of this loss failed after it had scaled the gradients: run the forward again")
    saved, parameters = tensors[:3], tensors[3:]
    if recorded:
        grads = loss_backward(grad, *saved, *parameters)
    else:
        grads = _direct_loss_gradients(ctx, grad, saved, _gradient_dtypes(*parameters))
    dx, dw, db = (g if n else None for g, n in zip(grads, ctx.needs))
    return (dx, dw, None, db, *(None,) * 16)


def _direct_loss_gradients(ctx, grad: Tensor, saved: tuple, dtypes: tuple) -> tuple:
    """Over the saved gradients that have their dtype, unless they are asked for again: in another backward, or where a
    captured one is replayed. What a hook on saved tensors puts in their place is not written to."""
    ours = [
        gradient.dtype == dtype and gradient.is_contiguous() and gradient.data_ptr() == place
        for gradient, dtype, place in zip(saved, dtypes, ctx.places)
    ]
    in_place = any(ours) and not (_graph_is_kept() or passes.capturing(grad))
    # All of them before anything is written: memory can run out.
    outs = tuple(g if in_place and own else _like(g, dtype) for g, own, dtype in zip(saved, ours, dtypes))
    ctx.scaled = in_place
    _scale(grad, saved, outs)
    return outs


def _loss_autograd(ctx, grad, *_):
    return _loss_gradients(ctx, grad, True)


loss_forward.register_autograd(_loss_autograd, setup_context=_loss_setup)


class _LossForward(torch.autograd.Function):
    """loss_forward without the operator: see `call`."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _loss_forward(*inputs)
        _loss_setup(ctx, inputs, output)
        ctx.places = tuple(gradient.data_ptr() for gradient in output[6:])
        return output

    @staticmethod
    def backward(ctx, grad, *_):
        return _loss_gradients(ctx, grad, _recorded(grad))


def _token_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    ignore_index: int,
    logit_scale: float,
    softcap: Optional[float],
    entropy: bool,
    sum_log_probs: bool,
    log_sum_sq: bool,
    is_top1: bool,
    compute_dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    row_scaled: bool,
    workspace: Optional[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """passes.TokenResult for hidden (N, H), weight (V, H), targets (N,)."""
    out, _ = _token_pass(
        hidden, weight, targets, bias, class_weight, ignore_index, logit_scale, softcap, entropy, sum_log_probs,
        log_sum_sq, is_top1, compute_dtype, needs_hidden, needs_weight, needs_bias, row_scaled, workspace, dense=True,
    )  # fmt: skip
    return tuple(out)


def _token_pass(
    hidden, weight, targets, bias, class_weight, ignore_index, logit_scale, softcap, entropy, sum_log_probs,
    log_sum_sq, is_top1, compute_dtype, needs_hidden, needs_weight, needs_bias, row_scaled, workspace, dense=False,
):  # fmt: skip
    """(passes.TokenResult, the rows that ran)"""
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    call = make_call(hidden, weight, compute_dtype, needs, row_scaled, workspace)
    with _isolated(hidden.device.type):
        head = Head(weight, bias, logit_scale, softcap, class_weight, compute_dtype)
        problem = passes.Problem(hidden, head, targets, ignore_index, call, in_forward=False)
        wants = Wants(entropy, sum_log_probs, log_sum_sq, is_top1)
        return passes.token_statistics(problem, wants, dense), problem.rows


# Compiled code must not capture one of them into a CUDA graph and run the other outside of it: the rows of E are those
# that count in the one case, and all of them in the other.
_APART = {"tags": [torch.Tag.cudagraph_unsafe]} if hasattr(torch.Tag, "cudagraph_unsafe") else {}

token_forward = torch.library.custom_op(
    add_op_namespace_prefix("token_forward"), _token_forward, mutates_args=(), **_APART
)


@token_forward.register_fake
def _(
    hidden, weight, targets, bias, class_weight, ignore_index, logit_scale, softcap, entropy, sum_log_probs,
    log_sum_sq, is_top1, compute_dtype, needs_hidden, needs_weight, needs_bias, row_scaled, workspace,
):  # fmt: skip
    acc = accumulation_dtype(compute_dtype)
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    call = make_call(hidden, weight, compute_dtype, needs, row_scaled, workspace)
    n_tokens = hidden.shape[0]

    def new(wanted=True, dtype=acc):
        return hidden.new_empty((n_tokens if wanted else 0,), dtype=dtype)

    return (
        new(), new(entropy), new(), new(sum_log_probs), new(log_sum_sq), new(is_top1, torch.bool),
        hidden.new_empty((4, n_tokens), dtype=acc),
        hidden.new_empty(
            passes.kept_exps_shape(call, n_tokens), dtype=backends.exps_dtype(call.backend, compute_dtype)
        ),
    )  # fmt: skip


def _token_backward(
    grad_log_probs: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    grad_lse: Optional[Tensor],
    grad_sum_log_probs: Optional[Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    entropy: Tensor,
    saved: Tensor,
    exps: Tensor,
    ignore_index: int,
    logit_scale: float,
    softcap: Optional[float],
    compute_dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    row_scaled: bool,
    workspace: Optional[int],
    row_index: Optional[Tensor] = None,
    row_targets: Optional[Tensor] = None,
    masked: Optional[bool] = None,
    restore: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db); 0-element where not wanted.

    row_index, row_targets: rows.Rows' index and targets, which spare selecting the rows once more. masked: whether
    the forward masked its rows, where that is known. restore: leave `exps` as they are found; False only where nobody
    else has them, as in an eager call's own backward.
    """
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    call = make_call(hidden, weight, compute_dtype, needs, row_scaled, workspace)
    with _isolated(hidden.device.type):
        head = Head(weight, bias, logit_scale, softcap, class_weight, compute_dtype)
        live = targets != ignore_index if masked else None
        rows = None if row_targets is None else passes.Rows(row_index, live, row_targets)
        problem = passes.Problem(hidden, head, targets, ignore_index, call, False, rows, masked)
        upstream = Upstream(grad_log_probs, grad_entropy, grad_lse, grad_sum_log_probs)
        dx, dw, db = passes.token_gradients(problem, needs, upstream, entropy, saved, exps, restore)
        return dx, dw, db if bias is None else db.to(bias.dtype)


token_backward = torch.library.custom_op(
    add_op_namespace_prefix("token_backward"), _token_backward, mutates_args=(), **_APART
)


@token_backward.register_fake
def _(
    grad_log_probs, grad_entropy, grad_lse, grad_sum_log_probs, hidden, weight, targets, bias, class_weight,
    entropy, saved, exps, ignore_index, logit_scale, softcap, compute_dtype, needs_hidden,
    needs_weight, needs_bias, row_scaled, workspace, row_index=None, row_targets=None, masked=None, restore=True,
):  # fmt: skip
    acc = accumulation_dtype(compute_dtype)
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,)),
        weight.new_empty(weight.shape[:1] if needs_bias else (0,), dtype=acc if bias is None else bias.dtype),
    )


def _token_setup(ctx, inputs, output, rows: Optional[passes.Rows] = None) -> None:
    hidden, weight, targets, bias, class_weight = inputs[:5]
    ctx.masked = None if rows is None else rows.live is not None
    selected = (None, None) if rows is None else (rows.index, rows.targets)
    ctx.save_for_backward(hidden, weight, targets, bias, class_weight, output[1], *output[6:], *selected)
    ctx.options = (*inputs[5:8], *inputs[12:])
    ctx.wants_entropy, ctx.wants_sum = inputs[8:10]
    ctx.mark_non_differentiable(*output[4:])
    ctx.set_materialize_grads(False)


def _token_gradients(ctx, grads, gradients) -> tuple:
    """The backward of token_forward; `gradients` is token_backward, or what it runs."""
    log_probs, entropy, lse, sum_log_probs = grads[:4]
    grads = (
        log_probs,
        entropy if ctx.wants_entropy else None,  # of a 0-element output: not a gradient of anything
        lse,
        sum_log_probs if ctx.wants_sum else None,
    )
    if all(g is None for g in grads):
        return (None,) * 18
    *saved, row_index, row_targets = ctx.saved_tensors
    out = gradients(
        *grads, *saved, *ctx.options, row_index, row_targets, ctx.masked, restore=gradients is token_backward
    )
    dx, dw, db = (o if n else None for o, n in zip(out, ctx.options[4:7]))
    return (dx, dw, None, db, *(None,) * 14)


def _token_autograd(ctx, *grads):
    return _token_gradients(ctx, grads, token_backward)


token_forward.register_autograd(_token_autograd, setup_context=_token_setup)


class _TokenForward(torch.autograd.Function):
    """token_forward without the operator: see `call`."""

    @staticmethod
    def forward(ctx, *inputs):
        output, rows = _token_pass(*inputs)
        _token_setup(ctx, inputs, output, rows)
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        return _token_gradients(ctx, grads, token_backward if _recorded(*grads[:4]) else _token_backward)


# What an operator runs, and the same with its gradient.
_DIRECT = {
    loss_forward: (_loss_forward, _LossForward.apply),
    loss_backward: (_loss_backward, loss_backward),
    token_forward: (lambda *inputs: tuple(_token_pass(*inputs)[0]), _TokenForward.apply),
    token_backward: (_token_backward, token_backward),
}


def call(operator, *inputs):
    """operator(*inputs), the short way where nobody is watching.

    An operator costs some 0.3 ms of Python on the way in and as much in its backward, which small batches feel. What
    it is for (torch.compile, fake tensors, functorch, dispatch modes) is not there in a plain eager call.
    """
    if torch.compiler.is_compiling() or _watched():
        return operator(*inputs)
    tensors = [t for t in inputs if isinstance(t, Tensor)]
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
        return operator(*inputs)
    function, differentiable = _DIRECT[operator]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return differentiable(*inputs)
    return function(*inputs)


def _watched() -> bool:
    """Whether dispatch modes (fake tensors, flop counters), functorch transforms or torch.jit.trace are active."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    return transforms or torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
