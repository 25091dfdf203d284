"""Time, peak memory and error of the loss at the LM head, this kernel against its peers in one run.

    python -m benchmarks.loss --shapes A,B,C,D            # on a GPU
    python -m benchmarks.loss --shapes cpu                # anywhere

See NOTES.md for the method. Results go to benchmarks/results/*.json; `python -m benchmarks.report` draws them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from . import peers, timing
from .runner import Settings, log, run_case
from .workloads import INPUTS, SCENARIOS, SHAPES, make_case, parse_shape

SCHEMA = 1
RESULTS = Path(__file__).resolve().parent / "results"


# --- the run ---------------------------------------------------------------------------------------------------------


def commit() -> str:
    """The commit under test: from the environment where there is no git, `-dirty` when the tree differs from it."""
    if value := os.environ.get("FUSED_LINEAR_CE_COMMIT"):
        return value
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("-dirty" if status.strip() else "")


def describe_device(device: torch.device) -> dict:
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": p.name,
            "capability": f"{p.major}.{p.minor}",
            "memory_bytes": p.total_memory,
            "multiprocessors": p.multi_processor_count,
        }
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = found[1].strip() if found else name
    return {"type": "cpu", "name": name, "threads": torch.get_num_threads()}


def load_contenders(names: list[str], options: peers.Options) -> tuple[list[peers.Contender], dict]:
    """(those that can be imported, what is known of all of them)"""
    present, about = [], {}
    for name in names:
        c = peers.contender(name)
        entry = {"title": c.label(), "metrics": list(c.metrics), "version": c.version()}
        try:
            entry.update(status="present", source=c.load(options))
            present.append(c)
        except Exception as error:  # an import can fail in any way: absent, with the reason
            entry.update(status="absent", reason=peers.reason(error))
            log(f"absent: {name}: {entry['reason']}")
        about[name] = entry
    return present, about


def absent_result(about: dict) -> dict:
    return {"title": about["title"], "metrics": about["metrics"], "status": "absent", "reason": about["reason"]}


def select_device(name: str) -> torch.device:
    """The device, made the current one; a "cuda" without an index is the current GPU."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def report_head(schema: int, now: datetime.datetime, device: torch.device, packages) -> dict:
    """What every results file says of when, from what and on what it was made."""
    return {
        "schema": schema,
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "device": describe_device(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{package: peers.version(package) for package in packages},
        },
    }


def run(args: argparse.Namespace) -> dict:
    started = time.monotonic()
    device = select_device(args.device)
    now = datetime.datetime.now(datetime.timezone.utc)
    settings, errors = Settings(args.rounds, args.budget, args.min_iterations, args.settle), not args.no_errors
    contenders, about = load_contenders(args.contenders, peers.Options(build=args.build))
    report = {
        **report_head(SCHEMA, now, device, ("triton", "kernels")),
        "settings": {**dataclasses.asdict(settings), "errors": errors, "seed": args.seed},
        "peers": about,
        "skipped": [],
        "cases": [],
    }
    path = Path(args.json) if args.json else RESULTS / f"{slug(report['device']['name'])}-{now:%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    for scenario in args.scenarios:
        for shape in args.shapes:
            for inputs in args.inputs:
                label = f"{shape} / {scenario} / {inputs}"
                if args.time_limit and time.monotonic() - started > args.time_limit:
                    log(f"skipped: {label}: the time limit is reached")
                    report["skipped"].append({"case": label, "reason": "time limit"})
                    continue
                log(f"{label}")
                begun = time.monotonic()
                try:
                    case = make_case(parse_shape(shape), SCENARIOS[scenario], inputs, device, seed=args.seed)
                    done = run_case(case, contenders, settings, errors)
                except Exception as error:  # the floor or the inputs do not fit: the other cases may
                    log(f"skipped: {label}: {peers.reason(error)}")
                    report["skipped"].append({"case": label, "reason": peers.reason(error)})
                else:
                    absent = {n: absent_result(a) for n, a in about.items() if a["status"] == "absent"}
                    names = [*(f.name for f in peers.FLOORS), *about]
                    done["results"] = {n: absent.get(n) or done["results"][n] for n in names}
                    report["cases"].append(done)
                    log(f"  {time.monotonic() - begun:.1f} s")
                # after every case, so that an interrupted run keeps what it measured
                path.write_text(json.dumps(report, indent=1) + "\n")
                case = None
                timing.release(device)
    path.write_text(json.dumps(report, indent=1) + "\n")
    log(f"results: {path.name}")
    return report


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "device"


