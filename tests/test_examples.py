"""The demo, run as `make demo` runs it, but small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--steps", "4", "--batch-size", "2", "--seq-len", "64", "--vocab-size", "1024", "--hidden-size", "32"]
SCALED_LOSS = """
_exact = fused_linear_cross_entropy
def fused_linear_cross_entropy(*args, **kwargs):
    loss, metrics = _exact(*args, **kwargs)
    return loss * (1 + 1e-4), metrics
"""


def build(out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "tools.build", "--out", str(out)], cwd=ROOT, check=True)
    return out


def train_tiny(out: Path, kernel: "Path | None", *options: str) -> subprocess.CompletedProcess:
    """Run the example on the kernel of a folder, past the Hub."""
    # Triton's interpreter, which other tests ask for, has no part in a user's run.
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "TRITON_INTERPRET")}
    if kernel is not None:
        env["LOCAL_KERNELS"] = f"trl-lib/fused-linear-ce={kernel}"
    command = [sys.executable, str(ROOT / "examples/train_tiny.py"), *TINY, "--out", str(out), *options]
    return subprocess.run(command, cwd=out, env=env, capture_output=True, text=True)


def test_both_heads_train_the_same_model(local_hub, tmp_path):
    """As `make demo` goes: published, loaded by commit, trained."""
    released = local_hub.run("python", "-m", "tools.release", "--quiet", "--allow-dirty")
    assert released.returncode == 0, released.stderr
    options = ["--out", str(tmp_path), "--revision", released.stdout.strip(), "--trust-remote-code"]
    run = local_hub.run("python", "examples/train_tiny.py", *TINY, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    largest = re.search(r"largest difference of the loss curves: (\S+)", run.stdout)
    assert largest, run.stdout
    assert float(largest[1]) <= 1e-4
    for row in ("token accuracy", "entropy", "loss peak memory"):
        assert row in run.stdout


@pytest.mark.slow
def test_a_loss_off_by_1e_4_relative_fails_the_demo(tmp_path):
    kernel = build(tmp_path / "build")
    for init in kernel.glob("torch-*/__init__.py"):
        init.write_text(init.read_text(encoding="utf-8") + SCALED_LOSS, encoding="utf-8")
    run = train_tiny(tmp_path, kernel)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED: the two loss heads do not train the same model." in run.stderr


@pytest.mark.slow
def test_without_a_kernel_the_demo_says_what_to_pass(tmp_path):
    run = train_tiny(tmp_path, None)
    assert run.returncode == 1
    assert "--revision SHA --trust-remote-code" in run.stderr
    assert "Traceback" not in run.stderr
