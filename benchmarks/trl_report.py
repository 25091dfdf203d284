"""The tables of docs/trl.md, from the results of `python -m benchmarks.trl_step`: a part of `benchmarks.report`."""

from __future__ import annotations

import json
from pathlib import Path

from .provenance import EARLIER, sentence, source
from .trl_heads import HEADS
from .trl_rows import ROWS
from .trl_step import MODES, SCHEMA

LEGEND = (
    "Median milliseconds of a step (peak memory in GiB, weights and optimizer states included). `vocab/(L x H)` is "
    "the vocabulary over layers times hidden size; *loss's share* is what TRL's step takes beyond the same step "
    "without a loss head; *faster* compares cce with TRL's default; *of the possible* is that gain over the gain of a "
    "loss that consists of its GEMMs and nothing else."
)


PEERS = ("nll", "chunked", "liger")  # other libraries' heads: shown from an earlier run too, but never compared


def read(results: Path) -> list[dict]:
    """The newest run's case of every device, row and mode, each with its run under "run"; a peer's result that it
    lacks, as it was not run or absent, is the last run's that had one, with that run under "run"."""
    runs = [json.loads(p.read_text()) for p in sorted(results.glob("*.json"))]
    runs = [r for r in runs if isinstance(r, dict) and r.get("schema") == SCHEMA]
    cases: dict[tuple, dict] = {}
    for run in sorted(runs, key=lambda r: r["date"]):
        for case in run["cases"]:
            key = (run["device"]["name"], case["mode"], case["row"])
            older = cases.get(key, {"results": {}})
            kept = {
                head: {"run": older["run"], **result}
                for head, result in older["results"].items()
                if head in PEERS
                and result["status"] == "ok"
                and case["results"].get(head, {"status": "absent"})["status"] == "absent"
            }
            cases[key] = {**case, "run": run, "results": {**case["results"], **kept}}
    order = list(ROWS)
    return sorted(cases.values(), key=lambda c: (c["run"]["device"]["name"], order.index(c["row"])))


def milliseconds(case: dict, head: str) -> float | None:
    """Of the case's own run: times of two runs are not to be compared."""
    result = case["results"].get(head, {})
    return None if "run" in result else result.get("median_ms")


def loss_share(case: dict) -> float | None:
    """The part of TRL's step that its loss head takes."""
    nll, none = milliseconds(case, "nll"), milliseconds(case, "none")
    return None if nll is None or none is None else (nll - none) / nll


def speedup(case: dict) -> float | None:
    """By how much cce shortens TRL's step."""
    cce, nll = milliseconds(case, "cce"), milliseconds(case, "nll")
    return None if cce is None or nll is None else (nll - cce) / nll


def share_of_possible(case: dict) -> float | None:
    """cce's gain over TRL's default, as a part of the gain of a loss at the floor."""
    cce, nll, floor = (milliseconds(case, head) for head in ("cce", "nll", "floor"))
    return None if None in (cce, nll, floor) or nll <= floor else (nll - cce) / (nll - floor)


def _cell(case: dict, head: str) -> str:
    result = case["results"].get(head)
    if result is None:
        return "not run"
    if result["status"] != "ok":
        return result["status"]
    peak = result["peak_bytes"]
    text = f"{result['median_ms']:.1f}" + ("" if peak is None else f" ({peak / 2**30:.1f})")
    return text + (f" {EARLIER}" if "run" in result else "")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def table(cases: list[dict]) -> list[str]:
    heads = [h for h in HEADS if any(h in c["results"] for c in cases)]
    title = {h: next(c["results"][h]["title"] for c in cases if h in c["results"]) for h in heads}
    derived = {"loss's share": loss_share, "faster": speedup, "of the possible": share_of_possible}
    head_cells = [f"**{title[h]}**" if h == "cce" else title[h] for h in heads]
    columns = ["step", *head_cells, "vocab/(L x H)", *derived]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for case in cases:
        cells = [f"**{_cell(case, h)}**" if h == "cce" else _cell(case, h) for h in heads]
        ratio = f"{case['vocab'] / (case['layers'] * case['hidden']):.1f}"
        lines.append(_row([case["title"], *cells, ratio, *(_percent(f(case)) for f in derived.values())]))
    return lines


def reasons(cases: list[dict]) -> list[str]:
    """Why a head has no figure, once for every reason."""
    found: dict[tuple, list[str]] = {}
    for case in cases:
        for head, r in case["results"].items():
            if r["status"] not in ("ok", "oom"):
                found.setdefault((HEADS[head].name, r["status"], r["reason"]), []).append(case["row"])
    return [f"- {h}: {status} at {', '.join(rows)} ({why})" for (h, status, why), rows in found.items()]


def _source(run: dict) -> str:
    v = run["versions"]
    return ", ".join([source(run), *(f"{p} {v[p]}" for p in ("triton", "transformers", "peft") if v.get(p))])


def provenance(cases: list[dict]) -> str:
    own: dict[str, list[str]] = {}
    for case in cases:
        own.setdefault(_source(case["run"]), []).append(case["row"])
    earlier = dict.fromkeys(_source(r["run"]) for c in cases for r in c["results"].values() if "run" in r)
    return f"{cases[0]['run']['device']['name']}; " + sentence(own, earlier)


def block(cases: list[dict]) -> str:
    """The section's text; empty without results."""
    lines: list[str] = []
    for device in dict.fromkeys(c["run"]["device"]["name"] for c in cases):
        for mode, title in MODES.items():
            mine = [c for c in cases if c["run"]["device"]["name"] == device and c["mode"] == mode]
            if mine:
                lines += [f"### {device}, {title}", "", *table(mine), "", provenance(mine), ""]
                if why := reasons(mine):
                    lines += ["Without a figure:", "", *why, ""]
    return "\n".join(["## Measured", "", LEGEND, "", *lines]).strip() if lines else ""
