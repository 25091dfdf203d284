"""Cross-entropy of a linear head without the (tokens, vocab) logits. Only the names in __all__ are the API."""

from . import layers
from .api import (
    LogProbs,
    fused_linear_cross_entropy,
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_forward,
    fused_linear_log_probs,
    fused_linear_log_probs_backward,
    fused_linear_log_probs_forward,
)
from .plan import plan

__all__ = [
    "LogProbs",
    "fused_linear_cross_entropy",
    "fused_linear_cross_entropy_backward",
    "fused_linear_cross_entropy_forward",
    "fused_linear_log_probs",
    "fused_linear_log_probs_backward",
    "fused_linear_log_probs_forward",
    "layers",
    "plan",
]
