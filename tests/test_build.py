"""The build: its form, how it loads, that two of them live in one process, and that verify finds what is wrong."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("tools", reason="the tools are not part of the Nix build's test sources")
kernels = pytest.importorskip("kernels")

from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

from tools import build as build_tool
from tools import card, provenance, public_api, verify
from tools.config import ROOT, Config

from .checkout import append, copy_checkout
from .checkout import git as run_git
from .conftest import REPO_ID, load_variant, submodule

CONFIG = Config.load()


@pytest.fixture
def checkout(tmp_path) -> Config:
    """A copy of what the build reads, outside of git, whose content and operator namespace are this test's own."""
    config = copy_checkout(tmp_path / "checkout")
    append(config, f"# {tmp_path.name}")
    return config


@pytest.fixture
def built(checkout, tmp_path) -> Path:
    """A build of its own, to be spoilt."""
    out = tmp_path / "build"
    build_tool.build(checkout, out)
    return out


def assert_computes_cross_entropy(kernel):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 12, generator=generator, requires_grad=True)
    weight = torch.randn(19, 12, generator=generator, requires_grad=True)
    targets = torch.tensor([3, 0, -100, 18, 5, 5, 11])
    expected = F.cross_entropy(hidden @ weight.T, targets)
    loss = kernel.fused_linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (hidden, weight)))


# --- form ------------------------------------------------------------------------------------------------------------


def test_build_toml_is_accepted():
    backends = [str(backend) for backend in Build.open(ROOT).general.backends]
    assert backends == list(CONFIG.backends) == ["cpu", "cuda", "rocm", "xpu"]


@pytest.mark.parametrize("backend", CONFIG.backends)
def test_variant_is_what_the_loader_expects(built, backend):
    variant = built / f"torch-{backend}"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert str(metadata.backend.backend_type) == backend
    assert metadata.id.startswith(f"_fused_linear_ce_{backend}_")
    assert (str(metadata.name), metadata.version, metadata.license) == (CONFIG.name, CONFIG.version, CONFIG.license)
    assert metadata.python_depends == []
    assert metadata.provenance.kernel_builder.version == build_tool.FORMAT_VERSION
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert set(metadata.digest.files) == {*CONFIG.shipped_files(), "_ops.py"}


def test_variants_differ_in_their_metadata_only(built):
    contents = {}
    for variant in built.glob("torch-*"):
        files = {path.relative_to(variant): path for path in variant.rglob("*") if path.is_file()}
        del files[Path("metadata.json")]
        contents[variant.name] = {name: path.read_bytes() for name, path in files.items()}
    assert len(contents) == len(CONFIG.backends)
    assert all(content == contents["torch-cpu"] for content in contents.values())


def test_build_is_deterministic(checkout, built, tmp_path):
    build_tool.build(checkout, tmp_path / "again")
    for path in (path for path in built.rglob("*") if path.is_file()):
        assert (tmp_path / "again" / path.relative_to(built)).read_bytes() == path.read_bytes()


def test_json_ships_and_bytecode_does_not(checkout, tmp_path):
    (checkout.package / "configs").mkdir()
    (checkout.package / "configs" / "extra.json").write_text("{}")
    (checkout.package / "__pycache__").mkdir()
    (checkout.package / "__pycache__" / "plan.cpython-311.pyc").write_bytes(b"")
    (checkout.package / "_ops.py").write_text("stale = True\n")
    build_tool.build(checkout, tmp_path / "build")
    variant = tmp_path / "build" / "torch-cuda"
    assert (variant / "configs" / "extra.json").is_file()
    assert not list(variant.rglob("__pycache__"))
    assert "stale" not in (variant / "_ops.py").read_text()


def test_card_lists_the_public_api():
    names = public_api.exported_names(CONFIG.package / "__init__.py")
    text = card.render(CONFIG)
    assert text.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    for name in names:
        assert name == "layers" or f"- `{name}`\n" in text
    for layer in public_api.layer_names(CONFIG.package):
        assert f"- `{layer}`\n" in text
    assert f'get_kernel("{REPO_ID}", revision=REVISION, trust_remote_code=["{REPO_ID}"])' in text
    assert "{{" not in text
    assert "{%" not in text
    assert "\n\n\n" not in text


