"""How exact the public functions are: masked and extreme logits, ties, rounding, reproducibility."""

import itertools
import math

import pytest
import torch

from . import oracle

# --- logits that are -inf or far from zero ---------------------------------------------------------------------------

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


def masked_inputs(name, device, dtype) -> oracle.Inputs:
    """600 classes, some masked through the bias; no target is masked."""
    inputs = oracle.make_inputs(device, dtype, (50,), 600, 40)
    inputs.bias[MASKED[name]] = -math.inf
    allowed = (inputs.bias > -math.inf).nonzero().squeeze(1)
    valid = inputs.targets != -100
    return inputs.replace(targets=torch.where(valid, allowed[inputs.targets % len(allowed)], -100))


@pytest.mark.parametrize("how", ["default", "slab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masked_classes_contribute_nothing(kernel, dev, dtype, name, how):
    inputs = masked_inputs(name, dev, dtype)
    workspace = oracle.workspace_for(kernel, how, inputs)
    options = {"z_loss": 0.01}
    outcome = oracle.run(kernel, inputs, return_metrics=True, workspace=workspace, **options)
    oracle.check(outcome, oracle.reference(*inputs.positional(), **options), dtype)
    assert not outcome.grads[1][MASKED[name]].any() and not outcome.grads[2][MASKED[name]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masked_classes_contribute_nothing_to_the_log_probs(kernel, dev, dtype, name):
    inputs = masked_inputs(name, dev, dtype)
    upstream = oracle.random_upstream(oracle.DIFFERENTIABLE, (50,), dev)
    outputs = tuple(name for name in oracle.PER_TOKEN if name != "mean_logits")
    values, outcome = oracle.run_log_probs(kernel, inputs, outputs=outputs, upstream=upstream)
    expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
    oracle.check_log_probs(values, expected, dtype)
    oracle.check_gradients(outcome, gradients, oracle.gradient_tolerance(dtype))


def test_the_mean_of_logits_with_a_masked_one(kernel, dev):
    inputs = masked_inputs("one", dev, torch.float32)
    mean = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("mean_logits",)).mean_logits
    valid = inputs.targets != -100
    assert bool((mean[valid] == -math.inf).all()) and not mean[~valid].any()


def test_a_masked_target_costs_infinity_and_its_gradient_is_torchs(kernel, dev):
    inputs = oracle.make_inputs(dev, ignored=0.0)
    inputs.bias[inputs.targets[3]] = -math.inf
    hit = inputs.targets == inputs.targets[3]
    expected = oracle.reference(*inputs.positional(), reduction="none")
    for workspace in (None, oracle.workspace_for(kernel, "kept", inputs, upstream="token")):
        outcome = oracle.run(kernel, inputs, reduction="none", workspace=workspace)
        assert bool((outcome.loss[hit] == math.inf).all())
        assert oracle.relative_error(outcome.loss[~hit], expected.loss[~hit.cpu()]) <= 1e-5
        oracle.check_gradients(outcome, expected, 1e-5)


def test_everything_masked_is_nan_as_in_torch(kernel, dev):
    inputs = oracle.make_inputs(dev, ignored=0.3)
    inputs = inputs.replace(bias=torch.full_like(inputs.bias, -math.inf))
    valid = (inputs.targets != -100).cpu()
    outcome = oracle.run(kernel, inputs, reduction="none")
    assert torch.equal(outcome.loss.isnan().cpu(), valid)
    assert torch.equal(outcome.grads[0].isnan().all(1).cpu(), valid)


def test_nan_in_the_bias_is_not_taken_for_a_mask(kernel, dev):
    inputs = oracle.make_inputs(dev, ignored=0.3)
    inputs.bias[17] = math.nan
    valid = (inputs.targets != -100).cpu()
    values, _ = oracle.run_log_probs(kernel, inputs, outputs=oracle.DIFFERENTIABLE)
    for name, value in values.items():
        assert torch.equal(value.isnan().cpu(), valid), name


def exact_inputs(device, offset: float, spread: int = 8) -> oracle.Inputs:
    """Inputs whose logits, common offset included, are fp32 numbers: what is lost is lost by the statistics."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randint(-spread, spread + 1, (60, 20), generator=g) / 8
    weight = torch.randint(-8, 9, (200, 20), generator=g) / 8
    bias = torch.full((200,), float(offset))
    logits = (hidden.double() @ weight.double().T + bias.double()).float()
    assert torch.equal(logits.double(), hidden.double() @ weight.double().T + bias.double())
    return oracle.Inputs(hidden, weight, torch.randint(200, (60,), generator=g), bias).to(device)


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_common_offset_costs_no_digits(kernel, dev, offset, reduction, how, smoothing):
    inputs = exact_inputs(dev, offset)
    workspace = oracle.workspace_for(kernel, how, inputs, upstream=oracle.upstream_of(reduction))
    options = {"reduction": reduction, "label_smoothing": smoothing}
    outcome = oracle.run(kernel, inputs, return_metrics=True, workspace=workspace, **options)
    expected = oracle.reference(*inputs.positional(), **options)
    oracle.check(outcome, expected, torch.float32, tolerance=5e-6)
    assert oracle.relative_error(outcome.loss, expected.loss) <= 1e-6


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_common_offset_costs_the_log_probs_no_digits(kernel, dev, offset):
    inputs = exact_inputs(dev, offset)
    upstream = oracle.random_upstream(oracle.DIFFERENTIABLE, (60,), dev)
    values, outcome = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN, upstream=upstream)
    expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
    oracle.check_log_probs(values, expected, torch.float32)
    assert oracle.relative_error(values["log_probs"], expected["log_probs"]) <= 1e-6
    assert oracle.relative_error(values["entropy"], expected["entropy"]) <= 2e-6
    oracle.check_gradients(outcome, gradients, 1e-5)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_very_different_sizes(kernel, dev, dtype, size, reduction):
    """Most exponentials underflow, and a row's maximum is far above what its first classes and its target show."""
    inputs = exact_inputs(dev, 0.0)
    inputs = inputs.replace(hidden=inputs.hidden * size).to(dev, dtype)
    z = oracle.transformed_logits(inputs.hidden.double(), inputs.weight.double())
    assert (z.max(1).values - z.gather(1, inputs.targets[:, None])[:, 0]).max() > 100
    outcome = oracle.run(kernel, inputs, reduction=reduction, return_metrics=True)
    oracle.check(outcome, oracle.reference(*inputs.positional(), reduction=reduction), dtype)


@pytest.mark.parametrize("how", ["default", "slab"])
@pytest.mark.parametrize("size", [8, 10, 12])
def test_confident_rows_keep_their_gradients(kernel, dev, size, how):
    """p_y is nearly 1 everywhere: the gradient is what 1 - p_y is, to the few last bits of fp32's 1 that torch's own
    fp32 cross-entropy loses as well."""
    weight = torch.linalg.qr(oracle.random((64, 64), dtype=torch.float64)).Q.float()
    inputs = oracle.Inputs(size * weight, weight, torch.arange(64)).to(dev)
    expected = oracle.reference(*inputs.positional())
    tolerance = 1e-5 + 5e-7 / expected.loss.item()
    assert tolerance < 2e-3
    outcome = oracle.run(
        kernel, inputs, workspace=None if how == "default" else oracle.smallest_workspace(kernel, inputs)
    )
    assert oracle.relative_error(outcome.loss, expected.loss) <= tolerance
    oracle.check_gradients(outcome, expected, tolerance)


# --- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [200_000, 32_000, 150_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accuracy_is_exact(kernel, dev, vocab, dtype):
    """The largest logit is told from the second largest where they are 1e-5 apart; bfloat16 would confuse most of
    them."""
    inputs = oracle.make_inputs("cpu", dtype, (24,), vocab, 16, bias=False, ignored=0.0)
    z = oracle.transformed_logits(inputs.hidden.double(), inputs.weight.double())
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
                oracle.as_leaf(inputs.hidden, True), inputs.weight, inputs.targets, return_metrics=True
            )
        assert metrics["num_correct_tokens"].item() == right
    out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("is_top1",))
    assert torch.equal(out.is_top1.cpu(), targets == top.indices[:, 0])


