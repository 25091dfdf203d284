"""What the kernel must compute, in float64 with the whole logits and torch's autograd, and how far off it may be.

Nothing here knows the kernel's formulas: the cross-entropy is torch.nn.functional.cross_entropy's, and autograd makes
every gradient. Also here: inputs, and one way to call the kernel that checks what no call may do (change a tensor of
its caller, give a gradient nobody asked for or of another shape or dtype).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from .conftest import submodule

HALF = (torch.bfloat16, torch.float16)
DIFFERENTIABLE = ("log_probs", "entropy", "lse")
PER_TOKEN = (*DIFFERENTIABLE, "mean_logits", "log_sum_sq_probs", "is_top1")

# --- errors ----------------------------------------------------------------------------------------------------------


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`. NaN and infinities, anywhere, give NaN or inf, which
    no tolerance admits."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference = (actual - expected).norm().item()
    if difference == 0:
        return 0.0
    size = expected.norm().item()
    return difference / size if size else float("inf")


def mean_signed_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """How much larger (in magnitude) the elements are on average, relative to their mean magnitude: what rounding that
    is not to the nearest, or is done too often, leaves behind while every single element looks right."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return ((actual - expected) * expected.sign()).mean().item() / expected.abs().mean().item()


def gradient_tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 3.5e-3)


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the losses and statistics of such inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def value_tolerance(dtype: torch.dtype) -> float:
    """Losses and statistics never pass through half precision: the logits are fp32."""
    return 1e-11 if dtype == torch.float64 else 1e-5


def assert_same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None, name: str = "") -> None:
    if expected is None:
        assert actual is None, name
        return
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, name
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    assert bool(same.all()), f"{name} differs in {int((~same).sum())} elements"


# --- the float64 result ----------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """float64, on the CPU."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    grads: tuple[torch.Tensor | None, ...]  # of hidden, weight, bias
    cancelling: tuple[float, ...]  # size of the terms that add up to each gradient, whatever they cancel
    loss_terms: float = 0.0  # and of those of the loss: lse and z_y, for a row whose difference is next to nothing


def transformed_logits(hidden, weight, bias=None, logit_scale=1.0, softcap=None) -> torch.Tensor:
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    z = logit_scale * z
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _double(tensor, round_to=None) -> torch.Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    rounded = tensor if round_to is None else tensor.to(round_to)
    return rounded.double().clone()


def _entropy(z: torch.Tensor) -> torch.Tensor:
    """-sum p log p, where a class of probability 0 adds 0 to it and to its gradient."""
    log_p = torch.log_softmax(z, 1)
    masked = z == -torch.inf
    return -(torch.softmax(z, 1) * log_p.masked_fill(masked, 0.0)).sum(1)


def _first_argmax(z: torch.Tensor) -> torch.Tensor:
    best = z.max(1, keepdim=True).values == z
    return best.to(torch.int8).argmax(1)


def _terms(grad_rows, x, weight, logit_scale) -> tuple[float, ...]:
    """Norms of dX, dW and db if nothing cancelled, for per-row upstream gradients."""
    g = (grad_rows.abs() * abs(logit_scale)).unsqueeze(1)
    largest = weight.abs().max(0).values
    return ((g * largest).norm().item(), (g * x.abs()).sum(0).norm().item(), g.sum().item())


