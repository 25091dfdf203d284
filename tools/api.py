"""The public API as data, api/v<version>.json, and the rule for changing it.

Whoever loads `version=1` gets the head of the branch v1. So the Hub's rule for kernels is that what `__all__` promises
never changes incompatibly within a version, and is extended within one only if all build variants get the extension.
Every upload of a noarch kernel replaces all of its variants; so here an extension is always exempt.

    python -m tools.api                     write the file of build.toml's version; refuses an incompatible change
    python -m tools.api --check             only compare the file with the source
    python -m tools.api --check --base REF  and with what it was at a git revision, so that editing it is no way round
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from typing import NamedTuple

from .config import ROOT, Config
from .public_api import describe, signature

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

BREAKING = (
    "Rule: an incompatible change needs a new kernel version. Raise `version` in build.toml and run "
    "`python -m tools.api`; those who load the old version keep its branch. Or take the change back."
)
EXTENSION = (
    "Rule: an extension keeps the version, as every upload of a noarch kernel replaces all of its variants. Run "
    "`python -m tools.api` and commit the file."
)
COMMAND = "Run `python -m tools.api` and commit the file."


class Change(NamedTuple):
    """One difference between two descriptions of the API."""

    breaking: bool
    text: str


def compare(old: dict, new: dict) -> list[Change]:
    """What changed from `old` to `new`, two files' contents; breaking changes first."""
    # A class that enters or leaves __all__ stays what it was for those who only get it returned.
    changes = [
        *(Change(False, f"{name} entered __all__") for name in old["types"] if name in new["names"]),
        *(Change(True, f"{name} left __all__") for name in old["names"] if name in new["types"]),
        *_compare_maps("", {**old["types"], **old["names"]}, {**new["types"], **new["names"]}, _compare_item),
        *_compare_maps("metric ", old["metrics"], new["metrics"], _compare_metric),
    ]
    return sorted(changes, key=lambda change: not change.breaking)


def _compare_maps(what: str, old: dict, new: dict, compare_one) -> Iterator[Change]:
    for name in old:
        if name in new:
            yield from compare_one(f"{what}{name}", old[name], new[name])
        else:
            yield Change(True, f"{what}{name} was removed")
    yield from (Change(False, f"{what}{name} was added") for name in new if name not in old)


def _compare_metric(name: str, old: str, new: str) -> Iterator[Change]:
    if old != new:
        yield Change(True, f"{name} is {new}, before {old}")


def _compare_item(name: str, old: dict, new: dict) -> Iterator[Change]:
    if old.keys() != new.keys():
        yield Change(True, f"{name} became {_kind(new)}, before {_kind(old)}")
    elif "parameters" in old:
        yield from _compare_functions(name, old, new)
    elif "classes" in old:
        yield from _compare_maps(f"{name}.", old["classes"], new["classes"], _compare_item)
    else:
        yield from _compare_fields(name, old["fields"], new["fields"])
        yield from _compare_maps(f"{name}.", old["methods"], new["methods"], _compare_functions)


def _kind(description: dict) -> str:
    return "a function" if "parameters" in description else "a module" if "classes" in description else "a class"


def _compare_functions(name: str, old: dict, new: dict) -> Iterator[Change]:
    before, after = signature(old).parameters, signature(new).parameters
    changes = [Change(True, f"{name} lost its parameter {p}") for p in before if p not in after]
    for p in after:
        if p not in before:
            required = after[p].default is Parameter.empty and after[p].kind not in VARIADIC
            changes.append(
                Change(required, f"{name} gained the {'required' if required else 'optional'} parameter {p}")
            )
        else:
            changes += _compare_parameter(f"{name}: {p}", before[p], after[p])
    places, now = ([p.name for p in ps.values() if p.kind in POSITIONAL] for ps in (before, after))
    if now[: len(places)] != places and not any(change.breaking for change in changes):
        changes.append(Change(True, f"{name} takes {', '.join(now)} by position, before {', '.join(places)}"))
    if old["returns"] != new["returns"]:
        changes.append(Change(True, f"{name} returns {new['returns']}, before {old['returns']}"))
    yield from changes


