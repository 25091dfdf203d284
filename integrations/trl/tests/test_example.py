"""examples/train_trl.py, run as a user runs it, but small."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fused_linear_ce_trl
from tests.demo import TINY, largest_difference, scale_loss

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "train_trl.py"


def run(out: Path, kernel: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "LOCAL_KERNELS": f"{fused_linear_ce_trl.KERNEL_ID}={kernel}"}
    command = [sys.executable, str(SCRIPT), *TINY, "--out", str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_i20_the_example_trains_offline_and_its_curves_are_equal(kernel_build, tmp_path):
    done = run(tmp_path, kernel_build)
    assert done.returncode == 0, done.stdout + done.stderr
    assert largest_difference(done.stdout) <= 1e-4
    assert (tmp_path / "trl.png").read_bytes().startswith(b"\x89PNG")
    for row in ("loss", "entropy", "token accuracy"):
        assert row in done.stdout


def test_a_loss_off_by_1e_4_relative_fails_the_example(kernel_build, tmp_path):
    kernel = tmp_path / "build"
    shutil.copytree(kernel_build, kernel)
    scale_loss(kernel)
    done = run(tmp_path, kernel)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: nll and cce do not train the same model." in done.stderr
