"""What the public functions promise about their inputs: ignored, wrong, poisoned, frozen, strided, huge."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import oracle
from .conftest import submodule
from .oracle import H, N, V

# --- nothing to learn from -------------------------------------------------------------------------------------------

CALLS = [
    *itertools.product(["mean", "sum"], ["default", "slab"]),
    ("none", "default"),
]


def check_all_ignored(kernel, dev, reduction, how, **options):
    inputs = oracle.make_inputs(dev, torch.bfloat16)
    workspace = oracle.workspace_for(kernel, how, inputs)
    inputs = inputs.replace(targets=torch.full_like(inputs.targets, -100))
    outcome = oracle.run(kernel, inputs, reduction=reduction, return_metrics=True, workspace=workspace, **options)
    assert outcome.loss.shape == (inputs.targets.shape if reduction == "none" else ())
    assert not outcome.loss.any()
    assert all(not grad.any() for grad in outcome.grads)  # NaN would be true
    assert {name: value.item() for name, value in outcome.metrics.items()} == dict.fromkeys(outcome.metrics, 0)


@pytest.mark.parametrize(("reduction", "how"), CALLS)
def test_all_ignored_is_a_connected_zero(kernel, dev, reduction, how):
    check_all_ignored(kernel, dev, reduction, how)
    weights = {"class_weight": torch.ones(V, device=dev), "token_weight": torch.ones(N, device=dev)}
    check_all_ignored(kernel, dev, reduction, how, label_smoothing=0.1, z_loss=0.1, **weights)


@pytest.mark.parametrize("num_items", [5, 0, torch.tensor(0), torch.tensor(5.0)], ids=str)
@pytest.mark.parametrize("how", ["default", "slab"])
def test_all_ignored_is_zero_whatever_the_divisor(kernel, dev, how, num_items):
    check_all_ignored(kernel, dev, "mean", how, num_items=num_items)


@pytest.mark.parametrize(("reduction", "how"), CALLS)
@pytest.mark.parametrize("lead", [(0,), (3, 0)], ids=str)
def test_no_tokens_is_a_connected_zero(kernel, dev, reduction, how, lead):
    inputs = oracle.make_inputs(dev, torch.float32, lead)
    outcome = oracle.run(kernel, inputs, reduction=reduction, return_metrics=True, workspace=oracle.workspace_for(
        kernel, how, oracle.make_inputs(dev)))  # fmt: skip
    assert outcome.loss.shape == (lead if reduction == "none" else ()) and not outcome.loss.any()
    assert outcome.grads[0].shape == (*lead, H)
    assert not outcome.grads[1].any() and not outcome.grads[2].any()
    assert {name: value.item() for name, value in outcome.metrics.items()} == dict.fromkeys(outcome.metrics, 0)


def test_log_probs_of_nothing(kernel, dev):
    for lead in ((0,), (4,)):
        inputs = oracle.make_inputs(dev, torch.float32, lead)
        inputs = inputs.replace(targets=torch.full_like(inputs.targets, -100))
        upstream = {name: torch.ones(lead, device=dev) for name in oracle.DIFFERENTIABLE}
        values, outcome = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN, upstream=upstream)
        assert all(value.shape == lead and not value.any() for value in values.values())
        assert all(not grad.any() for grad in outcome.grads)


@pytest.mark.parametrize("tokens", [0, 64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_to_learn_from_needs_no_fp32_weight(kernel, dev, tokens, reduction):
    """The gradient of the (bf16) weight is there, and zero, but no fp32 (V, H) beside it."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (tokens,), 4096, 256, bias=False)
    targets = torch.full_like(inputs.targets, -100)
    hidden, weight, _ = inputs.leaves()

    def call():
        loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        return loss, torch.autograd.grad(loss.sum(), (hidden, weight))

    assert not call()[1][1].any()
    gradient = weight.numel() * 2
    exponentials = tokens * 4096 * 4 if reduction == "none" else 0  # their buffer depends on the shapes alone
    peak, _ = oracle.allocations(call, dev)
    assert gradient <= peak < 1.5 * gradient + exponentials