def test_card_example_runs(build_dir, monkeypatch):
    """The card's code, as it stands, with the kernel under test in place of a published one."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{CONFIG.repo_id}={build_dir}")
    _, _, rest = card.render(CONFIG).partition("```python\n")
    code, _, _ = rest.partition("```")
    namespace = {}
    exec(code.replace("32000", "320"), namespace)
    assert namespace["loss"].isfinite()
    assert namespace["weight"].grad.shape == namespace["weight"].shape


# --- the command line ------------------------------------------------------------------------------------------------


def test_build_replaces_an_old_build_as_a_whole(checkout, built, capsys):
    assert build_tool.main(["--root", str(checkout.root), "--out", str(built), "--backends", "cpu,cuda"]) == 0
    assert sorted(path.name for path in built.iterdir()) == ["CARD.md", "torch-cpu", "torch-cuda"]
    assert sorted(path.name for path in built.parent.iterdir()) == ["build", "checkout"]
    assert "torch-cpu, torch-cuda" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "cpu,metal"], "no backend metal"),
        (["--unique-id", "a-b"], "names a module"),
    ],
)
def test_build_refuses(checkout, built, capsys, arguments, message):
    before = sorted(built.rglob("*"))
    assert build_tool.main(["--root", str(checkout.root), "--out", str(built), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert sorted(built.rglob("*")) == before


def test_build_does_not_delete_what_it_did_not_write(checkout, tmp_path, capsys):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    assert build_tool.main(["--root", str(checkout.root), "--out", str(tmp_path / "home")]) == 1
    assert "thesis.txt" in capsys.readouterr().err
    assert (tmp_path / "home" / "thesis.txt").read_text() == "mine"


def test_tools_do_not_import_torch():
    code = "import sys, tools.build, tools.verify, tools.check_layout; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- the unique id ---------------------------------------------------------------------------------------------------


@pytest.fixture
def git(checkout):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    run_git(checkout, "init", "--quiet")
    return functools.partial(run_git, checkout)


def test_unique_id_of_a_clean_checkout_is_the_tree(checkout, git, tmp_path):
    git("add", "--all")
    git("commit", "--quiet", "--message", "first")
    assert provenance.unique_id(checkout) == git("rev-parse", "HEAD^{tree}")[:7]
    build_tool.build(checkout, tmp_path / "build")
    kernel = Metadata.read_from_file(tmp_path / "build" / "torch-cpu" / "metadata.json").provenance.kernel
    assert (kernel.commit, kernel.dirty) == (git("rev-parse", "HEAD"), False)


def test_unique_ids_of_dirty_checkouts_differ(checkout, git, tmp_path):
    git("add", "--all")
    git("commit", "--quiet", "--message", "first")
    ids = set()
    for number in range(2):
        (checkout.package / "__init__.py").open("a").write(f"# {number}\n")
        ids.add(provenance.unique_id(checkout))
    git("checkout", "--quiet", "--", ".")
    (checkout.package / "untracked.py").touch()
    ids.add(provenance.unique_id(checkout))
    assert len(ids) == 3
    assert all(unique_id.endswith("_dirty") for unique_id in ids)
    build_tool.build(checkout, tmp_path / "build")
    assert Metadata.read_from_file(tmp_path / "build" / "torch-cpu" / "metadata.json").provenance.kernel.dirty
    assert verify.verify(checkout, tmp_path / "build") == []


def test_unique_id_before_the_first_commit_is_the_content(checkout, git):
    in_git = provenance.unique_id(checkout)
    shutil.rmtree(checkout.root / ".git")
    assert provenance.unique_id(checkout) == in_git
    (checkout.package / "__init__.py").open("a").write("# changed\n")
    assert provenance.unique_id(checkout) != in_git


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
def test_get_kernel_loads_it(kernel):
    names = public_api.exported_names(CONFIG.package / "__init__.py")
    assert all(hasattr(kernel, name) for name in names)
    assert_computes_cross_entropy(kernel)


def test_get_local_kernel_loads_it(built):
    kernel = kernels.get_local_kernel(built)
    assert Path(kernel.__file__).is_relative_to(built)
    assert_computes_cross_entropy(kernel)


def test_two_builds_live_in_one_process(checkout, built, tmp_path):
    first = kernels.get_local_kernel(built)
    (checkout.package / "__init__.py").open("a").write("\nANOTHER_BUILD = True\n")
    build_tool.build(checkout, tmp_path / "other")
    second = kernels.get_local_kernel(tmp_path / "other")
    assert second.ANOTHER_BUILD
    assert not hasattr(first, "ANOTHER_BUILD")
    assert first.__name__ != second.__name__
    namespaces = [submodule(kernel, "_ops")._OPS_NAME for kernel in (first, second)]
    assert namespaces == [first.__name__, second.__name__]
    for kernel in (first, second, first):
        assert_computes_cross_entropy(kernel)


def run_python(code: str, **environment) -> str:
    """The output of a fresh interpreter in the checkout."""
    environment = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# conftest turns Triton's interpreter on, which is not what these tests are about.
LOAD = """
import os, sys
from pathlib import Path

