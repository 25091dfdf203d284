"""What a backend is: seven functions on one chunk of tokens. The loop around them is passes.py.

Notation, for one token: x its hidden state, z = transform(x W^T + bias) its logits, y its target, m = max z,
log_sum = log sum_j exp(z_j - m), lse = m + log_sum, and for the gradient kernels chi_j = 1 - (z_j / softcap)^2
(1 without softcap), so that d z_j / d (x W^T)_j = logit_scale * chi_j.

    forward(x, targets, head, wants, stats, exps)  fills the row statistics; with `exps` (R, V) also stores
                                           E_j = exp(z_j - c) chi_j, for a per-row reference c of the backend's choice,
                                           and stats.scale = exp(c - lse), so that p_j chi_j = stats.scale * E_j
    finish(e, x, targets, head, stats, a, r, scaled)  puts the target's element into E, such that chi_j * dz_j of
                                           loss.py (with b = d = 0), times logit_scale, is factor * E_j; returns the
                                           factor (R,) and fills `scaled` (R, H) = factor * x, if it is not None
    dlogits(x, targets, head, stats, coefficients, out)  recomputes the logits and stores chi_j * dz_j of loss.py
    grad_hidden(e, weight, compute_dtype, out, accumulate)    out (R, H) (+)= e @ weight
    grad_weight(e, x, out, accumulate, scale=None, bias=None)
                                           out (V, H) (+)= e^T @ x; out may have e's dtype if nothing is accumulated;
                                           with a bias: grad_bias(e, scale, bias) besides
    grad_bias(e, scale, out)               out (V,) += e^T @ scale
    scale(source, factor, out)             out = source * factor, a 0-d tensor or one number a row; contiguous, rounded
                                           to out's dtype; out may be source

The Triton backend has one more, so that a call can give the device work before the host knows how many rows count:

    select(targets, ignore_index, vocab, early) -> Selection    early: whether there will be such work

A target of -1 marks a row without a class: its statistics are NaN.
"""

from dataclasses import dataclass, fields
from typing import Callable, NamedTuple, Optional

import torch

UPCAST_BYTES = 1 << 20  # copies of the weight that the torch backend upcasts, one slab of classes at a time


class Head(NamedTuple):
    """The projection and the logit transform. compute_dtype is what x and weight are rounded to before the GEMM."""

    weight: torch.Tensor  # (V, H), any float dtype, any strides
    bias: Optional[torch.Tensor]  # (V,)
    logit_scale: float
    softcap: Optional[float]
    class_weight: Optional[torch.Tensor]  # (V,), the w_j of sum_log_probs and of the constant gradient term
    compute_dtype: torch.dtype

    def class_weight_sum(self):
        """sum_j w_j: a 0-d tensor, or V where there are no class weights."""
        if self.class_weight is None:
            return self.weight.shape[0]
        return self.class_weight.to(accumulation_dtype(self.compute_dtype)).sum()

    def columns(self, start: int, stop: int) -> "Head":
        """The same head restricted to the classes [start, stop)."""
        cut = lambda t: None if t is None else t[start:stop]  # noqa: E731
        return self._replace(
            weight=self.weight[start:stop], bias=cut(self.bias), class_weight=cut(self.class_weight)
        )


class Wants(NamedTuple):
    """Statistics beyond (max, log_sum, target) that the caller will read."""

    entropy: bool = False
    sum_log_probs: bool = False
    log_sum_sq: bool = False
    is_top1: bool = False


class Selection(NamedTuple):
    """The rows that count, found on the device. Beyond their number both tensors are padded: with 0 and -1."""

    index: torch.Tensor  # (N,) int64, their positions in order
    targets: torch.Tensor  # (N,) int64, their targets; -1 for one outside [0, V)
    count: Callable[[], int]  # waits for the device to have counted


@dataclass
class Stats:
    """Per-token statistics, each (R,), in the accumulation dtype (is_top1: bool); None where not wanted.

    saved, (4, R), is one allocation for what every backward reads:
        max
        log_sum   log sum exp(z - max): kept apart from max so that a common offset costs no digits
        target    z_y - max
        scale     exp(c - lse), see above; only written where exps are stored
    """

    saved: torch.Tensor
    entropy: Optional[torch.Tensor]
    sum_log_probs: Optional[torch.Tensor]  # sum_j w_j log p_j
    log_sum_sq: Optional[torch.Tensor]  # log sum_j p_j^2
    is_top1: Optional[torch.Tensor]

    def __post_init__(self):
        self.max, self.log_sum, self.target, self.scale = self.saved.unbind(0)

    @classmethod
    def empty(cls, rows: int, wants: Wants, dtype: torch.dtype, device: torch.device) -> "Stats":
        def new(wanted: bool, kind: torch.dtype = dtype):
            return torch.empty(rows, dtype=kind, device=device) if wanted else None

        # Each of the four begins at whole 16 bytes: Triton compiles a kernel once more for pointers that do not.
        stride = -(-rows // 4) * 4
        saved = torch.empty((4, stride), dtype=dtype, device=device)
        return cls(
            saved if stride == rows else saved[:, :rows],
            new(wants.entropy), new(wants.sum_log_probs), new(wants.log_sum_sq), new(wants.is_top1, torch.bool),
        )  # fmt: skip

    def rows(self, start: int, stop: int) -> "Stats":
        """Views of the rows [start, stop): what a chunk writes into."""
        if start == 0 and stop == self.saved.shape[1]:
            return self
        parts = (getattr(self, f.name) for f in fields(self))
        return Stats(*(None if p is None else p[..., start:stop] for p in parts))

    @property
    def log_prob(self) -> torch.Tensor:
        return self.target - self.log_sum

    @property
    def lse(self) -> torch.Tensor:
        return self.max + self.log_sum


# A row whose a is nearly zero beside r is carried by its target's element alone: finish() takes |a| as NUDGE |r| at
# least, which changes the other elements by 1e-9 (float64: 1e-18) of r.
NUDGE = {torch.float32: 2.0**-30, torch.float64: 2.0**-60}


def target_chain(value: torch.Tensor, stats: Stats, softcap: Optional[float]) -> torch.Tensor:
    """value * chi at the target."""
    return value if softcap is None else value * (1 - torch.square((stats.target + stats.max) / softcap))


def lost_by_rounding(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The factor that rounding took off; 1 where nothing is left to multiply."""
    return torch.where(rounded == 0, 1.0, exact / rounded.to(exact.dtype))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64 (for gradient checks); everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
