"""Values and gradients of the public functions against float64: every option, every shape, the raw pairs."""

import math

import pytest
import torch
import torch.nn.functional as F

from . import oracle
from .conftest import DEVICES
from .oracle import H, N, V

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def on_cpu_or(*cases, gpu=()):
    """Parametrizes (dev, case): every case on the CPU, and those of `gpu` on the accelerator too, where each new
    combination of options costs seconds of compilation."""
    accelerator = DEVICES[1]
    name = lambda case: case if isinstance(case, str) else "-".join(map(str, case))  # noqa: E731
    return [pytest.param("cpu", case, id=f"cpu-{name(case)}") for case in cases] + [
        pytest.param(*accelerator.values, case, id=f"gpu-{name(case)}", marks=accelerator.marks) for case in gpu
    ]


# --- the oracle itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_oracle_is_torchs_cross_entropy(reduction, ignore_index, weighted):
    i = oracle.make_inputs(dtype=torch.float64, lead=(20,), vocab=13, hidden_size=5, ignore_index=ignore_index)
    class_weight = torch.rand(13, dtype=torch.float64) if weighted else None
    leaves = i.leaves()
    expected = F.cross_entropy(
        F.linear(*leaves), i.targets, class_weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=0.1
    )
    found = oracle.reference(
        *i.positional(), ignore_index, reduction=reduction, class_weight=class_weight, label_smoothing=0.1
    )
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(found.grads, torch.autograd.grad(expected.sum(), leaves))


def test_the_oracle_and_the_formula_of_the_documentation_agree():
    i = oracle.make_inputs(dtype=torch.float64, lead=(20,), vocab=13, hidden_size=5)
    w, t, eps = torch.rand(13, dtype=torch.float64), torch.rand(20, dtype=torch.float64), 0.2
    z = 4.0 * torch.tanh(1.5 * (i.hidden @ i.weight.T + i.bias) / 4.0)
    lse = z.exp().sum(1).log()
    y = i.targets.clamp(min=0)
    loss = (1 - eps) * w[y] * (lse - z[torch.arange(20), y]) + eps / 13 * (w * (lse[:, None] - z)).sum(1)
    loss = torch.where(i.targets == -100, 0.0, t * (loss + 0.1 * lse**2))
    found = oracle.reference(
        *i.positional(), logit_scale=1.5, softcap=4.0, reduction="none", label_smoothing=eps, z_loss=0.1,
        class_weight=w, token_weight=t,
    )  # fmt: skip
    torch.testing.assert_close(found.loss, loss)
    statistics, _ = oracle.reference_log_probs(*i.positional(), logit_scale=1.5, softcap=4.0)
    valid, p = i.targets != -100, z.softmax(1)
    torch.testing.assert_close(statistics["entropy"], torch.where(valid, -(p * p.log()).sum(1), 0.0))
    torch.testing.assert_close(statistics["log_sum_sq_probs"], torch.where(valid, p.square().sum(1).log(), 0.0))


def test_errors_see_nan_infinity_and_bias():
    x = oracle.random((1000,), dtype=torch.float64)
    nan = torch.where(torch.arange(1000) == 3, math.nan, x)
    for wrong in (nan, torch.full_like(x, math.inf), x * (1 + 2e-5)):
        assert not oracle.relative_error(wrong, x) <= 1e-5
        assert not oracle.relative_error(x, wrong) <= 1e-5
    assert not oracle.relative_error(torch.ones(2), torch.zeros(2)) <= 1e-5
    assert oracle.relative_error(x * (1 + 5e-6), x) <= 1e-5
    assert oracle.mean_signed_error(x * 1.01, x) == pytest.approx(0.01)
    assert abs(oracle.mean_signed_error(x + 0.01 * torch.randn(1000).sign(), x)) < 0.005


# --- every option ----------------------------------------------------------------------------------------------------

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


