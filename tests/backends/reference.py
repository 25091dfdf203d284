"""float64 references for the functions of a backend: logits, row statistics and dlogits of one chunk, the slow way."""

import torch


def logits(x, weight, bias=None, logit_scale=1.0, softcap=None) -> torch.Tensor:
    z = x.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def statistics(z, targets, class_weight=None) -> dict:
    """The fields of backends.base.Stats that do not depend on a backend's choices. p log p is 0 where p is."""
    m = z.max(1).values
    log_p = torch.log_softmax(z, 1)
    p = log_p.exp()
    weights = torch.ones(z.shape[1], dtype=torch.float64, device=z.device)
    if class_weight is not None:
        weights = class_weight.double()
    first = (z == m[:, None]).to(torch.int8).argmax(1)
    return {
        "max": m,
        "log_sum": torch.logsumexp(z, 1) - m,
        "target": z.gather(1, targets[:, None])[:, 0] - m,
        "entropy": -torch.where(p == 0, 0.0, p * log_p).sum(1),
        "sum_logits": torch.where(weights == 0, 0.0, z * weights).sum(1),
        "log_sum_sq": torch.logsumexp(2 * log_p, 1),
        "is_top1": first == targets,
    }


def chain(z, softcap) -> torch.Tensor:
    return torch.ones_like(z) if softcap is None else 1 - (z / softcap) ** 2


def dlogits(z, targets, a, b, t, d, class_weight=None, softcap=None) -> torch.Tensor:
    """chi_j (p_j (a + b (log p_j + entropy)) + t [j = y] + d w_j)."""
    a, b, t, d = (None if c is None else c.double()[:, None] for c in (a, b, t, d))
    log_p = torch.log_softmax(z, 1)
    p = log_p.exp()
    value = p * a
    if b is not None:
        entropy = statistics(z, targets)["entropy"][:, None]
        value = value + torch.where(p == 0, 0.0, p * b * (log_p + entropy))
    value = value + t * torch.nn.functional.one_hot(targets, z.shape[1])
    if d is not None:
        value = value + d * (1.0 if class_weight is None else class_weight.double())
    return value * chain(z, softcap)


def relative_error(actual, expected) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm()).item()
