"""The public API of the kernel, read from the source without importing it, as kernel-builder reads it."""

import ast
from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path


def exported_names(init: Path) -> list[str]:
    """The names in an `__init__.py`'s `__all__`. ValueError unless it is assigned once, as a plain list of strings."""
    tree = _parse(init)
    writes = [node for node in ast.walk(tree) if _writes_all(node)]
    if len(writes) != 1 or writes[0] not in tree.body:
        raise ValueError(f"{init.name} must assign __all__ exactly once, at module level")
    value = getattr(writes[0], "value", None)
    if not isinstance(writes[0], (ast.Assign, ast.AnnAssign)) or not isinstance(value, ast.List):
        raise ValueError("__all__ must be a plain list literal")
    names = [item.value for item in value.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if len(names) != len(value.elts):
        raise ValueError("__all__ must hold string literals only")
    if len(set(names)) != len(names):
        raise ValueError("__all__ names something twice")
    return names


def _writes_all(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def layer_names(package: Path) -> list[str]:
    """The layer classes: those defined in layers.py or layers/__init__.py, if `__all__` exports `layers`."""
    if "layers" not in exported_names(package / "__init__.py"):
        return []
    paths = [path for path in (package / "layers.py", package / "layers" / "__init__.py") if path.exists()]
    if not paths:
        raise ValueError("__all__ exports layers, but there is no layers.py")
    return [node.name for node in _parse(paths[0]).body if isinstance(node, ast.ClassDef)]


def describe(package: Path) -> dict:
    """What `__all__` of the package promises, as plain data.

    `names` has what `__all__` lists: a function as its parameters (as written, with type and default) and its return
    type, a class as its fields and methods, a submodule as its classes. `types` has, in the same form, the classes
    that those functions return and `__all__` does not list. ValueError: a name can't be found in the package.
    """
    init = package / "__init__.py"
    names, types = {}, {}
    for name in exported_names(init):
        path, node = _find(name, init)
        if node is None:
            names[name] = _module(path)
        elif isinstance(node, ast.ClassDef):
            names[name] = _class(node)
        else:
            names[name] = _function(node)
            types.update(_returned_classes(node, path))
    return {"names": names, "types": {name: types[name] for name in sorted(types.keys() - names.keys())}}


def signature(function: dict) -> Signature:
    """A function's description as an inspect.Signature, whose types and defaults are the texts in the source."""
    (node,) = ast.parse(f"def f({', '.join(function['parameters'])}): ...").body
    a = node.args
    positional = a.posonlyargs + a.args
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    groups = [
        (Parameter.POSITIONAL_ONLY, a.posonlyargs, defaults[: len(a.posonlyargs)]),
        (Parameter.POSITIONAL_OR_KEYWORD, a.args, defaults[len(a.posonlyargs) :]),
        (Parameter.VAR_POSITIONAL, [a.vararg] if a.vararg else [], [None]),
        (Parameter.KEYWORD_ONLY, a.kwonlyargs, a.kw_defaults),
        (Parameter.VAR_KEYWORD, [a.kwarg] if a.kwarg else [], [None]),
    ]
    text = lambda node: Parameter.empty if node is None else ast.unparse(node)  # noqa: E731
    return Signature(
        Parameter(arg.arg, kind, default=text(default), annotation=text(arg.annotation))
        for kind, args, group_defaults in groups
        for arg, default in zip(args, group_defaults)
    )


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _find(name: str, path: Path) -> tuple[Path, ast.FunctionDef | ast.ClassDef | None]:
    """The module that defines `name`, as the module at `path` sees it, and the definition; None for a submodule."""
    for node in _parse(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return path, node
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if node.module is None:
                        return _module_path(path, alias.name), None
                    return _find(alias.name, _module_path(path, *node.module.split(".")))
    raise ValueError(f"{path.name} exports {name}, but neither defines it nor imports it from its package")


def _module_path(importer: Path, *parts: str) -> Path:
    base = importer.parent.joinpath(*parts)
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.is_file():
        raise ValueError(f"{importer.name} imports {'.'.join(parts)}, which is not in its package")
    return path


def _returned_classes(function: ast.FunctionDef, path: Path) -> Iterator[tuple[str, dict]]:
    classes = {node.name: node for node in _parse(path).body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(function.returns) if function.returns else ():
        if isinstance(node, ast.Name) and node.id in classes:
            yield node.id, _class(classes[node.id])


def _function(node: ast.FunctionDef) -> dict:
    a = node.args
    positional = a.posonlyargs + a.args
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    parameters = [_declaration(arg, default) for arg, default in zip(positional, defaults)]
    if a.posonlyargs:
        parameters.insert(len(a.posonlyargs), "/")
    if a.vararg or a.kwonlyargs:
        parameters.append(f"*{_declaration(a.vararg, None)}" if a.vararg else "*")
    parameters += [_declaration(arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg:
        parameters.append(f"**{_declaration(a.kwarg, None)}")
    return {"parameters": parameters, "returns": ast.unparse(node.returns) if node.returns else None}


def _declaration(arg: ast.arg, default: ast.expr | None) -> str:
    """`name: type = default`, as far as there are a type and a default."""
    text = arg.arg if arg.annotation is None else f"{arg.arg}: {ast.unparse(arg.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _class(node: ast.ClassDef) -> dict:
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    methods = (item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"))
    return {"fields": fields, "methods": {item.name: _function(item) for item in methods}}


def _module(path: Path) -> dict:
    classes = (node for node in _parse(path).body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    return {"classes": {node.name: _class(node) for node in classes}}
