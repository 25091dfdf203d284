"""A scalar loss's gradients between the forward that makes them and the backward that scales them: their dtypes, how
often they are rounded, and what is written over."""

import pytest
import torch

from .. import oracle
from ..conftest import submodule
from .conftest import INTERPRETER

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
BACKENDS = [
    "torch",
    pytest.param("torch on a gpu", marks=pytest.mark.gpu),
    pytest.param("interpreter", marks=INTERPRETER),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def sizes(request, device, interpreted_bf16, kernel, monkeypatch) -> tuple:
    """(device, N, V, H), by backend."""
    if request.param == "torch on a gpu":  # as without Triton
        monkeypatch.setattr(submodule(kernel, "backends"), "choose", lambda *about: "eager")
    if "gpu" in request.param:
        return device, 1100, 2056, 256
    if request.param == "torch":
        return "cpu", 130, 90, 256
    pytest.importorskip("triton")
    if device != "cpu":
        pytest.skip("this machine has a GPU, so Triton compiles the kernels for it")
    request.getfixturevalue("forced")
    return "cpu", 40, 90, 256


def make(sizes, dtype) -> oracle.Inputs:
    device, tokens, vocab, width = sizes
    return oracle.make_inputs(device, dtype, (tokens,), vocab, width)


def gradients(kernel, inputs, upstream: float, **options) -> tuple:
    """Of the plan that makes them in the forward."""
    workspace = oracle.workspace_for(kernel, "forward", inputs)
    g = torch.tensor(upstream, device=inputs.hidden.device)
    return oracle.run(kernel, inputs, upstream=g, workspace=workspace, **options).grads


def loss_of(kernel, inputs, leaves, more=0) -> torch.Tensor:
    """By the same plan, of leaves that take `more` bytes of copies."""
    workspace = oracle.workspace_for(kernel, "forward", inputs) + more
    return kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2], workspace=workspace)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_dtypes(kernel, sizes, dtype):
    inputs = make(sizes, dtype)
    workspace = oracle.workspace_for(kernel, "forward", inputs)
    _, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), workspace=workspace)
    accumulated = FP64 if dtype == FP64 else FP32
    assert {t.dtype for t in saved[-3:]} == {accumulated}


@pytest.mark.parametrize("upstream", [0.25, -8.0, 2.0**-30])
def test_a_power_of_two_leaves_every_digit_alone(kernel, sizes, upstream):
    inputs = make(sizes, BF16)
    for scaled, plain in zip(gradients(kernel, inputs, upstream), gradients(kernel, inputs, 1.0)):
        oracle.assert_same_bits(scaled, plain * upstream)


@pytest.mark.parametrize("upstream", [1.0, 0.7, -3.0, 1.001, 0.9975, 1e3])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_errors_by_upstream(kernel, sizes, dtype, upstream):
    """All are those of one rounding, up as often as down. A second one would make nothing of a factor of 1.001."""
    inputs = make(sizes, dtype)
    grads = gradients(kernel, inputs, upstream)
    expected = oracle.reference(*inputs.positional(), upstream=torch.tensor(upstream, dtype=FP64))
    oracle.check_gradients(oracle.Outcome(None, None, grads), expected, oracle.gradient_tolerance(dtype))
    assert oracle.relative_error(grads[0], expected.grads[0]) < 2e-3
    assert abs(oracle.mean_signed_error(grads[0], expected.grads[0])) < 5e-4


def test_a_loss_scale_saves_an_fp16_gradient(kernel, sizes):
    """Before the scale its elements are below fp16's smallest number, 6e-8."""
    inputs = make(sizes, FP16)
    scale, items = 2.0**16, 10**8
    grads = gradients(kernel, inputs, scale, num_items=items)
    exact = torch.tensor(scale, dtype=FP64)
    expected = oracle.reference(*inputs.positional(), upstream=exact, num_items=items)
    assert expected.grads[0].abs().max() / scale < 6e-8
    oracle.check_gradients(oracle.Outcome(None, None, grads), expected, oracle.gradient_tolerance(FP16))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("upstream", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_written_over_only_where_nobody_asks_again(kernel, sizes, dtype, upstream, kept):
    """What has its dtype already is scaled where it is, unless the graph is kept for another backward."""
    inputs = make(sizes, dtype)
    leaves = inputs.leaves()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(kernel, inputs, leaves)
    before = [t.clone() for t in saved[:3]]
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream), retain_graph=kept)
    for grad, tensor, copy in zip(grads, saved, before):
        in_place = not kept and tensor.dtype == dtype
        assert (grad.data_ptr() == tensor.data_ptr()) == in_place
        if not in_place:
            oracle.assert_same_bits(tensor, copy)
        scaled = copy.float() * torch.tensor(upstream, device=copy.device)
        oracle.assert_same_bits(grad, scaled.to(dtype))


@pytest.mark.parametrize("late", [False, True])
def test_a_backward_that_failed_is_right_the_next_time_or_refused(kernel, sizes, monkeypatch, late):
    """Autograd lets it run again, over the gradients that it may have scaled. Under autocast that of the fp32 weight
    is scaled where it is, and that of the bf16 hidden states is made."""
    inputs = make(sizes, BF16)
    leaves = inputs.replace(weight=inputs.weight.float(), bias=inputs.bias.float()).leaves()
    with torch.autocast(sizes[0], BF16):
        loss = loss_of(kernel, inputs, leaves, more=inputs.weight.numel() * 2)
    upstream = torch.full_like(loss, 0.7)
    expected = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)

    def fail(*args, **options):
        raise torch.OutOfMemoryError("no memory")

    if late:
        loss.grad_fn.register_hook(fail)  # when all is done; else before anything is written
    with pytest.raises(torch.OutOfMemoryError), monkeypatch.context() as patch:
        if not late:
            patch.setattr(torch, "empty_like", fail)
        torch.autograd.grad(loss, leaves, upstream)
    if late:
        # The first of the two is torch's own, where torch did the scaling.
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|run the forward again"):
            torch.autograd.grad(loss, leaves, upstream)
        return
    for grad, right in zip(torch.autograd.grad(loss, leaves, upstream), expected):
        oracle.assert_same_bits(grad, right)
    with pytest.raises(RuntimeError, match="a second time"):  # torch's own
        torch.autograd.grad(loss, leaves, upstream)


def test_what_a_hook_unpacks_is_not_written_to(kernel, sizes):
    inputs = make(sizes, FP32)
    leaves = inputs.leaves()
    store = []

    def pack(tensor):
        store.append(tensor.clone())
        return len(store) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: store[index]):
        loss = loss_of(kernel, inputs, leaves)
    before = [t.clone() for t in store]
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, 0.5))
    for tensor, copy in zip(store, before):
        oracle.assert_same_bits(tensor, copy)
    for grad, copy in zip(grads, before):
        torch.testing.assert_close(grad, copy * 0.5, rtol=1e-6, atol=0)