def reference(
    hidden,
    weight,
    targets,
    bias=None,
    ignore_index=-100,
    logit_scale=1.0,
    softcap=None,
    reduction="mean",
    *,
    num_items=None,
    label_smoothing=0.0,
    z_loss=0.0,
    class_weight=None,
    token_weight=None,
    upstream=None,
    round_to=None,
    **_,
) -> Reference:
    """The loss and the gradients of (loss * upstream).sum(). round_to: the dtype autocast would run in."""
    leaves = [None if t is None else _double(t, round_to).requires_grad_() for t in (hidden, weight, bias)]
    h, w, b = leaves
    y_all = targets.detach().cpu().long().reshape(-1)
    valid = (y_all != ignore_index).nonzero().squeeze(1)
    x = h.reshape(-1, h.shape[-1])[valid]
    y = y_all[valid]
    z = transformed_logits(x, w, b, logit_scale, softcap)
    class_weight = _double(class_weight)
    row_weight = torch.ones(len(y), dtype=torch.float64)
    # y holds no ignored target any more, but -100 may be the index of none of them either
    losses = F.cross_entropy(
        z, y, weight=class_weight, reduction="none", label_smoothing=label_smoothing, ignore_index=-(10**6)
    )
    lse = torch.logsumexp(z, 1)
    if z_loss:
        losses = losses + z_loss * lse**2
    if token_weight is not None:
        row_weight = _double(token_weight).reshape(-1)[valid]
        losses = losses * row_weight
    divisor = 1.0
    if reduction == "none":
        loss = torch.zeros(len(y_all), dtype=torch.float64).index_put((valid,), losses).reshape(targets.shape)
    else:
        loss = losses.sum()
    if reduction == "mean" and len(y):
        if num_items is not None:
            divisor = float(num_items)
        else:
            divisor = float(len(y)) if class_weight is None else class_weight[y].sum().item()
        loss = loss / divisor
    upstream = torch.ones_like(loss) if upstream is None else _double(upstream)
    wanted = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad((loss * upstream).sum(), wanted))
    per_row = upstream.reshape(-1)[valid] if reduction == "none" else upstream.expand(len(y)) / divisor
    with torch.no_grad():
        row_weight = row_weight.abs()
        if class_weight is not None:
            row_weight = row_weight * class_weight.max().clamp(min=1)
        terms = row_weight * (1 + lse.abs()) / divisor
        per_row = per_row * row_weight * (1 + 2 * z_loss * lse.abs())
    return Reference(
        loss.detach(),
        {
            "num_correct_tokens": (_first_argmax(z.detach()) == y).sum() if len(y) else torch.tensor(0),
            "entropy_sum": _entropy(z.detach()).sum(),
            "num_valid_tokens": torch.tensor(len(y)),
            "nll_sum": (lse - z.gather(1, y.unsqueeze(1)).squeeze(1)).detach().sum(),
        },
        tuple(None if t is None else next(grads) for t in leaves),
        _terms(per_row, x.detach(), w.detach(), logit_scale),
        (terms.norm() if reduction == "none" else terms.sum()).item(),
    )


def reference_log_probs(
    hidden,
    weight,
    targets,
    bias=None,
    ignore_index=-100,
    logit_scale=1.0,
    softcap=None,
    *,
    upstream=None,
    round_to=None,
    **_,
) -> tuple[dict[str, torch.Tensor], Reference]:
    """Every per-token output, and the gradients of sum(output * upstream[output])."""
    leaves = [None if t is None else _double(t, round_to).requires_grad_() for t in (hidden, weight, bias)]
    h, w, b = leaves
    y_all = targets.detach().cpu().long().reshape(-1)
    valid = (y_all != ignore_index).nonzero().squeeze(1)
    x, y = h.reshape(-1, h.shape[-1])[valid], y_all[valid]
    z = transformed_logits(x, w, b, logit_scale, softcap)
    log_p = torch.log_softmax(z, 1)
    rows = {
        "log_probs": log_p.gather(1, y.unsqueeze(1)).squeeze(1),
        "entropy": _entropy(z),
        "lse": torch.logsumexp(z, 1),
        "mean_logits": z.mean(1).detach(),
        "log_sum_sq_probs": torch.logsumexp(2 * log_p, 1).detach(),
        "is_top1": _first_argmax(z.detach()) == y if len(y) else torch.zeros(0, dtype=torch.bool),
    }

    def scattered(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(y_all)).index_put((valid,), values).reshape(targets.shape)

    outputs = {name: scattered(values) for name, values in rows.items()}
    upstream = upstream or {}
    objective = sum((outputs[name] * _double(g)).sum() for name, g in upstream.items())
    grads = iter(())
    per_row = torch.zeros(len(y), dtype=torch.float64)
    if upstream:
        grads = iter(torch.autograd.grad(objective, [t for t in leaves if t is not None]))
        for name, g in upstream.items():
            size = 1 + rows["entropy"].detach() if name == "entropy" else 1.0
            per_row = per_row + _double(g).reshape(-1)[valid].abs() * size
    result = Reference(
        objective.detach() if upstream else torch.zeros(()),
        {},
        tuple(None if t is None else next(grads, None) for t in leaves),
        _terms(per_row, x.detach(), w.detach(), logit_scale),
    )
    return {name: value.detach() for name, value in outputs.items()}, result


# --- inputs ----------------------------------------------------------------------------------------------------------