def tied_inputs(device, dtype, classes: tuple, target: int, vocab: int) -> oracle.Inputs:
    """Small integers, so that every sum is exact, and the classes share the largest logit."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (vocab, 8), generator=g).float()
    weight[list(classes)] = 3.0
    hidden = torch.randint(1, 3, (10, 8), generator=g).float()
    return oracle.Inputs(hidden, weight, torch.full((10,), target)).to(device, dtype)


@pytest.mark.parametrize("classes", [(5, 9), (5, 140), (130, 700), (5, 150_000), (149_999, 199_999)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_go_to_the_first_index(kernel, dev, classes, dtype):
    vocab = 200_000 if max(classes) > 10_000 else 1000
    for position, target in enumerate(classes):
        inputs = tied_inputs(dev, dtype, classes, target, vocab)
        for needs in ((True, False, False), (False, False, False)):
            metrics = oracle.run(kernel, inputs, needs=needs, return_metrics=True).metrics
            assert metrics["num_correct_tokens"].item() == (10 if position == 0 else 0)
        out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=("is_top1",))
        assert bool(out.is_top1.all()) if position == 0 else not bool(out.is_top1.any())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_error_of_dw_does_not_grow_with_the_number_of_chunks(kernel, dev, reduction):
    """bf16, 4096 tokens, 1 to 256 chunks. Rounding a running sum 256 times would multiply it by ten."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (4096,), 64, 32, bias=False, ignored=0.0)
    g = oracle.random((4096,), dev) if reduction == "none" else None
    expected = oracle.reference(*inputs.positional(), reduction=reduction, upstream=g).grads
    upstream = oracle.upstream_of(reduction)
    kind = "kept" if reduction == "none" else "forward"
    least = oracle.workspace_for(kernel, kind, inputs, upstream=upstream)
    chunks, errors = [], []
    for workspace in (None, 4 * least, least):
        plan = oracle.plan_of(kernel, inputs, workspace, upstream=upstream)
        rows = plan.chunk_rows
        chunks.append(math.ceil((4096 - plan.kept_rows) / rows) if plan.kept_rows < 4096 else 1)
        outcome = oracle.run(kernel, inputs, reduction=reduction, upstream=g, workspace=workspace)
        errors.append([oracle.relative_error(a, b) for a, b in zip(outcome.grads[:2], expected[:2])])
    assert chunks[0] == 1 and chunks[-1] >= (200 if reduction == "mean" else 100), chunks
    for dx, dw in errors:
        assert max(dx, dw) <= oracle.gradient_tolerance(torch.bfloat16)
        assert dw <= errors[0][1] * 1.1 + 2e-5, (chunks, errors)
        assert dx <= errors[0][0] * 1.1 + 2e-5, (chunks, errors)


