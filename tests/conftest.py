"""The kernel under test, loaded as a user loads it: built, and through `kernels.get_kernel`.

FUSED_LINEAR_CE_BUILD names a build to test instead of this checkout's; so does LOCAL_KERNELS, which the Nix build's CI
sets. Where the `kernels` package is not installed, the build is imported by path.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPO_ID = "trl-lib/fused-linear-ce"
DEVICE = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"

# Tests that take a `dev` run on the CPU, and with -m gpu on the accelerator.
DEVICES = ["cpu", pytest.param(DEVICE if DEVICE != "cpu" else "cuda", marks=pytest.mark.gpu)]

if DEVICE == "cpu":
    # Triton's interpreter runs the kernels on CPU tensors. Triton reads this when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if DEVICE == "cpu":
        skip = pytest.mark.skip(reason="needs a CUDA, ROCm or XPU device, and this machine has none")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(params=DEVICES)
def dev(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def build_dir(tmp_path_factory) -> Path:
    """The directory with the variants under test. Every pytest-xdist worker builds its own; it takes milliseconds."""
    local_kernels = dict(entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry)
    given = os.environ.get("FUSED_LINEAR_CE_BUILD") or local_kernels.get(REPO_ID)
    if given:
        return Path(given).resolve()
    from tools.build import build
    from tools.config import Config

    out = tmp_path_factory.mktemp("kernel") / "build"
    build(Config.load(), out)
    return out


@pytest.fixture(scope="session")
def kernel(build_dir) -> ModuleType:
    return load_kernel(build_dir)


@pytest.fixture(autouse=True)
def nothing_is_decided_yet(request) -> None:
    """What another test has put in the place of a constant or a function must not decide here."""
    if "kernel" in request.fixturenames:
        plan = submodule(request.getfixturevalue("kernel"), "plan")
        plan.known_call.cache_clear()
        plan.known_plan.cache_clear()


@pytest.fixture(scope="session")
def local_hub_server():
    for module in ("tools", "huggingface_hub", "starlette", "uvicorn", "pygit2"):
        pytest.importorskip(module)
    from .hub import server

    with server() as serving:
        yield serving


@pytest.fixture
def local_hub(tmp_path, local_hub_server):
    """An empty local Hub, served while the test runs: a `tests.hub.RunningHub`."""
    from .hub import empty_hub

    return empty_hub(tmp_path / "hub", *local_hub_server)


def load_kernel(build_dir: Path) -> ModuleType:
    """The kernel of a build directory. LOCAL_KERNELS stays set, so that subprocesses get the same one."""
    if importlib.util.find_spec("kernels") is None:
        return load_variant(build_dir / f"torch-{torch_backend()}")
    import kernels

    os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={build_dir}"
    return kernels.get_kernel(REPO_ID, version=1)


def load_variant(variant: Path) -> ModuleType:
    """What `kernels` does with a variant once it has found it: import it under its id."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    if name in sys.modules:
        return sys.modules[name]
    init = variant / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(variant)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def torch_backend() -> str:
    """The backend that this torch was built for, which is the variant that `kernels` would choose."""
    if torch.version.cuda is not None:
        return "cuda"
    if torch.version.hip is not None:
        return "rocm"
    return "xpu" if getattr(torch.version, "xpu", None) is not None else "cpu"


def submodule(kernel: ModuleType, name: str) -> ModuleType:
    """An internal module of the loaded kernel, such as `submodule(kernel, "plan")`."""
    return importlib.import_module(f"{kernel.__name__}.{name}")
