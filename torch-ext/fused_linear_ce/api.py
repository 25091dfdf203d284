"""The public functions: check the input once, choose the operator, reduce what comes back.

Two operators serve everything. A scalar loss whose gradients fit the workspace goes to ops.loss_forward, which makes
them in the forward pass. Everything else (per-token losses, log-probabilities, few tokens on an accelerator, a small
workspace) goes to ops.token_forward, whose per-token statistics are combined here; autograd carries the combination
back.
"""

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import ops, validation
from .backends.base import accumulation_dtype
from .loss import LossOptions, mean_divisor, token_loss, token_loss_upstream
from .plan import Needs


class LogProbs(NamedTuple):
    """Per-token outputs of fused_linear_log_probs, in targets' shape; None where not asked for, 0 where ignored."""

    log_probs: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    lse: Optional[Tensor] = None
    mean_logits: Optional[Tensor] = None
    log_sum_sq_probs: Optional[Tensor] = None
    is_top1: Optional[Tensor] = None


class _Checked(NamedTuple):
    """The tensors of a call, checked and flattened to N tokens, and what the operators need to know about them."""

    hidden: Tensor  # (N, H)
    weight: Tensor
    targets: Tensor  # (N,)
    bias: Optional[Tensor]
    ignore_index: int
    logit_scale: float
    softcap: Optional[float]
    compute_dtype: torch.dtype
    autocast: bool
    leading_shape: torch.Size
    workspace: Optional[int]

    @property
    def valid(self) -> Tensor:
        """(N,) bool: the tokens that count."""
        return self.targets != self.ignore_index

    def shaped(self, values: Tensor) -> Tensor:
        """(N,) -> targets' shape."""
        return values if len(self.leading_shape) == 1 else values.reshape(self.leading_shape)


def _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace, how=None) -> _Checked:
    """how: of a raw backward, _how of its forward; whether autocast is on then does not matter."""
    validation.check_tensors(hidden, weight, targets, bias)
    validation.check_ignore_index(ignore_index)
    validation.check_workspace(workspace)
    logit_scale, softcap = validation.check_logit_transform(logit_scale, softcap)
    if how is None:
        # As for torch.nn.functional.linear: autocast casts everything but float64.
        floats = (hidden, weight) if bias is None else (hidden, weight, bias)
        autocast = torch.is_autocast_enabled(hidden.device.type) and all(t.dtype != torch.float64 for t in floats)
        compute_dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    else:
        autocast, compute_dtype = how.shape[1] > 0, how.dtype
    validation.check_compute_dtypes(hidden, weight, bias, autocast)
    flat = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    return _Checked(
        flat, weight, targets.flatten().to(torch.int64), bias, ignore_index,
        logit_scale, softcap, compute_dtype, autocast, targets.shape, workspace,
    )  # fmt: skip


def _how(c: _Checked) -> Tensor:
    """How a raw forward ran, for its backward, in a tensor whose values mean nothing: its dtype is what was computed
    in, its shape says whether rows were masked (rows.capturing; 2: not known) and whether autocast was on."""
    masked = ops.is_capturing(c.targets)
    return c.hidden.new_empty((2 if masked is None else int(masked), int(c.autocast)), dtype=c.compute_dtype)


def _asked(needs_grad: tuple, bias: Optional[Tensor]) -> Needs:
    """The raw pairs' needs_grad; without a bias there is no gradient of it."""
    validation.check_needs("needs_grad", needs_grad)
    return Needs(needs_grad[0], needs_grad[1], needs_grad[2] and bias is not None)


def _needs(c: _Checked) -> Needs:
    if not torch.is_grad_enabled():
        return Needs(False, False, False)
    return Needs(c.hidden.requires_grad, c.weight.requires_grad, c.bias is not None and c.bias.requires_grad)


class _Loss(NamedTuple):
    """The loss's own options, checked."""

    label_smoothing: float
    z_loss: float
    class_weight: Optional[Tensor]
    token_weight: Optional[Tensor]  # (N,)
    metrics: bool

    def options(self, c: _Checked) -> LossOptions:
        return LossOptions(self.label_smoothing, self.z_loss, c.weight.shape[0])

    def row_scaled(self, c: _Checked) -> bool:
        """Whether the gradient is E times a factor per row (passes.row_scaled): not smoothing's under a softcap."""
        return self.label_smoothing == 0 or c.softcap is None


