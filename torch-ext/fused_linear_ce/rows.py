"""Which tokens run: their selection, and gathering and scattering by it.

Rows whose target is ignore_index are dropped before anything is projected: NaN in them reaches nothing, and the cost
follows the rows that count. Dropping them needs their number on the host: one synchronisation a call on an
accelerator. Of many tokens the forward of the first is launched before that wait, so that the device has work. While a
CUDA graph is captured no wait is possible, so every row runs there and the ignored ones are masked instead.

A target outside the vocabulary raises on the CPU. Elsewhere reading it would cost a synchronisation, so its row is
run with the class -1: the backends make its statistics NaN, hence its loss and its gradient.
"""

from dataclasses import dataclass
from typing import Optional

import torch

from . import validation


def cut(tensor: torch.Tensor, start: int, stop: Optional[int]) -> torch.Tensor:
    """tensor[start:stop]; itself where that is all of it, since a view takes the host longer than this comparison."""
    whole = start == 0 and (stop is None or stop >= tensor.shape[0])
    return tensor if whole else tensor[start:stop]


@dataclass(frozen=True)
class Rows:
    """The rows that run. index: their positions, None for all. live: while capturing, which of them count."""

    index: Optional[torch.Tensor]
    live: Optional[torch.Tensor]
    targets: torch.Tensor  # (R,) int64 in [-1, V)

    def __len__(self) -> int:
        return self.targets.shape[0]

    def cut_targets(self, start: int, stop: int) -> torch.Tensor:
        return cut(self.targets, start, stop)

    def take(self, tensor: Optional[torch.Tensor], start: int = 0, stop: Optional[int] = None):
        """The rows [start, stop) of a tensor of all N tokens; masked rows read as zero."""
        if tensor is None:
            return None
        if self.index is not None:
            return tensor.index_select(0, cut(self.index, start, stop))
        part = cut(tensor, start, stop)
        if self.live is None:
            return part
        live = cut(self.live, start, stop)
        return torch.where(live.view(-1, *[1] * (part.dim() - 1)), part, False)  # (a zero of any dtype)

    def mask(self, values: torch.Tensor) -> torch.Tensor:
        """(R,) -> (R,), zero in the rows that do not count."""
        return values if self.live is None else torch.where(self.live, values, False)

    def put(self, values: torch.Tensor, out: torch.Tensor, start: int = 0, stop: Optional[int] = None) -> None:
        """The inverse of take; the rows of `out` that did not run are left alone."""
        if self.index is not None:
            out.index_copy_(0, self.index[start:stop], values.to(out.dtype))
        else:
            out[start:stop] = values

    def scatter(self, values: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """(R,) -> (N,), zero in the rows that did not run or do not count."""
        if self.index is None:
            return self.mask(values)
        return values.new_zeros(n_tokens).index_copy_(0, self.index, values)


def capturing(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cuda":
        return False
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


def select_rows(targets: torch.Tensor, ignore_index: int, vocab: int, masked: bool = False) -> Rows:
    targets = targets.to(torch.int64)
    if targets.device.type == "cpu":
        validation.check_target_values(targets, ignore_index, vocab)
    keep = targets != ignore_index
    index = live = None
    if masked:
        live = keep
        targets = torch.where(live, targets, 0)
    else:
        count = int(keep.sum())
        if count < targets.shape[0]:
            index = torch.argsort(keep, descending=True, stable=True)[:count]
            targets = targets[index]
    return Rows(index, live, torch.where(targets.clamp(0, vocab - 1) == targets, targets, -1))