import torch

from tests.conftest import load_variant, torch_backend

os.environ.pop("TRITON_INTERPRET", None)
"""


def test_import_leaves_triton_alone(built):
    code = LOAD + f"""
before = "triton" in sys.modules
load_variant(Path({str(built)!r}) / f"torch-{{torch_backend()}}")
print(before, "triton" in sys.modules)
"""
    before, after = run_python(code).split()
    assert after == before


def test_works_without_triton(built):
    """CPU builds of torch come without triton."""
    code = LOAD + f"""
sys.modules["triton"] = None
from tests.test_build import assert_computes_cross_entropy
assert_computes_cross_entropy(load_variant(Path({str(built)!r}) / "torch-cpu"))
"""
    run_python(code)


def test_works_where_no_gpu_is_visible(built):
    """A CUDA build of torch on a machine without a GPU loads the CUDA variant."""
    code = LOAD + f"""
from tests.test_build import assert_computes_cross_entropy
assert_computes_cross_entropy(load_variant(Path({str(built)!r}) / "torch-cuda"))
"""
    run_python(code, CUDA_VISIBLE_DEVICES="")


def test_load_variant_is_what_kernels_does(built):
    """Machines without the `kernels` package test the kernel through `load_variant`."""
    variant = built / "torch-xpu"
    kernel = load_variant(variant)
    assert kernel.__name__ == Metadata.read_from_file(variant / "metadata.json").id
    assert submodule(kernel, "plan").__name__ == f"{kernel.__name__}.plan"


# --- layers ----------------------------------------------------------------------------------------------------------


@kernels.use_kernel_forward_from_hub("FusedLinearCeTestHead")
class Head(nn.Module):
    """A model's output layer with its loss, as someone would write it without the kernel."""

    def __init__(self, hidden_size: int, vocab: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, hidden_size))
        self.bias = nn.Parameter(torch.randn(vocab)) if bias else None

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight, self.bias), targets)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_replaces_a_models_head(built, bias):
    torch.manual_seed(0)
    head = Head(12, 19, bias)
    hidden, targets = torch.randn(7, 12, requires_grad=True), torch.tensor([3, 0, -100, 18, 5, 5, 11])
    wanted = [hidden, *head.parameters()]
    expected = head(hidden, targets)
    expected_gradients = torch.autograd.grad(expected, wanted)

    layer = kernels.LocalLayerRepository(built, layer_name="LinearCrossEntropy")
    with kernels.use_kernel_mapping({"FusedLinearCeTestHead": {"cpu": {kernels.Mode.TRAINING: layer}}}):
        kernels.kernelize(head, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)

    assert head.forward.__func__ is layer.load().forward
    loss = head(hidden, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected_gradients)