def _check_loss(hidden, weight, targets, label_smoothing, z_loss, class_weight, token_weight, metrics) -> _Loss:
    label_smoothing = validation.check_label_smoothing(label_smoothing)
    z_loss = validation.check_z_loss(z_loss)
    validation.check_weights(hidden, weight, targets, class_weight, token_weight)
    flat = None if token_weight is None else token_weight.reshape(-1)
    return _Loss(label_smoothing, z_loss, class_weight, flat, metrics)


def _gradients_in_forward(c: _Checked, loss: _Loss, needs: Needs, reduction: str) -> bool:
    if reduction == "none" or not any(needs):
        return False
    call = ops.make_call(c.hidden, c.weight, c.compute_dtype, needs, loss.row_scaled(c), c.workspace)
    return call.gradients_in_forward(c.hidden.shape[0], constant=loss.label_smoothing > 0)


def _loss_forward(c: _Checked, loss: _Loss, needs: Needs, mean: bool, num_items):
    if not mean:
        num_items = None
    elif num_items is not None and not isinstance(num_items, Tensor):
        # Filled in on the device: a copy from the host would wait for the device, and not be captured.
        acc = accumulation_dtype(c.compute_dtype)
        num_items = torch.full((), num_items, dtype=acc, device=c.hidden.device)
    return ops.call(
        ops.loss_forward, c.hidden, c.weight, c.targets, c.bias, loss.class_weight, loss.token_weight, num_items,
        c.ignore_index, c.logit_scale, c.softcap, loss.label_smoothing, loss.z_loss, loss.metrics, mean,
        c.compute_dtype, *needs, c.workspace, torch.compiler.is_compiling(),
    )  # fmt: skip


def _token_forward(c: _Checked, needs: Needs, class_weight, row_scaled: bool, **wants: bool):
    wants = tuple(wants.get(name, False) for name in ("entropy", "sum_log_probs", "log_sum_sq", "is_top1"))
    return ops.call(
        ops.token_forward, c.hidden, c.weight, c.targets, c.bias, class_weight, c.ignore_index, c.logit_scale,
        c.softcap, *wants,
        c.compute_dtype, *needs, row_scaled, c.workspace,
    )  # fmt: skip


def _loss_token_forward(c: _Checked, loss: _Loss, needs: Needs):
    return _token_forward(
        c, needs, loss.class_weight, loss.row_scaled(c), entropy=loss.metrics, sum_log_probs=loss.label_smoothing > 0,
        is_top1=loss.metrics,
    )  # fmt: skip


