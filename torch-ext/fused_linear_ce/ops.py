"""The torch.library operators: what torch.compile, autograd and CUDA graphs see of the package.

    loss_forward    summed loss, metrics, and the gradients of the sum in the accumulation dtype
    loss_backward   those gradients times the upstream scalar, rounded once to the parameters' dtypes
    token_forward   per-token statistics (log-probability, entropy, log-sum-exp, ...) and the kept exponentials
    token_backward  gradients for per-token upstream gradients

Shapes of all outputs follow from the inputs' shapes and the options alone, so compiled graphs neither break nor
specialise on the number of tokens. The backward operators have no autograd formula: differentiating a second time
raises instead of being silently wrong.
"""

from typing import Optional

import torch
from torch import Tensor

from . import backends, passes
from ._ops import add_op_namespace_prefix
from .backends.base import Head, Wants, accumulation_dtype
from .loss import LossOptions, Upstream
from .plan import Call, Needs


def make_call(hidden, weight, compute_dtype, needs, row_scaled, workspace) -> Call:
    return Call(
        weight.shape[0], weight.shape[1], compute_dtype, hidden.dtype, weight.dtype, hidden.device.type,
        Needs(*needs), row_scaled, workspace,
    )  # fmt: skip


def token_row_scaled(needs_entropy_grad: bool, needs_sum_grad: bool, softcap: Optional[float]) -> bool:
    """Whether dlogits is E times a factor per row plus a rank-1 term: not with b != 0, nor with d != 0 under a softcap
    (loss.py's family)."""
    return not needs_entropy_grad and not (needs_sum_grad and softcap is not None)


def _isolated(device_type: str):
    """Operators inside must neither be autocast again nor recorded."""
    return torch.autocast(device_type, enabled=False)


