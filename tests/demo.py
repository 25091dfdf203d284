"""What the tests of the two demos in examples/ share: a small run, its verdict, and a kernel that fails it."""

import re
from pathlib import Path

TINY = ["--steps", "4", "--batch-size", "2", "--seq-len", "64", "--vocab-size", "1024", "--hidden-size", "32"]
SCALED_LOSS = """
_exact = fused_linear_cross_entropy
def fused_linear_cross_entropy(*args, **kwargs):
    loss, metrics = _exact(*args, **kwargs)
    return loss * (1 + 1e-4), metrics
"""


def scale_loss(build: Path) -> None:
    """Make every variant of a build give a loss that is off by 1e-4, relative."""
    for init in build.glob("torch-*/__init__.py"):
        init.write_text(init.read_text(encoding="utf-8") + SCALED_LOSS, encoding="utf-8")


def largest_difference(output: str) -> float:
    """What a demo printed of its two loss curves."""
    found = re.search(r"largest difference of the loss curves: (\S+)", output)
    assert found, output
    return float(found[1])