# --- rows that are ignored, wrong or poisoned ------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("reduction", "how"), CALLS)
def test_garbage_in_ignored_rows_reaches_nothing(kernel, dev, reduction, how, poison):
    inputs = oracle.make_inputs(dev)
    ignored = inputs.targets == -100
    assert 20 < int(ignored.sum()) < 100
    workspace = oracle.workspace_for(kernel, how, inputs)
    clean = inputs.replace(hidden=torch.where(ignored[:, None], 0.0, inputs.hidden))
    dirty = inputs.replace(hidden=torch.where(ignored[:, None], poison, inputs.hidden))
    g = oracle.random((N,), dev) if reduction == "none" else None
    options = {"reduction": reduction, "token_weight": torch.where(ignored, poison, 0.5)}
    outcome = oracle.run(kernel, dirty, upstream=g, return_metrics=True, workspace=workspace, z_loss=0.1, **options)
    assert not outcome.grads[0][ignored].any()
    options["token_weight"] = torch.full_like(options["token_weight"], 0.5)
    oracle.check(outcome, oracle.reference(*clean.positional(), upstream=g, z_loss=0.1, **options), torch.float32)


def test_garbage_in_the_upstream_gradient_of_ignored_rows_reaches_nothing(kernel, dev):
    inputs = oracle.make_inputs(dev)
    ignored = inputs.targets == -100
    g = torch.where(ignored, math.nan, oracle.random((N,), dev))
    clean = torch.where(ignored, 0.0, g)
    oracle.check_gradients(
        oracle.run(kernel, inputs, upstream=g, reduction="none"),
        oracle.reference(*inputs.positional(), upstream=clean, reduction="none"),
        1e-5,
    )
    _, outcome = oracle.run_log_probs(
        kernel, inputs, outputs=oracle.DIFFERENTIABLE, upstream=dict.fromkeys(oracle.DIFFERENTIABLE, g)
    )
    _, expected = oracle.reference_log_probs(
        *inputs.positional(), upstream=dict.fromkeys(oracle.DIFFERENTIABLE, clean)
    )
    oracle.check_gradients(outcome, expected, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_are_never_projected(kernel, dev, monkeypatch, reduction):
    inputs = oracle.make_inputs(dev, ignored=0.9)
    valid = int((inputs.targets != -100).sum())
    assert 0 < valid < N / 4
    rows = oracle.count_rows(kernel, monkeypatch, dev, forward=0)
    oracle.run(kernel, inputs, reduction=reduction, return_metrics=True)
    assert rows == {"forward": valid}


@pytest.mark.parametrize("bad", [-1, V, V + 1000, -101, 2**40, -(2**40)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_target_outside_the_vocabulary_is_an_error_on_the_cpu(kernel, bad, reduction):
    inputs = oracle.make_inputs(lead=(2, 75))
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
    inputs = oracle.make_inputs(device, ignored=0.2)
    inputs.targets[5] = bad
    clean = inputs.replace(targets=torch.where(inputs.targets == bad, -100, inputs.targets))
    others = torch.arange(N, device=device) != 5
    for reduction in ("none", "sum"):
        upstream = oracle.upstream_of(reduction)
        workspace = oracle.workspace_for(kernel, how, inputs, upstream=upstream)
        outcome = oracle.run(kernel, inputs, reduction=reduction, return_metrics=True, workspace=workspace)
        expected = oracle.reference(*clean.positional(), reduction=reduction)
        assert outcome.grads[0][5].isnan().all()
        assert oracle.relative_error(outcome.grads[0][others], expected.grads[0][others.cpu()]) <= 1e-5
        assert outcome.metrics["num_correct_tokens"].item() == expected.metrics["num_correct_tokens"].item()
        if reduction == "sum":
            assert outcome.loss.isnan()
        else:
            assert outcome.loss[5].isnan()
            assert oracle.relative_error(outcome.loss[others], expected.loss[others.cpu()]) <= 1e-5
    values, _ = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN, workspace=workspace)
    for name, value in values.items():
        if name not in ("is_top1", "mean_logits"):
            assert value[5].isnan(), name
    assert not values["is_top1"][5]


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nan_in_a_valid_row_poisons_that_row_alone(kernel, dev, poison, reduction, how):
    inputs = oracle.make_inputs(dev, ignored=0.0)
    workspace = oracle.workspace_for(kernel, how, inputs, upstream=oracle.upstream_of(reduction))
    others = torch.arange(N, device=dev) != 70
    expected = oracle.reference(*inputs.positional(), reduction=reduction)
    inputs.hidden[70, 3] = poison
    outcome = oracle.run(kernel, inputs, reduction=reduction, workspace=workspace)
    assert outcome.grads[0][70].isnan().any()
    assert oracle.relative_error(outcome.grads[0][others], expected.grads[0][others.cpu()]) <= 1e-5
    assert outcome.grads[1].isnan().any()
    if reduction == "mean":
        assert not outcome.loss.isfinite()
    else:
        assert not outcome.loss[70].isfinite()
        assert oracle.relative_error(outcome.loss[others], expected.loss[others.cpu()]) <= 1e-5


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_in_a_valid_row_poisons_its_statistics_alone(kernel, dev, poison):
    inputs = oracle.make_inputs(dev, ignored=0.0)
    others = torch.arange(N, device=dev) != 70
    expected, _ = oracle.reference_log_probs(*inputs.positional())
    inputs.hidden[70, 3] = poison
    values, _ = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN)
    for name, value in values.items():
        if name == "is_top1":
            assert torch.equal(value[others].cpu(), expected[name][others.cpu()]) and not value[70]
        else:
            assert not value[70].isfinite(), name
            assert oracle.relative_error(value[others], expected[name][others.cpu()]) <= 1e-5, name


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("hidden", "weight"), ("hidden", "bias")], ids=str)
@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes_that_differ_are_an_error_that_names_both(kernel, pair, other):
    inputs = oracle.make_inputs(dtype=torch.bfloat16)
    inputs = inputs.replace(**{pair[1]: getattr(inputs, pair[1]).to(other)})
    for call in (kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs):
        with pytest.raises(TypeError, match=f"hidden.*torch.bfloat16.*{pair[1]}.*{other}"):
            call(*inputs.positional())


