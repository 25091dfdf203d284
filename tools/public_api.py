"""The public names of the kernel, read from the source without importing it, as kernel-builder reads them."""

import ast
from pathlib import Path


def exported_names(init: Path) -> list[str]:
    """The names in an `__init__.py`'s `__all__`. ValueError unless it is assigned once, as a plain list of strings."""
    tree = ast.parse(init.read_text(encoding="utf-8"), str(init))
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
    tree = ast.parse(paths[0].read_text(encoding="utf-8"), str(paths[0]))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
