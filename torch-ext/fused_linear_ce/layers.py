"""Pure layers by the rules of the `kernels` library: no __init__, no state of their own, only a forward."""

import torch
from torch import nn

from .api import fused_linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """Mean cross-entropy of a linear head, for ``kernels.kernelize``.

    Replaces the forward of a module that holds the head and maps (hidden, targets) to the mean loss:
    hidden (..., H), targets (...) with -100 ignored; weight (V, H) and, where there is one, bias (V,) are the replaced
    module's own. Options beyond these need fused_linear_cross_entropy itself.
    """

    has_backward: bool = True
    can_torch_compile: bool = True
    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return fused_linear_cross_entropy(hidden, self.weight, targets, getattr(self, "bias", None))