def with_options(name: str, device: str, dtype: torch.dtype, reduction: str) -> tuple[oracle.Inputs, dict]:
    options = dict(OPTIONS[name])
    inputs = oracle.make_inputs(
        device, dtype, (N,), V, H, bias=options.pop("bias", False), ignore_index=options.get("ignore_index", -100)
    )
    exact = oracle.value_dtype(dtype)
    if options.pop("class_weight", False):
        options["class_weight"] = oracle.random((V,), device, exact, seed=2).abs()
    if options.pop("token_weight", False):
        options["token_weight"] = oracle.random((N,), device, exact, seed=3)
    if reduction != "mean":
        options.pop("num_items", None)
    options["reduction"] = reduction
    return inputs, options


def test_every_kind_of_plan_is_tested(kernel, dev):
    """The tests below run what `workspaces` finds; here nothing may be missing."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = oracle.make_inputs(dev, dtype)
        assert set(oracle.workspaces(kernel, inputs)) >= {"forward", "slab"}
        assert set(oracle.workspaces(kernel, inputs, upstream="token")) >= {"kept", "slab"}
        assert set(oracle.workspaces(kernel, inputs, upstream="token", row_scaled=False)) >= {"recompute", "slab"}


ON_GPU = ["plain", "everything"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dev", "name"), on_cpu_or(*OPTIONS, gpu=ON_GPU))
def test_loss_and_gradients(kernel, dev, dtype, name, reduction):
    inputs, options = with_options(name, dev, dtype, reduction)
    upstream = oracle.random((N,), dev, oracle.value_dtype(dtype), seed=4)
    upstream = upstream if reduction == "none" else upstream[0]
    outcome = oracle.run(kernel, inputs, upstream=upstream, return_metrics=True, **options)
    oracle.check(outcome, oracle.reference(*inputs.positional(), upstream=upstream, **options), dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dev", "name"),
    on_cpu_or("plain", "bias", "class_weight", "smoothing", "smoothed_softcap", "everything", gpu=ON_GPU),
)
def test_every_plan_gives_the_same(kernel, dev, dtype, name, reduction):
    inputs, options = with_options(name, dev, dtype, reduction)
    how = {"upstream": oracle.upstream_of(reduction), "row_scaled": oracle.row_scaled(options)}
    g = oracle.random((N,), dev, seed=4) if reduction == "none" else torch.tensor(-1.5, device=dev)
    expected = oracle.reference(*inputs.positional(), upstream=g, **options)
    found = oracle.workspaces(kernel, inputs, **how)
    assert len(found) >= 2
    for kind, workspace in found.items():
        plan = oracle.plan_of(kernel, inputs, workspace, **how)
        assert oracle.kind_of(plan) == kind
        assert plan.chunk_rows <= N / 3 and plan.kept_rows <= N / 3, "one chunk would test nothing"
        oracle.check(
            oracle.run(kernel, inputs, upstream=g, return_metrics=True, workspace=workspace, **options),
            expected,
            dtype,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("grads", ["log_probs", "entropy", "lse", "log_probs,lse", "log_probs,entropy,lse", ""])
@pytest.mark.parametrize(
    ("dev", "name"),
    on_cpu_or("plain", "bias", "negative_scale", "softcap", "ignore_inside", gpu=["plain", "softcap"]),
)
def test_log_probs(kernel, dev, dtype, name, grads):
    inputs, options = with_options(name, dev, dtype, "sum")
    del options["reduction"]
    upstream = oracle.random_upstream(filter(None, grads.split(",")), (N,), dev, oracle.value_dtype(dtype))
    values, outcome = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN, upstream=upstream, **options)
    expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream, **options)
    oracle.check_log_probs(values, expected, dtype)
    if upstream:
        assert outcome.grads[0] is not None and outcome.grads[1] is not None
        oracle.check_gradients(outcome, gradients, oracle.gradient_tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dev", "grads"), on_cpu_or(("log_probs", "lse"), oracle.DIFFERENTIABLE, gpu=[oracle.DIFFERENTIABLE])
)
def test_every_plan_gives_the_same_log_probs(kernel, dev, dtype, grads):
    inputs = oracle.make_inputs(dev, dtype)
    upstream = oracle.random_upstream(grads, (N,), dev)
    options = {"logit_scale": 0.8, "softcap": 5.0}
    expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream, **options)
    found = oracle.workspaces(kernel, inputs, upstream="token", row_scaled="entropy" not in grads)
    assert set(found) >= {"slab", "recompute" if "entropy" in grads else "kept"}
    for workspace in (None, *found.values()):
        values, outcome = oracle.run_log_probs(
            kernel, inputs, outputs=grads, upstream=upstream, workspace=workspace, **options
        )
        oracle.check_log_probs(values, expected, dtype)
        oracle.check_gradients(outcome, gradients, oracle.gradient_tolerance(dtype))


def test_log_probs_of_some_outputs(kernel):
    """What is not asked for is None; one name alone may be given as a string; the order does not matter."""
    inputs = oracle.make_inputs()
    expected, _ = oracle.reference_log_probs(*inputs.positional())
    for outputs in (("entropy",), ("is_top1", "log_probs"), ("log_sum_sq_probs", "lse", "mean_logits")):
        values, _ = oracle.run_log_probs(kernel, inputs, outputs=outputs)
        oracle.check_log_probs(values, expected, torch.float32)
    out = kernel.fused_linear_log_probs(*inputs.positional(), outputs="lse")
    oracle.check_log_probs({"lse": out.lse}, expected, torch.float32)
    assert out._fields == oracle.PER_TOKEN
    default = kernel.fused_linear_log_probs(*inputs.positional())
    assert [name for name in oracle.PER_TOKEN if getattr(default, name) is not None] == ["log_probs"]


def test_outputs_without_a_gradient_have_none(kernel):
    inputs = oracle.make_inputs()
    leaves = inputs.leaves()
    out = kernel.fused_linear_log_probs(leaves[0], leaves[1], inputs.targets, leaves[2], outputs=oracle.PER_TOKEN)
    for name in oracle.PER_TOKEN:
        assert getattr(out, name).requires_grad == (name in oracle.DIFFERENTIABLE), name
    _, metrics = kernel.fused_linear_cross_entropy(
        leaves[0], leaves[1], inputs.targets, leaves[2], reduction="none", return_metrics=True
    )
    assert not any(value.requires_grad for value in metrics.values())


def test_an_unused_output_gets_no_gradient_and_costs_nothing(kernel):
    """Gradients of one output of several: the others count as zero."""
    inputs = oracle.make_inputs()
    for name in oracle.DIFFERENTIABLE:
        upstream = {name: oracle.random((N,), seed=5)}
        _, outcome = oracle.run_log_probs(kernel, inputs, outputs=oracle.DIFFERENTIABLE, upstream=upstream)
        _, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
        oracle.check_gradients(outcome, gradients, 1e-5)


def test_the_loss_is_the_sum_of_what_the_log_probs_say(kernel):
    inputs = oracle.make_inputs()
    loss = kernel.fused_linear_cross_entropy(*inputs.positional(), reduction="sum", z_loss=0.1)
    out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("log_probs", "lse"))
    torch.testing.assert_close(loss, (0.1 * out.lse**2 - out.log_probs).sum())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(kernel, reduction):
    i = oracle.make_inputs(dtype=torch.float64, lead=(5,), vocab=7, hidden_size=4, ignored=0.2)
    class_weight, token_weight = torch.rand(7, dtype=torch.float64), torch.rand(5, dtype=torch.float64)

    def loss(hidden, weight, bias):
        return kernel.fused_linear_cross_entropy(
            hidden, weight, i.targets, bias, logit_scale=0.9, softcap=3.0, reduction=reduction, label_smoothing=0.1,
            z_loss=0.05, class_weight=class_weight, token_weight=token_weight,
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, i.leaves())


def test_gradcheck_of_the_log_probs(kernel):
    i = oracle.make_inputs(dtype=torch.float64, lead=(5,), vocab=7, hidden_size=4, ignored=0.2)

    def outputs(hidden, weight, bias):
        out = kernel.fused_linear_log_probs(
            hidden, weight, i.targets, bias, logit_scale=0.9, softcap=3.0, outputs=oracle.DIFFERENTIABLE
        )
        return out.log_probs, out.entropy, out.lse

    assert torch.autograd.gradcheck(outputs, i.leaves())


def test_a_logit_scale_of_zero_is_uniform(kernel):
    inputs = oracle.make_inputs()
    outcome = oracle.run(kernel, inputs, logit_scale=0.0)
    assert outcome.loss.item() == pytest.approx(math.log(V), rel=1e-6)
    assert all(not grad.any() for grad in outcome.grads)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 3), (3, 1, 8), (17, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_smallest_sizes(kernel, sizes, dtype):
    n, vocab, hidden_size = sizes
    inputs = oracle.make_inputs("cpu", dtype, (n,), vocab, hidden_size, ignored=0.0)
    outcome = oracle.run(kernel, inputs, return_metrics=True, z_loss=0.1)
    oracle.check(outcome, oracle.reference(*inputs.positional(), z_loss=0.1), dtype, noise=1e-7)


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 5), (2, 3, 4), (1, 1, 2, 3), (2, 0, 3), (0,)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_leading_dimensions(kernel, dev, lead, reduction):
    inputs = oracle.make_inputs(dev, torch.float32, lead, ignored=0.0)
    g = oracle.random(lead if reduction == "none" else (), dev)
    token_weight = oracle.random(lead, dev, seed=6).abs()
    outcome = oracle.run(
        kernel, inputs, upstream=g, reduction=reduction, token_weight=token_weight, return_metrics=True
    )
    assert outcome.loss.shape == (lead if reduction == "none" else ())
    expected = oracle.reference(*inputs.positional(), upstream=g, reduction=reduction, token_weight=token_weight)
    oracle.check(outcome, expected, torch.float32)
    if reduction == "none":
        values, _ = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN)
        oracle.check_log_probs(values, oracle.reference_log_probs(*inputs.positional())[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("ignore_index", [-100, 300, 3], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_integer_dtype_of_targets(kernel, dtype, ignore_index, reduction):
    """Also classes that a narrow integer would confuse with ignore_index: 156 is -100 in 8 bits, 44 is 300."""
    vocab = 120 if dtype == torch.int8 else 200
    inputs = oracle.make_inputs(lead=(64,), vocab=vocab, ignored=0.0)
    targets = torch.arange(64) + (40 if dtype == torch.int8 else 120)
    targets[::5] = 3
    inputs = inputs.replace(targets=targets.to(dtype))
    options = {"reduction": reduction, "class_weight": oracle.random((vocab,)).abs(), "ignore_index": ignore_index}
    outcome = oracle.run(kernel, inputs, return_metrics=True, **options)
    oracle.check(outcome, oracle.reference(*inputs.positional(), **options), torch.float32)


@pytest.mark.parametrize("ignore_index", [-(2**63), -1, 0, 5, V - 1, V, 2**31, 2**63 - 1], ids=str)
def test_any_ignore_index(kernel, ignore_index):
    inputs = oracle.make_inputs(ignore_index=ignore_index)
    assert (inputs.targets == ignore_index).sum() >= 30
    for reduction in ("mean", "none"):
        outcome = oracle.run(kernel, inputs, ignore_index=ignore_index, reduction=reduction, return_metrics=True)
        oracle.check(outcome, oracle.reference(*inputs.positional(), ignore_index, reduction=reduction), torch.float32)


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
    inputs = oracle.make_inputs(dev)
    num_items = _num_items(dev)[kind]
    workspace = oracle.workspace_for(kernel, how, inputs)
    outcome = oracle.run(kernel, inputs, num_items=num_items, return_metrics=True, workspace=workspace)
    assert outcome.loss.shape == ()
    oracle.check(outcome, oracle.reference(*inputs.positional(), num_items=num_items), torch.float32)


def test_num_items_is_used_instead_of_the_sum_of_class_weights(kernel):
    inputs, class_weight = oracle.make_inputs(), oracle.random((V,)).abs()
    outcome = oracle.run(kernel, inputs, num_items=11, class_weight=class_weight)
    oracle.check(
        outcome, oracle.reference(*inputs.positional(), num_items=11, class_weight=class_weight), torch.float32
    )


@pytest.mark.parametrize("num_items", [1001, torch.tensor(1001), None], ids=str)
@pytest.mark.parametrize("how", ["default", "slab"])
def test_the_default_dtype_of_torch_changes_nothing(kernel, num_items, how):
    """Models are often built under torch.set_default_dtype(bfloat16); 1001 is not a bfloat16 number."""
    inputs = oracle.make_inputs()
    workspace = oracle.workspace_for(kernel, how, inputs)
    options = {"num_items": num_items, "class_weight": oracle.random((V,)).abs(), "workspace": workspace}
    torch.set_default_dtype(torch.bfloat16)
    try:
        outcome = oracle.run(kernel, inputs, return_metrics=True, **options)
        values, _ = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN)
    finally:
        torch.set_default_dtype(torch.float32)
    oracle.check(outcome, oracle.reference(*inputs.positional(), **options), torch.float32)
    oracle.check_log_probs(values, oracle.reference_log_probs(*inputs.positional())[0], torch.float32)


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


@pytest.mark.parametrize(("reduction", "how", "options"), RAW, ids=str)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
def test_the_raw_loss_equals_autograds(kernel, dev, reduction, how, options, needs):
    inputs, options = oracle.make_inputs(dev, torch.bfloat16, (3, 50)), dict(options)
    if "class_weight" in options:
        options["class_weight"] = oracle.random((V,), dev).abs()
        options["token_weight"] = oracle.random((3, 50), dev)
    call = {"upstream": oracle.upstream_of(reduction), "row_scaled": oracle.row_scaled(options), "needs": needs}
    options["workspace"] = oracle.workspace_for(kernel, how, inputs, **call)
    options["reduction"] = reduction
    g = oracle.random((3, 50), dev) if reduction == "none" else torch.tensor(1.7, device=dev)
    expected = oracle.run(kernel, inputs, upstream=g, return_metrics=True, needs=needs, **options)

    with oracle.unchanged(*inputs.positional()):
        loss, metrics, saved = kernel.fused_linear_cross_entropy_forward(
            *inputs.positional(), return_metrics=True, needs_grad=needs, **options
        )
    oracle.assert_same_bits(loss, expected.loss)
    assert not loss.requires_grad and all(isinstance(t, torch.Tensor) for t in saved)
    for name in metrics:
        oracle.assert_same_bits(metrics[name], expected.metrics[name], name)
    options.pop("num_items", None)
    for _ in range(2):  # a second backward finds what was saved as it was
        with oracle.unchanged(g, *inputs.positional()):
            copies = [t.clone() for t in saved]
            grads = kernel.fused_linear_cross_entropy_backward(
                g, saved, *inputs.positional(), needs_grad=needs, **options
            )
            for before, after in zip(copies, saved):
                oracle.assert_same_bits(after, before)
        for name, grad, want in zip(("hidden", "weight", "bias"), grads, expected.grads):
            oracle.assert_same_bits(grad, want, name)
            if grad is not None:
                grad.fill_(math.nan)  # it is the caller's now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_raw_backward_with_an_upstream_of_one(kernel, dtype):
    """What it returns is the caller's: writing to it changes neither what was saved nor the next backward."""
    inputs = oracle.make_inputs(dtype=dtype)
    expected = oracle.run(kernel, inputs)
    loss, metrics, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), reduction="sum")
    assert metrics is None
    copies = [t.clone() for t in saved]
    for _ in range(2):
        grads = kernel.fused_linear_cross_entropy_backward(
            torch.ones_like(loss), saved, *inputs.positional(), reduction="sum"
        )
        valid = int((inputs.targets != -100).sum())
        for grad, want in zip(grads, expected.grads):
            assert oracle.relative_error(grad / valid, want) <= oracle.gradient_tolerance(dtype)
            grad.fill_(math.nan)
        for before, after in zip(copies, saved):
            oracle.assert_same_bits(after, before)


