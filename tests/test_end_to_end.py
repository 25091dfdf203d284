"""A kernel's whole way, with the real clients in processes of their own: released, loaded, pinned, locked, offline."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

for module in ("tools", "kernels", "huggingface_hub", "starlette", "uvicorn", "pygit2", "rich"):
    pytest.importorskip(module, reason="the tools are not part of the Nix build's test sources")

from tools.config import ROOT, Config

from .checkout import append, commit, copy_checkout
from .hub import Fault, RunningHub, empty_hub, server, status

REPO = "trl-lib/fused-linear-ce"
NOBODY = "http://127.0.0.1:9"  # the discard port: whoever asks this Hub fails


@dataclass
class Released:
    """Two revisions on a local Hub; the second one has REVISION = 2, and its release wrote the lock."""

    hub: RunningHub
    first: str
    second: str
    lock: Path


def release(hub: RunningHub, config: Config, *options: str) -> str:
    done = hub.run("python", "-m", "tools.release", "--root", str(config.root), "--quiet", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("end-to-end")
    config = copy_checkout(directory / "checkout")
    (config.root / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "benchmark.py", config.root / "benchmarks")
    commit(config)
    with server() as (switch, endpoint):
        hub = empty_hub(directory, switch, endpoint)
        first = release(hub, config)
        append(config, "REVISION = 2")
        commit(config)
        lock = directory / "kernels.lock"
        yield Released(hub, first, release(hub, config, "--lock", str(lock)), lock)


@pytest.fixture
def released(served, tmp_path):
    """The two revisions, clients with an empty cache, and an owner whom nobody trusts."""
    served.hub.home = tmp_path / "home"
    yield served
    served.hub.faults.clear()
    served.hub.hub.trusted.clear()


# What every consumer below runs: the loss of a loaded kernel against torch's, in float64.
CHECK = """
import json, kernels, torch
import torch.nn.functional as F

REPO = "trl-lib/fused-linear-ce"

def check(kernel):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 12), (19, 12)))
    targets = torch.tensor([3, 0, -100, 18, 5, 5, 11])
    expected = F.cross_entropy(hidden @ weight.T, targets)
    loss = kernel.fused_linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))):
        torch.testing.assert_close(a, b)
    return getattr(kernel, "REVISION", 1)

