"""Every contender is prepared, checked against the reference and measured, then all are timed in rounds.

`run_case` does so for one case of the loss. `Entry` and `time_in_rounds` serve the training steps of trl_step.py too.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Collection
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
    settle_s: float = 0.2  # GPU only


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

    return replayed(step, case) if contender.captured else step


def replayed(step, case: Case):
    """The step, recorded once; what a call returns and the gradients it leaves are the recording's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    case.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    gradients = [leaf.grad for leaf in case.leaves]

    def replay():
        graph.replay()
        for leaf, gradient in zip(case.leaves, gradients):
            leaf.grad = gradient
        return result

    return replay


def is_oom(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower()


class Entry:
    """A contender's way through one case: prepared, then timed round by round; any failure ends it.

    Preparing sets `step`, the call that is timed, and `estimate_ms`, its time. `reset` undoes what a call leaves.
    """

    estimate_ms: float

    def __init__(self, device: torch.device, reset: Callable[[], None], **about) -> None:
        self.device, self.reset = device, reset
        self.samples = timing.Samples()
        self.step: Callable[[], object] | None = None
        self.result: dict = {**about, "status": "ok"}

    def attempt(self, work: Callable[[], None]) -> None:
        failure = None
        try:
            work()
        except peers.Unsupported as error:
            failure = ("unsupported", str(error))
        except Exception as error:  # a contender may fail in any way: the others go on
            failure = ("oom", "out of memory") if is_oom(error) else ("error", peers.reason(error))
        if failure:
            # only now, when the exception is gone: its traceback held the tensors of the failed call
            self.fail(*failure)
            self.reset()
            timing.release(self.device)

    def fail(self, status: str, why: str) -> None:
        self.step = None
        self.result.update(status=status, reason=why)

    def time(self, n: int, settle_s: float) -> None:
        self.attempt(lambda: self._time(n, settle_s))

    def _time(self, n: int, settle_s: float) -> None:
        if self.device.type == "cuda":
            # The allocator's blocks, the caches and above all the clock are the last contender's: after one that
            # needed less power the first calls run faster, until the chip lowers its clock, at first too far.
            self.time_batch(max(1, math.ceil(settle_s * 1e3 / self.estimate_ms)))
        device_ms, host_ms = self.time_batch(n)
        self.samples.rounds.append(device_ms)
        self.samples.host += host_ms

    def time_batch(self, n: int) -> tuple[list[float], list[float]]:
        """Milliseconds of n calls, as timing.time_batch has them."""
        return timing.time_batch(self.step, self.reset, n, self.device)


def time_in_rounds(entries: Collection[Entry], settings: Settings) -> None:
    """Time those that were prepared, in another order every round, and add their summaries to their results."""
    for round_ in range(settings.rounds):
        for entry in timing.rotation([e for e in entries if e.step], round_, settings.rounds):
            n = timing.repeats(entry.estimate_ms, settings.rounds, settings.budget_s, settings.min_iterations)
            entry.time(n, settings.settle_s)
    for entry in entries:
        if entry.step:
            entry.result.update(entry.samples.summary())


class CaseEntry(Entry):
    """A contender for the loss of one case."""

    def __init__(self, contender: peers.Contender, case: Case) -> None:
        super().__init__(case.device, case.reset, title=contender.label(), metrics=list(contender.metrics))
        self.contender, self.case = contender, case

    def prepare(self, reference: Reference | None) -> None:
        if self.contender.needs_gpu and self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return self.fail("unsupported", "needs a GPU")
        self.attempt(lambda: self._prepare(reference))

    def _prepare(self, reference: Reference | None) -> None:
        case, device = self.case, self.device
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
        self.step = step
        self.estimate_ms = min(self.time_batch(1)[0])

    def time(self, n: int, settle_s: float) -> None:
        super().time(n, settle_s)
        if crowded(self.device):
            timing.release(self.device)


def crowded(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.memory_reserved(device) > 0.5 * torch.cuda.get_device_properties(device).total_memory


def run_case(case: Case, contenders: list[peers.Contender], settings: Settings, errors: bool = True) -> dict:
    """errors: whether the contenders are compared with the float64 reference."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # or compiled code of the last shape makes this one a recompilation with dynamic shapes
    reference = Reference(case) if errors else None
    timing.release(case.device)

    entries = {c.name: CaseEntry(c, case) for c in (*peers.FLOORS, *contenders)}
    for name, entry in entries.items():
        entry.prepare(reference)
        r = entry.result
        outcome = f"first call {r['first_call_s']:.2f} s" if entry.step else f"{r['status']}: {r['reason']}"
        log(f"  {name:16s} {outcome}")
    del reference
    timing.release(case.device)

    time_in_rounds(entries.values(), settings)

    results = {name: entry.result for name, entry in entries.items()}
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