def _row_weights(c: _Checked, loss: _Loss) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """(w_y, token weight) per token, 0 where ignored; None stands for 1."""
    acc = accumulation_dtype(c.compute_dtype)
    target_weight = token_weight = None
    if loss.class_weight is not None:
        column = torch.where(c.valid, c.targets, 0).clamp(0, c.weight.shape[0] - 1)
        target_weight = torch.where(c.valid, loss.class_weight.to(acc)[column], 0.0)
    if loss.token_weight is not None:
        token_weight = torch.where(c.valid, loss.token_weight.to(acc), 0.0)
    return target_weight, token_weight


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    reduction: str = "mean",
    return_metrics: bool = False,
    *,
    num_items: Optional[Union[int, float, Tensor]] = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Optional[Tensor] = None,
    token_weight: Optional[Tensor] = None,
    workspace: Optional[int] = None,
) -> Union[Tensor, tuple[Tensor, dict[str, Tensor]]]:
    """Cross-entropy of the logits of a linear head, without the logits.

    The logits are ``z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)`` (without softcap
    ``logit_scale * (hidden @ weight.T + bias)``), in float32 from the GEMM's accumulator on. The loss of a token is

        token_weight * ((1 - label_smoothing) * class_weight[y] * (lse - z_y)
                        + label_smoothing / V * sum_j class_weight[j] * (lse - z_j)
                        + z_loss * lse ** 2)

    that is, ``torch.nn.functional.cross_entropy`` plus PaLM's z-loss (arXiv 2204.02311), with lse = logsumexp(z).
    Gradients are exact: those of hidden and weight accumulate in float32 and are rounded once. After Cut Your Losses
    (arXiv 2411.09009), which never stores the logits, and Liger Kernel (arXiv 2410.10989), which makes the gradients
    in the forward pass.

    Args:
        hidden: (..., H), float32, bfloat16, float16 or float64; any strides.
        weight: (V, H), hidden's dtype (under autocast any); any strides.
        targets: (...), integer class indices in [0, V), or ignore_index.
        bias: (V,) or None. -inf masks a class.
        ignore_index: any integer, also one inside [0, V). Such tokens are never projected.
        logit_scale, softcap: the transform above. softcap None means none.
        reduction: "mean" (over the tokens that are not ignored; with class_weight over the sum of
            class_weight[targets], as in torch, but 0 and not NaN where that sum is 0), "sum" or "none" (float32,
            targets' shape, 0 where ignored).
        return_metrics: also return a dict of 0-d tensors of the same pass, without gradients: num_correct_tokens
            (the target is the first argmax; int64), entropy_sum (nats), num_valid_tokens (int64), nll_sum (nats, the
            plain lse - z_y).
        num_items: divisor of "mean" instead: a number, or a one-element tensor on any device (the number of tokens
            of a batch accumulated over several calls or ranks).
        label_smoothing: in [0, 1].
        z_loss: weight of lse ** 2.
        class_weight: (V,) or None, constant. A class of weight 0 adds nothing to label smoothing's sum, also where its
            logit is -inf (torch: NaN).
        token_weight: (...) or None, constant. It scales a token's loss and does not enter the divisor of "mean".
        workspace: bytes that the call may allocate beyond its outputs, or None for the default; see ``plan``.

    Returns:
        The loss (float32; float64 for float64 inputs), or (loss, metrics). No valid token: 0, connected to every
        input, with zero gradients.

    Raises:
        TypeError, ValueError: what is wrong with which argument, and its value.
        IndexError: a target is outside [0, V) and not ignore_index, where targets is on the CPU. Elsewhere such a
            token's loss and gradient are NaN.
    """
    validation.check_reduction(reduction, num_items, return_metrics)
    c = _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace)
    loss = _check_loss(hidden, weight, targets, label_smoothing, z_loss, class_weight, token_weight, return_metrics)
    needs = _needs(c)
    value, metrics, _ = _reduce(c, loss, needs, reduction, num_items)
    return (value, metrics) if return_metrics else value


def _reduce(c: _Checked, loss: _Loss, needs: Needs, reduction: str, num_items):
    """(loss, metrics, what the backward of the raw pair needs)."""
    divide = reduction == "mean"
    if _gradients_in_forward(c, loss, needs, reduction):
        # The gradients are those of the mean itself, whose upstream is 1 where nothing follows. A compiled graph
        # divides outside: there a number in num_items may change from call to call.
        inside = divide and not torch.compiler.is_compiling()
        divide = divide and not inside
        total, weight_sum, count, correct, entropy, nll, *gradients = _loss_forward(c, loss, needs, inside, num_items)
        saved = tuple(gradients)
    else:
        out = _loss_token_forward(c, loss, needs)
        weights = _row_weights(c, loss)
        losses = token_loss(out[0], out[2], out[3], *weights, loss.options(c))
        if divide or loss.metrics:
            count = c.valid.sum()
            weight_sum = None if weights[0] is None else weights[0].sum()
        if loss.metrics:
            with torch.no_grad():
                correct, entropy, nll = out[5].sum(), out[1].sum(), -out[0].sum()
        saved = (out[2], out[1], *out[6:])
        if reduction == "none":
            total = c.shaped(losses)
        else:
            total = losses.sum()
    metrics = None
    if loss.metrics:
        metrics = {
            "num_correct_tokens": correct,
            "entropy_sum": entropy,
            "num_valid_tokens": count,
            "nll_sum": nll,
        }
    divisor = None
    if divide:
        weight_sum = None if loss.class_weight is None else weight_sum
        divisor = mean_divisor(num_items, count, weight_sum, total.device, total.dtype)
        total = total / divisor
    return total, metrics, (divisor, saved)