@torch.library.custom_op(add_op_namespace_prefix("loss_forward"), mutates_args=())
def loss_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    ignore_index: int,
    logit_scale: float,
    softcap: Optional[float],
    label_smoothing: float,
    z_loss: float,
    metrics: bool,
    compute_dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    workspace: Optional[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """passes.LossResult for hidden (N, H), weight (V, H), targets (N,)."""
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    call = make_call(hidden, weight, compute_dtype, needs, True, workspace)
    options = loss_options(label_smoothing, z_loss, weight.shape[0], class_weight, compute_dtype)
    with _isolated(hidden.device.type):
        head = Head(weight, bias, logit_scale, softcap, class_weight, compute_dtype)
        problem = passes.Problem(hidden, head, targets, ignore_index, call, "scalar")
        return tuple(passes.loss_and_gradients(problem, needs, options, token_weight, metrics))


def loss_options(label_smoothing, z_loss, vocab, class_weight, compute_dtype) -> LossOptions:
    total = None
    if class_weight is not None:
        total = class_weight.to(accumulation_dtype(compute_dtype)).sum()
    return LossOptions(label_smoothing, z_loss, vocab, total)


@loss_forward.register_fake
def _(
    hidden, weight, targets, bias, class_weight, token_weight, ignore_index, logit_scale, softcap, label_smoothing,
    z_loss, metrics, compute_dtype, needs_hidden, needs_weight, needs_bias, workspace,
):  # fmt: skip
    acc = accumulation_dtype(compute_dtype)

    def new(*shape, dtype=acc):
        return hidden.new_empty(shape, dtype=dtype)

    return (
        new(), new(), new(dtype=torch.int64), new(dtype=torch.int64), new(), new(),
        new(*hidden.shape) if needs_hidden else new(0),
        new(*weight.shape) if needs_weight else new(0),
        new(weight.shape[0]) if needs_bias else new(0),
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("loss_backward"), mutates_args=())
def loss_backward(
    grad: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each saved gradient times the scalar `grad`, in its parameter's dtype; out of place, rounded once."""
    backend = backends.load(backends.choose(grad.device.type, grad.dtype == torch.float64))

    def scaled(saved: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(saved, dtype=dtype)
        backend.scale(saved, grad, out)
        return out

    return (
        scaled(grad_hidden, hidden_dtype),
        scaled(grad_weight, weight_dtype),
        scaled(grad_bias, bias_dtype),
    )


@loss_backward.register_fake
def _(grad, grad_hidden, grad_weight, grad_bias, hidden_dtype, weight_dtype, bias_dtype):
    pairs = ((grad_hidden, hidden_dtype), (grad_weight, weight_dtype), (grad_bias, bias_dtype))
    return tuple(torch.empty_like(saved, dtype=dtype) for saved, dtype in pairs)


def _loss_setup(ctx, inputs, output) -> None:
    hidden, weight, _, bias = inputs[:4]
    ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    ctx.needs = inputs[13:16]
    ctx.save_for_backward(*output[6:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def is_one(grad: Tensor) -> bool:
    """Whether the scalar is known to be 1 without a synchronisation or a guard: then there is nothing to multiply."""
    readable = type(grad) is Tensor and grad.device.type == "cpu" and not torch.compiler.is_compiling()
    return readable and grad.item() == 1


def scale_saved_gradients(grad: Tensor, saved: tuple, dtypes: tuple, needs: tuple) -> tuple:
    """(dX, dW, db) from loss_forward's gradients; None where not wanted."""
    if is_one(grad):
        scaled = tuple(s if s.dtype == d else s.to(d) for s, d in zip(saved, dtypes))
    else:
        scaled = loss_backward(grad, *saved, *dtypes)
    return tuple(s if n else None for s, n in zip(scaled, needs))


def _loss_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 17
    dx, dw, db = scale_saved_gradients(grad, ctx.saved_tensors, ctx.dtypes, ctx.needs)
    return (dx, dw, None, db, *(None,) * 13)


loss_forward.register_autograd(_loss_backward, setup_context=_loss_setup)


@torch.library.custom_op(add_op_namespace_prefix("token_forward"), mutates_args=())
def token_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    ignore_index: int,
    logit_scale: float,
    softcap: Optional[float],
    entropy: bool,
    sum_logits: bool,
    log_sum_sq: bool,
    is_top1: bool,
    compute_dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
    row_scaled: bool,
    workspace: Optional[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """passes.TokenResult for hidden (N, H), weight (V, H), targets (N,)."""
    call = make_call(
        hidden, weight, compute_dtype, (needs_hidden, needs_weight, needs_bias), row_scaled, workspace
    )
    with _isolated(hidden.device.type):
        head = Head(weight, bias, logit_scale, softcap, class_weight, compute_dtype)
        problem = passes.Problem(hidden, head, targets, ignore_index, call, "token")
        return tuple(passes.token_statistics(problem, Wants(entropy, sum_logits, log_sum_sq, is_top1)))


@token_forward.register_fake
def _(
    hidden, weight, targets, bias, class_weight, ignore_index, logit_scale, softcap, entropy, sum_logits, log_sum_sq,
    is_top1, compute_dtype, needs_hidden, needs_weight, needs_bias, row_scaled, workspace,
):  # fmt: skip
    acc = accumulation_dtype(compute_dtype)
    call = make_call(
        hidden, weight, compute_dtype, (needs_hidden, needs_weight, needs_bias), row_scaled, workspace
    )
    n_tokens = hidden.shape[0]

    def new(wanted=True, dtype=acc):
        return hidden.new_empty((n_tokens if wanted else 0,), dtype=dtype)

    return (
        new(), new(entropy), new(), new(sum_logits), new(log_sum_sq), new(is_top1, torch.bool), new(), new(), new(),
        hidden.new_empty(
            passes.kept_exps_shape(call, n_tokens), dtype=backends.exps_dtype(call.backend, compute_dtype)
        ),
    )  # fmt: skip


@torch.library.custom_op(add_op_namespace_prefix("token_backward"), mutates_args=())
def token_backward(
    grad_log_probs: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    grad_lse: Optional[Tensor],
    grad_sum_logits: Optional[Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    log_probs: Tensor,
    entropy: Tensor,
    max: Tensor,
    log_sum: Tensor,
    scale: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dX, dW, db); 0-element where not wanted."""
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    call = make_call(hidden, weight, compute_dtype, needs, row_scaled, workspace)
    with _isolated(hidden.device.type):
        head = Head(weight, bias, logit_scale, softcap, class_weight, compute_dtype)
        problem = passes.Problem(hidden, head, targets, ignore_index, call, "token")
        empty = hidden.new_empty(0)
        saved = passes.TokenResult(
            log_probs, entropy, empty, empty, empty, empty, max, log_sum, scale, exps
        )
        upstream = Upstream(grad_log_probs, grad_entropy, grad_lse, grad_sum_logits)
        dx, dw, db = passes.token_gradients(problem, needs, upstream, saved)
        return dx, dw, db if bias is None else db.to(bias.dtype)


@token_backward.register_fake
def _(
    grad_log_probs, grad_entropy, grad_lse, grad_sum_logits, hidden, weight, targets, bias, class_weight, log_probs,
    entropy, max, log_sum, scale, exps, ignore_index, logit_scale, softcap, compute_dtype, needs_hidden, needs_weight,
    needs_bias, row_scaled, workspace,
):  # fmt: skip
    acc = accumulation_dtype(compute_dtype)
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,)),
        weight.new_empty(weight.shape[:1] if needs_bias else (0,), dtype=acc if bias is None else bias.dtype),
    )


def _token_setup(ctx, inputs, output) -> None:
    hidden, weight, targets, bias, class_weight = inputs[:5]
    log_probs, entropy, *_ = output
    ctx.save_for_backward(hidden, weight, targets, bias, class_weight, log_probs, entropy, *output[6:])
    ctx.options = (*inputs[5:8], *inputs[12:])
    ctx.mark_non_differentiable(*output[4:])
    ctx.set_materialize_grads(False)


def _token_backward(ctx, grad_log_probs, grad_entropy, grad_lse, grad_sum_logits, *_):
    grads = (grad_log_probs, grad_entropy, grad_lse, grad_sum_logits)
    none = (None,) * 18
    if all(g is None for g in grads):
        return none
    out = token_backward(*grads, *ctx.saved_tensors, *ctx.options)
    needs = ctx.options[4:7]
    dx, dw, db = (o if n else None for o, n in zip(out, needs))
    return (dx, dw, None, db, *(None,) * 14)


token_forward.register_autograd(_token_backward, setup_context=_token_setup)
