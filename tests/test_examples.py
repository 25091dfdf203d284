"""The demo, run as `make demo` runs it, but small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .demo import TINY, largest_difference, scale_loss

ROOT = Path(__file__).parent.parent


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
    assert largest_difference(run.stdout) <= 1e-4
    for row in ("token accuracy", "entropy", "loss peak memory"):
        assert row in run.stdout


@pytest.mark.slow
def test_a_loss_off_by_1e_4_relative_fails_the_demo(tmp_path):
    kernel = build(tmp_path / "build")
    scale_loss(kernel)
    run = train_tiny(tmp_path, kernel)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "FAILED: the two loss heads do not train the same model." in run.stderr


@pytest.mark.slow
def test_without_a_kernel_the_demo_says_what_to_pass(tmp_path):
    run = train_tiny(tmp_path, None)
    assert run.returncode == 1
    assert "--revision SHA --trust-remote-code" in run.stderr
    assert "Traceback" not in run.stderr
