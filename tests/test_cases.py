"""Faults that were reported against other implementations of this loss, each as a test of the right value.

The numbers are this project's own; the address of the report is in the docstring. What concerns several devices is
not here.
"""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from . import oracle
from .conftest import torch_backend


def least_for_forward(kernel, inputs: oracle.Inputs) -> int:
    """The smallest workspace with which the gradients are made in the forward: as many chunks as there can be."""
    return oracle.workspaces(kernel, inputs)["forward"]


# --- gradients -------------------------------------------------------------------------------------------------------


def test_c01_classifier_gradient_far_from_torchs(kernel, dev):
    """https://github.com/apple/ml-cross-entropy/issues/14: many blocks of rows added into a bf16 dW."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (8193,), 32, 128, bias=False, ignored=0.0)
    # shift by one, as the report's training loop does
    inputs = inputs.replace(hidden=inputs.hidden[:-1], targets=inputs.targets[1:])
    head = nn.Linear(128, 32, bias=False, dtype=torch.bfloat16, device=dev)
    with torch.no_grad():
        head.weight.copy_(inputs.weight)
    expected = oracle.reference(inputs.hidden, head.weight, inputs.targets)
    for workspace in (None, least_for_forward(kernel, inputs)):
        head.zero_grad()
        kernel.fused_linear_cross_entropy(inputs.hidden, head.weight, inputs.targets, workspace=workspace).backward()
        # the torch backend's only error is one rounding
        once = oracle.relative_error(expected.grads[1].bfloat16(), expected.grads[1])
        assert oracle.relative_error(head.weight.grad, expected.grads[1]) <= (1.02 * once if dev == "cpu" else 3.5e-3)


def test_c02_flat_softmax_is_filtered_away(kernel, dev):
    """https://github.com/apple/ml-cross-entropy/pull/18: every p below 2^-12, as after a random initialisation."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (64,), 8192, 32, bias=False, ignored=0.0, spread=0.02)
    p = torch.softmax(oracle.transformed_logits(inputs.hidden.double(), inputs.weight.double()), 1)
    assert p.max() < 2**-12
    expected = oracle.reference(*inputs.positional())
    oracle.check(oracle.run(kernel, inputs), expected, torch.bfloat16)
    # without the targets' own rows, where the filter showed
    others = torch.ones(8192, dtype=torch.bool)
    others[inputs.targets.cpu()] = False
    grad = oracle.run(kernel, inputs).grads[1]
    assert oracle.relative_error(grad[others.to(dev)], expected.grads[1][others]) <= 5e-3


@pytest.mark.parametrize("first_ignored", [False, True])
def test_c03_reduction_none_with_nonuniform_weights(kernel, dev, first_ignored):
    """https://github.com/linkedin/Liger-Kernel/pull/1298, /issues/968: dW and db multiplied by grad_output[0]."""
    inputs = oracle.make_inputs(dev, torch.float32, (2, 4), 15, 10, ignored=0.0)
    if first_ignored:
        inputs.targets[0, 0] = -100
    g = oracle.random((2, 4), dev)
    outcome = oracle.run(kernel, inputs, reduction="none", upstream=g)
    oracle.check(outcome, oracle.reference(*inputs.positional(), reduction="none", upstream=g), torch.float32)
    leaves = inputs.leaves()
    per_token = kernel.fused_linear_cross_entropy(leaves[0], leaves[1], inputs.targets, leaves[2], reduction="none")
    (per_token * g).sum().backward()
    for leaf, grad in zip(leaves, outcome.grads):
        oracle.assert_same_bits(leaf.grad, grad)


