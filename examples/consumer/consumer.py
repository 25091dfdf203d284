"""A project that runs the kernel at the one commit that its kernels.lock names."""

from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import get_locked_kernel

REPO_ID = "trl-lib/fused-linear-ce"
LOCK = Path(__file__).with_name("kernels.lock")


def load_kernel():
    """The kernel at the locked commit. The list lets its code run, and no other untrusted publisher's."""
    return get_locked_kernel(REPO_ID, lockfile=LOCK, trust_remote_code=[REPO_ID])


def main():
    kernel = load_kernel()
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(1000, 32)
    targets = torch.randint(1000, (64,))
    fused = kernel.fused_linear_cross_entropy(hidden, weight, targets).item()
    full = F.cross_entropy(hidden @ weight.T, targets).item()
    print(f"{kernel.__name__}: loss {fused:.4f}; from the full logits {full:.4f}")


if __name__ == "__main__":
    main()
