"""Values and gradients of the public functions against the float64 result, and what they promise about their input."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import oracle
from .conftest import submodule
from .oracle import (
    DIFFERENTIABLE,
    PER_TOKEN,
    Inputs,
    as_leaf,
    assert_same_bits,
    check,
    check_gradients,
    check_log_probs,
    gradient_tolerance,
    kind_of,
    make_inputs,
    plan_of,
    random,
    reference,
    reference_log_probs,
    relative_error,
    run,
    run_log_probs,
    smallest_workspace,
    transformed_logits,
    unchanged,
    value_tolerance,
    workspace_for,
    workspaces,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
IDS = str


@pytest.fixture(params=oracle.DEVICES)
def dev(request) -> str:
    return request.param


def on_cpu_or(*cases, gpu=()):
    """Parametrizes (dev, case): every case on the CPU, and those of `gpu` on the accelerator too, where each new
    combination of options costs seconds of compilation."""
    accelerator = oracle.DEVICES[1]
    name = lambda case: case if isinstance(case, str) else "-".join(map(str, case))  # noqa: E731
    return [pytest.param("cpu", case, id=f"cpu-{name(case)}") for case in cases] + [
        pytest.param(*accelerator.values, case, id=f"gpu-{name(case)}", marks=accelerator.marks) for case in gpu
    ]


# --- the oracle itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_oracle_is_torchs_cross_entropy(reduction, ignore_index, weighted):
    i = make_inputs(dtype=torch.float64, lead=(20,), vocab=13, hidden_size=5, ignore_index=ignore_index)
    class_weight = torch.rand(13, dtype=torch.float64) if weighted else None
    leaves = [as_leaf(t, True) for t in (i.hidden, i.weight, i.bias)]
    expected = F.cross_entropy(
        F.linear(*leaves), i.targets, class_weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=0.1
    )
    found = reference(
        *i.positional(), ignore_index, reduction=reduction, class_weight=class_weight, label_smoothing=0.1
    )
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(found.grads, torch.autograd.grad(expected.sum(), leaves))


def test_the_oracle_and_the_formula_of_the_documentation_agree():
    i = make_inputs(dtype=torch.float64, lead=(20,), vocab=13, hidden_size=5)
    w, t, eps = torch.rand(13, dtype=torch.float64), torch.rand(20, dtype=torch.float64), 0.2
    z = 4.0 * torch.tanh(1.5 * (i.hidden @ i.weight.T + i.bias) / 4.0)
    lse = z.exp().sum(1).log()
    y = i.targets.clamp(min=0)
    loss = (1 - eps) * w[y] * (lse - z[torch.arange(20), y]) + eps / 13 * (w * (lse[:, None] - z)).sum(1)
    loss = torch.where(i.targets == -100, 0.0, t * (loss + 0.1 * lse**2))
    found = reference(
        *i.positional(), logit_scale=1.5, softcap=4.0, reduction="none", label_smoothing=eps, z_loss=0.1,
        class_weight=w, token_weight=t,
    )  # fmt: skip
    torch.testing.assert_close(found.loss, loss)
    statistics, _ = reference_log_probs(*i.positional(), logit_scale=1.5, softcap=4.0)
    valid, p = i.targets != -100, z.softmax(1)
    torch.testing.assert_close(statistics["entropy"], torch.where(valid, -(p * p.log()).sum(1), 0.0))
    torch.testing.assert_close(statistics["log_sum_sq_probs"], torch.where(valid, p.square().sum(1).log(), 0.0))


def test_errors_see_nan_infinity_and_bias():
    x = random((1000,), dtype=torch.float64)
    nan = torch.where(torch.arange(1000) == 3, math.nan, x)
    for wrong in (nan, torch.full_like(x, math.inf), x * (1 + 2e-5)):
        assert not relative_error(wrong, x) <= 1e-5
        assert not relative_error(x, wrong) <= 1e-5
    assert not relative_error(torch.ones(2), torch.zeros(2)) <= 1e-5
    assert relative_error(x * (1 + 5e-6), x) <= 1e-5
    assert oracle.mean_signed_error(x * 1.01, x) == pytest.approx(0.01)
    assert abs(oracle.mean_signed_error(x + 0.01 * torch.randn(1000).sign(), x)) < 0.005


# --- every option ----------------------------------------------------------------------------------------------------

N, V, H = 150, 301, 40
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "logit_scale": {"logit_scale": 0.7},
    "negative_scale": {"logit_scale": -1.3, "bias": True},
    "softcap": {"softcap": 3.0, "bias": True},
    "smoothing": {"label_smoothing": 0.1},
    "full_smoothing": {"label_smoothing": 1.0, "bias": True},
    "z_loss": {"z_loss": 1e-2},
    "class_weight": {"class_weight": True},
    "token_weight": {"token_weight": True},
    "num_items": {"num_items": 37},
    "ignore_inside": {"ignore_index": 5, "bias": True},
    "ignore_beyond": {"ignore_index": 301 + 10},
    "smoothed_softcap": {"label_smoothing": 0.3, "softcap": 3.0, "bias": True},
    "everything": {
        "bias": True, "logit_scale": 1.2, "softcap": 4.0, "label_smoothing": 0.2, "z_loss": 1e-2,
        "class_weight": True, "token_weight": True, "ignore_index": -1,
    },
}  # fmt: skip


def with_options(name: str, device: str, dtype: torch.dtype, reduction: str) -> tuple[Inputs, dict]:
    options = dict(OPTIONS[name])
    inputs = make_inputs(
        device, dtype, (N,), V, H, bias=options.pop("bias", False), ignore_index=options.get("ignore_index", -100)
    )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if options.pop("class_weight", False):
        options["class_weight"] = random((V,), device, exact, seed=2).abs()
    if options.pop("token_weight", False):
        options["token_weight"] = random((N,), device, exact, seed=3)
    if reduction != "mean":
        options.pop("num_items", None)
    options["reduction"] = reduction
    return inputs, options


def row_scaled(options: dict) -> bool:
    return not (options.get("label_smoothing") and options.get("softcap"))


def upstream_of(reduction: str) -> str:
    return "token" if reduction == "none" else "scalar"


def test_every_kind_of_plan_is_tested(kernel, dev):
    """The tests below run what `workspaces` finds; here nothing may be missing."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(dev, dtype)
        assert set(workspaces(kernel, inputs)) >= {"forward", "slab"}
        assert set(workspaces(kernel, inputs, upstream="token")) >= {"kept", "slab"}
        assert set(workspaces(kernel, inputs, upstream="token", row_scaled=False)) >= {"recompute", "slab"}