# --- stdout ----------------------------------------------------------------------------------------------------------


def mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"


def table(report: dict) -> str:
    lines = []
    for case in report["cases"]:
        lines.append("")
        lines.append(
            f"{case['shape']}: {case['tokens']} x {case['vocab']} x {case['hidden']} {case['dtype']}, "
            f"{case['scenario_title']}, {case['inputs']} inputs; floor = {' + '.join(case['floor_gemms'])}"
        )
        head = ("contender", "ms", "min", "spread", "x floor", "x logits", "extra MiB", "loss", "dX", "dW")
        lines.append("{:16s} {:>9s} {:>9s} {:>6s} {:>7s} {:>8s} {:>9s} {:>8s} {:>8s} {:>8s}".format(*head))
        for name, r in case["results"].items():
            if r["status"] != "ok":
                lines.append(f"{name:16s} {r['status']}: {r['reason'][:90]}")
                continue
            e = r.get("errors", {})
            lines.append(
                f"{name:16s} {r['median_ms']:9.3f} {r['min_ms']:9.3f} {r['spread']:6.1%} "
                f"{r.get('ratio_to_floor', float('nan')):7.3f} {r.get('ratio_to_logits_gemm', float('nan')):8.3f} "
                f"{mib(r['peak_extra_bytes']):>9s} "
                + " ".join(f"{e[k]:8.1e}" if k in e else f"{'-':>8s}" for k in ("loss", "dX", "dW"))
            )
    for skipped in report["skipped"]:
        lines.append(f"skipped: {skipped['case']}: {skipped['reason']}")
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    default_contenders = [c.name for c in peers.CONTENDERS if c.name not in peers.OPTIONAL]
    p = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__.splitlines()[0])

    def listed(known):
        def parse(text: str) -> list[str]:
            names = [n for n in text.split(",") if n]
            for n in names:
                try:
                    known(n)
                except KeyError:
                    raise argparse.ArgumentTypeError(f"unknown name {n!r}") from None
                except ValueError as error:
                    raise argparse.ArgumentTypeError(str(error)) from None
            return names

        return parse

    p.add_argument("--shapes", type=listed(parse_shape), help=f"{', '.join(SHAPES)} or NxVxH; A,B,C,D on a GPU")
    p.add_argument("--scenarios", type=listed(SCENARIOS.__getitem__), default=["fwd_bwd"], help=", ".join(SCENARIOS))
    p.add_argument("--inputs", type=listed(INPUTS.__getitem__), default=["random"], help=", ".join(INPUTS))
    p.add_argument(
        "--contenders",
        type=listed(peers.contender),
        default=default_contenders,
        help=f"default: {','.join(default_contenders)}; ours@256MiB has that workspace, ours-graph is captured; the "
        "floor always runs",
    )
    more = f"more of them: {', '.join(peers.OPTIONAL)}"
    p.add_argument("--with", dest="extra", type=listed(peers.contender), default=[], help=more)
    p.add_argument("--rounds", type=int, default=5, help="turns of every contender, each round in another order")
    p.add_argument("--budget", type=float, default=0.7, help="seconds of timed calls for a contender in a case")
    p.add_argument("--min-iterations", type=int, default=5, help="timed calls at least")
    p.add_argument("--settle", type=float, default=0.2, help="seconds of calls before a turn's timed ones (GPU)")
    p.add_argument("--time-limit", type=float, help="seconds after which no new case is started")
    p.add_argument("--no-errors", action="store_true", help="skip the float64 reference")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--build", type=Path, help="folder with the built variants; default: LOCAL_KERNELS, else build/")
    p.add_argument("--json", help="where the results go; default: benchmarks/results/<device>-<date>.json")
    args = p.parse_args(argv)
    args.contenders = [*args.contenders, *(n for n in args.extra if n not in args.contenders)]
    if args.shapes is None:
        args.shapes = ["cpu"] if torch.device(args.device).type == "cpu" else ["A", "B", "C", "D"]
    return args


def main(argv: list[str] | None = None) -> int:
    report = run(parse_args(argv))
    print(table(report))
    return 0 if report["cases"] else 1


if __name__ == "__main__":
    sys.exit(main())
