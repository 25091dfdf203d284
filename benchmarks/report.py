"""Tables and plots from benchmarks/results/*.json.

    python -m benchmarks.report            # writes RESULTS.md, the plots, and the blocks in README.md and docs/trl.md
    python -m benchmarks.report --check    # exits 1 when one of the texts is stale

A block lies between `<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`. A column of a table is one
run's: all contenders of a shape and their floor were timed together; of several runs the newest is shown. A peer
that was not in it keeps its figure from the last run that had it, marked, over the floor of that run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from . import trl_report
from .peers import contender
from .provenance import EARLIER, commit, sentence, source
from .workloads import SCENARIOS, SHAPES

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
MAIN = ("fwd_bwd", "random")
OWN = ("ours", "ours-graph")  # figures of this kernel's version, which a newer run makes obsolete
WORKSPACE = "ours@"  # before the bytes: this kernel with less or more memory than by default


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """What one table shows: cases of one device, dtype, scenario and input set, one for every shape."""

    device: dict
    scenario: str
    title: str
    inputs: str
    dtype: str
    named: bool  # the shapes of workloads.SHAPES; other sizes are a table of their own
    cases: dict[str, dict] = field(default_factory=dict)  # shape -> case, with its run under "run"

    @property
    def subject(self) -> str:
        return f"{self.title}, {self.inputs} inputs"

    @property
    def contenders(self) -> list[str]:
        names = [n for n in self._names() if not n.startswith(WORKSPACE)]
        return sorted(names, key=lambda n: (n != "ours", names.index(n)))

    @property
    def workspaces(self) -> list[str]:
        """Smallest first."""
        return sorted((n for n in self._names() if n.startswith(WORKSPACE)), key=lambda n: contender(n).workspace)

    def _names(self) -> list[str]:
        names = dict.fromkeys(n for case in self.cases.values() for n in case["results"])
        return [n for n in names if n not in ("floor", "logits-gemm")]

    def result(self, shape: str, name: str) -> dict | None:
        return self.cases[shape]["results"].get(name)

    def label(self, name: str) -> str:
        return next(r["title"] for s in self.cases if (r := self.result(s, name)))


def read(results: Path) -> list[Group]:
    groups: dict[tuple, Group] = {}
    runs = [json.loads(p.read_text()) for p in sorted(results.glob("*.json"))]
    runs = [r for r in runs if isinstance(r, dict) and r.get("schema") == SCHEMA]
    for run in sorted(runs, key=_recency(runs)):
        for case in run["cases"]:
            named = case["shape"] in SHAPES
            key = (run["device"]["name"], case["dtype"], case["scenario"], case["inputs"], named)
            if key not in groups:
                groups[key] = Group(
                    run["device"], case["scenario"], case["scenario_title"], case["inputs"], case["dtype"], named
                )
            cases, shape = groups[key].cases, case["shape"]
            older = cases.get(shape, {"results": {}})
            results = _kept(older, run) | _with_errors(case["results"], older)
            cases[shape] = {**case, "run": run, "results": results}
    for g in groups.values():
        g.cases = dict(sorted(g.cases.items(), key=lambda kv: _shape_order(kv[0])))
    # GPUs first, then in the order of the scenarios
    return sorted(groups.values(), key=lambda g: (g.device["type"] == "cpu", g.device["name"], _scenario_order(g)))


def _recency(runs: list[dict]):
    """The order of the runs: first those without this kernel's default, whose other workspaces stand beside another
    run's; then by their commits' last dates, and of one commit those last that were timed for longest: a run that
    compares values times little."""
    last: dict[str, str] = {}
    for r in runs:
        last[r["commit"]] = max(r["date"], last.get(r["commit"], ""))

    def order(run: dict) -> tuple:
        default = any("ours" in case["results"] for case in run["cases"])
        return default, last[run["commit"]], run["settings"]["budget_s"], run["date"]

    return order


def _kept(case: dict, run: dict) -> dict:
    """What a newer run of the case takes over where it has none of its own, and tables mark: a peer's, which did not
    change; that a peer was absent or could not do it; this kernel's of the same commit, or with other workspaces, of
    which some are too small."""
    return {
        name: {"run": case["run"], **result}
        for name, result in case["results"].items()
        if (result["status"] in ("ok", "absent", "unsupported") or name.startswith(WORKSPACE))
        and (name not in OWN or case["run"]["commit"] == run["commit"])
    }


def _with_errors(results: dict, older: dict) -> dict:
    """Results of a run that measured times alone, with the errors of the last run that compared values."""
    known = {name: r for name, r in older["results"].items() if r.get("errors")}

    def completed(name: str, result: dict) -> dict:
        if result["status"] != "ok" or result.get("errors") or name not in known:
            return result
        last = known[name]
        run = last.get("errors_run") or last.get("run") or older["run"]
        return {**result, "errors": last["errors"], "errors_run": run}

    return {name: completed(name, result) for name, result in results.items()}


def _shape_order(name: str) -> tuple:
    return (list(SHAPES).index(name),) if name in SHAPES else (len(SHAPES), name)


def _scenario_order(g: Group) -> tuple:
    names = list(SCENARIOS)
    return (names.index(g.scenario) if g.scenario in names else len(names), g.inputs, g.dtype, not g.named)


# --- tables ----------------------------------------------------------------------------------------------------------


def _row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _shape_head(case: dict) -> str:
    name = f"{case['shape']}: " if case["shape"] in SHAPES else ""
    model = f" ({case['model']})" if case["model"] else ""
    return f"{name}{case['tokens']} x {case['vocab']} x {case['hidden']}{model}"


def ratio_table(group: Group) -> list[str]:
    cases = list(group.cases.values())
    shortest = next(iter(cases))["floor_gemms"]
    lines = [_row(["x floor (extra MiB)", *map(_shape_head, cases)]), _row(["---"] * (len(cases) + 1))]
    floors = [
        f"{c['results']['floor']['median_ms']:.1f} ms" if "median_ms" in c["results"]["floor"] else "-" for c in cases
    ]
    lines.append(_row([f"floor: {' + '.join(shortest)}", *floors]))
    for name in group.contenders:
        label, cells = group.label(name), [_ratio_cell(group, shape, name) for shape in group.cases]
        if name == "ours":
            label, cells = f"**{label}**", [f"**{c}**" for c in cells]
        lines.append(_row([label, *cells]))
    return lines


def _ratio_cell(group: Group, shape: str, name: str) -> str:
    r = group.result(shape, name)
    if r is None:
        return "not run"
    if r["status"] != "ok":
        return r["status"]
    if "ratio_to_floor" not in r:
        return f"{r['median_ms']:.1f} ms"
    mark = f" {EARLIER}" if "run" in r else ""
    return f"{r['ratio_to_floor']:.2f} ({_mib(r['peak_extra_bytes'])}){mark}"


def workspace_table(group: Group) -> list[str]:
    """Time against memory: a column for each shape that was timed with other workspaces than the default."""
    shapes = [s for s in group.cases if any(group.result(s, n) for n in group.workspaces)]
    if not shapes:
        return []
    lines = [_row(["workspace: x floor (extra MiB)", *shapes]), _row(["---"] * (len(shapes) + 1))]
    for name in [*group.workspaces, "ours"]:
        label = "default" if name == "ours" else name.removeprefix(WORKSPACE)
        lines.append(_row([label, *(_ratio_cell(group, shape, name) for shape in shapes)]))
    return lines


def error_table(group: Group) -> list[str]:
    """The largest relative error of each contender over the shapes."""
    keys = [k for k in ("loss", "entropy", "dX", "dW", "db") if any(k in e for e in _all_errors(group))]
    if not keys:
        return []
    lines = [_row(["largest error against float64", *keys]), _row(["---"] * (len(keys) + 1))]
    for name in group.contenders:
        found = [r for s in group.cases if (r := group.result(s, name)) and r.get("errors")]
        if found:
            worst = [max((r["errors"][k] for r in found if k in r["errors"]), default=None) for k in keys]
            commits = dict.fromkeys(commit(r["errors_run"]) for r in found if "errors_run" in r and "run" not in r)
            label = group.label(name) + (f" (commit {', '.join(commits)})" if commits else "")
            label += f" {EARLIER}" if any("run" in r for r in found) else ""
            lines.append(_row([label, *("-" if w is None else f"{w:.1e}" for w in worst)]))
    return lines


def _all_errors(group: Group) -> list[dict]:
    return [r.get("errors", {}) for c in group.cases.values() for r in c["results"].values()]


def reasons(group: Group) -> list[str]:
    """Why a contender has no figure, once for every reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for shape, case in group.cases.items():
        for r in case["results"].values():
            if r["status"] != "ok":
                found.setdefault((r["title"], r["status"], r["reason"]), []).append(shape)
    lines = []
    for (title, status, reason), shapes in found.items():
        where = "" if len(shapes) == len(group.cases) else f" at {', '.join(shapes)}"
        lines.append(f"- {title}: {status}{where}" + ("" if status == "oom" else f" ({reason})"))
    return lines


