"""Check the kernel's source against the rules that kernel-builder and the Hub loader set for a kernel package.

kernel-builder finds most of these only inside its Nix build, and some only show up on a user's machine.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .config import ROOT, Config, source_files
from .public_api import exported_names

OP_DEFINITIONS = {"custom_op", "triton_op"}
OP_DECORATORS = OP_DEFINITIONS | {"register_kernel", "register_fake", "register_vmap", "register_torch_dispatch"}
ALLOWED_PACKAGES = sys.stdlib_module_names | {"torch", "triton"}
# The only directory of the package whose modules may import triton when they are imported.
TRITON_DIRECTORY = "backends/triton/"
DEVICE_MODULES = ("torch.cuda", "torch.xpu", "torch.accelerator", "triton.runtime")


class Problem(NamedTuple):
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check(config: Config) -> list[Problem]:
    """Every violation in the package of `config`."""
    problems = list(_file_problems(config))
    for path in source_files(config.package):
        if path.suffix != ".py":
            continue
        name = path.relative_to(config.package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for rule in (_op_namespaces, _imports, _lazy_triton, _import_time_work):
            problems += (Problem(name, line, message) for line, message in rule(tree, name))
    return problems


def _file_problems(config: Config) -> Iterator[Problem]:
    init = config.package / "__init__.py"
    if not init.is_file():
        yield Problem("__init__.py", 1, f"there is no package at torch-ext/{config.module}")
        return
    if (config.package / config.module).exists():
        yield Problem(config.module, 1, "a package inside the package of the same name makes kernel-builder refuse it")
    for path in source_files(config.package):
        if path.suffix.removeprefix(".") not in config.pyext:
            name = path.relative_to(config.package).as_posix()
            yield Problem(name, 1, "isn't shipped: build.toml's pyext doesn't list its extension")
    try:
        exported_names(init)
    except ValueError as error:
        yield Problem("__init__.py", 1, str(error))


def _op_namespaces(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Operators live in their build's own namespace, and kernel-builder must be able to see that they do.

    kernel-builder looks at decorators. An operator defined by a plain call, `custom_op("x::y", fn)`, is checked too.
    """
    decorators = {
        decorator
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for decorator in node.decorator_list
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        called = _dotted(call.func).rpartition(".")[2]
        if called in (OP_DECORATORS if call in decorators else OP_DEFINITIONS) and not _is_prefixed(call):
            yield call.lineno, f'the first argument of {called} must be add_op_namespace_prefix("...")'


def _is_prefixed(call: ast.Call) -> bool:
    prefix = call.args[0] if call.args else None
    return (
        isinstance(prefix, ast.Call)
        and isinstance(prefix.func, ast.Name)
        and prefix.func.id == "add_op_namespace_prefix"
        and len(prefix.args) == 1
        and isinstance(prefix.args[0], ast.Constant)
    )


def _imports(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """The package's name differs from build to build, and nothing but torch and triton is sure to be installed."""
    for node in ast.walk(tree):
        for imported in _imported_packages(node):
            if imported not in ALLOWED_PACKAGES:
                yield node.lineno, f"imports {imported}: only the standard library, torch, triton and relative imports"


def _lazy_triton(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """A CPU build of torch comes without triton, and the package must import with it all the same."""
    if name.startswith(TRITON_DIRECTORY):
        return
    for node in _import_time_nodes(tree):
        if "triton" in _imported_packages(node):
            yield node.lineno, f"imports triton at import time: import it in a function, or move to {TRITON_DIRECTORY}"


def _import_time_work(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """The package is imported where there is no GPU, by kernel-builder too; autotuning costs every user seconds."""
    for node in _import_time_nodes(tree):
        attribute = isinstance(node, ast.Attribute) and node.attr == "autotune"
        if attribute or (isinstance(node, ast.ImportFrom) and any(alias.name == "autotune" for alias in node.names)):
            yield node.lineno, "autotunes: ship configurations instead"
        called = _dotted(node.func) if isinstance(node, ast.Call) else ""
        if called.startswith(tuple(f"{module}." for module in DEVICE_MODULES)):
            yield node.lineno, f"calls {called} at import time, where there may be no GPU"


def _imported_packages(node: ast.AST) -> list[str]:
    """The top-level packages of an absolute import."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [(node.module or "").partition(".")[0]]
    return []


def _import_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: decorators and defaults, but not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Lambda):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in (*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)):
                yield part
                yield from _import_time_nodes(part)
            continue
        yield child
        yield from _import_time_nodes(child)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes on a name; the chain's end for one on anything else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_layout", description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to check (default: this one)")
    config = Config.load(parser.parse_args(argv).root)
    problems = check(config)
    for problem in problems:
        print(f"torch-ext/{config.module}/{problem}")
    if not problems:
        print(f"torch-ext/{config.module}: keeps the layout rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
