"""The loss and its derivatives with respect to a row's statistics: the one home of every loss formula.

With z a token's logits, y its target, p = softmax(z), lse = log sum exp z, w = class_weight, eps = label_smoothing,

    loss = token_weight * ( (1 - eps) w_y (lse - z_y)  +  eps / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2 )

The first two terms are torch.nn.functional.cross_entropy's, the third is PaLM's z-loss (arXiv 2204.02311, section 5).
Whatever the loss, it reads z only through four numbers of the row,

    log_prob = z_y - lse,    lse,    entropy = lse - sum_j p_j z_j,    sum_logits = sum_j w_j z_j,

so its gradient always has the shape of one family, with u_* = d loss / d (that number):

    dz_j = p_j (a + b (log p_j + entropy)) + t [j = y] + d w_j
    a = u_lse - u_log_prob     b = -u_entropy     t = u_log_prob     d = u_sum_logits
"""

from typing import NamedTuple, Optional

import torch


class LossOptions(NamedTuple):
    """The numbers in the formula above; vocab is V, class_weight_sum is sum_j w_j (V without class weights)."""

    label_smoothing: float
    z_loss: float
    vocab: int
    class_weight_sum: Optional[torch.Tensor]

    @property
    def smoothing_per_class(self) -> float:
        return self.label_smoothing / self.vocab

    @property
    def smoothing_total(self):
        """eps / V * sum_j w_j: the coefficient of lse in the smoothing term."""
        if self.class_weight_sum is None:
            return self.label_smoothing
        return self.smoothing_per_class * self.class_weight_sum


class Upstream(NamedTuple):
    """Per-token derivatives of the objective with respect to the row statistics; None stands for zero."""

    log_prob: Optional[torch.Tensor] = None
    entropy: Optional[torch.Tensor] = None
    lse: Optional[torch.Tensor] = None
    sum_logits: Optional[torch.Tensor] = None


class Coefficients(NamedTuple):
    """a, b, t, d of the gradient family, per token; b and d are None where the whole column is zero."""

    a: torch.Tensor
    b: Optional[torch.Tensor]
    t: torch.Tensor
    d: Optional[torch.Tensor]


def token_loss(log_prob, lse, sum_logits, target_weight, token_weight, options: LossOptions) -> torch.Tensor:
    """Per-token loss from the row statistics. target_weight is w_y; both weights may be None (= 1)."""
    loss = -log_prob if target_weight is None else -log_prob * target_weight
    if options.label_smoothing:
        smooth = options.smoothing_total * lse - options.smoothing_per_class * sum_logits
        loss = (1 - options.label_smoothing) * loss + smooth
    if options.z_loss:
        loss = loss + options.z_loss * lse * lse
    return loss if token_weight is None else loss * token_weight


def token_loss_upstream(grad, lse, target_weight, token_weight, options: LossOptions) -> Upstream:
    """Derivatives of sum_i grad_i * token_loss_i; grad is per token."""
    if token_weight is not None:
        grad = grad * token_weight
    log_prob = -(1 - options.label_smoothing) * grad
    if target_weight is not None:
        log_prob = log_prob * target_weight
    u_lse = u_sum = None
    if options.label_smoothing:
        u_lse = options.smoothing_total * grad
        u_sum = -options.smoothing_per_class * grad
    if options.z_loss:
        z_term = (2 * options.z_loss) * lse * grad
        u_lse = z_term if u_lse is None else u_lse + z_term
    return Upstream(log_prob=log_prob, lse=u_lse, sum_logits=u_sum)


def coefficients(upstream: Upstream, like: torch.Tensor) -> Coefficients:
    """The gradient family's coefficients; `like` gives shape, dtype and device where an upstream is absent."""
    zero = torch.zeros_like(like)
    t = zero if upstream.log_prob is None else upstream.log_prob
    a = -t if upstream.lse is None else upstream.lse - t
    b = None if upstream.entropy is None else -upstream.entropy
    return Coefficients(a=a, b=b, t=t, d=upstream.sum_logits)
