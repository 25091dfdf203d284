"""Time and peak memory of a whole training step in TRL with different loss heads, in one run.

    python -m benchmarks.trl_step                      # on a GPU: all rows
    python -m benchmarks.trl_step --rows tiny          # anywhere

A step is what SFTTrainer does for one batch: compute_loss with its metrics, backward, AdamW. All heads are put on one
model, one after the other; the learning rate is 0, so that each sees the same weights. NOTES.md has the method.
Results are written after every row; `python -m benchmarks.report` makes the tables of docs/trl.md from them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from . import peers, timing
from .loss import RESULTS, report_head, select_device, slug
from .runner import Entry, Settings, log, time_in_rounds
from .trl_heads import BOUNDS, HEADS, Head, Options, own_forward
from .trl_rows import GPU_ROWS, IGNORE_INDEX, ROWS, Row, build_model, causal_lm, make_batch

SCHEMA = "trl-step-1"
MODES = {"eager": "eager, gradient checkpointing", "compiled": "compiled layers, no checkpointing"}
PACKAGES = ("triton", "kernels", "trl", "transformers", "accelerate", "peft", "datasets", "liger-kernel")


def set_mode(model: nn.Module, mode: str) -> None:
    """eager: TRL's default. compiled: steps that wait for the GPU only; compiled layers are not taken back."""
    base = causal_lm(model)
    if mode == "eager":
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    base.gradient_checkpointing_disable()
    torch._dynamo.config.automatic_dynamic_shapes = False  # a row has one shape; code for any shape would be slower
    for layer in base.base_model.layers:
        layer.compile()


class HeadEntry(Entry):
    """A head on the model in one mode."""

    def __init__(self, head: Head, run: Run) -> None:
        super().__init__(run.device, run.reset, title=head.title)
        self.head, self.run = head, run
        self.forward = None

    def fail(self, status: str, why: str) -> None:
        self.forward = None
        super().fail(status, why)

    def prepare(self) -> None:
        self.attempt(self._prepare)

    def _prepare(self) -> None:
        run = self.run
        with own_forward(run.model) as base:
            compute_loss = self.head.attach(run.model, run.row, run.batch)
            self.forward = base.__dict__["forward"]
        run.reset()
        with self.attached():
            start = time.perf_counter()
            loss = run.forward_backward(compute_loss)
            timing.synchronize(run.device)
            self.result["first_step_s"] = round(time.perf_counter() - start, 3)
        if self.head.name not in BOUNDS:
            grads = [p.grad for p in run.model.parameters() if p.grad is not None]
            self.result["loss"] = loss.item()
            self.result["grad_norm"] = torch.nn.utils.get_total_norm(grads).item()
            if not math.isfinite(self.result["loss"] + self.result["grad_norm"]):
                raise FloatingPointError(f"loss {self.result['loss']}, gradient norm {self.result['grad_norm']}")
        del loss
        run.optimizer.step()  # its states exist from here on
        run.reset()
        self.step = functools.partial(run.step, compute_loss)

    def measure_memory(self) -> None:
        self.attempt(self._measure_memory)

    def _measure_memory(self) -> None:
        run = self.run
        with self.attached():
            peak, how = timing.peak_memory(self.step, run.reset, run.device)
            run.reset()
            resident = torch.cuda.memory_allocated(run.device) if run.device.type == "cuda" else None
            # beyond weights and optimizer states, and with them
            self.result["peak_extra_bytes"] = peak
            self.result["peak_bytes"] = None if peak is None or resident is None else peak + resident
            self.result["peak_source"] = how
        self.estimate_ms = min(self.time_batch(1)[0])

    def time_batch(self, n: int) -> tuple[list[float], list[float]]:
        with self.attached():
            return super().time_batch(n)

    @contextlib.contextmanager
    def attached(self):
        with own_forward(self.run.model) as base:
            base.forward = self.forward
            yield