# --- verify ----------------------------------------------------------------------------------------------------------


def run_verify(checkout, built, capsys) -> tuple[int, str]:
    status = verify.main([str(built), "--root", str(checkout.root)])
    return status, capsys.readouterr().out


def test_verify_accepts_a_build_that_was_used(checkout, built, capsys):
    kernels.get_local_kernel(built)  # leaves bytecode behind
    status, report = run_verify(checkout, built, capsys)
    assert (status, report.count("\n")) == (0, 1)
    assert "4 variants of fused-linear-ce version 1 are in order" in report


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


SPOILERS = {
    "tampered": (
        lambda build: (build / "torch-cuda/__init__.py").open("a").write("# changed\n"),
        ["torch-cuda: __init__.py was changed after the build"],
    ),
    "missing file": (
        lambda build: (build / "torch-cpu/__init__.py").unlink(),
        ["torch-cpu: __init__.py is missing, but the digest lists it"],
    ),
    "extra file": (
        lambda build: (build / "torch-xpu/backdoor.py").touch(),
        ["torch-xpu: backdoor.py is there, but the digest doesn't list it"],
    ),
    "missing variant": (
        lambda build: shutil.rmtree(build / "torch-rocm"),
        ["torch-rocm: missing, but build.toml lists its backend"],
    ),
    "extra variant": (
        lambda build: shutil.copytree(build / "torch-cpu", build / "torch-metal"),
        ["torch-metal: not a variant of build.toml"],
    ),
    "broken metadata": (
        lambda build: (build / "torch-cpu/metadata.json").write_text("{"),
        ["torch-cpu: metadata.json can't be read"],
    ),
    "no digest": (
        lambda build: edit(build / "torch-cpu/metadata.json", '"digest"', '"indigestible"'),
        ["torch-cpu: metadata.json has no digest", "torch-cuda: digest differs from that of torch-cpu"],
    ),
    "version": (
        lambda build: edit(build / "torch-cuda/metadata.json", '"version": 1', '"version": 2'),
        ["torch-cuda: metadata.json has version 2, expected 1"],
    ),
    "backend": (
        lambda build: edit(build / "torch-cuda/metadata.json", '"type": "cuda"', '"type": "xpu"'),
        ["torch-cuda: metadata.json has backend 'torch-xpu', expected 'torch-cuda'"],
    ),
    "unique id": (
        lambda build: edit(build / "torch-cuda/metadata.json", '"_fused_linear_ce_cuda_', '"_fused_linear_ce_cuda_f'),
        [
            "torch-cuda: _ops.py doesn't build its namespace from the unique id",
            "torch-cuda: unique id differs from that of torch-cpu",
        ],
    ),
    "card": (lambda build: (build / "CARD.md").unlink(), ["CARD.md: missing"]),
}


@pytest.mark.parametrize("spoil", SPOILERS)
def test_verify_names_what_is_wrong(checkout, built, capsys, spoil):
    change, expected = SPOILERS[spoil]
    change(built)
    status, report = run_verify(checkout, built, capsys)
    assert status == 1
    for message in expected:
        assert message in report


def test_verify_notices_variants_of_different_sources(checkout, built, tmp_path, capsys):
    (checkout.package / "__init__.py").open("a").write("# changed\n")
    build_tool.build(checkout, tmp_path / "other")
    shutil.rmtree(built / "torch-xpu")
    shutil.copytree(tmp_path / "other" / "torch-xpu", built / "torch-xpu")
    status, report = run_verify(checkout, built, capsys)
    assert status == 1
    assert "torch-xpu: digest differs from that of torch-cpu" in report


def test_verify_without_a_build(checkout, tmp_path, capsys):
    status, report = run_verify(checkout, tmp_path / "nowhere", capsys)
    assert status == 1
    assert "is not a directory; `make build` writes one" in report
