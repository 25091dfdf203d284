"""Clocks and peak memory, for CUDA devices and for the CPU."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give cached blocks back, so that one contender's leftovers do not shape the next one's allocations."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_batch(
    step: Callable[[], object], reset: Callable[[], None], n: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Milliseconds of n calls: (on the device, on the host until the call returned).

    On CUDA the device's time is between two events, so a gap that slow launches leave in it is counted, as a trainer
    would feel it. On the CPU both are the same.
    """
    device_ms, host_ms, events = [], [], []
    for _ in range(n):
        reset()
        if device.type == "cuda":
            events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            events[-1][0].record()
        start = time.perf_counter()
        step()
        host_ms.append((time.perf_counter() - start) * 1e3)
        if device.type == "cuda":
            events[-1][1].record()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        device_ms = [a.elapsed_time(b) for a, b in events]
    reset()
    return device_ms or host_ms, host_ms


def _status_bytes(key: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_memory(step: Callable[[], object], reset: Callable[[], None], device: torch.device) -> tuple[int | None, str]:
    """(peak bytes above what was allocated before the call, how it was measured); the gradients are part of it."""
    reset()
    release(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, "torch.cuda.max_memory_allocated"
    # torch keeps no statistics on the CPU: ask the kernel for the peak resident set, which writing 5 to clear_refs
    # resets. Large tensors are mapped and unmapped one by one, so this follows them; small ones drown in the heap.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None, "no peak statistics on this system"
    before = _status_bytes("VmRSS")
    step()
    peak = _status_bytes("VmHWM")
    if before is None or peak is None:
        return None, "no peak statistics on this system"
    return max(0, peak - before), "peak resident set"


@dataclass
class Samples:
    """All timings of one contender in one case, kept by round."""

    rounds: list[list[float]] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    @property
    def all(self) -> list[float]:
        return [t for r in self.rounds for t in r]

    def summary(self) -> dict:
        times = sorted(self.all)
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [median] * 3
        return {
            "median_ms": round(median, 5),
            "min_ms": round(times[0], 5),
            # relative: the middle half of all samples, and how far the medians of the rounds lie apart
            "spread": round((quartiles[2] - quartiles[0]) / median, 4),
            "drift": round((max(r := self.round_medians()) - min(r)) / median, 4),
            "host_ms": round(statistics.median(self.host), 5),
            "iterations": len(times),
        }

    def round_medians(self) -> list[float]:
        return [statistics.median(r) for r in self.rounds if r]


def repeats(estimate_ms: float, rounds: int, budget_s: float, min_iterations: int) -> int:
    """Timed calls in a round, so that all rounds together take about the budget and never fewer than the minimum."""
    wanted = budget_s * 1e3 / max(estimate_ms, 1e-3)
    total = max(min_iterations, min(int(wanted), 1000))
    return math.ceil(total / rounds)


def rotation(contenders: Sequence[T], round_: int, rounds: int) -> list[T]:
    """The contenders in another order every round: each comes early and late, so a drifting clock hits all alike."""
    n = len(contenders)
    first, direction = round_ * n // rounds, -1 if round_ % 2 else 1
    return [contenders[(first + direction * k) % n] for k in range(n)]