def autocast_reference(inputs, dtype, **options):
    return oracle.reference(*inputs.positional(), round_to=dtype, **options)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32), (torch.float32, torch.bfloat16, None)],
    ids=["fp32", "bf16 hidden", "bf16 weight"],
)
@pytest.mark.parametrize("how", ["default", "slab"])
def test_autocasts_dtype_is_used(kernel, dev, autocast, dtypes, how):
    inputs = oracle.make_inputs(dev)
    hidden, weight, bias = inputs.hidden.to(dtypes[0]), inputs.weight.to(dtypes[1]), inputs.bias
    inputs = oracle.Inputs(hidden, weight, inputs.targets, None if dtypes[2] is None else bias.to(dtypes[2]))
    workspace = oracle.workspace_for(kernel, how, inputs.to(dev, autocast))
    leaves = inputs.leaves()
    with oracle.unchanged(*inputs.positional()):
        with torch.autocast(dev, dtype=autocast):
            loss, metrics = kernel.fused_linear_cross_entropy(
                leaves[0], leaves[1], inputs.targets, leaves[2], return_metrics=True, workspace=workspace
            )
        assert loss.dtype == torch.float32
        loss.backward()  # outside of autocast, as trainers do
    grads = tuple(None if leaf is None else leaf.grad for leaf in leaves)
    assert all(g is None or g.dtype == leaf.dtype for g, leaf in zip(grads, leaves))
    expected = autocast_reference(inputs, autocast)
    oracle.check(oracle.Outcome(loss.detach(), metrics, grads), expected, autocast)
    exact = oracle.reference(*inputs.positional())
    assert oracle.relative_error(loss, exact.loss) > 1e-6, "nothing was rounded: autocast was not followed"