def test_c04_no_gradient_where_the_first_label_is_ignored(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/issues/678: reduction "none" and many ignored labels."""
    inputs = oracle.make_inputs(dev, ignored=0.8)
    inputs.targets[:10] = -100
    upstream = (inputs.targets != -100).to(torch.float32)  # a masked mean's: 0 in the first, ignored row
    outcome = oracle.run(kernel, inputs, reduction="none", upstream=upstream)
    expected = oracle.reference(*inputs.positional(), reduction="none", upstream=upstream)
    assert expected.grads[1].norm() > 1
    oracle.check(outcome, expected, torch.float32)


def test_c05_reduction_none_returns_a_scalar(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/issues/488: N = 20, V = 180000."""
    inputs = oracle.make_inputs(dev, torch.float32, (20,), 180_000, 16, bias=False, ignored=0.0)
    outcome = oracle.run(kernel, inputs, reduction="none", needs=(True, False, False))
    assert outcome.loss.shape == (20,)
    oracle.check(outcome, oracle.reference(*inputs.positional(), reduction="none"), torch.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("how", ["default", "forward"])
@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
def test_c06_a_retained_backward_scales_in_place(kernel, dev, reduction, how, frozen):
    """https://github.com/Dao-AILab/quack/pull/209: the second backward fails or gets the first one's factor."""
    inputs = oracle.make_inputs(dev, bias=False)
    needs = (frozen != "hidden", frozen != "weight", False)
    workspace = oracle.workspace_for(kernel, how, inputs, needs=needs)
    hidden, weight = oracle.as_leaf(inputs.hidden, needs[0]), oracle.as_leaf(inputs.weight, needs[1])
    loss = kernel.fused_linear_cross_entropy(hidden, weight, inputs.targets, reduction=reduction, workspace=workspace)
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    base = [g for g, n in zip(oracle.reference(*inputs.positional(), reduction=reduction).grads, needs) if n]
    previous = []
    for scale in (3.0, 1.0, 0.25):
        grads = torch.autograd.grad(loss * scale, leaves, retain_graph=True)
        for grad, want in zip(grads, base):
            assert oracle.relative_error(grad, scale * want) <= 1e-5
        previous.append((grads, [grad.clone() for grad in grads]))
    for grads, copies in previous:
        for grad, copy in zip(grads, copies):
            oracle.assert_same_bits(grad, copy)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_c06_under_autocast(kernel, dev, scale):
    """The same with fp32 parameters under bf16 autocast, the gradients accumulating in .grad."""
    inputs = oracle.make_inputs(dev)
    leaves = inputs.leaves()
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = kernel.fused_linear_cross_entropy(leaves[0], leaves[1], inputs.targets, leaves[2])
    (loss * scale).backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    loss.backward()
    expected = oracle.reference(*inputs.positional(), round_to=torch.bfloat16)
    for leaf, grad, want in zip(leaves, first, expected.grads):
        assert oracle.relative_error(grad, scale * want) <= oracle.gradient_tolerance(torch.bfloat16)
        assert oracle.relative_error(leaf.grad, (scale + 1) * want) <= oracle.gradient_tolerance(torch.bfloat16)


def confident_inputs(device, norm=20) -> oracle.Inputs:
    """Every row nearly certain of its target; with a norm of 200 p_y is 1 to 1e-26."""
    g = torch.Generator().manual_seed(0)
    weight = F.normalize(torch.randn(256, 32, generator=g), dim=1)
    targets = torch.randint(256, (64,), generator=g)
    return oracle.Inputs(norm * weight[targets], weight, targets).to(device)


def test_c07_the_gradient_of_lse_is_filtered_away(kernel, dev):
    """A filter on |p - onehot| drops the z-loss's gradient where every row is confident (cut-cross-entropy)."""
    inputs = confident_inputs(dev)
    hidden, weight, _ = inputs.leaves()
    out = kernel.fused_linear_log_probs(hidden, weight, inputs.targets, outputs=("lse",))
    assert oracle.reference_log_probs(*inputs.positional())[0]["log_probs"].exp().min() > 0.98
    (out.lse**2).mean().backward()
    twin, twin_weight = (t.detach().double().cpu().requires_grad_() for t in (hidden, weight))
    ((twin @ twin_weight.T).logsumexp(1) ** 2).mean().backward()
    assert twin.grad.norm() > 1
    assert oracle.relative_error(hidden.grad, twin.grad) <= 1e-5
    assert oracle.relative_error(weight.grad, twin_weight.grad) <= 1e-5
    # and as the loss's own term
    oracle.check_gradients(
        oracle.run(kernel, inputs, z_loss=1.0), oracle.reference(*inputs.positional(), z_loss=1.0), 1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option, logit_scale", [("z_loss", 1.0), ("z_loss", 0.7), ("label_smoothing", 1.0)])
@pytest.mark.parametrize("small", [1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("reduction, kind", [("mean", "forward"), ("none", "kept")])
def test_c07_the_gradient_of_lse_is_rounded_away(kernel, dev, dtype, option, logit_scale, small, reduction, kind):
    """All that certain rows have is the small term's gradient: it is to keep its own digits, not those of 1 + it."""
    inputs = confident_inputs(dev, 200).to(dev, dtype)
    upstream = oracle.upstream_of(reduction)
    workspace = oracle.workspace_for(kernel, kind, inputs, upstream=upstream)
    if kind == "kept":  # the other rows are recomputed
        assert 0 < oracle.plan_of(kernel, inputs, workspace, upstream=upstream).kept_rows < 64
    options = {
        option: small,
        "logit_scale": logit_scale,
        "reduction": reduction,
        "upstream": None if reduction == "mean" else torch.linspace(0.5, 1.5, 64, device=dev),
        "workspace": workspace,
    }
    expected = oracle.reference(*inputs.positional(), **options)
    tolerance = 1e-6 if dtype == torch.float32 else oracle.gradient_tolerance(dtype)
    oracle.check_gradients(oracle.run(kernel, inputs, **options), expected, tolerance)


def test_c09_a_running_sum_of_dw_in_bf16(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/issues/512: training diverges; the sum of many chunks in bf16.

    All rows push the same class the same way: added in bf16, later chunks no longer change the sum.
    """
    inputs = oracle.make_inputs(dev, torch.bfloat16, (4096,), 64, 32, bias=False, ignored=0.0, spread=0.1)
    hidden = inputs.hidden.abs() * 0.1 + 1
    inputs = inputs.replace(hidden=hidden, targets=torch.full_like(inputs.targets, 7))
    workspace = least_for_forward(kernel, inputs)
    assert oracle.plan_of(kernel, inputs, workspace).chunk_rows <= 32
    outcome = oracle.run(kernel, inputs, reduction="sum", workspace=workspace)
    expected = oracle.reference(*inputs.positional(), reduction="sum")
    assert oracle.relative_error(outcome.grads[1][7], expected.grads[1][7]) <= oracle.gradient_tolerance(
        torch.bfloat16
    )
    assert abs(oracle.mean_signed_error(outcome.grads[1], expected.grads[1])) <= 1e-3


def test_c10_the_error_of_dw_grows_with_the_number_of_chunks(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/pull/1391: dW rounded to bf16 after every chunk."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (2048,), 100, 24, bias=False, ignored=0.0)
    expected = oracle.reference(*inputs.positional()).grads[1]
    least, errors = least_for_forward(kernel, inputs), {}
    row = oracle.plan_of(kernel, inputs, 2 * least).workspace_bytes // 2048
    for workspace in (None, *(least + extra * row for extra in (300, 100, 30, 0))):
        chunks = -(-2048 // oracle.plan_of(kernel, inputs, workspace).chunk_rows)
        errors[chunks] = oracle.relative_error(oracle.run(kernel, inputs, workspace=workspace).grads[1], expected)
    assert min(errors) == 1 and max(errors) >= 100 and len(errors) >= 4, errors
    assert max(errors.values()) <= min(1.1 * errors[1], 3.5e-3), errors


def test_c11_half_precision_accumulates_over_tokens(kernel, dev):
    """https://github.com/axolotl-ai-cloud/axolotl/pull/1601, https://github.com/pytorch/pytorch/issues/124480: dW in
    an fp16 accumulator, chunk by chunk along its inner dimension; sums beyond 65504 on the way overflow."""
    inputs = oracle.make_inputs(dev, torch.float16, (2048,), 40, 16, bias=False, ignored=0.0)
    inputs = inputs.replace(hidden=inputs.hidden * 100)
    inputs = inputs.replace(weight=inputs.weight / 100, targets=torch.zeros_like(inputs.targets))
    inputs.hidden[:1024] = inputs.hidden[:1024].abs()
    inputs.hidden[1024:] = -inputs.hidden[:1024]
    expected = oracle.reference(*inputs.positional(), reduction="sum")
    half = oracle.reference(inputs.hidden[:1024], inputs.weight, inputs.targets[:1024], reduction="sum").grads[1]
    assert half.abs().max() > 65504 > 2 * expected.grads[1].abs().max()
    outcome = oracle.run(kernel, inputs, reduction="sum", workspace=least_for_forward(kernel, inputs))
    oracle.check_gradients(
        outcome, expected, oracle.gradient_tolerance(torch.float16), noise=0.0 if dev == "cpu" else 2e-4
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_c12_dx_is_rounded_once_per_vocabulary_chunk(kernel, dev, reduction):
    """huggingface/trl's chunked log-probabilities: rounding the part of every slab of classes biases dX, and entropy
    drifts over a training run although each step's error looks normal."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (512,), 1024, 64, bias=False, ignored=0.0)
    upstream = oracle.upstream_of(reduction)
    workspace = oracle.smallest_workspace(kernel, inputs, upstream=upstream)
    while (plan := oracle.plan_of(kernel, inputs, workspace, upstream=upstream)).slab < 64:
        workspace += workspace // 20
    assert plan.slab * 5 <= 1024
    outcome = oracle.run(kernel, inputs, reduction=reduction, workspace=workspace)
    expected = oracle.reference(*inputs.positional(), reduction="sum")
    assert oracle.relative_error(outcome.grads[0], expected.grads[0]) <= oracle.gradient_tolerance(torch.bfloat16)
    assert abs(oracle.mean_signed_error(outcome.grads[0], expected.grads[0])) <= 1e-4


def test_c13_a_minus_infinite_logit_and_a_nan_one(kernel, dev):
    """https://github.com/pytorch/pytorch/pull/195829: -inf adds nothing, NaN poisons its row, all -inf is NaN, and
    targets need not have stride 1."""
    inputs = oracle.make_inputs(dev, ignored=0.0)
    strided = torch.stack((inputs.targets, torch.full_like(inputs.targets, -1)), 1)[:, 0]
    assert strided.stride() == (2,)
    masked = inputs.bias.clone()
    masked[::2] = -math.inf
    allowed = inputs.replace(bias=masked, targets=(strided | 1).clamp(max=299))
    expected = oracle.reference(*allowed.positional(), reduction="none")
    oracle.check(oracle.run(kernel, allowed, reduction="none"), expected, torch.float32)

    hidden = allowed.hidden.clone()
    hidden[4] = math.nan
    poisoned = oracle.run(kernel, allowed.replace(hidden=hidden), reduction="none")
    others = torch.arange(150, device=dev) != 4
    assert poisoned.loss[4].isnan() and poisoned.grads[0][4].isnan().all()
    assert oracle.relative_error(poisoned.loss[others], expected.loss[others.cpu()]) <= 1e-5

    nothing_left = oracle.run(kernel, inputs.replace(bias=torch.full_like(masked, -math.inf)), reduction="none")
    assert nothing_left.loss.isnan().all()


def test_c13_an_out_of_range_target_is_clamped(kernel, dev):
    """https://github.com/pytorch/pytorch/pull/195829: never a plausible number."""
    inputs = oracle.make_inputs(dev, ignored=0.0)
    inputs.targets[9] = 301
    if dev == "cpu":
        with pytest.raises(IndexError, match="301"):
            oracle.run(kernel, inputs)
        return
    outcome = oracle.run(kernel, inputs, reduction="none")
    assert outcome.loss.isnan().nonzero().tolist() == [[9]]
    assert outcome.grads[0].isnan().all(1).nonzero().tolist() == [[9]]


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (False, False, False)], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_c15_a_frozen_head_still_gets_its_gradient_computed(kernel, dev, needs, reduction):
    """https://github.com/fla-org/flash-linear-attention/pull/1253, https://github.com/PrimeIntellect-ai/prime-rl/pull/3011

    and the opposite: a trainable weight or bias beside frozen hidden states that silently gets none."""
    inputs = oracle.make_inputs(dev)
    outcome = oracle.run(kernel, inputs, needs=needs, reduction=reduction)  # it checks which gradients exist
    oracle.check(outcome, oracle.reference(*inputs.positional(), reduction=reduction), torch.float32)


def test_c15_gradients_are_made_under_no_grad(kernel, dev):
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/3011"""
    inputs = oracle.make_inputs(dev, torch.float32, (16,), 4096, 256, bias=False, ignored=0.0)
    leaves = inputs.leaves()[:2]

    def call(context):
        with context:
            return kernel.fused_linear_cross_entropy(*leaves, inputs.targets)

    call(torch.no_grad())
    peak, _ = oracle.allocations(lambda: call(torch.no_grad()), dev)
    assert peak < inputs.weight.numel() * 4 / 2
    peak, _ = oracle.allocations(lambda: call(torch.enable_grad()), dev)
    assert peak >= inputs.weight.numel() * 4, "this measures nothing"


@pytest.mark.parametrize("how", ["default", "forward", "slab"])
def test_c17_only_the_last_labels_count(kernel, dev, how):
    """https://github.com/unslothai/unsloth/issues/5230: chunks without a valid row must not reset what was added."""
    inputs = oracle.make_inputs(dev, ignored=0.0, lead=(2, 500))
    inputs.targets[:, 3:-104] = -100  # those that count fill several of the small workspaces' chunks
    workspace = oracle.workspace_for(kernel, how, inputs)
    expected = oracle.reference(*inputs.positional())
    assert expected.grads[1].norm() > 0.1
    oracle.check(oracle.run(kernel, inputs, workspace=workspace, return_metrics=True), expected, torch.float32)


@pytest.mark.parametrize("upstream", ["expanded", "per row"])
def test_c18_upstream_gradients_are_read_as_one_scalar(kernel, dev, upstream):
    """https://github.com/NVIDIA/Megatron-LM/issues/1750, /issues/1627, https://github.com/ROCm/TransformerEngine/pull/336,
    /pull/409: a per-token upstream gradient, of stride 0 or not, with ignored rows."""
    inputs = oracle.make_inputs(dev, lead=(3, 50))
    g = torch.full((), 0.3, device=dev).expand(3, 50) if upstream == "expanded" else oracle.random((3, 50), dev)
    outcome = oracle.run(kernel, inputs, reduction="none", upstream=g)
    oracle.check(outcome, oracle.reference(*inputs.positional(), reduction="none", upstream=g), torch.float32)


def test_c20_the_loss_agrees_and_the_gradients_do_not(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/issues/827: bf16, packed sequences, four accumulation steps."""
    batches = [oracle.make_inputs(dev, torch.bfloat16, (2, 100), bias=False, ignored=0.4, seed=s) for s in range(4)]
    count = sum(int((b.targets != -100).sum()) for b in batches)
    # Each step's dW is summed here in float64: what torch rounds when it adds bf16 gradients is not the kernel's.
    total = expected_total = 0.0
    loss, expected_loss = 0.0, 0.0
    for batch in batches:
        hidden, weight = oracle.as_leaf(batch.hidden, True), oracle.as_leaf(batches[0].weight, True)
        part = kernel.fused_linear_cross_entropy(hidden, weight, batch.targets, num_items=count)
        part.backward()
        expected = oracle.reference(batch.hidden, weight, batch.targets, num_items=count)
        assert oracle.relative_error(hidden.grad, expected.grads[0]) <= oracle.gradient_tolerance(torch.bfloat16)
        total, expected_total = total + weight.grad.double().cpu(), expected_total + expected.grads[1]
        loss, expected_loss = loss + part.item(), expected_loss + expected.loss.item()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert oracle.relative_error(total, expected_total) <= oracle.gradient_tolerance(torch.bfloat16)


def test_c21_a_fused_loss_differs_from_its_trainers(kernel, dev):
    """https://github.com/huggingface/trl/pull/5731: every fused variant against the plain formula of its trainer.

    A clipped policy gradient with a temperature and an entropy bonus, as for GRPO."""
    inputs = oracle.make_inputs(dev, lead=(4, 20), ignored=0.25)
    advantage, old = oracle.random((4, 1), dev, seed=3), oracle.random((4, 20), dev, seed=4) * 0.1

    def policy_loss(log_probs, entropy, mask, advantage, old):
        ratio = (log_probs - log_probs.detach() + old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.01 * entropy
        return -(gain * mask).sum() / mask.sum()

    leaves = inputs.leaves()
    mask = inputs.targets != -100
    out = kernel.fused_linear_log_probs(
        leaves[0], leaves[1], inputs.targets, leaves[2], logit_scale=1 / 0.7, outputs=("log_probs", "entropy")
    )
    loss = policy_loss(out.log_probs, out.entropy, mask, advantage, old)
    loss.backward()

    twins = [t.detach().double().cpu().requires_grad_() for t in leaves]
    log_p = (F.linear(twins[0], twins[1], twins[2]) / 0.7).log_softmax(-1)
    chosen = log_p.gather(-1, inputs.targets.cpu().clamp(min=0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    expected = policy_loss(chosen, entropy, mask.cpu(), advantage.double().cpu(), old.double().cpu())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for leaf, twin in zip(leaves, twins):
        assert oracle.relative_error(leaf.grad, twin.grad) <= 1e-5


# --- values ----------------------------------------------------------------------------------------------------------


def test_c22_log_probabilities_above_zero(kernel, dev):
    """https://github.com/verl-project/verl/issues/2656: V = 129920 is a multiple of 128, not of 256 or 1024."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (8,), 129_920, 16, bias=False, ignored=0.0)
    values, _ = oracle.run_log_probs(
        kernel, inputs, outputs=("log_probs", "entropy", "lse"), needs=(False, False, False)
    )
    assert (values["log_probs"] <= 0).all() and (values["entropy"] >= 0).all()
    oracle.check_log_probs(values, oracle.reference_log_probs(*inputs.positional())[0], torch.bfloat16)


@pytest.mark.parametrize("vocab", [129_920, 1000, 257, 1023, 1025, 50_257])
def test_c23_padding_enters_the_log_sum(kernel, dev, vocab):
    """https://github.com/verl-project/verl/issues/2899: a padded class counts as logit 0, which dominates where all
    true logits are far below."""
    inputs = oracle.make_inputs(dev, torch.float32, (8,), vocab, 16, ignored=0.0)
    inputs = inputs.replace(bias=inputs.bias - 50)
    needs = (True, False, False)
    outcome = oracle.run(kernel, inputs, needs=needs, return_metrics=True)
    oracle.check(outcome, oracle.reference(*inputs.positional()), torch.float32, noise=1e-6)


@pytest.mark.parametrize("offset", [-104.0, -120.0, -2000.0])
def test_c24_all_logits_strongly_negative(kernel, dev, offset):
    """https://github.com/NovaSky-AI/SkyRL/pull/2141: a running maximum that starts at 0. The lse shifts by exactly the
    offset, all else does not change."""
    inputs = oracle.Inputs(
        *(t if t is None else t.round() / 4 for t in oracle.make_inputs(dev, ignored=0.0).positional())
    )
    inputs = inputs.replace(targets=oracle.make_inputs(dev, ignored=0.0).targets)
    outputs = ("log_probs", "entropy", "lse", "log_sum_sq_probs")
    near, _ = oracle.run_log_probs(kernel, inputs, outputs=outputs)
    far, outcome = oracle.run_log_probs(
        kernel, inputs.replace(bias=inputs.bias + offset), outputs=outputs,
        upstream={"log_probs": torch.ones(150, device=dev)},
    )  # fmt: skip
    for name in outputs:
        shift = offset if name == "lse" else 0.0
        torch.testing.assert_close(far[name], near[name] + shift, rtol=1e-6, atol=1e-6)
    oracle.check_gradients(
        outcome, oracle.reference_log_probs(*inputs.positional(), upstream={"log_probs": torch.ones(150)})[1], 1e-5
    )


def test_c26_a_leading_chunk_of_minus_infinity(kernel, dev):
    """huggingface/trl 1.16 and cut-cross-entropy: leading classes, or a whole tile, masked; one class masked and the
    entropy is NaN."""
    for masked in (slice(0, 16), slice(5, 6), slice(0, 128), slice(128, 256)):
        inputs = oracle.make_inputs(dev, vocab=400, ignored=0.0)
        inputs.bias[masked] = -math.inf
        allowed = (inputs.bias > -math.inf).nonzero().squeeze(1)
        inputs = inputs.replace(targets=allowed[inputs.targets % len(allowed)])
        upstream = oracle.random_upstream(oracle.DIFFERENTIABLE, (150,), dev)
        outputs = tuple(name for name in oracle.PER_TOKEN if name != "mean_logits")
        values, outcome = oracle.run_log_probs(kernel, inputs, outputs=outputs, upstream=upstream)
        expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream)
        oracle.check_log_probs(values, expected, torch.float32)
        oracle.check_gradients(outcome, gradients, 1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_c27_compiled_ignored_rows_read_foreign_memory(kernel, dev, reduction):
    """https://github.com/linkedin/Liger-Kernel/pull/1338: ignored rows never written, and the loss is whatever the
    allocator left there. Every element is defined, though memory is filled with NaN before it is handed out."""
    inputs = oracle.make_inputs(dev, lead=(256,), vocab=512, hidden_size=32, bias=False, ignored=0.25)
    expected = oracle.reference(*inputs.positional(), reduction=reduction)
    deterministic = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory

    def call(hidden, weight, targets):
        return kernel.fused_linear_cross_entropy(hidden, weight, targets, reduction=reduction, z_loss=0.0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for function in (call, compiled):
            hidden, weight, _ = inputs.leaves()
            loss = function(hidden, weight, inputs.targets)
            loss.sum().backward()
            oracle.check(
                oracle.Outcome(loss.detach(), None, (hidden.grad, weight.grad, None)), expected, torch.float32
            )
            if reduction == "none":
                assert not loss[inputs.targets == -100].any()
        values, _ = oracle.run_log_probs(kernel, inputs, outputs=oracle.PER_TOKEN)
        oracle.check_log_probs(values, oracle.reference_log_probs(*inputs.positional())[0], torch.float32)
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def test_c28_an_fp32_copy_of_the_weight(kernel, dev):
    """https://github.com/huggingface/trl/pull/6863: bf16 in must not make an fp32 (V, H), forward or backward."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (16,), 131_072, 256, bias=False, ignored=0.0)
    hidden = oracle.as_leaf(inputs.hidden, True)

    def call():
        loss = kernel.fused_linear_cross_entropy(hidden, inputs.weight, inputs.targets)
        loss.backward()
        return loss

    call()
    hidden.grad = None
    peak, _ = oracle.allocations(call, dev)
    assert peak < inputs.weight.numel() * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_c29_python_floats_under_compile(kernel, dev, reduction):
    """https://github.com/linkedin/Liger-Kernel/pull/1362: they become float64 kernel arguments. The compiled result is
    the eager one, in float32."""
    inputs = oracle.make_inputs(dev)

    def call(hidden, weight, bias, softcap, z_loss, scale):
        options = {"softcap": softcap, "z_loss": z_loss, "logit_scale": scale, "reduction": reduction}
        return kernel.fused_linear_cross_entropy(hidden, weight, inputs.targets, bias, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for options in ((30.0, 1e-4, 0.7), (25.0, 2e-4, 0.9)):
        leaves = inputs.leaves()
        loss = compiled(*leaves, *options)
        loss.sum().backward()
        again = call(*leaves, *options)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, again, rtol=1e-6, atol=1e-6)
        expected = oracle.reference(
            *inputs.positional(), softcap=options[0], z_loss=options[1], logit_scale=options[2], reduction=reduction
        )
        grads = tuple(leaf.grad for leaf in leaves)
        oracle.check(oracle.Outcome(loss.detach(), None, grads), expected, torch.float32)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")], ids=str)
def test_c30_mixed_dtypes_follow_autocast(kernel, dev, dtypes):
    """https://github.com/unslothai/unsloth-zoo/pull/107: hidden cast to fp32 where F.linear would cast to bf16."""
    inputs = oracle.make_inputs(dev, bias=False)
    hidden, weight = (t.to(getattr(torch, d)) for t, d in zip((inputs.hidden, inputs.weight), dtypes))
    with torch.autocast(dev, dtype=torch.bfloat16):
        loss = kernel.fused_linear_cross_entropy(hidden, weight, inputs.targets)
        logits = F.linear(hidden, weight)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert (
        oracle.relative_error(loss, oracle.reference(hidden, weight, inputs.targets, round_to=torch.bfloat16).loss)
        <= 1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c31_the_heads_bias_is_ignored(kernel, dev, dtype):
    """https://github.com/huggingface/trl/pull/7065"""
    inputs = oracle.make_inputs(dev, dtype)
    head = nn.Linear(40, 301, dtype=dtype, device=dev)
    with torch.no_grad():
        head.weight.copy_(inputs.weight)
        head.bias.copy_(inputs.bias * 3)
    out = kernel.fused_linear_log_probs(inputs.hidden, head.weight, inputs.targets, head.bias)
    g = oracle.random((150,), dev)
    out.log_probs.backward(g)
    expected, gradients = oracle.reference_log_probs(
        inputs.hidden, head.weight, inputs.targets, head.bias, upstream={"log_probs": g}
    )
    oracle.check_log_probs({"log_probs": out.log_probs.detach()}, expected, dtype)
    without = oracle.reference_log_probs(inputs.hidden, head.weight, inputs.targets)[0]
    assert oracle.relative_error(without["log_probs"], expected["log_probs"]) > 0.1
    assert oracle.relative_error(head.bias.grad, gradients.grads[2]) <= oracle.gradient_tolerance(dtype)
    assert oracle.relative_error(head.weight.grad, gradients.grads[1]) <= oracle.gradient_tolerance(dtype)


def test_c32_tensors_of_the_caller_are_overwritten(kernel, dev):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5947: metrics made from the same tensors afterwards."""
    inputs = oracle.make_inputs(dev)
    class_weight, token_weight = oracle.random((301,), dev).abs(), oracle.random((150,), dev)
    g = oracle.random((150,), dev)
    with oracle.unchanged(*inputs.positional(), class_weight, token_weight, g):
        outcome = oracle.run(
            kernel, inputs, upstream=g, reduction="none", class_weight=class_weight, token_weight=token_weight
        )
        outcome.loss.zero_()
        for grad in outcome.grads:
            grad.zero_()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_c35_garbage_in_a_padding_row(kernel, dev, poison):
    """torch 2.13's chunked loss gives NaN, Liger 0.8.5 a NaN dW: variable-length attention leaves such rows."""
    inputs = oracle.make_inputs(dev, ignored=0.0)
    inputs.targets[3] = -100
    expected = oracle.reference(*inputs.positional())
    hidden = inputs.hidden.clone()
    hidden[3] = poison
    outcome = oracle.run(kernel, inputs.replace(hidden=hidden), return_metrics=True)
    oracle.check(outcome, expected, torch.float32)
    assert not outcome.grads[0][3].any()


# --- normalisation and masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 12])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_c36_division_by_zero_where_all_labels_are_ignored(kernel, dev, tokens, reduction):
    """https://github.com/linkedin/Liger-Kernel/issues/177: 0, with zero gradients and an accuracy that is a number."""
    inputs = oracle.make_inputs(dev, lead=(tokens,))
    inputs = inputs.replace(targets=torch.full_like(inputs.targets, -100))
    outcome = oracle.run(kernel, inputs, reduction=reduction, return_metrics=True)
    assert outcome.loss.shape == ((tokens,) if reduction == "none" else ())
    assert not outcome.loss.any() and all(not grad.any() for grad in outcome.grads)
    for name, value in outcome.metrics.items():
        assert value.item() == 0, name


def test_c37_a_fully_masked_microbatch_ends_the_run(kernel, dev):
    """https://github.com/unslothai/unsloth/pull/10892, https://github.com/unslothai/unsloth/pull/7677: NaN loss and
    gradients from one microbatch of several, without a number of items."""
    first, second = oracle.make_inputs(dev, seed=1), oracle.make_inputs(dev, seed=2)
    weight = oracle.as_leaf(first.weight, True)
    nothing = torch.full_like(second.targets, -100)
    losses = []
    for hidden, targets in ((first.hidden, first.targets), (second.hidden, nothing)):
        loss = kernel.fused_linear_cross_entropy(hidden, weight, targets)
        loss.backward()
        losses.append(loss.item())
    expected = oracle.reference(first.hidden, weight, first.targets)
    assert losses[1] == 0 and losses[0] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert oracle.relative_error(weight.grad, expected.grads[1]) <= 1e-5


@pytest.mark.parametrize("kind", ["int", "0-d", "one element", "sum"])
def test_c38_gradient_accumulation_multiplies_the_loss(kernel, dev, kind):
    """https://github.com/linkedin/Liger-Kernel/issues/802, https://github.com/hiyouga/LlamaFactory/issues/7443: eight
    microbatches divided by the number of items of all are the batch in one."""
    batch = oracle.make_inputs(dev, lead=(8, 30), bias=False)
    count = (batch.targets != -100).sum()
    items = {"int": int(count), "0-d": count, "one element": count.reshape(1), "sum": None}[kind]
    weight, total = oracle.as_leaf(batch.weight, True), 0.0
    for hidden, targets in zip(batch.hidden, batch.targets):
        if kind == "sum":
            loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, reduction="sum") / count
        else:
            loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, num_items=items)
        assert loss.shape == ()
        loss.backward()
        total += loss.item()
    expected = oracle.reference(*batch.positional())
    assert total == pytest.approx(expected.loss.item(), rel=1e-5)
    assert oracle.relative_error(weight.grad, expected.grads[1]) <= 1e-5


def test_c39_the_normaliser_is_used_twice(kernel, dev):
    """https://github.com/unslothai/unsloth/pull/8261: the loss is linear in 1 / num_items, value and gradient."""
    inputs = oracle.make_inputs(dev)
    one = oracle.run(kernel, inputs, reduction="sum")
    for items in (4, 8, torch.tensor(16)):
        divided = oracle.run(kernel, inputs, num_items=items)
        assert oracle.relative_error(divided.loss, one.loss / int(items)) <= 1e-6
        for grad, whole in zip(divided.grads, one.grads):
            assert oracle.relative_error(grad, whole / int(items)) <= 1e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_c40_masked_tokens_are_projected(kernel, dev, monkeypatch, reduction):
    """https://github.com/huggingface/trl/pull/5575: the work follows the tokens that count."""
    inputs = oracle.make_inputs(dev, lead=(500,), ignored=0.9)
    valid = int((inputs.targets != -100).sum())
    rows = oracle.count_rows(kernel, monkeypatch, dev, forward=0, grad_weight=1)
    oracle.run(kernel, inputs, reduction=reduction)
    assert rows == {"forward": valid, "grad_weight": valid}


# --- dtypes, compilation, integration --------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_c49_dtypes_differ_under_mixed_precision(kernel, dev, autocast, bias):
    """https://github.com/linkedin/Liger-Kernel/issues/305, /issues/501: fp32 parameters, half activations."""
    inputs = oracle.make_inputs(dev, bias=bias)
    hidden = oracle.as_leaf(inputs.hidden.to(autocast), True)
    weight, bias_ = oracle.as_leaf(inputs.weight, True), oracle.as_leaf(inputs.bias, True)
    with torch.autocast(dev, dtype=autocast):
        loss = kernel.fused_linear_cross_entropy(hidden, weight, inputs.targets, bias_)
    loss.backward()
    expected = oracle.reference(hidden, weight, inputs.targets, bias_, round_to=autocast)
    assert oracle.relative_error(loss, expected.loss) <= 1e-5
    for leaf, want in zip((hidden, weight, bias_), expected.grads):
        if leaf is not None:
            assert leaf.grad.dtype == leaf.dtype
            assert oracle.relative_error(leaf.grad, want) <= oracle.gradient_tolerance(autocast)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_c50_mixed_dtypes_without_autocast(kernel, dev, dtypes):
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2847: an error of the compiler instead of one that helps."""
    inputs = oracle.make_inputs(dev, bias=False)
    with pytest.raises(TypeError, match=f"hidden is {dtypes[0]} but weight is {dtypes[1]}.*autocast"):
        kernel.fused_linear_cross_entropy(inputs.hidden.to(dtypes[0]), inputs.weight.to(dtypes[1]), inputs.targets)


def test_c51_backward_needs_half_precision(kernel, dev):
    """https://github.com/unslothai/unsloth/issues/2127, https://github.com/apple/ml-cross-entropy/pull/45: fp32."""
    inputs = oracle.make_inputs(dev)
    for workspace in (None, oracle.workspace_for(kernel, "slab", inputs)):
        oracle.check(
            oracle.run(kernel, inputs, workspace=workspace), oracle.reference(*inputs.positional()), torch.float32
        )


def test_c52_import_needs_a_gpu_or_triton(kernel, build_dir):
    """https://github.com/apple/ml-cross-entropy/issues/41, /issues/6: importing and using it needs neither."""
    variant = build_dir / f"torch-{torch_backend()}"
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    program = f"""
import importlib.util, sys
sys.modules["triton"] = None
spec = importlib.util.spec_from_file_location({name!r}, {str(variant / "__init__.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules[{name!r}] = module
spec.loader.exec_module(module)
import torch
loss = module.fused_linear_cross_entropy(torch.ones(3, 2, requires_grad=True), torch.ones(5, 2), torch.arange(3))
loss.backward()
print(round(loss.item(), 4))
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "1.6094", done.stderr  # log 5


def test_c54_compile_with_a_full_graph(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/issues/1327, /issues/174, https://github.com/pytorch/pytorch/issues/141639:
    forward and backward without a graph break (c55 as well)."""
    inputs = oracle.make_inputs(dev, torch.bfloat16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden, weight, bias, targets):
        loss, metrics = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, return_metrics=True)
        return loss * 2, metrics["num_correct_tokens"]

    leaves = inputs.leaves()
    loss, correct = step(*leaves, inputs.targets)
    loss.backward()
    expected = oracle.reference(*inputs.positional())
    assert correct.item() == expected.metrics["num_correct_tokens"].item()
    assert oracle.relative_error(loss, 2 * expected.loss) <= 1e-5
    for leaf, want in zip(leaves, expected.grads):
        assert oracle.relative_error(leaf.grad, 2 * want) <= oracle.gradient_tolerance(torch.bfloat16)


def test_c55_gradients_inside_a_custom_function(kernel):
    """https://github.com/pytorch/pytorch/issues/141639: the raw pair inside a torch.autograd.Function, compiled."""
    inputs = oracle.make_inputs(bias=False)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            loss, _, saved = kernel.fused_linear_cross_entropy_forward(hidden, weight, targets)
            ctx.save_for_backward(hidden, weight, targets, *saved)
            return loss

        @staticmethod
        def backward(ctx, grad):
            hidden, weight, targets, *saved = ctx.saved_tensors
            dx, dw, _ = kernel.fused_linear_cross_entropy_backward(grad, tuple(saved), hidden, weight, targets)
            return dx, dw, None

    compiled = torch.compile(Loss.apply, backend="aot_eager")
    hidden, weight, _ = inputs.leaves()
    (compiled(hidden, weight, inputs.targets) * 2).backward()
    expected = oracle.reference(*inputs.positional(), upstream=torch.tensor(2.0))
    assert oracle.relative_error(hidden.grad, expected.grads[0]) <= 1e-5
    assert oracle.relative_error(weight.grad, expected.grads[1]) <= 1e-5


@pytest.mark.parametrize("device_type", ["cpu", "mps", "npu", "hpu"])
def test_c58_the_fast_path_on_a_device_that_has_none(kernel, device_type):
    """https://github.com/linkedin/Liger-Kernel/pull/1316, https://github.com/verl-project/verl/issues/7950: a device
    that the Triton kernels do not know gets the torch backend."""
    assert kernel.plan(1024, 32000, 512, device_type=device_type).backend == "eager"


@pytest.mark.gpu
def test_c59_offsets_of_32_bits(kernel, device):
    """https://github.com/apple/ml-cross-entropy/pull/39: 262144 x 8192 weights are exactly 2^31."""
    vocab, hidden_size = 262_144, 8192
    g = torch.Generator(device).manual_seed(0)
    weight = torch.empty(vocab, hidden_size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=g)
    hidden = torch.randn(32, hidden_size, device=device, generator=g).bfloat16()
    targets = torch.arange(vocab - 32, vocab, device=device)
    leaves = [oracle.as_leaf(hidden, True), oracle.as_leaf(weight, True)]
    loss = kernel.fused_linear_cross_entropy(*leaves, targets)
    loss.backward()
    p = (hidden.float() @ weight.float().T).softmax(1)
    assert loss.item() == pytest.approx(-p[torch.arange(32), targets].log().mean().item(), rel=1e-4)
    p[torch.arange(32), targets] -= 1
    p /= 32
    assert oracle.relative_error(leaves[0].grad, p @ weight.float()) <= oracle.gradient_tolerance(torch.bfloat16)
    last = p[:, -4096:].T @ hidden.float()
    assert oracle.relative_error(leaves[1].grad[-4096:], last) <= oracle.gradient_tolerance(torch.bfloat16)


@pytest.mark.gpu
def test_c59_a_chunk_of_more_than_2_to_the_31_logits(kernel, device):
    """The same for the rows of one chunk: a workspace that holds all 16400 x 131200 exponentials."""
    inputs = oracle.make_inputs(device, torch.bfloat16, (16_400,), 131_200, 64, bias=False, ignored=0.0)
    assert oracle.plan_of(kernel, inputs, 1 << 36).chunk_rows * 131_200 > 2**31
    leaves = inputs.leaves()[:2]
    loss = kernel.fused_linear_cross_entropy(*leaves, inputs.targets, reduction="sum", workspace=1 << 36)
    loss.backward()
    for rows in (slice(0, 256), slice(8000, 8256), slice(16_144, 16_400)):
        x, y, w = inputs.hidden[rows].float(), inputs.targets[rows], inputs.weight.float()
        p = (x @ w.T).softmax(1)
        p[torch.arange(256), y] -= 1
        assert oracle.relative_error(leaves[0].grad[rows], p @ w) <= oracle.gradient_tolerance(torch.bfloat16)


def test_c63_temporaries_of_the_weights_size(kernel, dev):
    """https://github.com/linkedin/Liger-Kernel/pull/1324: none beyond the accumulator, which fp32 gives back as dW."""
    inputs = oracle.make_inputs(dev, torch.float32, (256,), 8192, 256, bias=False, ignored=0.0)
    leaves = inputs.leaves()[:2]
    workspace = oracle.smallest_workspace(kernel, inputs)
    while oracle.plan_of(kernel, inputs, workspace).gradients != "forward":
        workspace += workspace // 10

    def call():
        loss = kernel.fused_linear_cross_entropy(*leaves, inputs.targets, workspace=workspace)
        return torch.autograd.grad(loss, leaves)

    call()
    peak, _ = oracle.allocations(call, dev)
    gradients = sum(leaf.numel() * 4 for leaf in leaves)
    assert gradients <= peak <= 2.3 * gradients
    assert peak < 256 * 8192 * 4 + 2 * gradients, "the logits were whole"


def test_c64_evaluation_makes_the_logits(kernel, dev):
    """https://github.com/huggingface/trl/pull/5069: without gradients neither logits nor gradients are allocated."""
    inputs = oracle.make_inputs(dev, torch.bfloat16, (8192,), 8192, 32, bias=False, ignored=0.0)
    with torch.no_grad():
        call = lambda: kernel.fused_linear_cross_entropy(  # noqa: E731
            *inputs.positional(), return_metrics=True, workspace=16 << 20
        )
        call()
        peak, _ = oracle.allocations(call, dev)
    assert peak < 8192 * 8192 * 2 / 4


# --- what was asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_c66_label_smoothing(kernel, dev, reduction):
    """https://github.com/linkedin/Liger-Kernel/issues/81: as in torch, with class weights and ignored rows too."""
    inputs = oracle.make_inputs(dev)
    class_weight = oracle.random((301,), dev).abs()
    options = {"reduction": reduction, "label_smoothing": 0.15, "class_weight": class_weight}
    outcome = oracle.run(kernel, inputs, **options)
    logits = F.linear(inputs.hidden.double(), inputs.weight.double(), inputs.bias.double())
    expected = F.cross_entropy(
        logits, inputs.targets, class_weight.double(), reduction=reduction, label_smoothing=0.15
    )
    assert oracle.relative_error(outcome.loss, expected) <= 1e-5
    oracle.check(outcome, oracle.reference(*inputs.positional(), **options), torch.float32)


def test_c68_one_primitive_for_every_preference_loss(kernel, dev):
    """https://github.com/huggingface/trl/issues/7063, https://github.com/huggingface/trl/issues/7244,
    https://github.com/NVIDIA-NeMo/RL/pull/3128: here DPO, whose upstream gradients differ in sign."""
    inputs = oracle.make_inputs(dev, lead=(4, 25), bias=False)
    chosen, rejected = slice(0, 2), slice(2, 4)

    def preference_loss(log_probs):
        sums = log_probs.sum(1)
        return -F.logsigmoid(0.1 * (sums[chosen] - sums[rejected])).mean()

    hidden, weight, _ = inputs.leaves()
    loss = preference_loss(kernel.fused_linear_log_probs(hidden, weight, inputs.targets).log_probs)
    loss.backward()
    twins = [t.detach().double().cpu().requires_grad_() for t in (hidden, weight)]
    targets = inputs.targets.cpu()
    log_p = (twins[0] @ twins[1].T).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = preference_loss(torch.where(targets == -100, 0.0, log_p))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert oracle.relative_error(hidden.grad, twins[0].grad) <= 1e-5
    assert oracle.relative_error(weight.grad, twins[1].grad) <= 1e-5


def test_c70_memory_is_the_users_choice(kernel, dev):
    """https://github.com/huggingface/trl/pull/5829: less workspace is less memory, and the same result."""
    inputs = oracle.make_inputs(dev, torch.float32, (2048,), 2048, 64, bias=False, ignored=0.0)
    expected = oracle.reference(*inputs.positional())
    peaks = []
    for workspace in (64 << 20, 4 << 20, 1 << 20):
        leaves = inputs.leaves()[:2]

        def call(leaves=leaves, workspace=workspace):
            loss = kernel.fused_linear_cross_entropy(*leaves, inputs.targets, workspace=workspace)
            return loss, torch.autograd.grad(loss, leaves)

        loss, grads = call()
        oracle.check(oracle.Outcome(loss.detach(), None, (*grads, None)), expected, torch.float32)
        peaks.append(oracle.allocations(call, dev)[0])
    outputs = 2 * 2048 * 64 * 4
    assert peaks[0] > 2 * peaks[1] > 4 * (peaks[2] - outputs)


def test_c72_an_image_classifier_whose_loss_stays_flat(kernel, dev):
    """https://github.com/apple/ml-cross-entropy/issues/22: a small head with a bias learns as fast as with torch."""
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 32, generator=g)
    labels = torch.randint(10, (256,), generator=g)
    images = (centres[labels] + 0.5 * torch.randn(256, 32, generator=g)).to(dev)
    labels = labels.to(dev)
    curves = []
    for fused in (True, False):
        torch.manual_seed(0)
        body, head = nn.Linear(32, 16).to(dev), nn.Linear(16, 10).to(dev)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.5)
        curve = []
        for _ in range(25):
            hidden = torch.relu(body(images))
            if fused:
                loss = kernel.fused_linear_cross_entropy(hidden, head.weight, labels, head.bias)
            else:
                loss = F.cross_entropy(head(hidden), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    assert curves[0][-1] < 0.2 * curves[0][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-3, atol=1e-4)