ON_GPU = ["plain", "everything"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(("dev", "name"), on_cpu_or(*OPTIONS, gpu=ON_GPU))
def test_loss_and_gradients(kernel, dev, dtype, name, reduction):
    inputs, options = with_options(name, dev, dtype, reduction)
    upstream = random((N,), dev, seed=4).to(torch.float64 if dtype == torch.float64 else torch.float32)
    upstream = upstream if reduction == "none" else upstream[0]
    outcome = run(kernel, inputs, upstream=upstream, return_metrics=True, **options)
    check(outcome, reference(*inputs.positional(), upstream=upstream, **options), dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
@pytest.mark.parametrize(
    ("dev", "name"),
    on_cpu_or("plain", "bias", "class_weight", "smoothing", "smoothed_softcap", "everything", gpu=ON_GPU),
)
def test_every_plan_gives_the_same(kernel, dev, dtype, name, reduction):
    inputs, options = with_options(name, dev, dtype, reduction)
    how = {"upstream": upstream_of(reduction), "row_scaled": row_scaled(options)}
    g = random((N,), dev, seed=4) if reduction == "none" else torch.tensor(-1.5, device=dev)
    expected = reference(*inputs.positional(), upstream=g, **options)
    found = workspaces(kernel, inputs, **how)
    assert len(found) >= 2
    for kind, workspace in found.items():
        plan = plan_of(kernel, inputs, workspace, **how)
        assert kind_of(plan) == kind
        assert plan.chunk_rows <= N / 3 and plan.kept_rows <= N / 3, "one chunk would test nothing"
        check(
            run(kernel, inputs, upstream=g, return_metrics=True, workspace=workspace, **options), expected, dtype
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=IDS)
@pytest.mark.parametrize("grads", ["log_probs", "entropy", "lse", "log_probs,lse", "log_probs,entropy,lse", ""])
@pytest.mark.parametrize(
    ("dev", "name"),
    on_cpu_or("plain", "bias", "negative_scale", "softcap", "ignore_inside", gpu=["plain", "softcap"]),
)
def test_log_probs(kernel, dev, dtype, name, grads):
    inputs, options = with_options(name, dev, dtype, "sum")
    del options["reduction"]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = {n: random((N,), dev, exact, seed=k) for k, n in enumerate(filter(None, grads.split(",")))}
    values, outcome = run_log_probs(kernel, inputs, outputs=PER_TOKEN, upstream=upstream, **options)
    expected, gradients = reference_log_probs(*inputs.positional(), upstream=upstream, **options)
    check_log_probs(values, expected, dtype)
    if upstream:
        assert outcome.grads[0] is not None and outcome.grads[1] is not None
        check_gradients(outcome, gradients, gradient_tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
@pytest.mark.parametrize(("dev", "grads"), on_cpu_or(("log_probs", "lse"), DIFFERENTIABLE, gpu=[DIFFERENTIABLE]))
def test_every_plan_gives_the_same_log_probs(kernel, dev, dtype, grads):
    inputs = make_inputs(dev, dtype)
    upstream = {name: random((N,), dev, seed=k) for k, name in enumerate(grads)}
    options = {"logit_scale": 0.8, "softcap": 5.0}
    expected, gradients = reference_log_probs(*inputs.positional(), upstream=upstream, **options)
    found = workspaces(kernel, inputs, upstream="token", row_scaled="entropy" not in grads)
    assert set(found) >= {"slab", "recompute" if "entropy" in grads else "kept"}
    for workspace in (None, *found.values()):
        values, outcome = run_log_probs(
            kernel, inputs, outputs=grads, upstream=upstream, workspace=workspace, **options
        )
        check_log_probs(values, expected, dtype)
        check_gradients(outcome, gradients, gradient_tolerance(dtype))


def test_log_probs_of_some_outputs(kernel):
    """What is not asked for is None; one name alone may be given as a string; the order does not matter."""
    inputs = make_inputs()
    expected, _ = reference_log_probs(*inputs.positional())
    for outputs in (("entropy",), ("is_top1", "log_probs"), ("log_sum_sq_probs", "lse", "mean_logits")):
        values, _ = run_log_probs(kernel, inputs, outputs=outputs)
        check_log_probs(values, expected, torch.float32)
    out = kernel.fused_linear_log_probs(*inputs.positional(), outputs="lse")
    check_log_probs({"lse": out.lse}, expected, torch.float32)
    assert out._fields == PER_TOKEN
    default = kernel.fused_linear_log_probs(*inputs.positional())
    assert [name for name in PER_TOKEN if getattr(default, name) is not None] == ["log_probs"]


def test_outputs_without_a_gradient_have_none(kernel):
    inputs = make_inputs()
    leaves = [as_leaf(t, True) for t in (inputs.hidden, inputs.weight, inputs.bias)]
    out = kernel.fused_linear_log_probs(leaves[0], leaves[1], inputs.targets, leaves[2], outputs=PER_TOKEN)
    for name in PER_TOKEN:
        assert getattr(out, name).requires_grad == (name in DIFFERENTIABLE), name
    _, metrics = kernel.fused_linear_cross_entropy(
        leaves[0], leaves[1], inputs.targets, leaves[2], reduction="none", return_metrics=True
    )
    assert not any(value.requires_grad for value in metrics.values())


def test_an_unused_output_gets_no_gradient_and_costs_nothing(kernel):
    """Gradients of one output of several: the others count as zero."""
    inputs = make_inputs()
    for name in DIFFERENTIABLE:
        upstream = {name: random((N,), seed=5)}
        _, outcome = run_log_probs(kernel, inputs, outputs=DIFFERENTIABLE, upstream=upstream)
        _, gradients = reference_log_probs(*inputs.positional(), upstream=upstream)
        check_gradients(outcome, gradients, 1e-5)


def test_the_loss_is_the_sum_of_what_the_log_probs_say(kernel):
    inputs = make_inputs()
    loss = kernel.fused_linear_cross_entropy(*inputs.positional(), reduction="sum", z_loss=0.1)
    out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("log_probs", "lse"))
    torch.testing.assert_close(loss, (0.1 * out.lse**2 - out.log_probs).sum())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(kernel, reduction):
    i = make_inputs(dtype=torch.float64, lead=(5,), vocab=7, hidden_size=4, ignored=0.2)
    class_weight, token_weight = torch.rand(7, dtype=torch.float64), torch.rand(5, dtype=torch.float64)

    def loss(hidden, weight, bias):
        return kernel.fused_linear_cross_entropy(
            hidden, weight, i.targets, bias, logit_scale=0.9, softcap=3.0, reduction=reduction, label_smoothing=0.1,
            z_loss=0.05, class_weight=class_weight, token_weight=token_weight,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, [as_leaf(t, True) for t in (i.hidden, i.weight, i.bias)])


def test_gradcheck_of_the_log_probs(kernel):
    i = make_inputs(dtype=torch.float64, lead=(5,), vocab=7, hidden_size=4, ignored=0.2)

    def outputs(hidden, weight, bias):
        out = kernel.fused_linear_log_probs(
            hidden, weight, i.targets, bias, logit_scale=0.9, softcap=3.0, outputs=DIFFERENTIABLE
        )
        return out.log_probs, out.entropy, out.lse

    assert torch.autograd.gradcheck(outputs, [as_leaf(t, True) for t in (i.hidden, i.weight, i.bias)])


def test_a_logit_scale_of_zero_is_uniform(kernel):
    inputs = make_inputs()
    outcome = run(kernel, inputs, logit_scale=0.0)
    assert outcome.loss.item() == pytest.approx(math.log(V), rel=1e-6)
    assert all(not grad.any() for grad in outcome.grads)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 3), (3, 1, 8), (17, 2, 1)], ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=IDS)
