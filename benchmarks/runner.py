"""One case: every contender is prepared, checked against the reference and measured, then all are timed in rounds."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass

import torch

from . import peers, timing
from .reference import Reference
from .trained import softmax_statistics
from .workloads import Case


@dataclass
class Settings:
    rounds: int = 5
    budget_s: float = 0.7
    min_iterations: int = 5
    errors: bool = True


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_step(case: Case, contender: peers.Contender):
    """A call as a trainer makes it: forward, and backward where the scenario has one."""
    fn = contender.build(case)
    if contender.is_gemm:
        return fn

    def step():
        with contextlib.ExitStack() as stack:
            if not case.scenario.backward:
                stack.enter_context(torch.no_grad())
            if case.scenario.autocast:
                stack.enter_context(torch.autocast(case.device.type, dtype=case.gemm_dtype))
            loss, metrics = fn()
        if case.scenario.backward:
            loss.backward(case.upstream)
        return loss, metrics

    return step


def is_oom(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


class Entry:
    """A contender's way through one case: prepared, checked, then timed round by round; any failure ends it."""

    def __init__(self, contender: peers.Contender, case: Case) -> None:
        self.contender, self.case = contender, case
        self.samples = timing.Samples()
        self.step = None
        self.result: dict = {"title": contender.label(), "metrics": list(contender.metrics), "status": "ok"}

    def attempt(self, work) -> None:
        failure = None
        try:
            work()
        except peers.Unsupported as error:
            failure = ("unsupported", str(error))
        except Exception as error:  # a peer may fail in any way: the others go on
            failure = ("oom", "out of memory") if is_oom(error) else ("error", peers.reason(error))
        if failure:
            # only now, when the exception is gone: its traceback held the tensors of the failed call
            self.fail(*failure)
            self.case.reset()
            timing.release(self.case.device)

    def fail(self, status: str, why: str) -> None:
        self.step = None
        self.result.update(status=status, reason=why)

    def prepare(self, reference: Reference | None) -> None:
        if self.contender.needs_gpu and self.case.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return self.fail("unsupported", "needs a GPU")
        self.attempt(lambda: self._prepare(reference))

    def _prepare(self, reference: Reference | None) -> None:
        case, device = self.case, self.case.device
        case.reset()
        step = make_step(case, self.contender)
        timing.synchronize(device)
        start = time.perf_counter()
        loss, metrics = step()
        timing.synchronize(device)
        self.result["first_call_s"] = round(time.perf_counter() - start, 4)
        if reference is not None and not self.contender.is_gemm:
            self.result["errors"] = reference.errors(case, loss, metrics)
        del loss, metrics
        case.reset()

        peak, how = timing.peak_memory(step, case.reset, device)
        gradients = sum(t.grad.nbytes for t in case.leaves if t.grad is not None)
        # beyond inputs, and beyond inputs and the gradients that are the call's result
        self.result["peak_bytes"] = peak
        self.result["gradient_bytes"] = gradients
        self.result["peak_extra_bytes"] = None if peak is None else max(0, peak - gradients)
        self.result["peak_source"] = how
        case.reset()
        self.estimate_ms = min(timing.time_batch(step, case.reset, 1, device)[0])
        self.step = step

    def time(self, n: int) -> None:
        self.attempt(lambda: self._time(n))

    def _time(self, n: int) -> None:
        if self.case.device.type == "cuda":
            # the allocator's blocks and the caches are the last contender's: one call to settle
            timing.time_batch(self.step, self.case.reset, 1, self.case.device)
        device_ms, host_ms = timing.time_batch(self.step, self.case.reset, n, self.case.device)
        self.samples.rounds.append(device_ms)
        self.samples.host += host_ms


def crowded(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.memory_reserved(device) > 0.5 * torch.cuda.get_device_properties(device).total_memory


def run_case(case: Case, contenders: list[peers.Contender], settings: Settings) -> dict:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # or compiled code of the last shape makes this one a recompilation with dynamic shapes
    reference = Reference(case) if settings.errors else None
    timing.release(case.device)

    entries = {c.name: Entry(c, case) for c in (*peers.FLOORS, *contenders)}
    for name, entry in entries.items():
        entry.prepare(reference)
        r = entry.result
        outcome = f"first call {r['first_call_s']:.2f} s" if entry.step else f"{r['status']}: {r['reason']}"
        log(f"  {name:16s} {outcome}")
    del reference
    timing.release(case.device)

    for round_ in range(settings.rounds):
        for name in timing.rotation([n for n, e in entries.items() if e.step], round_, settings.rounds):
            entry = entries[name]
            if entry.step:
                n = timing.repeats(entry.estimate_ms, settings.rounds, settings.budget_s, settings.min_iterations)
                entry.time(n)
                if crowded(case.device):
                    timing.release(case.device)

    results = {}
    for name, entry in entries.items():
        if entry.step:
            entry.result.update(entry.samples.summary())
        results[name] = entry.result
    for base, key in (("floor", "ratio_to_floor"), ("logits-gemm", "ratio_to_logits_gemm")):
        base_ms = results[base].get("median_ms")
        for r in results.values():
            if base_ms and "median_ms" in r:
                r[key] = round(r["median_ms"] / base_ms, 4)
    s, shape = case.scenario, case.shape
    trained = {"softmax": softmax_statistics(case.hidden, case.weight)} if case.inputs == "trained" else {}
    return {
        "shape": shape.name,
        "model": shape.model,
        "tokens": shape.tokens,
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "scenario": s.name,
        "scenario_title": s.title,
        "inputs": case.inputs,
        **trained,
        "dtype": str(case.hidden.dtype).removeprefix("torch."),
        "valid_rows": case.valid_rows,
        "floor_gemms": list(s.gemms),
        "results": results,
    }
