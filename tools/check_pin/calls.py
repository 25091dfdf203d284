"""A consumer's manifest: a JSON list of the calls that it makes, checked against the signatures in a revision.

    [
      {"call": "fused_linear_cross_entropy", "positional": 3, "keywords": ["bias", "return_metrics"],
       "metrics": ["num_correct_tokens"]},
      {"call": "fused_linear_log_probs", "positional": 3, "keywords": ["outputs"], "fields": ["log_probs", "entropy"]},
      {"call": "layers.LinearCrossEntropy"}
    ]

`positional` is the number of arguments by position and `keywords` the names of the others; `fields` are attributes
that the consumer reads off the result, `metrics` keys of the dict that comes with `return_metrics=True`. An entry with
`call` alone only asks for the name to be there.
"""

import json
from pathlib import Path
from typing import NamedTuple

from ..public_api import describe, signature
from .report import Failed


class Call(NamedTuple):
    """One entry of a manifest; `positional` is None where only the name is asked for."""

    call: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def __str__(self) -> str:
        arguments = [*("..." for _ in range(self.positional or 0)), *(f"{name}=..." for name in self.keywords)]
        return f"{self.call}({', '.join(arguments)})"


def read_manifest(path: Path) -> list[Call]:
    """ValueError: what is wrong with which entry."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} must be a JSON list with at least one call")
    return [_entry(entry, f"{path}: entry {number}") for number, entry in enumerate(entries)]


def _entry(entry: object, where: str) -> Call:
    if not isinstance(entry, dict) or not isinstance(entry.get("call"), str):
        raise ValueError(f'{where} must be an object with "call", the name of a function or class')
    unknown = sorted(entry.keys() - set(Call._fields))
    if unknown:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(Call._fields)}")
    lists = {key: entry.get(key, []) for key in ("keywords", "fields", "metrics")}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{where}: {key!r} must be a list of names, not {value!r}")
    positional = entry.get("positional", 0 if entry.keys() - {"call"} else None)
    if positional is not None and (type(positional) is not int or positional < 0):
        raise ValueError(f"{where}: 'positional' must be a number of arguments, not {positional!r}")
    return Call(entry["call"], positional, *(tuple(lists[key]) for key in ("keywords", "fields", "metrics")))


def check_calls(package: Path, calls: list[Call]) -> str:
    """The package at `package`, read and not run, takes every one of the calls."""
    try:
        api = describe(package)
    except (OSError, ValueError, SyntaxError) as error:
        raise Failed("unreadable-api", f"the public API of {package.name} can't be read: {error}") from error
    wrong = [problem for call in calls for problem in _problems(api, call)]
    if wrong:
        raise Failed("api-changed", *wrong)
    return f"takes every call of the manifest ({len(calls)})"


def _problems(api: dict, call: Call) -> list[str]:
    found = _look_up(api["names"], call.call)
    if found is None:
        return [f"{call.call} is gone; there are {', '.join(api['names'])}"]
    if call.positional is None:
        return []
    if "parameters" not in found:
        return [f"{call.call} is not a function, but the manifest calls it"]
    problems = []
    try:
        signature(found).bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        problems.append(f"{call} does not fit any more: {error}; it takes ({', '.join(found['parameters'])})")
    classes = {**api["types"], **api["names"]}
    result = classes.get(found["returns"], {"fields": []})
    fields = {field.partition(":")[0] for field in result["fields"]}
    problems += [f"{call.call} returns no field {name}" for name in call.fields if name not in fields]
    return problems


def _look_up(names: dict, dotted: str) -> dict | None:
    """`layers.Layer.forward`: a class of a submodule and a method of a class are reached by dots."""
    first, *rest = dotted.split(".")
    found = names.get(first)
    for part in rest:
        found = found and {**found.get("classes", {}), **found.get("methods", {})}.get(part)
    return found


def check_metrics(observed: list[str], calls: list[Call]) -> None:
    """`observed` are the keys that the kernel returned when it was run."""
    missing = {
        f"{call.call} returns no metric {name}" for call in calls for name in call.metrics if name not in observed
    }
    if missing:
        raise Failed("api-changed", *sorted(missing), f"there are {', '.join(observed)}")
