"""The exact answer in float64, and the error of a contender against it.

The loss, the entropy and the accuracy are computed for every row (a slab at a time); the gradients on a subset of rows
of dX and of ids of dW, which is enough to see an error and cheap enough to run beside every timing.
"""

from __future__ import annotations

import torch

from .workloads import IGNORE_INDEX, Case

SLAB_ELEMENTS = 1 << 27  # 1 GiB of float64 logits at a time


def _relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    norm = ref.norm()
    diff = (out.double() - ref).norm()
    return float(diff / norm) if norm > 0 else float(diff)


class Reference:
    @torch.no_grad()
    def __init__(self, case: Case, rows: int = 256, ids: int = 1024, seed: int = 1) -> None:
        s = case.scenario
        device, (tokens, vocab) = case.device, (case.shape.tokens, case.shape.vocab)
        # the values that the matrix units read: under autocast the rounded ones
        hidden, weight = (t.detach().to(case.gemm_dtype).double() for t in (case.hidden, case.weight))
        bias = None if case.bias is None else case.bias.detach().double()
        valid = case.targets != IGNORE_INDEX
        targets = case.targets.clamp(min=0)

        gen = torch.Generator().manual_seed(seed)
        self.rows = torch.randperm(tokens, generator=gen)[:rows].sort().values.to(device)
        # half of the ids are targets: they carry the -1, without which dW would be tested on its small entries alone
        some = torch.randint(tokens, (ids // 2,), generator=gen).to(device)
        other = torch.randint(vocab, (ids // 2,), generator=gen).to(device)
        self.ids = torch.cat([targets[some], other]).unique()

        def logits(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            z = h @ w.T
            if b is not None:
                z += b
            return z if s.softcap is None else z.div_(s.softcap).tanh_().mul_(s.softcap)

        def dlogits(z: torch.Tensor, lse: torch.Tensor, onehot: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            d = torch.exp(z - lse[:, None]) - onehot
            if s.softcap is not None:
                d *= 1 - (z / s.softcap) ** 2
            return d.mul_(g[:, None])

        slab = max(1, SLAB_ELEMENTS // vocab)
        nll = torch.zeros(tokens, dtype=torch.float64, device=device)
        lse = torch.zeros_like(nll)
        entropy = torch.zeros_like(nll)
        correct = torch.zeros(tokens, dtype=torch.bool, device=device)
        for i in range(0, tokens, slab):
            part = slice(i, i + slab)
            z = logits(hidden[part], weight, bias)
            m = z.amax(-1)
            lse[part] = m + (z - m[:, None]).exp_().sum(-1).log()
            nll[part] = lse[part] - z.gather(-1, targets[part, None])[:, 0]
            correct[part] = z.argmax(-1) == targets[part]
            p = (z - lse[part, None]).exp_()
            entropy[part] = lse[part] - p.mul_(z).sum(-1)
            del z, p
        self.per_token = torch.where(valid, nll, 0.0)
        self.loss = self.per_token if s.reduction == "none" else self.per_token.sum() / case.valid_rows
        self.entropy_sum = entropy[valid].sum()
        self.num_correct = int((correct & valid).sum())

        self.dx = self.dw = self.db = None
        if not s.backward:
            return
        g = torch.where(valid, 1.0 / case.valid_rows if case.upstream is None else case.upstream.double(), 0.0)
        if s.hidden_grad:
            parts = []
            for i in range(0, len(self.rows), slab):
                r = self.rows[i : i + slab]
                z = logits(hidden[r], weight, bias)
                onehot = torch.zeros_like(z).scatter_(1, targets[r, None], 1.0)
                parts.append(dlogits(z, lse[r], onehot, g[r]) @ weight)
                del z, onehot
            self.dx = torch.cat(parts)
        if s.weight_grad:
            sub_bias = None if bias is None else bias[self.ids]
            self.dw = torch.zeros(len(self.ids), case.shape.hidden, dtype=torch.float64, device=device)
            db = torch.zeros(len(self.ids), dtype=torch.float64, device=device)
            for i in range(0, tokens, 4096):
                part = slice(i, i + 4096)
                z = logits(hidden[part], weight[self.ids], sub_bias)
                onehot = (targets[part, None] == self.ids).double()
                d = dlogits(z, lse[part], onehot, g[part])
                self.dw += d.T @ hidden[part]
                db += d.sum(0)
            self.db = None if bias is None else db

    @torch.no_grad()
    def errors(self, case: Case, loss: torch.Tensor, metrics: dict | None) -> dict[str, float]:
        """Relative (Frobenius) errors of what a contender returned and left in `.grad`."""
        out = {"loss": _relative(loss.detach(), self.loss)}
        metrics = metrics or {}
        if (value := metrics.get("entropy_sum")) is not None:
            out["entropy"] = _relative(torch.as_tensor(value, device=case.device), self.entropy_sum)
        if (value := metrics.get("num_correct_tokens")) is not None:
            out["num_correct_difference"] = int(value) - self.num_correct
        for key, tensor, index, ref in (
            ("dX", case.hidden, self.rows, self.dx),
            ("dW", case.weight, self.ids, self.dw),
            ("db", case.bias, self.ids, self.db),
        ):
            if ref is not None:
                if tensor.grad is None:
                    raise RuntimeError(f"{key} was not computed")
                out[key] = _relative(tensor.grad[index], ref)
        return out