N, V, H = 150, 301, 40  # tokens, classes and width, where a test does not say others


@dataclass(frozen=True)
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None = None

    def to(self, device, dtype=None) -> Inputs:
        move = lambda t: None if t is None else t.to(device, dtype)  # noqa: E731
        return Inputs(move(self.hidden), move(self.weight), self.targets.to(device), move(self.bias))

    def positional(self) -> tuple:
        return (self.hidden, self.weight, self.targets, self.bias)

    def leaves(self, needs=(True, True, True)) -> list[torch.Tensor | None]:
        """hidden, weight and bias as leaves of autograd."""
        return [as_leaf(t, n) for t, n in zip((self.hidden, self.weight, self.bias), needs)]

    def replace(self, **changes) -> Inputs:
        return replace(self, **changes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(N, V, H)"""
        return (self.targets.numel(), *self.weight.shape)


def make_inputs(
    device="cpu", dtype=torch.float32, lead=(N,), vocab=V, hidden_size=H, bias=True, ignored=0.3,
    ignore_index=-100, spread=2.0, seed=0,
) -> Inputs:  # fmt: skip
    """Random inputs whose logits have a standard deviation of about `spread`, with about `ignored` of the targets
    ignored. The same numbers on every device."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*lead, hidden_size, generator=g)
    weight = torch.randn(vocab, hidden_size, generator=g) * (spread / hidden_size**0.5)
    targets = torch.randint(vocab, lead, generator=g)
    targets = torch.where(torch.rand(lead, generator=g) < ignored, ignore_index, targets)
    b = torch.randn(vocab, generator=g) * (spread / 2) if bias else None
    return Inputs(hidden, weight, targets, b).to(device, dtype)


def random(like: torch.Tensor | tuple, device="cpu", dtype=torch.float32, seed=1) -> torch.Tensor:
    shape = like if isinstance(like, (tuple, torch.Size)) else like.shape
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def random_upstream(names, like: torch.Tensor | tuple, device="cpu", dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A gradient for each of these outputs, all of them different."""
    return {name: random(like, device, dtype, seed=k) for k, name in enumerate(names)}


# --- calling the kernel ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] | None
    grads: tuple[torch.Tensor | None, ...]  # of hidden, weight, bias


def as_leaf(tensor: torch.Tensor | None, needs: bool) -> torch.Tensor | None:
    """A leaf that shares the tensor's memory, strides and all."""
    return None if tensor is None else tensor.detach().requires_grad_(needs)


def tracing(on: bool = True):
    """As while torch.compile traces, if on. torch.compiler.is_compiling itself is to stay what it is: Dynamo knows
    torch's functions by identity, from when it is first used."""
    return mock.patch.object(torch.compiler, "_is_compiling_flag", on)


@contextlib.contextmanager
def unchanged(*tensors):
    """Nothing in the block writes to the tensors, not even the same values."""
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    before = [(t, t._version, t.detach().clone()) for t in tensors]
    yield
    for t, version, copy in before:
        assert t._version == version
        assert_same_bits(t.detach(), copy, "a tensor of the caller")


def _gradients(leaves) -> tuple[torch.Tensor | None, ...]:
    for leaf in leaves:
        if leaf is not None and leaf.grad is not None:
            assert leaf.requires_grad
            assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
    return tuple(None if leaf is None else leaf.grad for leaf in leaves)


def run(kernel, inputs: Inputs, *, upstream=None, needs=(True, True, True), **options) -> Outcome:
    """fused_linear_cross_entropy and its backward."""
    leaves = inputs.leaves(needs)
    given = (*inputs.positional(), upstream, *options.values())
    with unchanged(*given):
        out = kernel.fused_linear_cross_entropy(leaves[0], leaves[1], inputs.targets, leaves[2], **options)
        loss, metrics = out if options.get("return_metrics") else (out, None)
        assert loss.requires_grad == any(leaf is not None and leaf.requires_grad for leaf in leaves)
        assert loss.dtype == value_dtype(inputs.hidden.dtype)
        if loss.requires_grad:
            loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    grads = _gradients(leaves)
    for grad, leaf in zip(grads, leaves):
        assert (grad is not None) == (leaf is not None and leaf.requires_grad)
    return Outcome(loss.detach(), metrics, grads)


def run_log_probs(kernel, inputs: Inputs, *, outputs, upstream=None, needs=(True, True, True), **options):
    """fused_linear_log_probs, and the backward of sum(output * upstream[output]): ({name: output}, Outcome)."""
    leaves = inputs.leaves(needs)
    upstream = upstream or {}
    with unchanged(*inputs.positional(), *upstream.values()):
        out = kernel.fused_linear_log_probs(
            leaves[0], leaves[1], inputs.targets, leaves[2], outputs=outputs, **options
        )
        if upstream and any(leaf is not None and leaf.requires_grad for leaf in leaves):
            torch.autograd.backward([getattr(out, name) for name in upstream], list(upstream.values()))
    values = {name: getattr(out, name).detach() for name in outputs}
    assert all(getattr(out, name) is None for name in set(PER_TOKEN) - set(outputs))
    return values, Outcome(torch.zeros(()), None, _gradients(leaves))


def check_gradients(outcome: Outcome, expected: Reference, tolerance: float, *, noise: float = 0.0) -> None:
    """Every gradient that was made is right. noise admits, beside the relative error, this part of the terms that
    cancel (where the sum is no larger than the rounding of what is added up)."""
    names = ("hidden", "weight", "bias")
    for name, grad, want, terms in zip(names, outcome.grads, expected.grads, expected.cancelling):
        if grad is None:
            continue
        grad, want = grad.double().cpu(), want.double()
        assert grad.shape == want.shape, name
        error = (grad - want).norm().item()
        allowed = tolerance * want.norm().item() + noise * terms
        assert error <= allowed, f"gradient of {name}: error {error:.3g}, allowed {allowed:.3g}"


def check(outcome: Outcome, expected: Reference, dtype: torch.dtype, *, tolerance=None, noise: float = 0.0) -> None:
    """Loss, metrics and gradients against the float64 result. noise: see check_gradients; a loss is fp32, whatever the
    dtype, and gets no more than two roundings of its terms."""
    value = value_tolerance(dtype)
    assert outcome.loss.shape == expected.loss.shape
    error = (outcome.loss.double().cpu() - expected.loss).norm().item()
    allowed = value * expected.loss.norm().item() + min(noise, 2.0**-23) * expected.loss_terms
    assert error <= allowed, f"loss: error {error:.3g}, allowed {allowed:.3g}"
    if outcome.metrics is not None:
        assert set(outcome.metrics) >= set(expected.metrics)
        for name, want in expected.metrics.items():
            got = outcome.metrics[name]
            assert got.shape == () and not got.requires_grad, name
            if name.startswith("num_"):
                assert got.dtype == torch.int64 and got.item() == want.item(), (name, got.item(), want.item())
            else:
                assert relative_error(got, want) <= value, (name, got.item(), want.item())
    check_gradients(outcome, expected, gradient_tolerance(dtype) if tolerance is None else tolerance, noise=noise)


def check_log_probs(values: dict, expected: dict, dtype: torch.dtype, *, noise: float = 0.0) -> None:
    for name, got in values.items():
        want = expected[name]
        assert got.shape == want.shape, name
        if name == "is_top1":
            assert got.dtype == torch.bool and torch.equal(got.cpu(), want)
            continue
        assert got.dtype == value_dtype(dtype), name
        error = (got.double().cpu() - want).norm().item()
        allowed = value_tolerance(dtype) * want.norm().item() + noise * want.numel() ** 0.5
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


# --- workspaces ------------------------------------------------------------------------------------------------------

PLANS = ("forward", "kept", "recompute", "slab")


def upstream_of(reduction: str) -> str:
    return "token" if reduction == "none" else "scalar"


def row_scaled(options: dict) -> bool:
    """False where the logits' gradient is not their exponentials times a factor per row."""
    return not (options.get("label_smoothing") and options.get("softcap"))


def plan_of(kernel, inputs: Inputs, workspace=None, *, upstream="scalar", row_scaled=True, needs=(True, True, True)):
    """The plan of such a call."""
    needs = (needs[0], needs[1], needs[2] and inputs.bias is not None)
    return kernel.plan(
        *inputs.sizes, inputs.hidden.dtype, device_type=inputs.hidden.device.type, weight_dtype=inputs.weight.dtype,
        needs=needs, upstream=upstream, row_scaled=row_scaled, workspace=workspace,
    )  # fmt: skip


def needed(plan) -> int:
    """The smallest workspace of plan(workspace): what the error about one byte says is needed."""
    with pytest.raises(ValueError, match="workspace") as error:
        plan(1)
    return int(re.search(r"needs (\d+) bytes", str(error.value)).group(1))


def smallest_workspace(kernel, inputs: Inputs, **how) -> int:
    return needed(lambda workspace: plan_of(kernel, inputs, workspace, **how))


def kind_of(plan) -> str:
    """One of PLANS: how the gradients of such a plan are made."""
    if plan.gradients != "backward":
        return plan.gradients
    if plan.slab < plan.vocab:
        return "slab"
    return "kept" if plan.kept_rows else "recompute"


@functools.cache
def _workspaces(kernel, sizes, dtype, device_type, backend, needs, upstream, row_scaled) -> dict[str, int]:
    """{kind: workspace}: the smallest workspace of every kind of plan that there is, but for slabs the largest with
    several slabs and chunks. backend: the one that plans are for; a test may have chosen another than the device's."""

    def plan(workspace):
        return kernel.plan(
            *sizes, dtype, device_type=device_type, needs=needs, upstream=upstream, row_scaled=row_scaled,
            workspace=workspace,
        )  # fmt: skip

    def kind(workspace):
        return kind_of(plan(workspace))

    found, least = {}, needed(plan) if sizes[0] else 1
    for low, high in itertools.pairwise(least + int(256 * 1.07**step) - 256 for step in range(300)):
        here = kind(high)
        if here == "slab" and plan(high).slab * 2 <= sizes[1] and plan(high).chunk_rows * 3 <= sizes[0]:
            found[here] = high
        if here in ("none", "slab") or here in found:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if kind(middle) == here else (middle, high)
        found[here] = high
    return found


def workspaces(kernel, inputs: Inputs, *, upstream="scalar", row_scaled=True, needs=(True, True, True)):
    """A workspace for every way (of PLANS) in which such a call can run."""
    needs = (needs[0], needs[1], needs[2] and inputs.bias is not None)
    sizes, device = inputs.sizes, inputs.hidden.device.type
    backend = plan_of(kernel, inputs).backend
    return _workspaces(kernel, sizes, inputs.hidden.dtype, device, backend, needs, upstream, row_scaled)


def workspace_for(kernel, kind: str, inputs: Inputs, **how) -> int | None:
    """A workspace with which the call runs a plan of this kind; "default" is None."""
    if kind == "default":
        return None
    found = workspaces(kernel, inputs, **how)
    if kind == "kept" and how.get("upstream", "scalar") == "scalar" and kind not in found:
        pytest.skip("a scalar loss keeps no exponentials for its backward on this device")
    assert kind in found, f"no workspace makes this call run as {kind!r}, only as one of {sorted(found)}"
    return found[kind]


# --- memory and work -------------------------------------------------------------------------------------------------


def memory_changes(call) -> list[int]:
    """Bytes that torch's CPU allocator gave out (or, below 0, got back) during a call, inside operators too, in order
    and as the profiler sees it. What the call returns is still held at the end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    del kept
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def allocations(call, device: str) -> tuple[int, int]:
    """(peak bytes that `call` allocated above what there was before, its largest single allocation on the CPU, or the
    peak again on an accelerator). What the call returns counts."""
    if torch.device(device).type != "cpu":
        accelerator = getattr(torch, torch.device(device).type)
        gc.collect()  # what other tests have left in cycles would go during the call, and count against it
        accelerator.synchronize()
        before = accelerator.memory_allocated()
        accelerator.reset_peak_memory_stats()
        kept = call()
        accelerator.synchronize()
        peak = accelerator.max_memory_allocated() - before
        del kept
        return peak, peak
    sizes = memory_changes(call)
    assert sizes, "the profiler saw no allocation: this measures nothing"
    return max(itertools.accumulate(sizes)), max(sizes)


def count_rows(kernel, monkeypatch, device: str, **positions: int) -> dict[str, int]:
    """The rows that functions of the backend get from now on; positions: which argument of a function has them."""
    backends = submodule(kernel, "backends")
    backend = backends.load(backends.choose(device, False))
    rows = dict.fromkeys(positions, 0)

    def counted(function, name, position, /, *arguments, **options):
        rows[name] += arguments[position].shape[0]
        return function(*arguments, **options)

    for name, position in positions.items():
        monkeypatch.setattr(backend, name, functools.partial(counted, getattr(backend, name), name, position))
    return rows