def test_the_raw_backward_may_run_after_the_weight_has_gone(kernel):
    """Where gradients are made in the forward, the values of hidden and weight are not read again."""
    inputs = oracle.make_inputs()
    expected = oracle.run(kernel, inputs, upstream=torch.tensor(2.0))
    _, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional())
    gone = inputs.replace(hidden=torch.full_like(inputs.hidden, math.nan), weight=inputs.weight * math.nan)
    assert oracle.plan_of(kernel, inputs).gradients == "forward"
    grads = kernel.fused_linear_cross_entropy_backward(torch.tensor(2.0), saved, *gone.positional())
    for grad, want in zip(grads, expected.grads):
        oracle.assert_same_bits(grad, want)


@pytest.mark.parametrize("kind", ["default", "kept", "slab"])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "lse"), oracle.DIFFERENTIABLE], ids=str)
def test_the_raw_log_probs_equal_autograds(kernel, dev, outputs, kind):
    inputs = oracle.make_inputs(dev, torch.bfloat16, (3, 50))
    kind = "recompute" if kind == "kept" and "entropy" in outputs else kind
    workspace = oracle.workspace_for(kernel, kind, inputs, upstream="token", row_scaled="entropy" not in outputs)
    options = {"outputs": outputs, "logit_scale": 0.7, "workspace": workspace}
    upstream = oracle.random_upstream(outputs, (3, 50), dev)
    values, expected = oracle.run_log_probs(kernel, inputs, upstream=upstream, **options)
    out, saved = kernel.fused_linear_log_probs_forward(*inputs.positional(), **options)
    for name in oracle.PER_TOKEN:
        oracle.assert_same_bits(getattr(out, name), values.get(name), name)
    copies = [t.clone() for t in saved]
    given = kernel.LogProbs(**upstream)
    for _ in range(2):
        grads = kernel.fused_linear_log_probs_backward(given, saved, *inputs.positional(), **options)
        for grad, want in zip(grads, expected.grads):
            oracle.assert_same_bits(grad, want)
            grad.fill_(math.nan)
        for before, after in zip(copies, saved):
            oracle.assert_same_bits(after, before)


