"""Where the kernel comes from, and who has to allow it."""

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import kernels
import pytest
from packaging.version import Version

import fused_linear_ce_trl
from fused_linear_ce_trl import kernel
from support import config, make_model, make_trainer

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_local_build(monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setenv(kernel.REVISION_VARIABLE, SHA)


@pytest.fixture
def fetched(monkeypatch):
    """What was asked of `kernels.get_kernel`, which is not run."""
    calls = []

    def get_kernel(repo_id, **options):
        calls.append((repo_id, options))
        return types.SimpleNamespace(name="kernel")

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    return calls


def test_f15_id_and_revision_are_constants():
    assert kernel.KERNEL_ID == "trl-lib/fused-linear-ce"
    assert kernel.KERNEL_REVISION is None or re.fullmatch("[0-9a-f]{40}", kernel.KERNEL_REVISION)
    sources = list(Path(kernel.__file__).parent.glob("*.py"))
    quoting = [path.name for path in sources if f'"{kernel.KERNEL_ID}"' in path.read_text(encoding="utf-8")]
    assert quoting == ["kernel.py"]


def test_r1_nothing_is_fetched_without_opt_in(no_local_build, fetched):
    with pytest.raises(ValueError) as error:
        kernel.load_kernel()
    text = str(error.value)
    for part in ("loss_type='cce'", "download", kernel.KERNEL_ID, SHA, "trust_remote_code=True", "LOCAL_KERNELS"):
        assert part in text
    assert fetched == []


def test_r1_trainer_asks_before_it_prepares_anything(no_local_build, fetched, tmp_path):
    model = make_model()
    with pytest.raises(ValueError, match=f"would download the kernel .* at revision {SHA}"):
        make_trainer(model, config(tmp_path))
    assert fetched == [] and "forward" not in vars(model)


def test_r1_trust_remote_code_of_the_config_is_an_opt_in(no_local_build, fetched, tmp_path, monkeypatch):
    """The trainer passes it on; that the loaded kernel is then used is what every other test of it shows."""
    loaded = []
    monkeypatch.setattr(fused_linear_ce_trl.trainer, "load_kernel", lambda trust: loaded.append(trust) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_trainer(make_model(), config(tmp_path, trust_remote_code=True))
    assert loaded == [True]


@pytest.mark.parametrize(
    "opt_in",
    [
        lambda: kernel.load_kernel(trust_remote_code=True),
        lambda: fused_linear_ce_trl.enable(trust_remote_code=True),
        lambda: fused_linear_ce_trl.patch_cce_lm_head(make_model(), trust_remote_code=True),
    ],
)
def test_r1_arguments_are_an_opt_in(no_local_build, fetched, opt_in):
    opt_in()
    assert len(fetched) == 1
    # Allowed once: it runs in this process already.
    assert kernel.load_kernel().name == "kernel"
    assert len(fetched) == 1


def test_r1b_only_this_kernel_is_trusted(no_local_build, fetched):
    kernel.load_kernel(trust_remote_code=True)
    assert fetched == [(kernel.KERNEL_ID, {"revision": SHA, "trust_remote_code": [kernel.KERNEL_ID]})]


@pytest.mark.parametrize(
    ("version", "trust"),
    [("0.14.0", True), ("0.16.1", True), ("0.17.0", [kernel.KERNEL_ID]), ("0.18.0", [kernel.KERNEL_ID])],
)
def test_t4_older_kernels_know_no_allow_list(version, trust):
    assert kernel.allow_list(Version(version)) == trust


def test_r11_kernels_before_0_14_are_refused_by_version(no_local_build, fetched, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.13.0")
    with pytest.raises(ImportError, match=r"needs kernels>=0\.14.*0\.13\.0 is installed"):
        kernel.load_kernel(trust_remote_code=True)
    assert fetched == []


def test_f2_a_missing_kernels_package_is_named(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="needs the package `kernels`"):
        kernel.load_kernel()


def test_r11_transformers_gate_is_not_asked(monkeypatch):
    """transformers' own range excludes kernels that work here, and would hide them."""
    import transformers.utils

    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda *a, **k: 1 / 0)
    assert hasattr(kernel.load_kernel(), "fused_linear_cross_entropy")


@pytest.mark.parametrize("revision", ["v1", "main", SHA[:12], SHA.upper(), SHA + "0"])
def test_t3_only_a_commit_is_a_revision(monkeypatch, fetched, revision):
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setenv(kernel.REVISION_VARIABLE, revision)
    with pytest.raises(ValueError, match=f"must be a commit, 40 hex digits.*{revision}"):
        kernel.load_kernel(trust_remote_code=True)
    assert fetched == []


def test_t3_the_constant_is_used_and_the_variable_wins(monkeypatch, fetched):
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setattr(kernel, "KERNEL_REVISION", "f" * 40)
    assert kernel.pinned_revision() == "f" * 40
    monkeypatch.setenv(kernel.REVISION_VARIABLE, SHA)
    assert kernel.pinned_revision() == SHA


def test_t3_no_revision_is_an_error_that_says_how_to_name_one(monkeypatch, fetched):
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setattr(kernel, "KERNEL_REVISION", None)
    with pytest.raises(ValueError, match=f"{kernel.REVISION_VARIABLE}.*LOCAL_KERNELS"):
        kernel.load_kernel(trust_remote_code=True)


def test_r1_a_local_build_needs_no_opt_in(kernel_build):
    loaded = kernel.load_kernel()
    assert Path(loaded.__file__).is_relative_to(kernel_build)


def test_r1_local_builds_of_other_kernels_are_no_opt_in(no_local_build, monkeypatch, fetched):
    monkeypatch.setenv("LOCAL_KERNELS", f"other/{kernel.KERNEL_ID}=/nowhere:other/kernel=/nowhere")
    with pytest.raises(ValueError, match="would download"):
        kernel.load_kernel()


def test_r1d_nll_never_touches_loader_or_network(no_local_build, monkeypatch, tmp_path):
    def forbidden(*args, **kwargs):
        raise AssertionError("loaded the kernel, or opened a connection")

    monkeypatch.setattr(kernels, "get_kernel", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(fused_linear_ce_trl.trainer, "load_kernel", forbidden)
    args = config(tmp_path, "nll", max_steps=1, trust_remote_code=True)
    fused_linear_ce_trl.enable()
    make_trainer(make_model(), args, cls=fused_linear_ce_trl.SFTTrainer).train()


@pytest.mark.parametrize(
    "function",
    [kernel.load_kernel, fused_linear_ce_trl.enable, fused_linear_ce_trl.patch_cce_lm_head,
     fused_linear_ce_trl.cut_cross_entropy_loss, fused_linear_ce_trl.SFTTrainer],
)  # fmt: skip
def test_r1c_docstrings_say_that_code_is_downloaded_and_run(function):
    assert "DOWNLOADS AND RUNS CODE" in function.__doc__ or "DOWNLOAD AND RUN CODE" in function.__doc__


FROM_A_HUB = """
import os, subprocess, sys

release = [sys.executable, "-m", "tools.release", "--quiet", "--allow-dirty"]
revision = subprocess.run(release, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
os.environ["FUSED_LINEAR_CE_REVISION"] = revision

from support import config, make_model, make_trainer
from fused_linear_ce_trl import load_kernel

try:
    make_trainer(make_model(), config(sys.argv[1]))
except ValueError as error:
    assert f"would download the kernel trl-lib/fused-linear-ce at revision {revision}" in str(error)
trainer = make_trainer(make_model(), config(sys.argv[1], trust_remote_code=True))
trainer.train()
assert trainer.state.log_history[0]["entropy"] > 0
print("loaded", load_kernel().__file__)
assert f"/snapshots/{revision}/" in load_kernel().__file__
"""


@pytest.mark.slow
def test_f1_r1_t3_trains_with_the_kernel_of_a_hub_by_commit(tmp_path):
    """Released to a local Hub, fetched from it by its commit after the opt-in, by the real clients."""
    root = Path(__file__).resolve().parents[3]
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_OFFLINE")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
    result = subprocess.run(
        [sys.executable, "-m", "tools.local_hub", "--", sys.executable, "-c", FROM_A_HUB, str(tmp_path)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0 and "\nloaded " in result.stdout, result.stdout + result.stderr
