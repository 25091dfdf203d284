"""`kernels benchmark .` (or any folder with a build): this kernel against full logits, with a check of the results.

The reference that `kernels benchmark` prints a speed-up against is the verify function, timed once: read it as an
order of magnitude. `python -m benchmarks.loss` is the careful comparison, with the peers and the floor.
"""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


def full_logits(hidden, weight, targets, bias=None, softcap=None, reduction="mean"):
    logits = F.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction=reduction)


class FusedLinearCrossEntropyBenchmark(Benchmark):
    seed = 0

    def setup(self):
        # tokens, vocab, hidden: Qwen3-0.6B's head on a GPU, and what a CPU does in some milliseconds
        n, v, h = (256, 4096, 128) if self.device == "cpu" else (4096, 151936, 1024)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.hidden = torch.randn(n, h, device=self.device).to(dtype).requires_grad_()
        self.weight = torch.randn(v, h, device=self.device).mul_(h**-0.5).to(dtype).requires_grad_()
        self.bias = torch.randn(v, device=self.device).to(dtype).requires_grad_()
        self.targets = torch.randint(v, (n,), device=self.device)
        self.upstream = torch.randn(n, device=self.device)
        # undoes the mean's division, so that the runner's absolute tolerance sees the gradients
        self.scale = torch.tensor(float(n), device=self.device)

    def fused(self, **kwargs):
        return self.kernel.fused_linear_cross_entropy(self.hidden, self.weight, self.targets, **kwargs)

    def hidden_gradient(self, loss, upstream):
        for t in (self.hidden, self.weight, self.bias):
            t.grad = None
        loss.backward(upstream)
        return self.hidden.grad

    # the loss and both metrics, nothing stored
    def benchmark_forward(self):
        with torch.no_grad():
            self.out, _ = self.fused(return_metrics=True)

    def verify_forward(self):
        with torch.no_grad():
            return full_logits(self.hidden, self.weight, self.targets)

    # the loss of a training step
    def benchmark_forward_backward(self):
        loss, _ = self.fused(return_metrics=True)
        self.out = self.hidden_gradient(loss, self.scale)

    def verify_forward_backward(self):
        return self.hidden_gradient(full_logits(self.hidden, self.weight, self.targets), self.scale)

    # per-token losses under per-token upstream gradients: reinforcement learning, DPO
    def benchmark_per_token(self):
        self.out = self.hidden_gradient(self.fused(reduction="none"), self.upstream)

    def verify_per_token(self):
        loss = full_logits(self.hidden, self.weight, self.targets, reduction="none")
        return self.hidden_gradient(loss, self.upstream)

    def benchmark_softcap_bias(self):
        self.out = self.hidden_gradient(self.fused(bias=self.bias, softcap=30.0), self.scale)

    def verify_softcap_bias(self):
        return self.hidden_gradient(full_logits(self.hidden, self.weight, self.targets, self.bias, 30.0), self.scale)
