"""The layout rules: this source keeps them, and a violation of each one is found."""

import pytest

pytest.importorskip("tools", reason="the tools are not part of the Nix build's test sources")

from tools import check_layout
from tools.config import ROOT, Config

BUILD_TOML = (ROOT / "build.toml").read_text(encoding="utf-8")

# A package that keeps all rules; every test below spoils one thing in it.
GOOD = {
    "__init__.py": 'from .op import forward\n\n__all__ = ["forward"]\n',
    "op.py": """
import functools
from typing import Optional

import torch

from ._ops import add_op_namespace_prefix


@torch.library.custom_op(add_op_namespace_prefix("forward"), mutates_args=())
def forward(x: torch.Tensor) -> torch.Tensor:
    from .backends.triton.forward import run

    return run(x)


@forward.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.register_vmap(add_op_namespace_prefix("forward"))
def _(info, in_dims, x):
    return forward(x), in_dims[0]


@functools.lru_cache
def capability():
    import triton

    return triton.runtime.driver.active.get_current_target(), torch.cuda.get_device_capability()
""",
    "backends/__init__.py": "",
    "backends/triton/__init__.py": "",
    "backends/triton/forward.py": "import triton\n\n\n@triton.jit\ndef run(x): ...\n",
    "backends/triton/configs/h200.json": "{}",
}


@pytest.fixture
def violations(tmp_path):
    """Writes GOOD with some files replaced, and checks it."""

    def check(**files):
        package = tmp_path / "torch-ext" / "fused_linear_ce"
        (tmp_path / "build.toml").write_text(BUILD_TOML, encoding="utf-8")
        for name, text in {**GOOD, **files}.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return [str(problem) for problem in check_layout.check(Config.load(tmp_path))]

    return check


def test_this_source_keeps_the_rules():
    assert check_layout.check(Config.load()) == []


def test_a_good_package_has_no_violations(violations):
    assert violations() == []


PREFIX = "from ._ops import add_op_namespace_prefix\n"


@pytest.mark.parametrize(
    ("line", "source"),
    [
        (2, '@torch.library.custom_op("fused::forward", mutates_args=())\ndef f(x): ...'),
        (2, '@torch.library.custom_op(name=add_op_namespace_prefix("forward"), mutates_args=())\ndef f(x): ...'),
        (2, "@triton_op(add_op_namespace_prefix(NAME), mutates_args=())\ndef f(x): ..."),
        (2, '@torch.library.register_fake("fused::forward")\ndef _(x): ...'),
        (2, '@torch.library.register_kernel(f"{NAMESPACE}::forward", "cpu")\ndef _(x): ...'),
        (2, '@forward.register_kernel("cpu")\ndef _(x): ...'),
        (2, '@torch.library.register_vmap("fused::forward")\ndef _(info, in_dims, x): ...'),
        (2, '@torch.library.register_torch_dispatch("fused::forward", Mode)\ndef _(mode, func): ...'),
        (2, 'forward = torch.library.custom_op("fused::forward", f, mutates_args=())'),
        (3, 'def define():\n    @torch.library.custom_op("fused::forward", mutates_args=())\n    def f(x): ...'),
    ],
)
def test_operators_need_the_builds_namespace(violations, line, source):
    (problem,) = violations(**{"extra.py": PREFIX + source})
    assert problem.startswith(f"extra.py:{line}: ")
    assert 'must be add_op_namespace_prefix("...")' in problem


def test_a_nested_package_is_refused(violations):
    (problem,) = violations(**{"fused_linear_ce/__init__.py": "from .. import *\n"})
    assert "a package inside the package of the same name" in problem


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import numpy as np", "numpy"),
        ("from fused_linear_ce import op", "fused_linear_ce"),
        ("def f():\n    import transformers.models", "transformers"),
        ("try:\n    import einops\nexcept ImportError:\n    pass", "einops"),
    ],
)
def test_only_torch_triton_and_the_standard_library_are_imported(violations, source, imported):
    (problem,) = violations(**{"extra.py": source})
    assert f"imports {imported}:" in problem


@pytest.mark.parametrize(
    "source",
    ["import triton", "from triton import language", "try:\n    import triton\nexcept ImportError:\n    pass"],
)
@pytest.mark.parametrize("name", ["extra.py", "backends/extra.py"])
def test_triton_is_imported_lazily(violations, name, source):
    (problem,) = violations(**{name: source})
    assert problem.startswith(name)
    assert "imports triton at import time" in problem


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from .op import forward", "must assign __all__ exactly once"),
        ('__all__ = ["a"]\n__all__ += ["b"]', "must assign __all__ exactly once"),
        ('if True:\n    __all__ = ["a"]', "must assign __all__ exactly once"),
        ('__all__ = ("a",)', "must be a plain list literal"),
        ('__all__ = ["a"] + ["b"]', "must be a plain list literal"),
        ('__all__ = [*names, "a"]', "must hold string literals only"),
        ('__all__ = ["a", "a"]', "names something twice"),
    ],
)
def test_all_is_a_plain_list(violations, source, message):
    (problem,) = violations(**{"__init__.py": source})
    assert message in problem


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import triton\n@triton.autotune(configs=[], key=[])\ndef f(x): ...", "autotunes"),
        ("from triton import autotune", "autotunes"),
        ("import triton\nT = triton.runtime.driver.active.get_current_target()", "calls triton.runtime"),
        ("import torch\nSMS = torch.cuda.get_device_properties(0)", "calls torch.cuda.get_device_properties"),
        ("import torch\nclass A:\n    xpu = torch.xpu.is_available()", "calls torch.xpu.is_available"),
        ("import torch\ndef f(n=torch.cuda.device_count()): ...", "calls torch.cuda.device_count"),
    ],
)
def test_import_does_no_work(violations, source, message):
    (problem,) = violations(**{"backends/triton/extra.py": source})
    assert message in problem


def test_a_file_that_would_not_ship_is_named(violations):
    (problem,) = violations(**{"backends/triton/configs/h100.yaml": "x: 1"})
    assert problem.startswith("backends/triton/configs/h100.yaml")
    assert "isn't shipped" in problem


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "build.toml").write_text(BUILD_TOML, encoding="utf-8")
    (problem,) = check_layout.check(Config.load(tmp_path))
    assert "there is no package at torch-ext/fused_linear_ce" in str(problem)


def test_command_line(violations, tmp_path, capsys):
    violations()
    assert check_layout.main(["--root", str(tmp_path)]) == 0
    violations(**{"extra.py": "import numpy"})
    assert check_layout.main(["--root", str(tmp_path)]) == 1
    assert "torch-ext/fused_linear_ce/extra.py:1: imports numpy" in capsys.readouterr().out
