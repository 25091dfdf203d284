"""The loss and its derivatives with respect to a row's statistics: the one home of every loss formula.

With z a token's logits, y its target, p = softmax(z), lse = log sum exp z, w = class_weight, eps = label_smoothing,

    loss = token_weight * ( (1 - eps) w_y (lse - z_y)  +  eps / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2 )

The first two terms are torch.nn.functional.cross_entropy's, the third is PaLM's z-loss (arXiv 2204.02311, section 5).
Whatever the loss, it reads z only through four numbers of the row,

    log_prob = log p_y,    lse,    entropy = -sum_j p_j log p_j,    sum_log_probs = sum_j w_j log p_j,

so its gradient always has the shape of one family, with u_* = d loss / d (that number):

    dz_j = p_j (a + b (log p_j + entropy)) + (r - a) [j = y] + d w_j
    r = u_lse - sum_j w_j * u_sum_log_probs     a = r - u_log_prob     b = -u_entropy     d = u_sum_log_probs

with the element of the target computed as a (p_y - 1) + r + d w_y. r and not u_log_prob is carried, because the first
term vanishes on a row that is certain of its target. What is left is 0 for cross-entropy, and what a small z-loss or
label smoothing adds; r as the difference of a, then close to 1, and u_log_prob would have few of its digits.

All but lse are sums of log p_j = (z_j - m) - log sum exp(z - m), with m the row's maximum: a common offset of the
logits costs them no digits.
"""

from typing import NamedTuple, Optional

import torch


class LossOptions(NamedTuple):
    """The numbers in the formula above; vocab is V."""

    label_smoothing: float
    z_loss: float
    vocab: int

    @property
    def smoothing_per_class(self) -> float:
        return self.label_smoothing / self.vocab


class Upstream(NamedTuple):
    """Per-token derivatives of the objective with respect to the row statistics; None stands for zero."""

    log_prob: Optional[torch.Tensor] = None
    entropy: Optional[torch.Tensor] = None
    lse: Optional[torch.Tensor] = None
    sum_log_probs: Optional[torch.Tensor] = None


class Coefficients(NamedTuple):
    """a, b, r, d of the gradient family, per token; b and d are None where the whole column is zero."""

    a: torch.Tensor
    b: Optional[torch.Tensor]
    r: torch.Tensor
    d: Optional[torch.Tensor]


def token_loss(log_prob, lse, sum_log_probs, target_weight, token_weight, options: LossOptions) -> torch.Tensor:
    """Per-token loss from the row statistics. target_weight is w_y; both weights may be None (= 1)."""
    loss = -log_prob if target_weight is None else -log_prob * target_weight
    if options.label_smoothing:
        loss = (1 - options.label_smoothing) * loss - options.smoothing_per_class * sum_log_probs
    if options.z_loss:
        loss = loss + options.z_loss * lse * lse
    return loss if token_weight is None else loss * token_weight


def mean_divisor(num_items, count, class_weight_sum: Optional[torch.Tensor], device, dtype: torch.dtype):
    """What "mean" divides by: num_items, the sum of w_y, or the number of tokens that count. 1 where there is nothing
    to divide, so that the loss of no token is a connected 0. count: an int, where the host knows it, or a tensor."""
    known = isinstance(count, int)
    if num_items is None:
        if class_weight_sum is not None:
            return torch.where(class_weight_sum == 0, 1.0, class_weight_sum)
        return max(count, 1) if known else count.clamp(min=1)
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.reshape(()).to(device, dtype)
        if known:
            return num_items if count else 1
        return torch.where(count == 0, 1.0, num_items)
    return num_items if num_items != 0 else (count == 0).to(dtype)


def token_loss_upstream(grad, lse, target_weight, token_weight, options: LossOptions) -> Upstream:
    """Derivatives of sum_i grad_i * token_loss_i; grad is per token."""
    if token_weight is not None:
        grad = grad * token_weight
    log_prob = -(1 - options.label_smoothing) * grad
    if target_weight is not None:
        log_prob = log_prob * target_weight
    return Upstream(
        log_prob=log_prob,
        lse=(2 * options.z_loss) * lse * grad if options.z_loss else None,
        sum_log_probs=-options.smoothing_per_class * grad if options.label_smoothing else None,
    )


def coefficients(upstream: Upstream, class_weight_sum, like: torch.Tensor) -> Coefficients:
    """The gradient family's coefficients. class_weight_sum is sum_j w_j; `like` gives shape, dtype and device where an
    upstream is absent."""
    r = torch.zeros_like(like) if upstream.lse is None else upstream.lse
    if upstream.sum_log_probs is not None:
        r = r - class_weight_sum * upstream.sum_log_probs
    a = r if upstream.log_prob is None else r - upstream.log_prob
    b = None if upstream.entropy is None else -upstream.entropy
    return Coefficients(a=a, b=b, r=r, d=upstream.sum_log_probs)


def target_dlogit(c: Coefficients, log_prob: torch.Tensor, entropy: Optional[torch.Tensor]) -> torch.Tensor:
    """The family's element j = y, without d w_y: a (p_y - 1) + r, as a p_y + (r - a) would cancel."""
    value = c.a * torch.expm1(log_prob) + c.r
    if c.b is None:
        return value
    p = torch.exp(log_prob)
    return value + c.b * torch.where(p == 0, 0.0, p * (log_prob + entropy))