@pytest.mark.parametrize("grads", [("log_probs",), ("lse",), ("entropy",), ()], ids=str)
def test_the_raw_log_probs_backward_with_some_upstreams(kernel, grads):
    inputs = oracle.make_inputs()
    upstream = {name: oracle.random((N,)) for name in grads}
    _, expected = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
    _, saved = kernel.fused_linear_log_probs_forward(*inputs.positional(), outputs=oracle.DIFFERENTIABLE)
    found = kernel.fused_linear_log_probs_backward(
        kernel.LogProbs(**upstream), saved, *inputs.positional(), outputs=oracle.DIFFERENTIABLE
    )
    if grads:
        oracle.check_gradients(oracle.Outcome(None, None, found), expected, 1e-5)
    else:
        assert all(not grad.any() for grad in found)


def test_the_raw_pair_in_a_function_of_ones_own(kernel):
    """What it is for: a torch.autograd.Function that gathers the weight again in backward."""
    inputs = oracle.make_inputs(lead=(2, 30))

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

    hidden, weight, _ = inputs.leaves()
    g = oracle.random((2, 30))
    (Loss.apply(hidden, weight, inputs.targets) * g).sum().backward()
    expected = oracle.reference(inputs.hidden, inputs.weight, inputs.targets, reduction="none", upstream=g)
    assert oracle.relative_error(hidden.grad, expected.grads[0]) <= 1e-5
    assert oracle.relative_error(weight.grad, expected.grads[1]) <= 1e-5


def test_value_tolerances_are_what_the_contract_says():
    assert oracle.value_tolerance(torch.bfloat16) == oracle.value_tolerance(torch.float32) == 1e-5
    assert oracle.gradient_tolerance(torch.float32) == 1e-5
    assert oracle.gradient_tolerance(torch.bfloat16) == oracle.gradient_tolerance(torch.float16) == 3.5e-3