def test_smallest_sizes(kernel, sizes, dtype):
    n, vocab, hidden_size = sizes
    inputs = make_inputs("cpu", dtype, (n,), vocab, hidden_size, ignored=0.0)
    outcome = run(kernel, inputs, return_metrics=True, z_loss=0.1)
    check(outcome, reference(*inputs.positional(), z_loss=0.1), dtype, noise=1e-7)


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 5), (2, 3, 4), (1, 1, 2, 3), (2, 0, 3), (0,)], ids=IDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_leading_dimensions(kernel, dev, lead, reduction):
    inputs = make_inputs(dev, torch.float32, lead, ignored=0.0)
    g = random(lead if reduction == "none" else (), dev)
    token_weight = random(lead, dev, seed=6).abs()
    outcome = run(kernel, inputs, upstream=g, reduction=reduction, token_weight=token_weight, return_metrics=True)
    assert outcome.loss.shape == (lead if reduction == "none" else ())
    expected = reference(*inputs.positional(), upstream=g, reduction=reduction, token_weight=token_weight)
    check(outcome, expected, torch.float32)
    if reduction == "none":
        values, _ = run_log_probs(kernel, inputs, outputs=PER_TOKEN)
        check_log_probs(values, reference_log_probs(*inputs.positional())[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=IDS)
@pytest.mark.parametrize("ignore_index", [-100, 300, 3], ids=IDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_integer_dtype_of_targets(kernel, dtype, ignore_index, reduction):
    """Also classes that a narrow integer would confuse with ignore_index: 156 is -100 in 8 bits, 44 is 300."""
    vocab = 120 if dtype == torch.int8 else 200
    inputs = make_inputs(lead=(64,), vocab=vocab, ignored=0.0)
    targets = torch.arange(64) + (40 if dtype == torch.int8 else 120)
    targets[::5] = 3
    inputs = inputs.replace(targets=targets.to(dtype))
    options = {"reduction": reduction, "class_weight": random((vocab,)).abs(), "ignore_index": ignore_index}
    outcome = run(kernel, inputs, return_metrics=True, **options)
    check(outcome, reference(*inputs.positional(), **options), torch.float32)


@pytest.mark.parametrize("ignore_index", [-(2**63), -1, 0, 5, V - 1, V, 2**31, 2**63 - 1], ids=IDS)
def test_any_ignore_index(kernel, ignore_index):
    inputs = make_inputs(ignore_index=ignore_index)
    assert (inputs.targets == ignore_index).sum() >= 30
    for reduction in ("mean", "none"):
        outcome = run(kernel, inputs, ignore_index=ignore_index, reduction=reduction, return_metrics=True)
        check(outcome, reference(*inputs.positional(), ignore_index, reduction=reduction), torch.float32)


# --- num_items -------------------------------------------------------------------------------------------------------


def _num_items(device):
    return {
        "int": 37,
        "float": 37.5,
        "0-d": torch.tensor(37),
        "0-d device": torch.tensor(37, device=device),
        "(1,)": torch.tensor([37], device=device),
        "(1, 1)": torch.tensor([[37.0]], device=device),
        "float64": torch.tensor(37.25, dtype=torch.float64, device=device),
        "bfloat16": torch.tensor(37.0, dtype=torch.bfloat16, device=device),
        "int32": torch.tensor(37, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize("kind", _num_items("cpu"))
@pytest.mark.parametrize("how", ["default", "slab"])
def test_num_items_replaces_the_divisor(kernel, dev, kind, how):
    inputs = make_inputs(dev)
    num_items = _num_items(dev)[kind]
    workspace = workspace_for(kernel, how, inputs)
    outcome = run(kernel, inputs, num_items=num_items, return_metrics=True, workspace=workspace)
    assert outcome.loss.shape == ()
    check(outcome, reference(*inputs.positional(), num_items=num_items), torch.float32)


def test_num_items_is_used_instead_of_the_sum_of_class_weights(kernel):
    inputs, class_weight = make_inputs(), random((V,)).abs()
    outcome = run(kernel, inputs, num_items=11, class_weight=class_weight)
    check(outcome, reference(*inputs.positional(), num_items=11, class_weight=class_weight), torch.float32)


@pytest.mark.parametrize("num_items", [1001, torch.tensor(1001), None], ids=IDS)
@pytest.mark.parametrize("how", ["default", "slab"])
def test_the_default_dtype_of_torch_changes_nothing(kernel, num_items, how):
    """Models are often built under torch.set_default_dtype(bfloat16); 1001 is not a bfloat16 number."""
    inputs = make_inputs()
    workspace = workspace_for(kernel, how, inputs)
    options = {"num_items": num_items, "class_weight": random((V,)).abs(), "workspace": workspace}
    torch.set_default_dtype(torch.bfloat16)
    try:
        outcome = run(kernel, inputs, return_metrics=True, **options)
        values, _ = run_log_probs(kernel, inputs, outputs=PER_TOKEN)
    finally:
        torch.set_default_dtype(torch.float32)
    check(outcome, reference(*inputs.positional(), **options), torch.float32)
    check_log_probs(values, reference_log_probs(*inputs.positional())[0], torch.float32)


# --- the table of inputs: nothing to learn from ----------------------------------------------------------------------

CALLS = [
    *itertools.product(["mean", "sum"], ["default", "slab"]),
    ("none", "default"),
]


def check_all_ignored(kernel, dev, reduction, how, **options):
    inputs = make_inputs(dev, torch.bfloat16)
    workspace = workspace_for(kernel, how, inputs)
    inputs = inputs.replace(targets=torch.full_like(inputs.targets, -100))
    outcome = run(kernel, inputs, reduction=reduction, return_metrics=True, workspace=workspace, **options)
    assert outcome.loss.shape == (inputs.targets.shape if reduction == "none" else ())
    assert not outcome.loss.any()
    assert all(not grad.any() for grad in outcome.grads)  # NaN would be true
    assert {name: value.item() for name, value in outcome.metrics.items()} == dict.fromkeys(outcome.metrics, 0)


@pytest.mark.parametrize(("reduction", "how"), CALLS)
def test_all_ignored_is_a_connected_zero(kernel, dev, reduction, how):
    check_all_ignored(kernel, dev, reduction, how)
    weights = {"class_weight": torch.ones(V, device=dev), "token_weight": torch.ones(N, device=dev)}
    check_all_ignored(kernel, dev, reduction, how, label_smoothing=0.1, z_loss=0.1, **weights)


@pytest.mark.parametrize("num_items", [5, 0, torch.tensor(0), torch.tensor(5.0)], ids=IDS)
@pytest.mark.parametrize("how", ["default", "slab"])
def test_all_ignored_is_zero_whatever_the_divisor(kernel, dev, how, num_items):
    check_all_ignored(kernel, dev, "mean", how, num_items=num_items)


@pytest.mark.parametrize(("reduction", "how"), CALLS)
@pytest.mark.parametrize("lead", [(0,), (3, 0)], ids=IDS)
def test_no_tokens_is_a_connected_zero(kernel, dev, reduction, how, lead):
    inputs = make_inputs(dev, torch.float32, lead)
    outcome = run(kernel, inputs, reduction=reduction, return_metrics=True, workspace=workspace_for(
        kernel, how, make_inputs(dev)))  # fmt: skip
    assert outcome.loss.shape == (lead if reduction == "none" else ()) and not outcome.loss.any()
    assert outcome.grads[0].shape == (*lead, H)
    assert not outcome.grads[1].any() and not outcome.grads[2].any()
    assert {name: value.item() for name, value in outcome.metrics.items()} == dict.fromkeys(outcome.metrics, 0)


def test_log_probs_of_nothing(kernel, dev):
    for lead in ((0,), (4,)):
        inputs = make_inputs(dev, torch.float32, lead)
        inputs = inputs.replace(targets=torch.full_like(inputs.targets, -100))
        upstream = {name: torch.ones(lead, device=dev) for name in DIFFERENTIABLE}
        values, outcome = run_log_probs(kernel, inputs, outputs=PER_TOKEN, upstream=upstream)
        assert all(value.shape == lead and not value.any() for value in values.values())
        assert all(not grad.any() for grad in outcome.grads)


@pytest.mark.parametrize("tokens", [0, 64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_to_learn_from_needs_no_fp32_weight(kernel, dev, tokens, reduction):
    """The gradient of the (bf16) weight is there, and zero, but no fp32 (V, H) beside it."""
    inputs = make_inputs(dev, torch.bfloat16, (tokens,), 4096, 256, bias=False)
    targets = torch.full_like(inputs.targets, -100)
    hidden, weight = as_leaf(inputs.hidden, True), as_leaf(inputs.weight, True)

    def call():
        loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        return loss, torch.autograd.grad(loss.sum(), (hidden, weight))

    assert not call()[1][1].any()
    gradient = weight.numel() * 2
    exponentials = tokens * 4096 * 4 if reduction == "none" else 0  # their buffer depends on the shapes alone
    peak, _ = oracle.allocations(call, dev)
    assert gradient <= peak < 1.5 * gradient + exponentials


# --- the table of inputs: rows that are ignored, wrong or poisoned ---------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("reduction", "how"), CALLS)
def test_garbage_in_ignored_rows_reaches_nothing(kernel, dev, reduction, how, poison):
    inputs = make_inputs(dev)
    ignored = inputs.targets == -100
    assert 20 < int(ignored.sum()) < 100
    workspace = workspace_for(kernel, how, inputs)
    clean = inputs.replace(hidden=torch.where(ignored[:, None], 0.0, inputs.hidden))
    dirty = inputs.replace(hidden=torch.where(ignored[:, None], poison, inputs.hidden))
    g = random((N,), dev) if reduction == "none" else None
    options = {"reduction": reduction, "token_weight": torch.where(ignored, poison, 0.5)}
    outcome = run(kernel, dirty, upstream=g, return_metrics=True, workspace=workspace, z_loss=0.1, **options)
    assert not outcome.grads[0][ignored].any()
    options["token_weight"] = torch.full_like(options["token_weight"], 0.5)
    check(outcome, reference(*clean.positional(), upstream=g, z_loss=0.1, **options), torch.float32)


def test_garbage_in_the_upstream_gradient_of_ignored_rows_reaches_nothing(kernel, dev):
    inputs = make_inputs(dev)
    ignored = inputs.targets == -100
    g = torch.where(ignored, math.nan, random((N,), dev))
    clean = torch.where(ignored, 0.0, g)
    check_gradients(
        run(kernel, inputs, upstream=g, reduction="none"),
        reference(*inputs.positional(), upstream=clean, reduction="none"),
        1e-5,
    )
    _, outcome = run_log_probs(kernel, inputs, outputs=DIFFERENTIABLE, upstream=dict.fromkeys(DIFFERENTIABLE, g))
    _, expected = reference_log_probs(*inputs.positional(), upstream=dict.fromkeys(DIFFERENTIABLE, clean))
    check_gradients(outcome, expected, 1e-5)


@contextlib.contextmanager
def projected_rows(kernel, monkeypatch, device, dtype=torch.float32):
    """Counts the rows that the backend's forward gets."""
    backends = submodule(kernel, "backends")
    backend = backends.load(backends.choose(device, dtype == torch.float64))
    rows, original = [], backend.forward
    with monkeypatch.context() as patch:
        patch.setattr(backend, "forward", lambda x, *a, **k: (rows.append(x.shape[0]), original(x, *a, **k))[1])
        yield rows


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_never_projected(kernel, dev, monkeypatch, reduction):
    inputs = make_inputs(dev, ignored=0.9)
    valid = int((inputs.targets != -100).sum())
    assert 0 < valid < N / 4
    with projected_rows(kernel, monkeypatch, dev) as rows:
        run(kernel, inputs, reduction=reduction, return_metrics=True)
    assert sum(rows) == valid


@pytest.mark.parametrize("bad", [-1, V, V + 1000, -101, 2**40, -(2**40)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_target_outside_the_vocabulary_is_an_error_on_the_cpu(kernel, bad, reduction):
    inputs = make_inputs(lead=(2, 75))
    inputs.targets[1, 3] = bad
    for call in (kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs):
        options = {"reduction": reduction} if call is kernel.fused_linear_cross_entropy else {}
        with pytest.raises(IndexError, match=rf"targets.* {bad} .*\b78\b"):
            call(*inputs.positional(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-1, V, 2**40])
@pytest.mark.parametrize("how", ["default", "kept", "slab"])
def test_a_target_outside_the_vocabulary_is_nan_where_looking_costs(kernel, device, bad, how):
    """NaN loss and gradient of that row; the other rows are right."""
    inputs = make_inputs(device, ignored=0.2)
    inputs.targets[5] = bad
    clean = inputs.replace(targets=torch.where(inputs.targets == bad, -100, inputs.targets))
    others = torch.arange(N, device=device) != 5
    for reduction in ("none", "sum"):
        upstream = upstream_of(reduction)
        workspace = workspace_for(kernel, how, inputs, upstream=upstream)
        outcome = run(kernel, inputs, reduction=reduction, return_metrics=True, workspace=workspace)
        expected = reference(*clean.positional(), reduction=reduction)
        assert outcome.grads[0][5].isnan().all()
        assert relative_error(outcome.grads[0][others], expected.grads[0][others.cpu()]) <= 1e-5
        assert outcome.metrics["num_correct_tokens"].item() == expected.metrics["num_correct_tokens"].item()
        if reduction == "sum":
            assert outcome.loss.isnan()
        else:
            assert outcome.loss[5].isnan()
            assert relative_error(outcome.loss[others], expected.loss[others.cpu()]) <= 1e-5
    values, _ = run_log_probs(kernel, inputs, outputs=PER_TOKEN, workspace=workspace)
    for name, value in values.items():
        if name not in ("is_top1", "mean_logits"):
            assert value[5].isnan(), name
    assert not values["is_top1"][5]


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_in_a_valid_row_poisons_that_row_alone(kernel, dev, poison, reduction, how):
    inputs = make_inputs(dev, ignored=0.0)
    workspace = workspace_for(kernel, how, inputs, upstream=upstream_of(reduction))
    others = torch.arange(N, device=dev) != 70
    expected = reference(*inputs.positional(), reduction=reduction)
    inputs.hidden[70, 3] = poison
    outcome = run(kernel, inputs, reduction=reduction, workspace=workspace)
    assert outcome.grads[0][70].isnan().any()
    assert relative_error(outcome.grads[0][others], expected.grads[0][others.cpu()]) <= 1e-5
    assert outcome.grads[1].isnan().any()
    if reduction == "mean":
        assert not outcome.loss.isfinite()
    else:
        assert not outcome.loss[70].isfinite()
        assert relative_error(outcome.loss[others], expected.loss[others.cpu()]) <= 1e-5


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_in_a_valid_row_poisons_its_statistics_alone(kernel, dev, poison):
    inputs = make_inputs(dev, ignored=0.0)
    others = torch.arange(N, device=dev) != 70
    expected, _ = reference_log_probs(*inputs.positional())
    inputs.hidden[70, 3] = poison
    values, _ = run_log_probs(kernel, inputs, outputs=PER_TOKEN)
    for name, value in values.items():
        if name == "is_top1":
            assert torch.equal(value[others].cpu(), expected[name][others.cpu()]) and not value[70]
        else:
            assert not value[70].isfinite(), name
            assert relative_error(value[others], expected[name][others.cpu()]) <= 1e-5, name


# --- the table of inputs: logits that are -inf or far from zero ------------------------------------------------------

MASKED = {
    "one": slice(5, 6),
    "first": slice(0, 1),
    "first_tile": slice(0, 128),
    "first_tiles": slice(0, 512),
    "a_tile": slice(256, 384),
    "last": slice(599, 600),
    "last_tiles": slice(300, 600),
    "all_but_two": slice(0, 598),
}


def masked_inputs(name, device, dtype) -> Inputs:
    """600 classes, some masked through the bias; no target is masked."""
    inputs = make_inputs(device, dtype, (50,), 600, 40)
    inputs.bias[MASKED[name]] = -math.inf
    allowed = (inputs.bias > -math.inf).nonzero().squeeze(1)
    valid = inputs.targets != -100
    return inputs.replace(targets=torch.where(valid, allowed[inputs.targets % len(allowed)], -100))


@pytest.mark.parametrize("how", ["default", "slab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
@pytest.mark.parametrize("name", MASKED)
def test_masked_classes_contribute_nothing(kernel, dev, dtype, name, how):
    inputs = masked_inputs(name, dev, dtype)
    workspace = workspace_for(kernel, how, inputs)
    options = {"z_loss": 0.01}
    outcome = run(kernel, inputs, return_metrics=True, workspace=workspace, **options)
    check(outcome, reference(*inputs.positional(), **options), dtype)
    assert not outcome.grads[1][MASKED[name]].any() and not outcome.grads[2][MASKED[name]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
@pytest.mark.parametrize("name", MASKED)
def test_masked_classes_contribute_nothing_to_the_log_probs(kernel, dev, dtype, name):
    inputs = masked_inputs(name, dev, dtype)
    upstream = {name: random((50,), dev, seed=k) for k, name in enumerate(DIFFERENTIABLE)}
    outputs = tuple(name for name in PER_TOKEN if name != "mean_logits")
    values, outcome = run_log_probs(kernel, inputs, outputs=outputs, upstream=upstream)
    expected, gradients = reference_log_probs(*inputs.positional(), upstream=upstream)
    check_log_probs(values, expected, dtype)
    check_gradients(outcome, gradients, gradient_tolerance(dtype))


def test_the_mean_of_logits_with_a_masked_one(kernel, dev):
    inputs = masked_inputs("one", dev, torch.float32)
    mean = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("mean_logits",)).mean_logits
    valid = inputs.targets != -100
    assert bool((mean[valid] == -math.inf).all()) and not mean[~valid].any()


def test_a_masked_target_costs_infinity_and_its_gradient_is_torchs(kernel, dev):
    inputs = make_inputs(dev, ignored=0.0)
    inputs.bias[inputs.targets[3]] = -math.inf
    hit = inputs.targets == inputs.targets[3]
    expected = reference(*inputs.positional(), reduction="none")
    for workspace in (None, workspace_for(kernel, "kept", inputs, upstream="token")):
        outcome = run(kernel, inputs, reduction="none", workspace=workspace)
        assert bool((outcome.loss[hit] == math.inf).all())
        assert relative_error(outcome.loss[~hit], expected.loss[~hit.cpu()]) <= 1e-5
        check_gradients(outcome, expected, 1e-5)


def test_everything_masked_is_nan_as_in_torch(kernel, dev):
    inputs = make_inputs(dev, ignored=0.3)
    inputs = inputs.replace(bias=torch.full_like(inputs.bias, -math.inf))
    valid = (inputs.targets != -100).cpu()
    outcome = run(kernel, inputs, reduction="none")
    assert torch.equal(outcome.loss.isnan().cpu(), valid)
    assert torch.equal(outcome.grads[0].isnan().all(1).cpu(), valid)


def test_nan_in_the_bias_is_not_taken_for_a_mask(kernel, dev):
    inputs = make_inputs(dev, ignored=0.3)
    inputs.bias[17] = math.nan
    valid = (inputs.targets != -100).cpu()
    values, _ = run_log_probs(kernel, inputs, outputs=DIFFERENTIABLE)
    for name, value in values.items():
        assert torch.equal(value.isnan().cpu(), valid), name


def exact_inputs(device, offset: float, spread: int = 8) -> Inputs:
    """Inputs whose logits, common offset included, are fp32 numbers: what is lost is lost by the statistics."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randint(-spread, spread + 1, (60, 16), generator=g) / 8
    weight = torch.randint(-8, 9, (200, 16), generator=g) / 8
    bias = torch.full((200,), float(offset))
    logits = (hidden.double() @ weight.double().T + bias.double()).float()
    assert torch.equal(logits.double(), hidden.double() @ weight.double().T + bias.double())
    return Inputs(hidden, weight, torch.randint(200, (60,), generator=g), bias).to(device)


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_common_offset_costs_no_digits(kernel, dev, offset, reduction, how, smoothing):
    inputs = exact_inputs(dev, offset)
    workspace = workspace_for(kernel, how, inputs, upstream=upstream_of(reduction))
    options = {"reduction": reduction, "label_smoothing": smoothing}
    outcome = run(kernel, inputs, return_metrics=True, workspace=workspace, **options)
    expected = reference(*inputs.positional(), **options)
    check(outcome, expected, torch.float32, tolerance=5e-6)
    assert relative_error(outcome.loss, expected.loss) <= 1e-6


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_common_offset_costs_the_log_probs_no_digits(kernel, dev, offset):
    inputs = exact_inputs(dev, offset)
    upstream = {name: random((60,), dev, seed=k) for k, name in enumerate(DIFFERENTIABLE)}
    values, outcome = run_log_probs(kernel, inputs, outputs=PER_TOKEN, upstream=upstream)
    expected, gradients = reference_log_probs(*inputs.positional(), upstream=upstream)
    check_log_probs(values, expected, torch.float32)
    assert relative_error(values["log_probs"], expected["log_probs"]) <= 1e-6
    assert relative_error(values["entropy"], expected["entropy"]) <= 2e-6
    check_gradients(outcome, gradients, 1e-5)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_very_different_sizes(kernel, dev, dtype, size, reduction):
    """Most exponentials underflow, and a row's maximum is far above what its first classes and its target show."""
    inputs = exact_inputs(dev, 0.0)
    inputs = inputs.replace(hidden=inputs.hidden * size).to(dev, dtype)
    z = transformed_logits(inputs.hidden.double(), inputs.weight.double())
    assert (z.max(1).values - z.gather(1, inputs.targets[:, None])[:, 0]).max() > 100
    outcome = run(kernel, inputs, reduction=reduction, return_metrics=True)
    check(outcome, reference(*inputs.positional(), reduction=reduction), dtype)


@pytest.mark.parametrize("how", ["default", "slab"])
@pytest.mark.parametrize("size", [8, 10, 12])
def test_confident_rows_keep_their_gradients(kernel, dev, size, how):
    """p_y is nearly 1 everywhere: the gradient is what 1 - p_y is, to the few last bits of fp32's 1 that torch's own
    fp32 cross-entropy loses as well."""
    weight = torch.linalg.qr(random((64, 64), dtype=torch.float64)).Q.float()
    inputs = Inputs(size * weight, weight, torch.arange(64)).to(dev)
    expected = reference(*inputs.positional())
    tolerance = 1e-5 + 5e-7 / expected.loss.item()
    assert tolerance < 2e-3
    outcome = run(kernel, inputs, workspace=None if how == "default" else smallest_workspace(kernel, inputs))
    assert relative_error(outcome.loss, expected.loss) <= tolerance
    check_gradients(outcome, expected, tolerance)


# --- the table of inputs: dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("hidden", "weight"), ("hidden", "bias")], ids=IDS)
@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64], ids=IDS)
def test_dtypes_that_differ_are_an_error_that_names_both(kernel, pair, other):
    inputs = make_inputs(dtype=torch.bfloat16)
    inputs = inputs.replace(**{pair[1]: getattr(inputs, pair[1]).to(other)})
    for call in (kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs):
        with pytest.raises(TypeError, match=f"hidden.*torch.bfloat16.*{pair[1]}.*{other}"):
            call(*inputs.positional())


def autocast_reference(inputs, dtype, **options):
    return reference(*inputs.positional(), round_to=dtype, **options)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=IDS)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32), (torch.float32, torch.bfloat16, None)],
    ids=["fp32", "bf16 hidden", "bf16 weight"],
)
@pytest.mark.parametrize("how", ["default", "slab"])
def test_autocasts_dtype_is_used(kernel, dev, autocast, dtypes, how):
    inputs = make_inputs(dev)
    hidden, weight, bias = inputs.hidden.to(dtypes[0]), inputs.weight.to(dtypes[1]), inputs.bias
    inputs = Inputs(hidden, weight, inputs.targets, None if dtypes[2] is None else bias.to(dtypes[2]))
    workspace = workspace_for(kernel, how, inputs.to(dev, autocast))
    leaves = [as_leaf(t, True) for t in (inputs.hidden, inputs.weight, inputs.bias)]
    with unchanged(*inputs.positional()):
        with torch.autocast(dev, dtype=autocast):
            loss, metrics = kernel.fused_linear_cross_entropy(
                leaves[0], leaves[1], inputs.targets, leaves[2], return_metrics=True, workspace=workspace
            )
        assert loss.dtype == torch.float32
        loss.backward()  # outside of autocast, as trainers do
    grads = tuple(None if leaf is None else leaf.grad for leaf in leaves)
    assert all(g is None or g.dtype == leaf.dtype for g, leaf in zip(grads, leaves))
    expected = autocast_reference(inputs, autocast)
    check(oracle.Outcome(loss.detach(), metrics, grads), expected, autocast)
    exact = reference(*inputs.positional())
    assert relative_error(loss, exact.loss) > 1e-6, "nothing was rounded: autocast was not followed"


def test_autocast_of_the_log_probs(kernel, dev):
    inputs = make_inputs(dev)
    upstream = {name: random((N,), dev, seed=k) for k, name in enumerate(DIFFERENTIABLE)}
    with torch.autocast(dev, dtype=torch.bfloat16):
        values, outcome = run_log_probs(kernel, inputs, outputs=PER_TOKEN, upstream=upstream)
    expected, gradients = reference_log_probs(*inputs.positional(), round_to=torch.bfloat16, upstream=upstream)
    check_log_probs(values, expected, torch.float32)
    check_gradients(outcome, gradients, gradient_tolerance(torch.bfloat16))


def test_autocast_leaves_float64_alone(kernel):
    inputs = make_inputs(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome = run(kernel, inputs)
    check(outcome, reference(*inputs.positional()), torch.float64)


def test_autocast_for_another_device_or_switched_off_is_none(kernel, dev):
    inputs = make_inputs(dev)
    other = "cuda" if dev == "cpu" else "cpu"
    with torch.autocast(other, dtype=torch.bfloat16, enabled=other == "cpu"):
        outcome = run(kernel, inputs)
    with torch.autocast(dev, dtype=torch.bfloat16), torch.autocast(dev, enabled=False):
        again = run(kernel, inputs)
    for found in (outcome, again):
        check(found, reference(*inputs.positional()), torch.float32)


def test_fp32_is_ieee_unless_torchs_switch_says_otherwise(kernel, dev):
    """TF32 has 10 bits of mantissa: a loss or a gradient made with it is wrong in the fourth digit."""
    inputs = make_inputs(dev, hidden_size=512)
    expected = reference(*inputs.positional())
    check(run(kernel, inputs), expected, torch.float32)
    check(run(kernel, inputs, workspace=workspace_for(kernel, "slab", inputs)), expected, torch.float32)
    if dev == "cpu":
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        fast = run(kernel, inputs)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    check_gradients(fast, expected, 5e-3)
    assert relative_error(fast.grads[1], expected.grads[1]) > 1e-5, "the switch has no effect"
    check(run(kernel, inputs), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=IDS)
def test_the_loss_of_half_precision_is_fp32(kernel, dev, dtype):
    inputs = make_inputs(dev, dtype)
    loss, metrics = kernel.fused_linear_cross_entropy(*inputs.positional(), return_metrics=True)
    assert loss.dtype == metrics["entropy_sum"].dtype == metrics["nll_sum"].dtype == torch.float32
    assert metrics["num_correct_tokens"].dtype == metrics["num_valid_tokens"].dtype == torch.int64
    assert all(value.device == loss.device for value in metrics.values())


# --- the table of inputs: weights that are not here ------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_a_dtensor_is_an_error_that_says_what_to_do(kernel, one_rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    i = make_inputs()
    shard = distribute_tensor(i.weight, one_rank, [Shard(0)])
    cases = {
        "weight": (i.hidden, shard, i.targets, i.bias),
        "hidden": (distribute_tensor(i.hidden, one_rank, [Replicate()]), i.weight, i.targets, i.bias),
        "targets": (i.hidden, i.weight, distribute_tensor(i.targets, one_rank, [Replicate()]), i.bias),
        "bias": (i.hidden, i.weight, i.targets, distribute_tensor(i.bias, one_rank, [Shard(0)])),
    }
    for call in (kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs):
        for name, arguments in cases.items():
            with pytest.raises(TypeError, match=rf"{name}.*DTensor.*{name}\.full_tensor\(\)"):
                call(*arguments)
        with pytest.raises(TypeError, match=r"weight.*DTensor.*full_tensor\(\)"):
            call(i.hidden, torch.nn.Parameter(shard), i.targets)
    # and what it says works
    parameter = torch.nn.Parameter(shard)
    kernel.fused_linear_cross_entropy(i.hidden, parameter.full_tensor(), i.targets, i.bias).backward()
    expected = reference(*i.positional()).grads[1]
    assert relative_error(parameter.grad.full_tensor(), expected) <= 1e-5


def test_a_zero3_weight_is_an_error_that_says_what_to_do(kernel):
    i = make_inputs()
    partition = torch.nn.Parameter(torch.empty(0))
    partition.ds_shape = torch.Size((V, H))
    for call in (kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs):
        with pytest.raises(ValueError, match=rf"weight.*\({V}, {H}\).*GatheredParameters"):
            call(i.hidden, partition, i.targets)
        with pytest.raises(ValueError, match=r"weight has no elements, shape \(0,\).*[Gg]ather"):
            call(i.hidden, torch.empty(0), i.targets)


# --- the table of inputs: backward twice -----------------------------------------------------------------------------

TWICE = [
    ("mean", "default"),
    ("sum", "forward"),
    ("mean", "slab"),
    ("none", "default"),
    ("none", "kept"),
    ("none", "slab"),
]


def connected(kernel, inputs, reduction, how, **options):
    leaves = [as_leaf(t, True) for t in (inputs.hidden, inputs.weight, inputs.bias)]
    workspace = workspace_for(kernel, how, inputs, upstream=upstream_of(reduction))
    loss = kernel.fused_linear_cross_entropy(
        leaves[0], leaves[1], inputs.targets, leaves[2], reduction=reduction, workspace=workspace, **options
    )
    return loss, leaves


@pytest.mark.parametrize(("reduction", "how"), TWICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
def test_a_second_backward_gives_its_own_gradients(kernel, dev, dtype, reduction, how):
    """Two different upstream gradients, and what was returned first is written over by its owner in between."""
    inputs = make_inputs(dev, dtype)
    loss, leaves = connected(kernel, inputs, reduction, how)
    for scale in (1.0, -3.0, 1.0, 0.5):
        g = torch.full_like(loss, scale)
        expected = reference(*inputs.positional(), reduction=reduction, upstream=g)
        grads = torch.autograd.grad(loss, leaves, g, retain_graph=True)
        check_gradients(oracle.Outcome(loss, None, grads), expected, gradient_tolerance(dtype))
        for grad in grads:
            grad.fill_(math.nan)


@pytest.mark.parametrize(("reduction", "how"), TWICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
def test_returned_gradients_do_not_change(kernel, dev, dtype, reduction, how):
    inputs = make_inputs(dev, dtype)
    loss, leaves = connected(kernel, inputs, reduction, how)
    first = torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, leaves, torch.full_like(loss, 7.0), retain_graph=True)
    third = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    for name, a, b, c, d in zip(("hidden", "weight", "bias"), first, copies, second, third):
        assert_same_bits(a, b, name)
        assert_same_bits(d, b, f"the third gradient of {name}")
        assert not torch.equal(c, b)


@pytest.mark.parametrize(("reduction", "how"), TWICE)
def test_gradients_accumulate(kernel, dev, reduction, how):
    """.backward() three times with retain_graph: autograd may keep the first gradient it is given as .grad and add the
    later ones to it in place."""
    inputs = make_inputs(dev)
    loss, leaves = connected(kernel, inputs, reduction, how)
    for _ in range(3):
        loss.backward(torch.ones_like(loss), retain_graph=True)
    expected = reference(*inputs.positional(), reduction=reduction, upstream=torch.full_like(loss, 3.0))
    check_gradients(oracle.Outcome(loss, None, tuple(leaf.grad for leaf in leaves)), expected, 1e-5)


def test_a_retained_graph_of_log_probs(kernel, dev):
    inputs = make_inputs(dev)
    leaves = [as_leaf(t, True) for t in (inputs.hidden, inputs.weight, inputs.bias)]
    out = kernel.fused_linear_log_probs(leaves[0], leaves[1], inputs.targets, leaves[2], outputs=DIFFERENTIABLE)
    for names in (("log_probs",), ("entropy", "lse"), ("log_probs",), DIFFERENTIABLE):
        upstream = {name: random((N,), dev, seed=k) for k, name in enumerate(names)}
        grads = torch.autograd.grad(
            [getattr(out, name) for name in names], leaves, list(upstream.values()), retain_graph=True
        )
        _, expected = reference_log_probs(*inputs.positional(), upstream=upstream)
        check_gradients(oracle.Outcome(None, None, grads), expected, 1e-5)
        for grad in grads:
            grad.fill_(math.nan)


@pytest.mark.parametrize(("reduction", "how"), TWICE)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_second_derivative_raises(kernel, reduction, how, scale):
    """A gradient penalty must not silently be taken for a constant."""
    inputs = make_inputs()
    loss, leaves = connected(kernel, inputs, reduction, how)
    g = torch.full_like(loss, scale)
    grads = torch.autograd.grad(loss, leaves, g, create_graph=True)
    for grad in grads:
        with pytest.raises((RuntimeError, NotImplementedError)):
            (grad.square().sum() + leaves[0].sum()).backward(retain_graph=True)


def test_a_second_derivative_of_log_probs_raises(kernel):
    inputs = make_inputs()
    hidden = as_leaf(inputs.hidden, True)
    out = kernel.fused_linear_log_probs(hidden, inputs.weight, inputs.targets, outputs=DIFFERENTIABLE)
    for output in (out.log_probs, out.entropy, out.lse):
        (grad,) = torch.autograd.grad(output.sum(), hidden, create_graph=True)
        with pytest.raises((RuntimeError, NotImplementedError)):
            (grad.square().sum() + hidden.sum()).backward(retain_graph=True)


# --- the table of inputs: frozen -------------------------------------------------------------------------------------

NEEDS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("needs", NEEDS, ids=lambda n: "".join("hwb"[k] if x else "-" for k, x in enumerate(n)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["default", "small"])
def test_what_is_frozen_gets_no_gradient_and_the_others_are_unchanged(kernel, dev, needs, reduction, how):
    inputs = make_inputs(dev, torch.bfloat16)
    upstream = upstream_of(reduction)
    workspace = None if how == "default" else smallest_workspace(kernel, inputs, upstream=upstream)
    outcome = run(kernel, inputs, needs=needs, reduction=reduction, return_metrics=True, workspace=workspace)
    check(outcome, reference(*inputs.positional(), reduction=reduction), torch.bfloat16)
    upstream = dict.fromkeys(DIFFERENTIABLE, torch.ones(N, device=dev))
    values, outcome = run_log_probs(
        kernel, inputs, outputs=DIFFERENTIABLE, upstream=upstream, needs=needs, workspace=workspace
    )
    expected, gradients = reference_log_probs(*inputs.positional(), upstream=upstream)
    check_log_probs(values, expected, torch.bfloat16)
    check_gradients(outcome, gradients, gradient_tolerance(torch.bfloat16))
    assert [grad is not None for grad in outcome.grads] == list(needs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_has_no_buffer(kernel, dev, reduction, frozen):
    """With 8 tokens the (V, H) of dW dwarfs all else, with 8 classes the (N, H) of dX does."""
    sizes = ((8,), 4096, 256) if frozen == "weight" else ((4096,), 8, 256)
    inputs = make_inputs(dev, torch.float32, *sizes, bias=False, ignored=0.0)
    big = 4096 * 256 * 4

    def call(needs):
        leaves = [as_leaf(t, n) for t, n in zip((inputs.hidden, inputs.weight), needs)]

        def body():
            loss = kernel.fused_linear_cross_entropy(*leaves, inputs.targets, reduction=reduction)
            loss.sum().backward()
            return loss, [leaf.grad for leaf in leaves]

        body()
        for leaf in leaves:
            leaf.grad = None
        return oracle.allocations(body, dev)[0]

    assert call((True, True)) >= big
    needs = (True, False) if frozen == "weight" else (False, True)
    if frozen == "weight":
        assert call(needs) < big / 4
    else:
        # dX would be one more (N, H) beside the chunk's copies of hidden
        assert call(needs) <= call((True, True)) - 0.9 * big


@pytest.mark.parametrize("needs", NEEDS[1:-1], ids=lambda n: "".join("hwb"[k] if x else "-" for k, x in enumerate(n)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_frozen_has_no_gemm(kernel, dev, monkeypatch, reduction, needs):
    inputs = make_inputs(dev)
    backends = submodule(kernel, "backends")
    backend, called = backends.load(backends.choose(dev, False)), set()
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        original = getattr(backend, name)
        spy = lambda *a, name=name, original=original, **k: (called.add(name), original(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(backend, name, spy)
    names = [name for name, need in zip(("grad_hidden", "grad_weight", "grad_bias"), needs) if need]
    for workspace in (None, *workspaces(kernel, inputs, needs=needs, upstream=upstream_of(reduction)).values()):
        called.clear()
        run(kernel, inputs, needs=needs, reduction=reduction, workspace=workspace)
        assert called == set(names)


def test_what_is_frozen_is_not_saved_either(kernel):
    inputs = make_inputs()
    for needs in NEEDS:
        *_, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), needs_grad=needs)
        shapes = [tuple(t.shape) for t in saved]
        assert ((N, H) in shapes, (V, H) in shapes) == needs[:2]


def test_without_gradients_nothing_is_saved(kernel):
    inputs = make_inputs()
    with torch.no_grad():
        loss = run_without_leaves(kernel, inputs)
    assert not loss.requires_grad and loss.grad_fn is None
    with torch.inference_mode():
        inference = run_without_leaves(kernel, inputs)
    assert_same_bits(inference, loss)


def run_without_leaves(kernel, inputs):
    return kernel.fused_linear_cross_entropy(
        as_leaf(inputs.hidden, True), as_leaf(inputs.weight, True), inputs.targets, as_leaf(inputs.bias, True)
    )


# --- the table of inputs: strides ------------------------------------------------------------------------------------


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address."""
    out = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape)
    return out.copy_(t)


def sliced(t: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dimension of something larger."""
    return torch.stack((t, torch.full_like(t, 9)), -1)[..., 0]


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else sliced(t)


def padded(t: torch.Tensor) -> torch.Tensor:
    """Rows of a wider matrix, so that no row starts aligned."""
    if t.dim() < 2:
        return misaligned(t)
    out = torch.full((*t.shape[:-1], t.shape[-1] + 3), 9, dtype=t.dtype, device=t.device)[..., 1:-2]
    return out.copy_(t)


def flipped(t: torch.Tensor) -> torch.Tensor:
    """Rows in another order in memory: a negative stride by way of views is not possible in torch, so every other row
    of a doubled tensor."""
    return torch.stack((t, torch.full_like(t, 9)), 1)[:, 0] if t.dim() else t


LAYOUTS = {f.__name__: f for f in (misaligned, sliced, transposed, padded, flipped)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
@pytest.mark.parametrize(
    ("reduction", "how"), [("mean", "default"), ("none", "default"), ("none", "kept"), ("mean", "slab")]
)
def test_any_strides(kernel, dev, dtype, layout, reduction, how):
    plain = make_inputs(dev, dtype, (3, 50))
    change = LAYOUTS[layout]
    inputs = Inputs(*(change(t) for t in plain.positional()))
    assert all(torch.equal(a, b) for a, b in zip(inputs.positional(), plain.positional()))
    assert layout == "misaligned" or not inputs.weight.is_contiguous()
    scaled = reduction == "none"
    workspace = workspace_for(kernel, how, inputs, upstream="token" if scaled else "scalar")
    options = {
        "class_weight": change(random((V,), dev).abs()), "token_weight": change(random((3, 50), dev, seed=2)),
        "reduction": reduction,
    }  # fmt: skip
    g = change(random((3, 50), dev, seed=3)) if reduction == "none" else None
    outcome = run(kernel, inputs, upstream=g, return_metrics=True, workspace=workspace, **options)
    check(outcome, reference(*plain.positional(), upstream=g, **options), dtype)


def test_hidden_that_no_view_flattens(kernel, dev):
    """(T, B) hidden states read as (B, T), as from a model with the batch second."""
    plain = make_inputs(dev, torch.float32, (5, 7))
    inputs = plain.replace(hidden=plain.hidden.transpose(0, 1), targets=plain.targets.transpose(0, 1))
    g = random((7, 5), dev).t().contiguous().t()
    outcome = run(kernel, inputs, upstream=g, reduction="none")
    check(outcome, reference(*inputs.positional(), upstream=g, reduction="none"), torch.float32)


@pytest.mark.parametrize("expanded", ["hidden", "weight", "bias", "targets", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_expanded_inputs(kernel, dev, expanded, reduction):
    inputs = make_inputs(dev, torch.float32, (20,), ignored=0.0)
    names = ("hidden", "weight", "bias", "targets") if expanded == "all" else (expanded,)
    inputs = inputs.replace(**{n: getattr(inputs, n)[:1].expand(getattr(inputs, n).shape) for n in names})
    g = random((20,), dev) if reduction == "none" else None
    outcome = run(kernel, inputs, upstream=g, reduction=reduction)
    check(outcome, reference(*inputs.positional(), upstream=g, reduction=reduction), torch.float32, noise=1e-6)


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
def test_expanded_upstream_gradients(kernel, dev, how):
    """.sum().backward() hands down a gradient of stride 0."""
    inputs = make_inputs(dev, torch.float32, (3, 50))
    expected = reference(*inputs.positional(), reduction="sum")
    workspace = workspace_for(kernel, how, inputs, upstream="token")
    loss, leaves = connected(kernel, inputs, "none", how)
    loss.sum().backward()
    check_gradients(oracle.Outcome(None, None, tuple(leaf.grad for leaf in leaves)), expected, 1e-5)
    rows = torch.arange(3.0, device=dev)[:, None]
    outcome = run(kernel, inputs, upstream=rows.expand(3, 50), reduction="none", workspace=workspace)
    check(outcome, reference(*inputs.positional(), upstream=rows.expand(3, 50), reduction="none"), torch.float32)


def test_gradients_flow_into_what_made_the_inputs(kernel, dev):
    """Views and computed inputs: a shifted slice of hidden states, a tied and scaled weight."""
    i = make_inputs(dev, torch.float32, (2, 9), ignored=0.2)
    states, embedding = as_leaf(i.hidden, True), as_leaf(i.weight, True)
    loss = kernel.fused_linear_cross_entropy(states[:, :-1], 2 * embedding, i.targets[:, 1:])
    loss.backward()
    same, tied = states.detach().double().requires_grad_(), embedding.detach().double().requires_grad_()
    F.cross_entropy((same[:, :-1] @ (2 * tied).T).flatten(0, 1), i.targets[:, 1:].flatten()).backward()
    assert relative_error(states.grad, same.grad) <= 1e-5
    assert relative_error(embedding.grad, tied.grad) <= 1e-5
    assert not states.grad[:, -1].any()


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(kernel, device):
    """N * V, also within one chunk, and offsets of the last rows."""
    n, vocab, hidden_size = 16400, 131200, 64
    assert n * vocab > 2**31
    inputs = make_inputs(device, torch.bfloat16, (n,), vocab, hidden_size, bias=False, ignored=0.0)
    _check_large(kernel, inputs, chunk=512, workspace=8 << 30)


@pytest.mark.gpu
def test_more_than_2_to_the_31_weights(kernel, device):
    """V * H, with targets in the last classes."""
    n, vocab, hidden_size = 40, 262400, 8192
    assert vocab * hidden_size > 2**31
    g = torch.Generator(device).manual_seed(0)
    weight = torch.empty(vocab, hidden_size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=g)
    hidden = torch.randn(n, hidden_size, device=device, generator=g).bfloat16()
    inputs = Inputs(hidden, weight, torch.arange(vocab - n, vocab, device=device))
    _check_large(kernel, inputs, chunk=8, workspace=None)


@pytest.mark.gpu
def test_more_than_2_to_the_31_hidden_states(kernel, device):
    """N * H, with only the last rows valid."""
    n, vocab, hidden_size = 262400, 200, 8192
    hidden = torch.empty(n, hidden_size, dtype=torch.bfloat16, device=device).fill_(math.nan)
    i = make_inputs(device, torch.bfloat16, (64,), vocab, hidden_size, bias=False, ignored=0.0)
    hidden[-64:] = i.hidden
    targets = torch.full((n,), -100, device=device)
    targets[-64:] = i.targets
    outcome = run(kernel, Inputs(hidden, i.weight, targets))
    expected = reference(*i.positional())
    assert relative_error(outcome.loss, expected.loss) <= 1e-5
    assert not outcome.grads[0][:-64].any()
    assert relative_error(outcome.grads[0][-64:], expected.grads[0]) <= gradient_tolerance(torch.bfloat16)
    assert relative_error(outcome.grads[1], expected.grads[1]) <= gradient_tolerance(torch.bfloat16)


def _check_large(kernel, inputs: Inputs, chunk: int, workspace) -> None:
    """Against fp32 logits on the same device, chunk by chunk: float64 would not fit into the time."""
    for reduction in ("sum", "none"):
        leaves = [as_leaf(t, True) for t in (inputs.hidden, inputs.weight)]
        loss = kernel.fused_linear_cross_entropy(*leaves, inputs.targets, reduction=reduction, workspace=workspace)
        loss.sum().backward()
        hidden, weight = leaves[0].grad, leaves[1].grad
        total, dw = 0.0, torch.zeros_like(weight, dtype=torch.float32)
        w = inputs.weight.float()
        for start in range(0, len(inputs.targets), chunk):
            rows = slice(start, start + chunk)
            x, y = inputs.hidden[rows].float(), inputs.targets[rows]
            z = x @ w.T
            total += F.cross_entropy(z, y, reduction="sum").item()
            p = z.softmax(1)
            p[torch.arange(len(y)), y] -= 1
            assert relative_error(hidden[rows], p @ w) <= gradient_tolerance(torch.bfloat16)
            dw.addmm_(p.T, x)
        assert loss.sum().item() == pytest.approx(total, rel=1e-5)
        del w, p, z
        assert ((weight - dw).norm() / dw.norm()).item() <= gradient_tolerance(torch.bfloat16)


@pytest.mark.slow
def test_more_than_2_to_the_31_logits_on_the_cpu(kernel):
    n, vocab = 16400, 131200
    i = make_inputs("cpu", torch.float32, (n,), vocab, 2, bias=False, ignored=0.0)
    with torch.no_grad():
        out = kernel.fused_linear_log_probs(*i.positional())
    last = Inputs(i.hidden[-50:], i.weight, i.targets[-50:])
    expected, _ = reference_log_probs(*last.positional())
    assert relative_error(out.log_probs[-50:], expected["log_probs"]) <= 1e-5


# --- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [200_000, 32_000, 150_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
def test_accuracy_is_exact(kernel, dev, vocab, dtype):
    """The largest logit is told from the second largest where they are 1e-5 apart; bfloat16 would confuse most of
    them."""
    inputs = make_inputs("cpu", dtype, (24,), vocab, 16, bias=False, ignored=0.0)
    z = transformed_logits(inputs.hidden.double(), inputs.weight.double())
    top = z.topk(2)
    clear = (top.values[:, 0] - top.values[:, 1]) > 1e-5 * top.values[:, 0]
    assert clear.sum() >= 20
    targets = torch.where(clear, top.indices[:, 0], -100)
    targets[::3] = top.indices[::3, 1]  # the second largest is wrong
    inputs = inputs.replace(targets=targets).to(dev)
    right = int((targets == top.indices[:, 0]).sum())
    for grads in (torch.enable_grad, torch.no_grad):
        with grads():
            _, metrics = kernel.fused_linear_cross_entropy(
                as_leaf(inputs.hidden, True), inputs.weight, inputs.targets, return_metrics=True
            )
        assert metrics["num_correct_tokens"].item() == right
    out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("is_top1",))
    assert torch.equal(out.is_top1.cpu(), targets == top.indices[:, 0])


def tied_inputs(device, dtype, classes: tuple, target: int, vocab: int) -> Inputs:
    """Small integers, so that every sum is exact, and the classes share the largest logit."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (vocab, 8), generator=g).float()
    weight[list(classes)] = 3.0
    hidden = torch.randint(1, 3, (10, 8), generator=g).float()
    return Inputs(hidden, weight, torch.full((10,), target)).to(device, dtype)


@pytest.mark.parametrize("classes", [(5, 9), (5, 140), (130, 700), (5, 150_000), (149_999, 199_999)], ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
def test_ties_go_to_the_first_index(kernel, dev, classes, dtype):
    vocab = 200_000 if max(classes) > 10_000 else 1000
    for position, target in enumerate(classes):
        inputs = tied_inputs(dev, dtype, classes, target, vocab)
        for needs in ((True, False, False), (False, False, False)):
            metrics = run(kernel, inputs, needs=needs, return_metrics=True).metrics
            assert metrics["num_correct_tokens"].item() == (10 if position == 0 else 0)
        out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("is_top1",))
        assert bool(out.is_top1.all()) if position == 0 else not bool(out.is_top1.any())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_error_of_dw_does_not_grow_with_the_number_of_chunks(kernel, dev, reduction):
    """bf16, 4096 tokens, 1 to 256 chunks. Rounding a running sum 256 times would multiply it by ten."""
    inputs = make_inputs(dev, torch.bfloat16, (4096,), 64, 32, bias=False, ignored=0.0)
    g = random((4096,), dev) if reduction == "none" else None
    expected = reference(*inputs.positional(), reduction=reduction, upstream=g).grads
    upstream = upstream_of(reduction)
    kind = "kept" if reduction == "none" else "forward"
    least = workspace_for(kernel, kind, inputs, upstream=upstream)
    chunks, errors = [], []
    for workspace in (None, 4 * least, least):
        plan = plan_of(kernel, inputs, workspace, upstream=upstream)
        rows = plan.chunk_rows
        chunks.append(math.ceil((4096 - plan.kept_rows) / rows) if plan.kept_rows < 4096 else 1)
        outcome = run(kernel, inputs, reduction=reduction, upstream=g, workspace=workspace)
        errors.append([relative_error(a, b) for a, b in zip(outcome.grads[:2], expected[:2])])
    assert chunks[0] == 1 and chunks[-1] >= (200 if reduction == "mean" else 100), chunks
    for dx, dw in errors:
        assert max(dx, dw) <= gradient_tolerance(torch.bfloat16)
        assert dw <= errors[0][1] * 1.1 + 2e-5, (chunks, errors)
        assert dx <= errors[0][0] * 1.1 + 2e-5, (chunks, errors)


@pytest.mark.parametrize("kind", ["default", "slab"])
def test_the_error_of_dx_is_not_biased(kernel, dev, kind):
    """Rounding dX once per slab of classes leaves the norm of its error small, but shrinks or grows it as a whole."""
    inputs = make_inputs(dev, torch.bfloat16, (1024,), 2048, 64, bias=False, ignored=0.0)
    workspace = None
    if kind == "slab":
        workspace = smallest_workspace(kernel, inputs)
        while plan_of(kernel, inputs, workspace).slab < 100:
            workspace += workspace // 20
        assert plan_of(kernel, inputs, workspace).slab * 5 <= 2048
    outcome = run(kernel, inputs, reduction="sum", workspace=workspace)
    expected = reference(*inputs.positional(), reduction="sum")
    check(outcome, expected, torch.bfloat16)
    for grad, want in zip(outcome.grads[:2], expected.grads[:2]):
        assert abs(oracle.mean_signed_error(grad, want)) <= 1e-4


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_run_gives_the_same_bits(kernel, dev, reduction, how):
    inputs = make_inputs(dev, torch.bfloat16, (300,))
    workspace = workspace_for(kernel, how, inputs, upstream=upstream_of(reduction))
    options = {"reduction": reduction, "return_metrics": True, "workspace": workspace, "z_loss": 0.1}
    first, second = (run(kernel, inputs, **options) for _ in range(2))
    assert_same_bits(first.loss, second.loss)
    for name in first.metrics:
        assert_same_bits(first.metrics[name], second.metrics[name], name)
    for a, b in zip(first.grads, second.grads):
        assert_same_bits(a, b)


def test_the_workspace_that_the_error_names_suffices(kernel, dev):
    for dtype, (upstream, reduction) in itertools.product(
        (torch.float32, torch.bfloat16), (("scalar", "mean"), ("token", "none"))
    ):
        inputs = make_inputs(dev, dtype)
        least = smallest_workspace(kernel, inputs, upstream=upstream)
        outcome = run(kernel, inputs, reduction=reduction, workspace=least)
        check(outcome, reference(*inputs.positional(), reduction=reduction), dtype)
        with pytest.raises(ValueError, match=f"workspace={least - 1} .*{least}"):
            run(kernel, inputs, reduction=reduction, workspace=least - 1)


# --- the raw pairs ---------------------------------------------------------------------------------------------------

RAW = [
    ("mean", "default", {}),
    ("mean", "default", {"num_items": 31}),
    ("mean", "default", {"num_items": torch.tensor([31])}),
    ("sum", "slab", {"label_smoothing": 0.1, "z_loss": 0.1}),
    ("mean", "slab", {"logit_scale": 0.5}),
    ("none", "default", {"softcap": 3.0}),
    ("none", "kept", {"class_weight": True, "token_weight": True}),
    ("none", "recompute", {"label_smoothing": 0.1, "softcap": 3.0}),
]


@pytest.mark.parametrize(("reduction", "how", "options"), RAW, ids=IDS)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)], ids=IDS)
def test_the_raw_loss_equals_autograds(kernel, dev, reduction, how, options, needs):
    inputs, options = make_inputs(dev, torch.bfloat16, (3, 50)), dict(options)
    if "class_weight" in options:
        options["class_weight"] = random((V,), dev).abs()
        options["token_weight"] = random((3, 50), dev)
    scaled, upstream = row_scaled(options), "token" if reduction == "none" else "scalar"
    options["workspace"] = workspace_for(kernel, how, inputs, upstream=upstream, row_scaled=scaled, needs=needs)
    options["reduction"] = reduction
    g = random((3, 50), dev) if reduction == "none" else torch.tensor(1.7, device=dev)
    expected = run(kernel, inputs, upstream=g, return_metrics=True, needs=needs, **options)

    with unchanged(*inputs.positional()):
        loss, metrics, saved = kernel.fused_linear_cross_entropy_forward(
            *inputs.positional(), return_metrics=True, needs_grad=needs, **options
        )
    assert_same_bits(loss, expected.loss)
    assert not loss.requires_grad and all(isinstance(t, torch.Tensor) for t in saved)
    for name in metrics:
        assert_same_bits(metrics[name], expected.metrics[name], name)
    options.pop("num_items", None)
    for _ in range(2):  # a second backward finds what was saved as it was
        with unchanged(g, *inputs.positional()):
            copies = [t.clone() for t in saved]
            grads = kernel.fused_linear_cross_entropy_backward(
                g, saved, *inputs.positional(), needs_grad=needs, **options
            )
            for before, after in zip(copies, saved):
                assert_same_bits(after, before)
        for name, grad, want in zip(("hidden", "weight", "bias"), grads, expected.grads):
            assert_same_bits(grad, want, name)
            if grad is not None:
                grad.fill_(math.nan)  # it is the caller's now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=IDS)
def test_the_raw_backward_with_an_upstream_of_one(kernel, dtype):
    """What it returns is the caller's: writing to it changes neither what was saved nor the next backward."""
    inputs = make_inputs(dtype=dtype)
    expected = run(kernel, inputs)
    loss, metrics, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), reduction="sum")
    assert metrics is None
    copies = [t.clone() for t in saved]
    for _ in range(2):
        grads = kernel.fused_linear_cross_entropy_backward(
            torch.ones_like(loss), saved, *inputs.positional(), reduction="sum"
        )
        valid = int((inputs.targets != -100).sum())
        for grad, want in zip(grads, expected.grads):
            assert relative_error(grad / valid, want) <= gradient_tolerance(dtype)
            grad.fill_(math.nan)
        for before, after in zip(copies, saved):
            assert_same_bits(after, before)


def test_the_raw_backward_may_run_after_the_weight_has_gone(kernel):
    """Where gradients are made in the forward, the values of hidden and weight are not read again."""
    inputs = make_inputs()
    expected = run(kernel, inputs, upstream=torch.tensor(2.0))
    _, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional())
    gone = inputs.replace(hidden=torch.full_like(inputs.hidden, math.nan), weight=inputs.weight * math.nan)
    assert plan_of(kernel, inputs).gradients == "forward"
    grads = kernel.fused_linear_cross_entropy_backward(torch.tensor(2.0), saved, *gone.positional())
    for grad, want in zip(grads, expected.grads):
        assert_same_bits(grad, want)


@pytest.mark.parametrize("kind", ["default", "kept", "slab"])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "lse"), DIFFERENTIABLE], ids=IDS)
def test_the_raw_log_probs_equal_autograds(kernel, dev, outputs, kind):
    inputs = make_inputs(dev, torch.bfloat16, (3, 50))
    kind = "recompute" if kind == "kept" and "entropy" in outputs else kind
    workspace = workspace_for(kernel, kind, inputs, upstream="token", row_scaled="entropy" not in outputs)
    options = {"outputs": outputs, "logit_scale": 0.7, "workspace": workspace}
    upstream = {name: random((3, 50), dev, seed=k) for k, name in enumerate(outputs)}
    values, expected = run_log_probs(kernel, inputs, upstream=upstream, **options)
    out, saved = kernel.fused_linear_log_probs_forward(*inputs.positional(), **options)
    for name in PER_TOKEN:
        assert_same_bits(getattr(out, name), values.get(name), name)
    copies = [t.clone() for t in saved]
    given = kernel.LogProbs(**upstream)
    for _ in range(2):
        grads = kernel.fused_linear_log_probs_backward(given, saved, *inputs.positional(), **options)
        for grad, want in zip(grads, expected.grads):
            assert_same_bits(grad, want)
            grad.fill_(math.nan)
        for before, after in zip(copies, saved):
            assert_same_bits(after, before)


@pytest.mark.parametrize("grads", [("log_probs",), ("lse",), ("entropy",), ()], ids=IDS)
def test_the_raw_log_probs_backward_with_some_upstreams(kernel, grads):
    inputs = make_inputs()
    upstream = {name: random((N,)) for name in grads}
    _, expected = reference_log_probs(*inputs.positional(), upstream=upstream)
    _, saved = kernel.fused_linear_log_probs_forward(*inputs.positional(), outputs=DIFFERENTIABLE)
    found = kernel.fused_linear_log_probs_backward(
        kernel.LogProbs(**upstream), saved, *inputs.positional(), outputs=DIFFERENTIABLE
    )
    if grads:
        check_gradients(oracle.Outcome(None, None, found), expected, 1e-5)
    else:
        assert all(not grad.any() for grad in found)


def test_the_raw_pair_in_a_function_of_ones_own(kernel):
    """What it is for: a torch.autograd.Function that gathers the weight again in backward."""
    inputs = make_inputs(lead=(2, 30))

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, partition, targets):
            weight = partition.clone()  # "gathered"
            loss, _, saved = kernel.fused_linear_cross_entropy_forward(
                hidden, weight, targets, reduction="none", needs_grad=(True, True, False)
            )
            ctx.save_for_backward(hidden, partition, targets, *saved)
            return loss

        @staticmethod
        def backward(ctx, grad):
            hidden, partition, targets, *saved = ctx.saved_tensors
            weight = partition.clone()  # once more
            dx, dw, _ = kernel.fused_linear_cross_entropy_backward(
                grad, tuple(saved), hidden, weight, targets, reduction="none", needs_grad=(True, True, False)
            )
            return dx, dw, None

    hidden, weight = as_leaf(inputs.hidden, True), as_leaf(inputs.weight, True)
    g = random((2, 30))
    (Loss.apply(hidden, weight, inputs.targets) * g).sum().backward()
    expected = reference(inputs.hidden, inputs.weight, inputs.targets, reduction="none", upstream=g)
    assert relative_error(hidden.grad, expected.grads[0]) <= 1e-5
    assert relative_error(weight.grad, expected.grads[1]) <= 1e-5


def test_value_tolerances_are_what_the_contract_says():
    assert value_tolerance(torch.bfloat16) == value_tolerance(torch.float32) == 1e-5
    assert gradient_tolerance(torch.float32) == 1e-5
    assert gradient_tolerance(torch.bfloat16) == gradient_tolerance(torch.float16) == 3.5e-3
