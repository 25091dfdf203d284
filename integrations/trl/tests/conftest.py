"""The kernel is this checkout's build, loaded as users load one: by LOCAL_KERNELS, which subprocesses inherit."""

import os
import sys
from pathlib import Path

# Read when the libraries are imported. A test that tried to reach the Hub would fail, not wait.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="0")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]
sys.path[:0] = [str(PACKAGE), str(ROOT), str(Path(__file__).parent)]
# Subprocesses (command line, distributed tests) find the package too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])

import pytest  # noqa: E402
import torch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # the models are tiny


def pytest_collection_modifyitems(items):
    if DEVICE == "cpu":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


@pytest.fixture(scope="session")
def kernel_build(tmp_path_factory) -> Path:
    from tools.build import build
    from tools.config import Config

    out = tmp_path_factory.mktemp("kernel") / "build"
    build(Config.load(), out)
    return out


@pytest.fixture(autouse=True)
def local_kernel(kernel_build, monkeypatch):
    """Every test can load the kernel, and none finds it loaded by another."""
    from fused_linear_ce_trl import kernel

    monkeypatch.setenv("LOCAL_KERNELS", f"{kernel.KERNEL_ID}={kernel_build}")
    monkeypatch.delenv(kernel.REVISION_VARIABLE, raising=False)
    monkeypatch.setattr(kernel, "_loaded", {})
    yield
    from fused_linear_ce_trl import disable

    disable()