class Run:
    """A row's model, batch and optimizer, which all heads share."""

    def __init__(self, row: Row, device: torch.device, seed: int) -> None:
        self.row, self.device = row, device
        self.model = build_model(row, device, seed)
        self.batch = make_batch(row, causal_lm(self.model).config.vocab_size, device, seed)
        # as transformers' Trainer counts them; the first token of a sequence is nobody's target
        self.num_items = (self.batch["labels"][:, 1:] != IGNORE_INDEX).sum()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)

    def reset(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def forward_backward(self, compute_loss) -> torch.Tensor:
        with torch.autocast(self.device.type, self.row.autocast, enabled=self.row.autocast is not None):
            loss = compute_loss(self.batch, self.num_items)
        loss.backward()
        return loss.detach()

    def step(self, compute_loss) -> None:
        self.forward_backward(compute_loss)
        self.optimizer.step()


def run_mode(run: Run, mode: str, heads: list[Head], settings: Settings) -> dict:
    set_mode(run.model, mode)
    entries = {head.name: HeadEntry(head, run) for head in heads}
    for name, entry in entries.items():
        entry.prepare()
        r = entry.result
        outcome = f"first step {r['first_step_s']} s" if entry.step else f"{r['status']}: {r['reason']}"
        log(f"  {name:8s} {outcome}")
    for entry in entries.values():
        if entry.step:
            entry.measure_memory()
    time_in_rounds(entries.values(), settings)
    return {name: entry.result for name, entry in entries.items()}


def describe(row: Row, run: Run, mode: str) -> dict:
    config = causal_lm(run.model).config
    return {
        "row": row.name,
        "title": row.title,
        "model": row.model,
        "mode": mode,
        "mode_title": MODES[mode],
        "tokens": row.tokens,
        "valid_tokens": int(run.num_items),
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "lora_rank": row.lora_rank,
        "dtype": str(next(run.model.parameters()).dtype).removeprefix("torch."),
        "autocast": None if row.autocast is None else str(row.autocast).removeprefix("torch."),
    }


def load_heads(names: list[str], options: Options) -> tuple[list[Head], dict]:
    present, about = [], {}
    for name in names:
        head = HEADS[name]
        try:
            about[name] = {"status": "present", "source": head.load(options), "title": head.title}
            present.append(head)
        except Exception as error:  # an import can fail in any way: absent, with the reason
            about[name] = {"status": "absent", "reason": peers.reason(error), "title": head.title}
            log(f"absent: {name}: {about[name]['reason']}")
    return present, about


def run(args: argparse.Namespace) -> dict:
    started = time.monotonic()
    device = select_device(args.device)
    settings = Settings(args.rounds, args.budget, args.min_iterations, args.settle)
    heads, about = load_heads(args.heads, Options(args.build, args.chunked_trl))
    now = datetime.datetime.now(datetime.timezone.utc)
    report = {
        **report_head(SCHEMA, now, device, PACKAGES),
        "settings": {**dataclasses.asdict(settings), "seed": args.seed},
        "heads": about,
        "skipped": [],
        "cases": [],
    }
    path = Path(args.json) if args.json else RESULTS / f"trl-{slug(report['device']['name'])}-{now:%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        path.write_text(json.dumps(report, indent=1) + "\n")

    def skip(label: str, why: str) -> None:
        log(f"skipped: {label}: {why}")
        report["skipped"].append({"case": label, "reason": why})

    for name in args.rows:
        state = None
        for mode in args.modes:
            label = f"{name} / {mode}"
            if args.time_limit and time.monotonic() - started > args.time_limit:
                skip(label, "time limit")
                save()
                continue
            log(label)
            begun = time.monotonic()
            try:
                torch._dynamo.reset()  # or the last row's layers make this one's a recompilation with dynamic shapes
                state = state or Run(ROWS[name], device, args.seed)
                case = {**describe(ROWS[name], state, mode), "results": run_mode(state, mode, heads, settings)}
            except Exception as error:  # the model does not fit: the other rows may
                skip(label, peers.reason(error))
                state = None
            else:
                case["results"].update({n: a for n, a in about.items() if a["status"] == "absent"})
                report["cases"].append(case)
                log(table(case) + f"\n  {time.monotonic() - begun:.1f} s")
            save()  # an interrupted run keeps what it measured
        del state
        timing.release(device)
    save()
    log(f"results: {path.name}")
    return report


def gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f}"


def table(case: dict) -> str:
    lines = [f"  {case['title']}; {case['mode_title']}"]
    lines.append(
        "  {:8s} {:>9s} {:>7s} {:>7s} {:>9s} {:>9s} {:>10s} {:>10s}".format(
            "head", "ms", "spread", "drift", "peak GiB", "extra GiB", "loss", "grad norm"
        )
    )
    for name, r in case["results"].items():
        if r["status"] != "ok":
            lines.append(f"  {name:8s} {r['status']}: {r['reason'][:90]}")
            continue
        loss, norm = (f"{r[k]:.6f}" if k in r else "-" for k in ("loss", "grad_norm"))
        lines.append(
            f"  {name:8s} {r['median_ms']:9.2f} {r['spread']:7.1%} {r['drift']:7.1%} {gib(r['peak_bytes']):>9s} "
            f"{gib(r['peak_extra_bytes']):>9s} {loss:>10s} {norm:>10s}"
        )
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.trl_step", description=__doc__.splitlines()[0])

    def listed(known):
        def parse(text: str) -> list[str]:
            names = [n for n in text.split(",") if n]
            for n in names:
                if n not in known:
                    raise argparse.ArgumentTypeError(f"unknown name {n!r}: choose from {', '.join(known)}")
            return names

        return parse

    p.add_argument("--rows", type=listed(ROWS), help=f"{', '.join(ROWS)}; default: on a GPU all but the tiny ones")
    p.add_argument("--modes", type=listed(MODES), default=list(MODES), help=", ".join(MODES))
    p.add_argument("--heads", type=listed(HEADS), default=list(HEADS), help=", ".join(HEADS))
    p.add_argument("--rounds", type=int, default=3, help="turns of every head, each round in another order")
    p.add_argument("--budget", type=float, default=3.0, help="seconds of timed steps for a head in a row")
    p.add_argument("--min-iterations", type=int, default=6, help="timed steps at least")
    p.add_argument("--settle", type=float, default=0.2, help="seconds of calls before a turn's timed ones (GPU)")
    p.add_argument("--time-limit", type=float, help="seconds after which no new row is started")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--build", type=Path, help="folder with the built kernel; default: LOCAL_KERNELS, else build/")
    p.add_argument("--chunked-trl", type=Path, help="folder with TRL 1.14.2, for the head `chunked`")
    p.add_argument("--json", help="where the results go; default: benchmarks/results/trl-<device>-<date>.json")
    args = p.parse_args(argv)
    if args.rows is None:
        args.rows = ["tiny"] if torch.device(args.device).type == "cpu" else GPU_ROWS
    # compiled layers stay compiled, so eager comes first
    args.modes = [mode for mode in MODES if mode in args.modes]
    return args


def main(argv: list[str] | None = None) -> int:
    report = run(parse_args(argv))
    return 0 if report["cases"] else 1


if __name__ == "__main__":
    sys.exit(main())