def failure(**options):
    try:
        kernels.get_kernel(REPO, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def load(hub: RunningHub, options: str, **environment) -> int:
    """Load with `get_kernel(REPO, <options>)` in a new process and check it: the revision's number."""
    return int(hub.python(f"{CHECK}\nprint(check(kernels.get_kernel(REPO, {options})))", **environment))


def download(released: Released, *options: str) -> None:
    done = released.hub.run("hf", "download", "--repo-type", "kernel", REPO, *options)
    assert done.returncode == 0, done.stderr


# --- loading ---------------------------------------------------------------------------------------------------------


def test_two_revisions_load_in_one_process(released):
    code = f"""{CHECK}
first, second, main = {released.first!r}, {released.second!r}, {released.hub.repository(REPO).branches()["main"]!r}
allowed = dict(trust_remote_code=[REPO])
loaded = [kernels.get_kernel(REPO, revision=sha, **allowed) for sha in (first, second, first)]
print(json.dumps({{
    "revisions": [check(kernel) for kernel in loaded],
    "names": [kernel.__name__ for kernel in loaded],
    "version": check(kernels.get_kernel(REPO, version=1, **allowed)),
    "trusted": check(kernels.get_kernel(REPO, revision=second, trust_remote_code=True)),
    "no trust": failure(revision=second),
    "other list": failure(revision=second, trust_remote_code=["trl-lib/other"]),
    "main": failure(revision=main, **allowed),
    "has_kernel": kernels.has_kernel(REPO, revision=first, **allowed),
}}))
"""
    found = json.loads(released.hub.python(code).splitlines()[-1])
    assert found["revisions"] == [1, 2, 1]
    assert found["names"][0] == found["names"][2] != found["names"][1]
    assert found["version"] == found["trusted"] == 2
    assert found["has_kernel"] is True
    for key in ("no trust", "other list"):
        assert found[key].startswith(f"ValueError: Kernel repository '{REPO}' is not from a trusted publisher")
    assert "EntryNotFound" in found["main"]  # it holds the card alone


def test_a_trusted_publisher_needs_no_list(released):
    released.hub.hub.trusted.add("trl-lib")
    assert load(released.hub, f"revision={released.first!r}") == 1


def test_a_fault_while_loading_is_an_error_and_the_next_try_loads(released):
    released.hub.faults.append(Fault("GET", r"/resolve/.*/torch-cpu/plan\.py$", status(503)))
    code = f"""{CHECK}
options = dict(revision={released.second!r}, trust_remote_code=[REPO])
print(json.dumps([failure(**options), check(kernels.get_kernel(REPO, **options))]))
"""
    error, revision = json.loads(released.hub.python(code))
    assert "503 Service Unavailable" in error
    assert "torch-cpu/plan.py" in error
    assert revision == 2


# --- offline ---------------------------------------------------------------------------------------------------------


def test_offline_from_a_whole_snapshot(released):
    download(released, "--revision", released.first)
    download(released, "--revision", "v1")
    code = f"""{CHECK}
allowed = dict(trust_remote_code=[REPO])
print(json.dumps([check(kernels.get_kernel(REPO, revision={released.first!r}, **allowed)),
                  check(kernels.get_kernel(REPO, version=1, **allowed))]))
"""
    released.hub.requests.clear()
    assert json.loads(released.hub.python(code, HF_HUB_OFFLINE="1")) == [1, 2]
    assert released.hub.requests == []


def test_offline_from_a_folder(released, tmp_path):
    folder = tmp_path / "kernel"
    download(released, "--revision", released.first, "--local-dir", str(folder))
    local = {"LOCAL_KERNELS": f"{REPO}={folder}", "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": NOBODY}
    assert load(released.hub, f"revision={released.second!r}", **local) == 1  # the folder, whatever the code names


# --- the lock --------------------------------------------------------------------------------------------------------


@pytest.fixture
def consumer(released, tmp_path) -> Path:
    """The example, with the lock of the release."""
    shutil.copytree(ROOT / "examples" / "consumer", tmp_path / "consumer")
    shutil.copy(released.lock, tmp_path / "consumer")
    return tmp_path / "consumer"


def test_the_releases_lock_is_that_of_kernels_lock(released, consumer):
    (consumer / "kernels.lock").unlink()
    refused = released.hub.run("kernels", "lock", str(consumer))
    assert refused.returncode == 1
    assert "is not from a trusted publisher" in refused.stderr
    released.hub.hub.trusted.add("trl-lib")
    done = released.hub.run("kernels", "lock", str(consumer))
    assert done.returncode == 0, done.stderr
    theirs = json.loads((consumer / "kernels.lock").read_text())
    assert theirs == json.loads(released.lock.read_text())
    assert theirs[0]["lock"]["commit"] == released.second


def test_the_consumer_runs_online_and_offline(released, consumer):
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": NOBODY}
    online = released.hub.run("python", "consumer.py", cwd=consumer)
    assert online.returncode == 0, online.stderr
    fused, full = re.search(r"loss (\S+); from the full logits (\S+)$", online.stdout.strip()).groups()
    assert float(fused) == pytest.approx(float(full), abs=2e-4)

    # When this no longer fails, the clients have learned it: then simplify the recipe in examples/consumer/README.md.
    failed = released.hub.run("python", "consumer.py", cwd=consumer, **offline)
    assert failed.returncode == 1
    assert "Cannot find a local snapshot" in failed.stderr

    download(released, "--revision", released.second)
    again = released.hub.run("python", "consumer.py", cwd=consumer, **offline)
    assert again.returncode == 0, again.stderr
    assert again.stdout == online.stdout


# --- the command lines of kernels and huggingface_hub ----------------------------------------------------------------


def test_kernels_versions_and_info(released):
    done = released.hub.run("kernels", "versions", REPO)
    assert done.returncode == 0, done.stderr
    assert "Version 1:" in done.stdout
    assert "torch-cpu compatible, preferred" in done.stdout
    done = released.hub.run("kernels", "info", REPO, "--revision", released.first, "--json")
    info = json.loads(done.stdout)
    assert (info["revision"], info["version"], info["license"]) == (released.first, 1, "Apache-2.0")
    assert info["backends"] == ["cpu", "cuda", "rocm", "xpu"]


def test_kernels_download(released, consumer):
    done = released.hub.run("kernels", "download", str(consumer))
    assert done.returncode == 0, done.stderr
    snapshot = released.hub.home / "hub" / f"kernels--{REPO.replace('/', '--')}" / "snapshots" / released.second
    assert [path.name for path in (snapshot / "build").iterdir()] == ["torch-cpu"]


@pytest.mark.slow
def test_hf_download_and_kernels_benchmark(released, tmp_path):
    download(released, "--revision", "v1", "--local-dir", str(tmp_path / "kernel"))
    done = released.hub.run("kernels", "benchmark", "./kernel", "--iterations", "1", "--warmup", "0", cwd=tmp_path)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    for workload in ("forward", "forward_backward", "per_token", "softcap_bias"):
        (row,) = re.findall(rf"│ {workload} +│.*", report)
        assert "✓" in row  # its result matches the reference
