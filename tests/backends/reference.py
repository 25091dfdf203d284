"""float64 references for a backend's functions on one chunk of tokens, and the checks against them."""

from typing import NamedTuple

import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT = {"rtol": 1e-5, "atol": 2e-5}  # of fp32 arithmetic on logits of magnitude 10


class Chunk(NamedTuple):
    """What forward and dlogits take, as the caller of a backend has it."""

    x: torch.Tensor
    targets: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    class_weight: torch.Tensor | None = None
    compute_dtype: torch.dtype = torch.float32

    def head(self, base):
        return base.Head(
            self.weight, self.bias, self.logit_scale, self.softcap, self.class_weight, self.compute_dtype
        )

    @property
    def z(self) -> torch.Tensor:
        """The logits of the operands as rounded to the compute dtype, (R, V)."""
        z = self.x.to(FP64) @ self.weight.to(self.compute_dtype).to(FP64).T
        if self.bias is not None:
            z = z + self.bias.to(self.compute_dtype).to(FP64)
        z = z * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    @property
    def chi(self):
        return 1.0 if self.softcap is None else 1 - (self.z / self.softcap) ** 2


def make_chunk(
    rows, vocab, width, *, dtype=torch.float32, weight_dtype=None, bias=False, class_weight=False, device="cpu",
    seed=0, x_dtype=None, **options,
) -> Chunk:  # fmt: skip
    """Random operands with logits of magnitude 3 or so. x_dtype: what x is held in, if that is not `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(*shape, generator=generator)

    x = new(rows, width).to(dtype).to(x_dtype or dtype)
    weight = (3 * width**-0.5 * new(vocab, width)).to(weight_dtype or dtype)
    weights = new(vocab).abs()
    weights[vocab // 3] = 0.0
    return Chunk(
        x.to(device),
        torch.randint(0, vocab, (rows,), generator=generator).to(device),
        weight.to(device),
        new(vocab).to(weight_dtype or dtype).to(device) if bias else None,
        class_weight=weights.to(device) if class_weight else None,
        compute_dtype=dtype,
        **options,
    )


class Where(NamedTuple):
    """Where a test of the Triton backend runs, and at what size."""

    device: str
    rows: int
    vocab: int  # beyond the classes that the reference is made from, and not a whole number of tiles
    width: int

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def chunk(self, dtype=FP32, **options) -> Chunk:
        return make_chunk(self.rows, self.vocab, self.width, dtype=dtype, device=self.device, **options)

    def exps(self, dtype=FP32, rows=None, vocab=None) -> torch.Tensor:
        """E's buffer as passes.py makes it: rows of whole 64 elements."""
        vocab = vocab or self.vocab
        kind = FP32 if dtype == FP32 else BF16
        return torch.empty(rows or self.rows, -(-vocab // 64) * 64, dtype=kind, device=self.device)[:, :vocab]


def overflowing(where: Where, dtype, rows, above=100.0) -> Chunk:
    """A chunk in which a late class of some rows lies `above` nats over the reference's classes and the target.

    A row direction that no weight but that class's has: the row's other logits stay as they were.
    """
    chunk = where.chunk(dtype)
    late = where.vocab - 3
    chunk.weight[:, 0] = 0.0
    chunk.weight[late] = 0.0
    chunk.weight[late, 0] = 16.0
    chunk.x[:, 0] = 0.0
    chunk.targets[chunk.targets == late] = 0
    others = chunk.z.max(1).values
    for row in rows:
        chunk.x[row, 0] = ((above + others[row]) / 16).to(dtype)
    return chunk


def statistics(z, targets, class_weight=None) -> dict:
    """The fields of backends.base.Stats that do not depend on a backend's choices. p log p is 0 where p is."""
    m = z.max(1).values
    log_p = torch.log_softmax(z, 1)
    p = log_p.exp()
    weights = torch.ones(z.shape[1], dtype=FP64, device=z.device) if class_weight is None else class_weight.to(FP64)
    first = (z == m[:, None]).to(torch.int8).argmax(1)
    return {
        "max": m,
        "log_sum": torch.logsumexp(z, 1) - m,
        "target": z.gather(1, targets[:, None])[:, 0] - m,
        "entropy": -torch.where(p == 0, 0.0, p * log_p).sum(1),
        "sum_log_probs": torch.where(weights == 0, 0.0, log_p * weights).sum(1),
        "log_sum_sq": torch.logsumexp(2 * log_p, 1),
        "is_top1": first == targets,
    }


def dlogits(chunk: Chunk, a, b, r, d) -> torch.Tensor:
    """chi_j (p_j (a + b (log p_j + entropy)) + (r - a) [j = y] + d w_j)."""
    a, b, r, d = (None if c is None else c.to(FP64)[:, None] for c in (a, b, r, d))
    log_p = torch.log_softmax(chunk.z, 1)
    p = log_p.exp()
    value = p * a
    if b is not None:
        entropy = -torch.where(p == 0, 0.0, p * log_p).sum(1, keepdim=True)
        value = value + torch.where(p == 0, 0.0, p * b * (log_p + entropy))
    value = value + (r - a) * torch.nn.functional.one_hot(chunk.targets, log_p.shape[1])
    if d is not None:
        value = value + d * (1.0 if chunk.class_weight is None else chunk.class_weight.to(FP64))
    return value * chunk.chi


def run_forward(backend, base, chunk: Chunk, wants, exps=None):
    """Stats of a chunk; exps is a buffer for E or None."""
    acc = base.accumulation_dtype(chunk.compute_dtype)
    stats = base.Stats.empty(chunk.x.shape[0], wants, acc, chunk.x.device)
    for name in ("max", "log_sum", "target", "entropy", "sum_log_probs", "log_sum_sq"):
        if getattr(stats, name) is not None:
            getattr(stats, name).fill_(-12345.0)  # whatever is not written shows
    backend.forward(chunk.x, chunk.targets, chunk.head(base), wants, stats, exps)
    return stats


def check_forward(backend, base, chunk: Chunk, wants, exps=None, tolerance=EXACT, exps_tolerance=None):
    """Every statistic that was asked for, none that was not, and p chi = scale E where E is stored."""
    stats = run_forward(backend, base, chunk, wants, exps)
    expected = statistics(chunk.z, chunk.targets, chunk.class_weight)
    for name in ("max", "log_sum", "target"):
        torch.testing.assert_close(getattr(stats, name).to(FP64), expected[name], **tolerance, msg=message(name))
    for name in ("entropy", "sum_log_probs", "log_sum_sq", "is_top1"):
        value = getattr(stats, name)
        assert (value is not None) == getattr(wants, name)
        if name == "is_top1" and value is not None:
            assert value.dtype == torch.bool
            assert torch.equal(value, expected[name])
        elif value is not None:
            scale = chunk.weight.shape[0] if name == "sum_log_probs" else 1
            close = dict(tolerance, atol=tolerance["atol"] * scale)
            torch.testing.assert_close(value.to(FP64), expected[name], **close, msg=message(name))
    if exps is not None:
        p = torch.softmax(chunk.z, 1) * chunk.chi
        actual = stats.scale.to(FP64)[:, None] * exps.to(FP64)
        torch.testing.assert_close(actual, p, **(exps_tolerance or tolerance), msg=message("scale * E"))
    return stats


def message(name):
    return lambda text: f"{name}: {text}"