def _compare_parameter(name: str, old: Parameter, new: Parameter) -> Iterator[Change]:
    if old.kind != new.kind:
        # What is passed by keyword still is where it may also be passed by position.
        breaking = (old.kind, new.kind) != (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        yield Change(breaking, f"{name} is {new.kind.description}, before {old.kind.description}")
    if old.default != new.default:
        yield Change(old.default is not Parameter.empty, f"{name} has {_default(new)}, before {_default(old)}")
    if old.annotation != new.annotation:
        breaking = not _alternatives(old.annotation) <= _alternatives(new.annotation)
        yield Change(breaking, f"{name} takes {_type(new)}, before {_type(old)}")


def _default(parameter: Parameter) -> str:
    return "no default" if parameter.default is Parameter.empty else f"the default {parameter.default}"


def _type(parameter: Parameter) -> str:
    return "anything" if parameter.annotation is Parameter.empty else parameter.annotation


def _alternatives(annotation: str) -> set[str]:
    """What a Union or Optional consists of, as text."""
    node = ast.parse(annotation, mode="eval").body if isinstance(annotation, str) else None
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Union", "Optional"):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        alternatives = set().union(*(_alternatives(ast.unparse(item)) for item in items))
        return alternatives | ({"None"} if ast.unparse(node.value) == "Optional" else set())
    return {annotation}


def _compare_fields(name: str, old: list[str], new: list[str]) -> Iterator[Change]:
    """Fields may be appended, for results are read by name or from the left; they keep their places and types."""
    yield from (
        Change(True, f"{name}: the field `{field}` was removed or changed") for field in old if field not in new
    )
    yield from (Change(False, f"{name}: the field `{field}` was added") for field in new if field not in old)
    if set(old) <= set(new) and new[: len(old)] != old:
        yield Change(True, f"{name}: its fields changed places")


def observe_metrics(kernel) -> dict[str, str]:
    """Name and dtype of what `return_metrics=True` returns: keys of a dict, which no signature shows."""
    import torch

    hidden, weight, targets = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    _, metrics = kernel.fused_linear_cross_entropy(hidden, weight, targets, return_metrics=True)
    return {name: str(value.dtype).removeprefix("torch.") for name, value in metrics.items()}


def generate(config: Config) -> dict:
    """The file's content for a checkout. It builds the kernel and runs it once, for the metrics."""
    import kernels

    from .build import build

    with tempfile.TemporaryDirectory() as directory:
        build(config, Path(directory) / "build")
        metrics = observe_metrics(kernels.get_local_kernel(Path(directory) / "build"))
    return {"version": config.version, **describe(config.package), "metrics": metrics}


def problems(committed: dict | None, current: dict) -> list[str]:
    """What is wrong with the committed file, and what to do about it; empty if it describes the source."""
    if committed == current:
        return []
    if committed is None:
        return [f"there is no api/v{current['version']}.json, the version in build.toml", COMMAND]
    changes = compare(committed, current)
    if not changes:
        return ["the file describes the same API in another way than the source", COMMAND]
    return [*(change.text for change in changes), BREAKING if changes[0].breaking else EXTENSION]


def breaks(old: dict | None, new: dict) -> bool:
    return old is not None and any(change.breaking for change in compare(old, new))


def at_revision(config: Config, name: str, revision: str) -> dict | None:
    """The content of a committed JSON file at a git revision; None if it isn't there. ValueError: no such revision."""
    git = ["git", "-C", str(config.root)]
    known = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], capture_output=True)
    if known.returncode != 0:
        raise ValueError(f"{revision!r} is no commit of this repository")
    shown = subprocess.run([*git, "show", f"{revision}:{name}"], capture_output=True, text=True)
    return json.loads(shown.stdout) if shown.returncode == 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.api", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file is not right")
    parser.add_argument("--base", metavar="REF", help="with --check: compare with the file at this git revision too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    args = parser.parse_args(argv)
    config = Config.load(args.root)
    name = f"api/v{config.version}.json"
    path = config.root / name
    try:
        base = at_revision(config, name, args.base) if args.base else None
    except ValueError as error:
        parser.error(f"--base: {error}")
    current = generate(config)
    committed = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if args.check:
        wrong = problems(committed, current) or (problems(base, current) if breaks(base, current) else [])
        verdict = f"{name}: {'does not hold' if wrong else 'describes the API'}"
        print(verdict, *(f"  {line}" for line in wrong), sep="\n")
        return 1 if wrong else 0
    if breaks(committed, current):
        lines = [f"{name} was not written", *(f"  {line}" for line in problems(committed, current))]
        print("\n".join(lines), file=sys.stderr)
        return 1
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(current, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {name}: {', '.join(current['names'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
