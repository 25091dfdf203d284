"""How the tables name the runs that their figures come from."""

from __future__ import annotations

from collections.abc import Iterable

EARLIER = "†"


def commit(run: dict) -> str:
    """Its short form, with what is behind the 40 digits."""
    return run["commit"] if len(run["commit"]) < 40 else run["commit"][:10] + run["commit"][40:]


def source(run: dict) -> str:
    return f"{run['date'][:10]}, commit {commit(run)}, torch {run['versions']['torch']}"


def sentence(own: dict[str, list[str]], earlier: Iterable[str], note: str = "") -> str:
    """own: by run what it timed; earlier: the runs of the figures that are marked."""
    runs = [run if len(own) == 1 else f"{', '.join(what)}: {run}" for run, what in own.items()]
    marked = "; ".join(earlier)
    return "; ".join(runs) + "." + (f" {EARLIER} of another run{note}: {marked}." if marked else "")