def test_autocast_of_the_log_probs(kernel, dev):
    inputs = oracle.make_inputs(dev)
    upstream = oracle.random_upstream(oracle.DIFFERENTIABLE, (N,), dev)
    with torch.autocast(dev, dtype=torch.bfloat16):
        values, outcome = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN, upstream=upstream)
    expected, gradients = oracle.reference_log_probs(*inputs.positional(), round_to=torch.bfloat16, upstream=upstream)
    oracle.check_log_probs(values, expected, torch.float32)
    oracle.check_gradients(outcome, gradients, oracle.gradient_tolerance(torch.bfloat16))


def test_autocast_leaves_float64_alone(kernel):
    inputs = oracle.make_inputs(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome = oracle.run(kernel, inputs)
    oracle.check(outcome, oracle.reference(*inputs.positional()), torch.float64)


def test_autocast_for_another_device_or_switched_off_is_none(kernel, dev):
    inputs = oracle.make_inputs(dev)
    other = "cuda" if dev == "cpu" else "cpu"
    with torch.autocast(other, dtype=torch.bfloat16, enabled=other == "cpu"):
        outcome = oracle.run(kernel, inputs)
    with torch.autocast(dev, dtype=torch.bfloat16), torch.autocast(dev, enabled=False):
        again = oracle.run(kernel, inputs)
    for found in (outcome, again):
        oracle.check(found, oracle.reference(*inputs.positional()), torch.float32)


def test_fp32_is_ieee_unless_torchs_switch_says_otherwise(kernel, dev):
    """TF32 has 10 bits of mantissa: a loss or a gradient made with it is wrong in the fourth digit."""
    inputs = oracle.make_inputs(dev, hidden_size=512)
    expected = oracle.reference(*inputs.positional())
    oracle.check(oracle.run(kernel, inputs), expected, torch.float32)
    oracle.check(
        oracle.run(kernel, inputs, workspace=oracle.workspace_for(kernel, "slab", inputs)), expected, torch.float32
    )
    if dev == "cpu":
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        fast = oracle.run(kernel, inputs)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    oracle.check_gradients(fast, expected, 5e-3)
    assert oracle.relative_error(fast.grads[1], expected.grads[1]) > 1e-5, "the switch has no effect"
    oracle.check(oracle.run(kernel, inputs), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_of_half_precision_is_fp32(kernel, dev, dtype):
    inputs = oracle.make_inputs(dev, dtype)
    loss, metrics = kernel.fused_linear_cross_entropy(*inputs.positional(), return_metrics=True)
    assert loss.dtype == metrics["entropy_sum"].dtype == metrics["nll_sum"].dtype == torch.float32
    assert metrics["num_correct_tokens"].dtype == metrics["num_valid_tokens"].dtype == torch.int64
    assert all(value.device == loss.device for value in metrics.values())


# --- weights that are not here ---------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_a_dtensor_is_an_error_that_says_what_to_do(kernel, one_rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    i = oracle.make_inputs()
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
    expected = oracle.reference(*i.positional()).grads[1]
    assert oracle.relative_error(parameter.grad.full_tensor(), expected) <= 1e-5


def test_a_zero3_weight_is_an_error_that_says_what_to_do(kernel):
    i = oracle.make_inputs()
    partition = torch.nn.Parameter(torch.empty(0))
    partition.ds_shape = torch.Size((V, H))
    for call in (kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs):
        with pytest.raises(ValueError, match=rf"weight.*\({V}, {H}\).*GatheredParameters"):
            call(i.hidden, partition, i.targets)
        with pytest.raises(ValueError, match=r"weight has no elements, shape \(0,\).*[Gg]ather"):
            call(i.hidden, torch.empty(0), i.targets)


# --- backward twice --------------------------------------------------------------------------------------------------

TWICE = [
    ("mean", "default"),
    ("sum", "forward"),
    ("mean", "slab"),
    ("none", "default"),
    ("none", "kept"),
    ("none", "slab"),
]


def connected(kernel, inputs, reduction, how, **options):
    leaves = inputs.leaves()
    workspace = oracle.workspace_for(kernel, how, inputs, upstream=oracle.upstream_of(reduction))
    loss = kernel.fused_linear_cross_entropy(
        leaves[0], leaves[1], inputs.targets, leaves[2], reduction=reduction, workspace=workspace, **options
    )
    return loss, leaves


@pytest.mark.parametrize(("reduction", "how"), TWICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_second_backward_gives_its_own_gradients(kernel, dev, dtype, reduction, how):
    """Two different upstream gradients, and what was returned first is written over by its owner in between."""
    inputs = oracle.make_inputs(dev, dtype)
    loss, leaves = connected(kernel, inputs, reduction, how)
    for scale in (1.0, -3.0, 1.0, 0.5):
        g = torch.full_like(loss, scale)
        expected = oracle.reference(*inputs.positional(), reduction=reduction, upstream=g)
        grads = torch.autograd.grad(loss, leaves, g, retain_graph=True)
        oracle.check_gradients(oracle.Outcome(loss, None, grads), expected, oracle.gradient_tolerance(dtype))
        for grad in grads:
            grad.fill_(math.nan)


@pytest.mark.parametrize(("reduction", "how"), TWICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_returned_gradients_do_not_change(kernel, dev, dtype, reduction, how):
    inputs = oracle.make_inputs(dev, dtype)
    loss, leaves = connected(kernel, inputs, reduction, how)
    first = torch.autograd.grad(loss, leaves, torch.ones_like(loss), retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, leaves, torch.full_like(loss, 7.0), retain_graph=True)
    third = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    for name, a, b, c, d in zip(("hidden", "weight", "bias"), first, copies, second, third):
        oracle.assert_same_bits(a, b, name)
        oracle.assert_same_bits(d, b, f"the third gradient of {name}")
        assert not torch.equal(c, b)


@pytest.mark.parametrize(("reduction", "how"), TWICE)
def test_gradients_accumulate(kernel, dev, reduction, how):
    """.backward() three times with retain_graph: autograd may keep the first gradient it is given as .grad and add the
    later ones to it in place."""
    inputs = oracle.make_inputs(dev)
    loss, leaves = connected(kernel, inputs, reduction, how)
    for _ in range(3):
        loss.backward(torch.ones_like(loss), retain_graph=True)
    expected = oracle.reference(*inputs.positional(), reduction=reduction, upstream=torch.full_like(loss, 3.0))
    oracle.check_gradients(oracle.Outcome(loss, None, tuple(leaf.grad for leaf in leaves)), expected, 1e-5)


def test_a_retained_graph_of_log_probs(kernel, dev):
    inputs = oracle.make_inputs(dev)
    leaves = inputs.leaves()
    out = kernel.fused_linear_log_probs(leaves[0], leaves[1], inputs.targets, leaves[2], outputs=oracle.DIFFERENTIABLE)
    for names in (("log_probs",), ("entropy", "lse"), ("log_probs",), oracle.DIFFERENTIABLE):
        upstream = oracle.random_upstream(names, (N,), dev)
        grads = torch.autograd.grad(
            [getattr(out, name) for name in names], leaves, list(upstream.values()), retain_graph=True
        )
        _, expected = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
        oracle.check_gradients(oracle.Outcome(None, None, grads), expected, 1e-5)
        for grad in grads:
            grad.fill_(math.nan)


@pytest.mark.parametrize(("reduction", "how"), TWICE)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_second_derivative_raises(kernel, reduction, how, scale):
    """A gradient penalty must not silently be taken for a constant."""
    inputs = oracle.make_inputs()
    loss, leaves = connected(kernel, inputs, reduction, how)
    g = torch.full_like(loss, scale)
    grads = torch.autograd.grad(loss, leaves, g, create_graph=True)
    for grad in grads:
        with pytest.raises((RuntimeError, NotImplementedError)):
            (grad.square().sum() + leaves[0].sum()).backward(retain_graph=True)


def test_a_second_derivative_of_log_probs_raises(kernel):
    inputs = oracle.make_inputs()
    hidden = oracle.as_leaf(inputs.hidden, True)
    out = kernel.fused_linear_log_probs(hidden, inputs.weight, inputs.targets, outputs=oracle.DIFFERENTIABLE)
    for output in (out.log_probs, out.entropy, out.lse):
        (grad,) = torch.autograd.grad(output.sum(), hidden, create_graph=True)
        with pytest.raises((RuntimeError, NotImplementedError)):
            (grad.square().sum() + hidden.sum()).backward(retain_graph=True)


# --- frozen ----------------------------------------------------------------------------------------------------------

NEEDS = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize("needs", NEEDS, ids=lambda n: "".join("hwb"[k] if x else "-" for k, x in enumerate(n)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("how", ["default", "small"])
def test_what_is_frozen_gets_no_gradient_and_the_others_are_unchanged(kernel, dev, needs, reduction, how):
    inputs = oracle.make_inputs(dev, torch.bfloat16)
    upstream = oracle.upstream_of(reduction)
    workspace = None if how == "default" else oracle.smallest_workspace(kernel, inputs, upstream=upstream)
    outcome = oracle.run(kernel, inputs, needs=needs, reduction=reduction, return_metrics=True, workspace=workspace)
    oracle.check(outcome, oracle.reference(*inputs.positional(), reduction=reduction), torch.bfloat16)
    upstream = dict.fromkeys(oracle.DIFFERENTIABLE, torch.ones(N, device=dev))
    values, outcome = oracle.run_log_probs(
        kernel, inputs, outputs=oracle.DIFFERENTIABLE, upstream=upstream, needs=needs, workspace=workspace
    )
    expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
    oracle.check_log_probs(values, expected, torch.bfloat16)
    oracle.check_gradients(outcome, gradients, oracle.gradient_tolerance(torch.bfloat16))
    assert [grad is not None for grad in outcome.grads] == list(needs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_has_no_buffer(kernel, dev, reduction, frozen):
    """With 8 tokens the (V, H) of dW dwarfs all else, with 8 classes the (N, H) of dX does."""
    sizes = ((8,), 4096, 256) if frozen == "weight" else ((4096,), 8, 256)
    inputs = oracle.make_inputs(dev, torch.float32, *sizes, bias=False, ignored=0.0)
    big = 4096 * 256 * 4

    def call(needs):
        leaves = inputs.leaves(needs)

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
    inputs = oracle.make_inputs(dev)
    backends = submodule(kernel, "backends")
    backend, called = backends.load(backends.choose(dev, False)), set()
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        original = getattr(backend, name)
        spy = lambda *a, name=name, original=original, **k: (called.add(name), original(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(backend, name, spy)
    names = [name for name, need in zip(("grad_hidden", "grad_weight", "grad_bias"), needs) if need]
    for workspace in (
        None,
        *oracle.workspaces(kernel, inputs, needs=needs, upstream=oracle.upstream_of(reduction)).values(),
    ):
        called.clear()
        oracle.run(kernel, inputs, needs=needs, reduction=reduction, workspace=workspace)
        assert called == set(names)


def test_what_is_frozen_is_not_saved_either(kernel):
    inputs = oracle.make_inputs()
    for needs in NEEDS:
        *_, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), needs_grad=needs)
        shapes = [tuple(t.shape) for t in saved]
        assert ((N, H) in shapes, (V, H) in shapes) == needs[:2]


def test_without_gradients_nothing_is_saved(kernel):
    inputs = oracle.make_inputs()
    with torch.no_grad():
        loss = run_without_leaves(kernel, inputs)
    assert not loss.requires_grad and loss.grad_fn is None
    with torch.inference_mode():
        inference = run_without_leaves(kernel, inputs)
    oracle.assert_same_bits(inference, loss)


def run_without_leaves(kernel, inputs):
    return kernel.fused_linear_cross_entropy(
        oracle.as_leaf(inputs.hidden, True),
        oracle.as_leaf(inputs.weight, True),
        inputs.targets,
        oracle.as_leaf(inputs.bias, True),
    )


# --- strides ---------------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("reduction", "how"), [("mean", "default"), ("none", "default"), ("none", "kept"), ("mean", "slab")]
)
def test_any_strides(kernel, dev, dtype, layout, reduction, how):
    plain = oracle.make_inputs(dev, dtype, (3, 50))
    change = LAYOUTS[layout]
    inputs = oracle.Inputs(*(change(t) for t in plain.positional()))
    assert all(torch.equal(a, b) for a, b in zip(inputs.positional(), plain.positional()))
    assert layout == "misaligned" or not inputs.weight.is_contiguous()
    workspace = oracle.workspace_for(kernel, how, inputs, upstream=oracle.upstream_of(reduction))
    options = {
        "class_weight": change(oracle.random((V,), dev).abs()),
        "token_weight": change(oracle.random((3, 50), dev, seed=2)),
        "reduction": reduction,
    }
    g = change(oracle.random((3, 50), dev, seed=3)) if reduction == "none" else None
    outcome = oracle.run(kernel, inputs, upstream=g, return_metrics=True, workspace=workspace, **options)
    oracle.check(outcome, oracle.reference(*plain.positional(), upstream=g, **options), dtype)


def test_hidden_that_no_view_flattens(kernel, dev):
    """(T, B) hidden states read as (B, T), as from a model with the batch second."""
    plain = oracle.make_inputs(dev, torch.float32, (5, 7))
    inputs = plain.replace(hidden=plain.hidden.transpose(0, 1), targets=plain.targets.transpose(0, 1))
    g = oracle.random((7, 5), dev).t().contiguous().t()
    outcome = oracle.run(kernel, inputs, upstream=g, reduction="none")
    oracle.check(outcome, oracle.reference(*inputs.positional(), upstream=g, reduction="none"), torch.float32)


@pytest.mark.parametrize("expanded", ["hidden", "weight", "bias", "targets", "all"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_expanded_inputs(kernel, dev, expanded, reduction):
    inputs = oracle.make_inputs(dev, torch.float32, (20,), ignored=0.0)
    names = ("hidden", "weight", "bias", "targets") if expanded == "all" else (expanded,)
    inputs = inputs.replace(**{n: getattr(inputs, n)[:1].expand(getattr(inputs, n).shape) for n in names})
    g = oracle.random((20,), dev) if reduction == "none" else None
    outcome = oracle.run(kernel, inputs, upstream=g, reduction=reduction)
    oracle.check(
        outcome, oracle.reference(*inputs.positional(), upstream=g, reduction=reduction), torch.float32, noise=1e-6
    )


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
def test_expanded_upstream_gradients(kernel, dev, how):
    """.sum().backward() hands down a gradient of stride 0."""
    inputs = oracle.make_inputs(dev, torch.float32, (3, 50))
    expected = oracle.reference(*inputs.positional(), reduction="sum")
    workspace = oracle.workspace_for(kernel, how, inputs, upstream="token")
    loss, leaves = connected(kernel, inputs, "none", how)
    loss.sum().backward()
    oracle.check_gradients(oracle.Outcome(None, None, tuple(leaf.grad for leaf in leaves)), expected, 1e-5)
    rows = torch.arange(3.0, device=dev)[:, None]
    outcome = oracle.run(kernel, inputs, upstream=rows.expand(3, 50), reduction="none", workspace=workspace)
    oracle.check(
        outcome, oracle.reference(*inputs.positional(), upstream=rows.expand(3, 50), reduction="none"), torch.float32
    )


def test_gradients_flow_into_what_made_the_inputs(kernel, dev):
    """Views and computed inputs: a shifted slice of hidden states, a tied and scaled weight."""
    i = oracle.make_inputs(dev, torch.float32, (2, 9), ignored=0.2)
    states, embedding = oracle.as_leaf(i.hidden, True), oracle.as_leaf(i.weight, True)
    loss = kernel.fused_linear_cross_entropy(states[:, :-1], 2 * embedding, i.targets[:, 1:])
    loss.backward()
    same, tied = states.detach().double().requires_grad_(), embedding.detach().double().requires_grad_()
    F.cross_entropy((same[:, :-1] @ (2 * tied).T).flatten(0, 1), i.targets[:, 1:].flatten()).backward()
    assert oracle.relative_error(states.grad, same.grad) <= 1e-5
    assert oracle.relative_error(embedding.grad, tied.grad) <= 1e-5
    assert not states.grad[:, -1].any()


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits(kernel, device):
    """N * V, also within one chunk, and offsets of the last rows."""
    n, vocab, hidden_size = 16400, 131200, 64
    assert n * vocab > 2**31
    inputs = oracle.make_inputs(device, torch.bfloat16, (n,), vocab, hidden_size, bias=False, ignored=0.0)
    _check_large(kernel, inputs, chunk=512, workspace=8 << 30)


@pytest.mark.gpu
def test_more_than_2_to_the_31_weights(kernel, device):
    """V * H, with targets in the last classes."""
    n, vocab, hidden_size = 40, 262400, 8192
    assert vocab * hidden_size > 2**31
    g = torch.Generator(device).manual_seed(0)
    weight = torch.empty(vocab, hidden_size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=g)
    hidden = torch.randn(n, hidden_size, device=device, generator=g).bfloat16()
    inputs = oracle.Inputs(hidden, weight, torch.arange(vocab - n, vocab, device=device))
    _check_large(kernel, inputs, chunk=8, workspace=None)


@pytest.mark.gpu
def test_more_than_2_to_the_31_hidden_states(kernel, device):
    """N * H, with only the last rows valid."""
    n, vocab, hidden_size = 262400, 200, 8192
    hidden = torch.empty(n, hidden_size, dtype=torch.bfloat16, device=device).fill_(math.nan)
    i = oracle.make_inputs(device, torch.bfloat16, (64,), vocab, hidden_size, bias=False, ignored=0.0)
    hidden[-64:] = i.hidden
    targets = torch.full((n,), -100, device=device)
    targets[-64:] = i.targets
    outcome = oracle.run(kernel, oracle.Inputs(hidden, i.weight, targets))
    expected = oracle.reference(*i.positional())
    assert oracle.relative_error(outcome.loss, expected.loss) <= 1e-5
    assert not outcome.grads[0][:-64].any()
    assert oracle.relative_error(outcome.grads[0][-64:], expected.grads[0]) <= oracle.gradient_tolerance(
        torch.bfloat16
    )
    assert oracle.relative_error(outcome.grads[1], expected.grads[1]) <= oracle.gradient_tolerance(torch.bfloat16)


def _check_large(kernel, inputs: oracle.Inputs, chunk: int, workspace) -> None:
    """Against fp32 logits on the same device, chunk by chunk: float64 would not fit into the time."""
    for reduction in ("sum", "none"):
        leaves = inputs.leaves()[:2]
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
            assert oracle.relative_error(hidden[rows], p @ w) <= oracle.gradient_tolerance(torch.bfloat16)
            dw.addmm_(p.T, x)
        assert loss.sum().item() == pytest.approx(total, rel=1e-5)
        del w, p, z
        assert ((weight - dw).norm() / dw.norm()).item() <= oracle.gradient_tolerance(torch.bfloat16)


@pytest.mark.slow
def test_more_than_2_to_the_31_logits_on_the_cpu(kernel):
    n, vocab = 16400, 131200
    i = oracle.make_inputs("cpu", torch.float32, (n,), vocab, 2, bias=False, ignored=0.0)
    with torch.no_grad():
        out = kernel.fused_linear_log_probs(*i.positional())
    last = oracle.Inputs(i.hidden[-50:], i.weight, i.targets[-50:])
    expected, _ = oracle.reference_log_probs(*last.positional())
    assert oracle.relative_error(out.log_probs[-50:], expected["log_probs"]) <= 1e-5