def fused_linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    workspace: Optional[int] = None,
) -> LogProbs:
    """Per-token log-probabilities of the targets, and what else a trainer reads off the logits, without the logits.

    Args:
        hidden, weight, targets, bias, ignore_index, logit_scale, softcap: as in fused_linear_cross_entropy. A sampling
            temperature T is logit_scale = 1 / T.
        outputs: any of "log_probs" (z_y - lse), "entropy" (nats), "lse" (logsumexp of the logits): differentiable,
            each with its own upstream gradient per token; "mean_logits" (mean of z over the classes),
            "log_sum_sq_probs" (log of sum_j p_j ** 2), "is_top1" (the target is the first argmax; bool): without
            gradient. An entropy that may be differentiated makes the backward recompute the logits of every token.
        workspace: as in fused_linear_cross_entropy; the default keeps the exponentials of as many tokens as fit, so
            that backward recomputes only the rest.

    Returns:
        LogProbs: float32 tensors of targets' shape, 0 (False) where ignored, None where not in outputs.

    Raises:
        As fused_linear_cross_entropy.
    """
    names = validation.check_outputs(outputs)
    c = _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace)
    out = _log_probs_forward(c, names, _needs(c))
    return _named(c, names, out)


def _log_probs_row_scaled(names, needs: Needs) -> bool:
    """As _Loss.row_scaled: not if the entropy may be differentiated."""
    return "entropy" not in names or not any(needs)


def _log_probs_forward(c: _Checked, names, needs: Needs):
    return _token_forward(
        c, needs, None, _log_probs_row_scaled(names, needs), entropy="entropy" in names,
        sum_log_probs="mean_logits" in names, log_sum_sq="log_sum_sq_probs" in names, is_top1="is_top1" in names,
    )  # fmt: skip


def _named(c: _Checked, names, out) -> LogProbs:
    log_probs, entropy, lse, sum_log_probs, log_sum_sq, is_top1 = out[:6]
    values = {
        "log_probs": log_probs,
        "entropy": entropy,
        "lse": lse,
        "log_sum_sq_probs": log_sum_sq,
        "is_top1": is_top1,
    }
    if "mean_logits" in names:
        values["mean_logits"] = lse.detach() + sum_log_probs.detach() / c.weight.shape[0]
    return LogProbs(**{name: c.shaped(values[name]) for name in names})


# The raw pairs: the same passes without autograd, for consumers that write their own torch.autograd.Function (a
# ZeRO-3 trainer, which must gather the weight again in its backward pass).


def fused_linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    reduction: str = "mean",
    return_metrics: bool = False,
    *,
    num_items: Optional[Union[int, float, Tensor]] = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Optional[Tensor] = None,
    token_weight: Optional[Tensor] = None,
    workspace: Optional[int] = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Optional[dict[str, Tensor]], tuple[Tensor, ...]]:
    """fused_linear_cross_entropy's forward, outside autograd.

    Args:
        needs_grad: which gradients of (hidden, weight, bias) the backward will be asked for. All else as there.

    Returns:
        (loss, metrics or None, saved): saved is a tuple of tensors to hand to fused_linear_cross_entropy_backward.
    """
    validation.check_reduction(reduction, num_items, return_metrics)
    c = _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace)
    loss = _check_loss(hidden, weight, targets, label_smoothing, z_loss, class_weight, token_weight, return_metrics)
    needs = _asked(needs_grad, bias)
    with torch.no_grad():
        value, metrics, (divisor, saved) = _reduce(c, loss, needs, reduction, num_items)
    if divisor is None:
        divisor = 1.0
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), float(divisor), dtype=value.dtype, device=value.device)
    # Its shape says whether there is a loss for each token.
    return value, metrics, (_how(c), divisor.reshape((1,) if reduction == "none" else ()), *saved)