@pytest.mark.parametrize("kind", ["default", "slab"])
def test_the_error_of_dx_is_not_biased(kernel, dev, kind):
    """Rounding dX once per slab of classes leaves the norm of its error small, but shrinks or grows it as a whole."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (1024,), 2048, 64, bias=False, ignored=0.0)
    workspace = None
    if kind == "slab":
        workspace = oracle.smallest_workspace(kernel, inputs)
        while oracle.plan_of(kernel, inputs, workspace).slab < 100:
            workspace += workspace // 20
        assert oracle.plan_of(kernel, inputs, workspace).slab * 5 <= 2048
    outcome = oracle.run(kernel, inputs, reduction="sum", workspace=workspace)
    expected = oracle.reference(*inputs.positional(), reduction="sum")
    oracle.check(outcome, expected, torch.bfloat16)
    for grad, want in zip(outcome.grads[:2], expected.grads[:2]):
        assert abs(oracle.mean_signed_error(grad, want)) <= 1e-4


@pytest.mark.parametrize("how", ["default", "kept", "slab"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_run_gives_the_same_bits(kernel, dev, reduction, how):
    inputs = oracle.make_inputs(dev, torch.bfloat16, (300,))
    workspace = oracle.workspace_for(kernel, how, inputs, upstream=oracle.upstream_of(reduction))
    options = {"reduction": reduction, "return_metrics": True, "workspace": workspace, "z_loss": 0.1}
    first, second = (oracle.run(kernel, inputs, **options) for _ in range(2))
    oracle.assert_same_bits(first.loss, second.loss)
    for name in first.metrics:
        oracle.assert_same_bits(first.metrics[name], second.metrics[name], name)
    for a, b in zip(first.grads, second.grads):
        oracle.assert_same_bits(a, b)


def test_the_workspace_that_the_error_names_suffices(kernel, dev):
    for dtype, (upstream, reduction) in itertools.product(
        (torch.float32, torch.bfloat16), (("scalar", "mean"), ("token", "none"))
    ):
        inputs = oracle.make_inputs(dev, dtype)
        least = oracle.smallest_workspace(kernel, inputs, upstream=upstream)
        outcome = oracle.run(kernel, inputs, reduction=reduction, workspace=least)
        oracle.check(outcome, oracle.reference(*inputs.positional(), reduction=reduction), dtype)
        with pytest.raises(ValueError, match=f"workspace={least - 1} .*{least}"):
            oracle.run(kernel, inputs, reduction=reduction, workspace=least - 1)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.97])
def test_an_fp32_gradient_of_hidden_by_several_chunks_and_slabs(kernel, dev, reduction, ignored):
    """It is its own accumulator: its rows are in front until the last slab, and then go where they belong."""
    inputs = oracle.make_inputs(dev, lead=(150,), vocab=3000, hidden_size=8, ignored=ignored)
    workspace = oracle.workspaces(kernel, inputs)["slab"]
    plan = oracle.plan_of(kernel, inputs, workspace)
    assert plan.slab * 2 <= 3000 and plan.chunk_rows * 3 <= 150
    upstream = oracle.random(inputs.targets, dev) if reduction == "none" else None
    options = {"reduction": reduction} | ({} if upstream is None else {"upstream": upstream})
    outcome = oracle.run(kernel, inputs, workspace=workspace, **options)
    oracle.check(outcome, oracle.reference(*inputs.positional(), **options), torch.float32)
