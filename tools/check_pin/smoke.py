"""Run a kernel of the cache on small tensors and compare it with float64.

    python smoke.py REPO_ID REVISION SNAPSHOT ALLOWED

A program of its own, so that the code under check is loaded into no other process. It prints one JSON object: the
device, the largest relative error, and the names of the metrics; or what is wrong. The reference is torch's own
cross-entropy of the full float64 logits.
"""

import json
import math
import sys
from pathlib import Path

TOLERANCE = 1e-5  # of float32 results, relative to the reference's largest element: what the kernel promises


def load(repo_id: str, revision: str, snapshot: Path, allowed: list[str]):
    """The kernel, as a consumer loads it. RuntimeError: it is not the code that was checked."""
    import kernels

    kernel = kernels.get_kernel(repo_id, revision=revision, trust_remote_code=allowed)
    origin = Path(kernel.__file__).resolve()
    if not Path(kernel.__file__).absolute().is_relative_to(snapshot.absolute()):
        raise RuntimeError(f"get_kernel loaded {origin}, which is not in {snapshot}")
    return kernel


def cases():
    """(rows, vocabulary, hidden size, options): mean and sum, the logit transform, and nothing but ignored rows."""
    yield 37, 301, 24, {}
    yield 12, 77, 16, {"reduction": "sum", "logit_scale": 0.7, "softcap": 5.0}
    yield 9, 50, 8, {"ignore_index": 3}


def reference(hidden, weight, targets, bias, *, reduction="mean", logit_scale=1.0, softcap=None, ignore_index=-100):
    """(loss, log-probabilities) in float64, from all logits."""
    import torch
    import torch.nn.functional as F

    logits = logit_scale * (hidden @ weight.T + bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction=reduction, ignore_index=ignore_index)
    return loss, -F.cross_entropy(logits, targets, reduction="none", ignore_index=ignore_index)


def error_of(result, expected) -> float:
    error = (result.double() - expected).abs().max() / expected.abs().max()
    return float(error) if math.isfinite(error) else math.inf


def compare(kernel, device: str) -> dict:
    """The largest relative error of loss, log-probabilities and gradients, and what it is the error of."""
    import torch

    generator = torch.Generator().manual_seed(0)
    worst, where, names = 0.0, "", []
    for rows, vocab, hidden_size, options in cases():
        shapes = ((rows, hidden_size), (vocab, hidden_size), (vocab,))
        exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        # The reference starts from the very numbers that the kernel gets.
        inputs = [tensor.float().to(device).requires_grad_() for tensor in exact]
        exact = [tensor.float().double().requires_grad_() for tensor in exact]
        targets = torch.randint(vocab, (rows,), generator=generator)
        targets[::4] = options.get("ignore_index", -100)
        hidden, weight, bias = inputs
        arguments = (hidden, weight, targets.to(device), bias)
        loss, metrics = kernel.fused_linear_cross_entropy(*arguments, return_metrics=True, **options)
        rest = {name: value for name, value in options.items() if name != "reduction"}
        log_probs = kernel.fused_linear_log_probs(*arguments, **rest).log_probs
        expected_loss, expected_log_probs = reference(exact[0], exact[1], targets, exact[2], **options)
        gradients = torch.autograd.grad(loss, inputs)
        expected = torch.autograd.grad(expected_loss, exact)
        pairs = {
            "loss": (loss, expected_loss),
            "log_probs": (log_probs, expected_log_probs),
            "gradient of hidden": (gradients[0], expected[0]),
            "gradient of weight": (gradients[1], expected[1]),
            "gradient of bias": (gradients[2], expected[2]),
        }
        for name, (result, wanted) in pairs.items():
            error = error_of(result.detach().cpu(), wanted.detach())
            if error > worst:
                worst, where = error, f"{name}, {rows} x {vocab} x {hidden_size}, {options}"
        names = list(metrics)
    return {"device": device, "error": worst, "where": where, "metrics": names}


def main(argv: list[str]) -> int:
    repo_id, revision, snapshot, allowed = argv
    try:
        kernel = load(repo_id, revision, Path(snapshot), json.loads(allowed))
    except Exception as error:
        print(json.dumps({"load": f"{type(error).__name__}: {error}"}))
        return 1
    import torch

    accelerator = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
    try:
        result = compare(kernel, accelerator)
    except Exception as error:
        print(json.dumps({"run": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