def _source(run: dict) -> str:
    triton = run["versions"].get("triton")
    return source(run) + (f", Triton {triton}" if triton else "")


def provenance(group: Group) -> str:
    newest: dict[str, list[str]] = {}
    for shape, case in group.cases.items():
        newest.setdefault(_source(case["run"]), []).append(shape)
    earlier = dict.fromkeys(
        _source(r["run"]) for c in group.cases.values() for r in c["results"].values() if "run" in r
    )
    return f"{group.device['name']}, {group.dtype}; " + sentence(newest, earlier, ", over that run's floor")


def _short_device(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def plot_name(group: Group) -> str:
    return f"{_short_device(group.device['name'])}-{group.scenario}-{group.inputs}.png"


def shown(groups: list[Group]) -> list[Group]:
    """What the README has: of each device the named shapes, and other sizes only where no shape is named."""
    named = {g.device["name"] for g in groups if g.named}
    return [g for g in groups if g.named or g.device["name"] not in named]


def summary_table(groups: list[Group]) -> list[str]:
    """The other scenarios of a device in one table: this kernel, and the fastest peer beside it."""
    shapes = sorted({s for g in groups for s in g.cases}, key=_shape_order)
    peers = any(not n.startswith("ours") for g in groups for n in g.contenders)
    head = "x floor, ours (fastest peer timed)" if peers else "x floor, ours"
    lines = [_row([head, *shapes, "commit"]), _row(["---"] * (len(shapes) + 2))]
    for g in groups:
        cells = []
        for shape in shapes:
            if shape not in g.cases:
                cells.append("-")
                continue
            ok = {n: r for n in g.contenders if (r := g.result(shape, n)) and "ratio_to_floor" in r}
            others = [n for n in ok if not n.startswith("ours")]
            best = min(others, key=lambda n: ok[n]["ratio_to_floor"], default=None)
            mine = (
                f"**{ok['ours']['ratio_to_floor']:.2f}**"
                if "ours" in ok
                else g.cases[shape]["results"].get("ours", {}).get("status", "not run")
            )
            mark = f" {EARLIER}" if best and "run" in ok[best] else ""
            cells.append(mine + (f" ({ok[best]['ratio_to_floor']:.2f} {ok[best]['title']}{mark})" if best else ""))
        floor = " + ".join(next(iter(g.cases.values()))["floor_gemms"])
        commits = ", ".join(dict.fromkeys(commit(case["run"]) for case in g.cases.values()))
        lines.append(_row([f"{g.subject}; floor: {floor}", *cells, commits]))
    return lines


LEGEND = (
    "Ratios are medians over the floor, the time of the GEMMs that the scenario cannot do without as plain matrix "
    "products on the same inputs in the same run; in brackets the peak memory in MiB beyond the inputs, less the "
    "returned gradients (which may not exist yet at the peak: `plan` counts all that a call holds). Contenders that "
    "offer accuracy and entropy (this kernel, TRL) compute them; the others only the loss."
)


def readme_block(groups: list[Group]) -> str:
    lines: list[str] = []
    by_device: dict[tuple, list[Group]] = {}
    for g in shown(groups):
        by_device.setdefault((g.device["name"],), []).append(g)
    for mine in by_device.values():
        main = [g for g in mine if (g.scenario, g.inputs) == MAIN]
        for g in main:
            lines += [f"### {g.title}, {g.device['name']}, {g.dtype}", "", *ratio_table(g), ""]
            lines += [f"![time and memory](benchmarks/results/{plot_name(g)})", "", provenance(g), ""]
            if curve := workspace_table(g):
                lines += [*curve, ""]
            if why := reasons(g):
                lines += ["Without a figure:", "", *why, ""]
        if others := [g for g in mine if g not in main]:
            lines += [f"The other scenarios, {mine[0].device['name']}:", "", *summary_table(others), ""]
            sources: dict[str, list[str]] = {}
            for g in others:
                sources.setdefault(provenance(g), []).append(g.subject)
            lines += [*(f"- {'; '.join(rows)}: {text}" for text, rows in sources.items()), ""]
    if not lines:
        return "No results yet."
    return "\n".join(
        [LEGEND, "", *lines, "All tables, with the errors: [benchmarks/RESULTS.md](benchmarks/RESULTS.md)."]
    )


def results_page(groups: list[Group]) -> str:
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.report` from `results/*.json`; NOTES.md has the method.",
        "",
    ]
    lines += [LEGEND, ""]
    for g in groups:
        sizes = "" if g.named else ", other sizes"
        lines += [f"## {g.title}; {g.inputs} inputs, {g.device['name']}, {g.dtype}{sizes}", "", *ratio_table(g), ""]
        if curve := workspace_table(g):
            lines += [*curve, ""]
        if errors := error_table(g):
            lines += [*errors, ""]
        lines += [provenance(g), ""]
        if why := reasons(g):
            lines += ["Without a figure:", "", *why, ""]
    if not groups:
        lines += ["No results yet.", ""]
    return "\n".join(lines)


def rewritten(page: str, block: str) -> str:
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page needs one {BEGIN} and one {END} after it")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    body = f"{block.strip()}\n" if block else ""
    return f"{head}{BEGIN}\n{body}{END}{tail}"


# --- the plot --------------------------------------------------------------------------------------------------------

INK, MUTED, GRID, BAND = "#1f2328", "#6e7781", "#e6e8eb", "#eef4ff"
COLOURS = ("#1f6feb", "#d1480c", "#1a7f37", "#8250df", "#bf8700", "#0e8a8a", "#cf222e", "#57606a")
MARKERS = "osD^vPXh"


def _legend(case: dict) -> str:
    size = f"{case['tokens']} x {case['vocab']} x {case['hidden']}"
    return f"{case['shape']}, {case['model']}\n{size}" if case["model"] else size


def plot(group: Group, path: Path) -> None:
    """A row for each contender and a mark for each shape: time over the floor on the left, memory on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def value(shape: str, name: str, key: str) -> float | None:
        r = group.result(shape, name)
        return None if not r or r["status"] != "ok" else r.get(key)

    def typical(name: str) -> float:
        ratios = [v for s in group.cases if (v := value(s, name, "ratio_to_floor"))]
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    names = [n for n in group.contenders if any(value(s, n, "ratio_to_floor") for s in group.cases)]
    names.sort(key=typical)
    if not names:
        return
    plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK})
    fig, (left, right) = plt.subplots(
        1, 2, sharey=True, figsize=(10, 1.8 + 0.42 * len(names)), width_ratios=(3, 2), layout="constrained"
    )
    shapes = list(group.cases)
    offsets = [0.0] if len(shapes) == 1 else [0.34 * (2 * i / (len(shapes) - 1) - 1) for i in range(len(shapes))]
    for axis, key, scale in ((left, "ratio_to_floor", 1.0), (right, "peak_extra_bytes", 2**20)):
        for row, name in enumerate(names):
            if name.startswith("ours"):
                axis.axhspan(row - 0.5, row + 0.5, color=BAND, zorder=0, lw=0)
            for i, shape in enumerate(shapes):
                v = value(shape, name, key)
                if v is None:
                    continue
                v = max(v / scale, 1.0) if key == "peak_extra_bytes" else v
                axis.plot(
                    v,
                    row + offsets[i],
                    MARKERS[i % len(MARKERS)],
                    color=COLOURS[i % len(COLOURS)],
                    ms=5.5,
                    mew=0,
                    zorder=3,
                )
            axis.axhline(row + 0.5, color=GRID, lw=0.8, zorder=1)
        axis.set_xscale("log")
        axis.tick_params(length=0, colors=MUTED)
        axis.grid(axis="x", color=GRID, lw=0.8, zorder=0)
        for side in axis.spines.values():
            side.set_visible(False)
    left.axvline(1.0, color=INK, lw=1.2, zorder=2)
    left.set_yticks(range(len(names)), [group.label(n) for n in names], color=INK)
    for tick, name in zip(left.get_yticklabels(), names):
        tick.set_fontweight("bold" if name.startswith("ours") else "normal")
    left.set_ylim(len(names) - 0.5, -0.5)

    largest = max(v for n in names for s in shapes if (v := value(s, n, "ratio_to_floor")))
    smallest = min(v for n in names for s in shapes if (v := value(s, n, "ratio_to_floor")))
    ticks = [
        t
        for t in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
        if smallest * 0.85 < t < largest * 1.2
    ]
    left.set_xlim(min(0.9, smallest * 0.9), max(1.6, largest * 1.12))
    left.set_xticks(ticks, [f"{t:g}" for t in ticks])
    left.minorticks_off()
    memory = [v / 2**20 for n in names for s in shapes if (v := value(s, n, "peak_extra_bytes")) is not None]
    right.set_xscale("log", base=2)
    if memory:
        low, high = max(1.0, min(memory)) * 0.7, max(1.0, *memory) * 1.4
        powers = next(  # the finest ticks whose labels don't touch
            p for b in (2, 4, 16, 64) if len(p := [b**k for k in range(24) if low < b**k < high]) <= 5 or b == 64
        )
        right.set_xlim(low, high)
        right.set_xticks(powers, [f"{t // 1024} GiB" if t >= 1024 else f"{t} MiB" for t in powers])
    right.minorticks_off()
    for row, name in enumerate(names):
        without: dict[str, list[str]] = {}
        for shape in shapes:
            r = group.result(shape, name)
            if r and r["status"] != "ok":
                without.setdefault(r["status"], []).append(shape)
        text = "; ".join(f"{', '.join(of)}: {status}" for status, of in without.items())
        at = {"xy": (0.995, row), "xycoords": ("axes fraction", "data")}
        left.annotate(text, **at, ha="right", va="center", fontsize=7, color=MUTED)
    left.set_title("time, as a multiple of the bare GEMMs (left is better)", loc="left", fontsize=9, color=MUTED)
    right.set_title("peak memory beyond inputs and gradients", loc="left", fontsize=9, color=MUTED)

    handles = [
        plt.Line2D(
            [],
            [],
            ls="",
            marker=MARKERS[i % len(MARKERS)],
            color=COLOURS[i % len(COLOURS)],
            ms=5.5,
            mew=0,
            label=_legend(c),
        )
        for i, c in enumerate(group.cases.values())
    ]
    fig.legend(handles=handles, loc="outside lower left", ncols=min(4, len(handles)), frameon=False, fontsize=8)
    fig.suptitle(
        f"{group.subject}, {group.device['name']}, {group.dtype}",
        x=0.008, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    fig.savefig(path, dpi=160, facecolor="white", metadata={"Software": None})
    plt.close(fig)


# --- the command -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    p.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--readme", type=Path, default=ROOT / "README.md")
    p.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    p.add_argument("--trl-page", type=Path, default=ROOT / "docs" / "trl.md")
    p.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is stale")
    args = p.parse_args(argv)

    groups = read(args.results)
    blocks = {args.readme: readme_block(groups), args.trl_page: trl_report.block(trl_report.read(args.results))}
    texts = {args.page: results_page(groups)}
    for path, block in blocks.items():
        try:
            texts[path] = rewritten(path.read_text(), block)
        except ValueError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            return 2
    plots = {args.results / plot_name(g): g for g in shown(groups) if (g.scenario, g.inputs) == MAIN}
    if args.check:
        stale = [p.name for p, text in texts.items() if not p.exists() or p.read_text() != text]
        stale += [p.name for p in plots if not p.exists()]
        if stale:
            print(f"stale: {', '.join(stale)}: run python -m benchmarks.report", file=sys.stderr)
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    for path, group in plots.items():
        plot(group, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