def fused_linear_cross_entropy_backward(
    grad_loss: Tensor,
    saved: tuple[Tensor, ...],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    reduction: str = "mean",
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Optional[Tensor] = None,
    token_weight: Optional[Tensor] = None,
    workspace: Optional[int] = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Gradients of fused_linear_cross_entropy_forward's loss.

    Args:
        grad_loss: upstream gradient: 0-d, or of targets' shape for reduction "none".
        saved: what the forward returned; it is not changed.
        The others: the very arguments of the forward; whether autocast is on does not matter. Where
            ``plan(...).gradients`` is "forward" the values of hidden and weight are not read again.

    Returns:
        (grad_hidden, grad_weight, grad_bias) in the dtypes of their tensors; None where needs_grad says so.
    """
    validation.check_reduction(reduction)
    validation.check_saved(saved, (5, 6))
    how, divisor, *saved = saved
    validation.check_same_reduction(reduction, divisor.dim() == 1)
    c = _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace, how)
    loss = _check_loss(hidden, weight, targets, label_smoothing, z_loss, class_weight, token_weight, False)
    needs = _asked(needs_grad, bias)
    validation.check_upstream("grad_loss", grad_loss, targets.shape if reduction == "none" else torch.Size())
    with torch.no_grad():
        grad = grad_loss / divisor
        if len(saved) == len(needs):  # the gradients themselves: what the forward did, compiled perhaps as this is not
            validation.check_saved_gradients(saved, needs)
            grads = ops.call(ops.loss_backward, grad, *saved, c.hidden, weight, bias)
        else:
            grad = grad.reshape(-1).expand(c.hidden.shape[0])
            lse, *saved = saved
            u = token_loss_upstream(grad, lse, *_row_weights(c, loss), loss.options(c))
            grads = _token_backward(c, needs, u, loss.class_weight, how, saved, loss.row_scaled(c))
    return _shaped(grads, needs, hidden)


def fused_linear_log_probs_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    workspace: Optional[int] = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[LogProbs, tuple[Tensor, ...]]:
    """fused_linear_log_probs's forward, outside autograd: (LogProbs, saved) with saved for its backward.

    needs_grad says which gradients of (hidden, weight, bias) the backward will be asked for.
    """
    names = validation.check_outputs(outputs)
    c = _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace)
    needs = _asked(needs_grad, bias)
    with torch.no_grad():
        out = _log_probs_forward(c, names, needs)
    return _named(c, names, out), (_how(c), out[1], *out[6:])


def fused_linear_log_probs_backward(
    grads: LogProbs,
    saved: tuple[Tensor, ...],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: Optional[float] = None,
    *,
    outputs: tuple[str, ...] = ("log_probs",),
    workspace: Optional[int] = None,
    needs_grad: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Gradients of fused_linear_log_probs_forward.

    Args:
        grads: LogProbs of upstream gradients of log_probs, entropy and lse, of targets' shape; None for zero.
        saved: what the forward returned; it is not changed. The others: the very arguments of the forward; whether
            autocast is on does not matter.

    Returns:
        (grad_hidden, grad_weight, grad_bias) in the dtypes of their tensors; None where needs_grad says so.
    """
    names = validation.check_outputs(outputs)
    validation.check_saved(saved, (4,))
    how, *saved = saved
    c = _check(hidden, weight, targets, bias, ignore_index, logit_scale, softcap, workspace, how)
    validation.check_grads(grads, names, targets.shape)
    needs = _asked(needs_grad, bias)
    flat = tuple(None if g is None else g.reshape(-1) for g in (grads.log_probs, grads.entropy, grads.lse))
    with torch.no_grad():
        out = _token_backward(c, needs, (*flat, None), None, how, saved, _log_probs_row_scaled(names, needs))
    return _shaped(out, needs, hidden)


def _token_backward(c: _Checked, needs: Needs, upstream, class_weight, how: Tensor, saved, row_scaled: bool):
    masked = None if how.shape[0] == 2 else how.shape[0] == 1
    return ops.call(
        ops.token_backward, *upstream, c.hidden, c.weight, c.targets, c.bias, class_weight, *saved, c.ignore_index,
        c.logit_scale, c.softcap, c.compute_dtype, *needs, row_scaled, c.workspace, None, None, masked,
    )  # fmt: skip


def _shaped(grads, needs: Needs, hidden: Tensor):
    dx, dw, db = (g if n else None for g, n in zip(grads, needs))
    return (None if dx is None else dx.reshape(hidden.shape)), dw, db
