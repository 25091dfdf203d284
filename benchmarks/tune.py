"""Measure tile shapes of the forward kernel on the GPU at hand and write them where the package looks for them.

    make build && python -m benchmarks.tune            # a few minutes; writes configs/<device name>.json
    make build                                         # ship it

For each hidden size every candidate runs on one chunk of 4096 rows, with and without storing E, with the metrics
that a trainer asks for; the fastest median wins. Candidates that do not compile or do not fit are skipped. Several
candidates within the noise are a tie, and the first of the list wins it.
"""

import argparse
import functools
import importlib
import itertools
import json
from pathlib import Path

import torch
from rich.progress import track

from benchmarks import peers
from benchmarks.timing import Samples, time_batch

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "torch-ext" / "fused_linear_ce" / "backends" / "triton" / "configs"
HIDDEN_SIZES = (640, 1024, 2048, 4096)
ROWS, VOCAB = 4096, 131072
NOISE = 0.01


SHAPES = {
    "pipeline": [(128, 256, 64, 4, 4)],  # hopper.py's own
    "descriptors": [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 128, 8, 2)],
    "pointers": [(128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 256, 32, 8, 3), (128, 64, 32, 4, 4)],
}


def candidates(tiles_type, loads: str) -> list:
    """Tile shapes worth a try, the likeliest first."""
    return [tiles_type(*s, group, loads) for s, group in itertools.product(SHAPES[loads], (16, 8, 32))]


def measure(step, device: torch.device) -> float:
    """Median milliseconds; compiles and warms up first."""
    for _ in range(2):
        step()
    samples = Samples()
    for _ in range(3):
        times, host = time_batch(step, lambda: None, 5, device)
        samples.rounds.append(times)
        samples.host += host
    return samples.summary()["median_ms"]


def tune(module, hidden_sizes, device: torch.device, rows: int = ROWS, vocab: int = VOCAB) -> tuple[dict, dict]:
    """({"store": entries, "forward": entries}, {what was timed: milliseconds})."""
    base = importlib.import_module(f"{module.__name__}.backends.base")
    triton_backend = importlib.import_module(f"{module.__name__}.backends.triton")
    tuning = triton_backend.tuning
    wants = base.Wants(entropy=True, is_top1=True)
    chosen, timed = {"store": [], "forward": []}, {}
    for hidden_size in hidden_sizes:
        x = torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16)
        weight = torch.randn(vocab, hidden_size, device=device, dtype=torch.bfloat16) * hidden_size**-0.5
        targets = torch.randint(vocab, (rows,), device=device)
        exps = torch.empty(rows, vocab, device=device, dtype=torch.bfloat16)
        head = base.Head(weight, None, 1.0, None, None, torch.bfloat16)
        stats = base.Stats.empty(rows, wants, torch.float32, device)
        for kind in chosen:
            best = None
            out = exps if kind == "store" else None
            tries = candidates(tuning.Tiles, tuning.best_loads(device))
            for tiles in track(tries, description=f"hidden size {hidden_size}, {kind}"):
                step = functools.partial(triton_backend.forward, x, targets, head, wants, stats, out, tiles)
                try:
                    ms = measure(step, device)
                except Exception as error:  # a shape that does not compile or fit is no candidate
                    timed[f"{kind} {hidden_size} {tuple(tiles)}"] = type(error).__name__
                    continue
                timed[f"{kind} {hidden_size} {tuple(tiles)}"] = ms
                if best is None or ms < best[0] * (1 - NOISE):
                    best = (ms, tiles)
            chosen[kind].append({"max_hidden_size": hidden_size, "tiles": best[1]._asdict()})
    for entries in chosen.values():
        entries[-1]["max_hidden_size"] = 1 << 30  # the largest size's tiles serve everything above
    return chosen, timed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=Path, help="directory with the built variants (default: build/)")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="directory for <device name>.json")
    parser.add_argument("--hidden-sizes", default=",".join(map(str, HIDDEN_SIZES)))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA or ROCm device here: tile shapes are measured, not guessed")
    device = torch.device("cuda", torch.cuda.current_device())
    module, _ = peers.load_kernel(args.build)
    chosen, timed = tune(module, [int(h) for h in args.hidden_sizes.split(",")], device)
    for what, ms in timed.items():
        print(f"{what:60} {ms}")
    path = args.out / (torch.cuda.get_device_name(device).replace(" ", "_") + ".json")
    path.write_text(json.dumps(chosen, indent=2) + "\n")
    print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
