"""A scalar loss's gradients between the forward that makes them and the backward that scales them: their dtypes, how
often they are rounded, and what is written over."""

import contextlib

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


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
def test_dtypes(kernel, sizes, dtype):
    """dW and db are sums over chunks; dX is not, so it is kept as it will be returned where that has fp32's range."""
    inputs = make(sizes, dtype)
    workspace = oracle.workspace_for(kernel, "forward", inputs)
    _, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), workspace=workspace)
    accumulated = FP64 if dtype == FP64 else FP32
    assert [t.dtype for t in saved[-3:]] == [BF16 if dtype == BF16 else accumulated, accumulated, accumulated]


def test_narrow_rows_are_rounded_once(kernel, sizes):
    """Of a few elements the second rounding may add to the first one, beyond the bound."""
    for seed in range(20):
        inputs = oracle.make_inputs(sizes[0], BF16, (1,), 64, 16, ignored=0.0, seed=seed)
        grads = gradients(kernel, inputs, 0.7)
        expected = oracle.reference(*inputs.positional(), upstream=torch.tensor(0.7, dtype=FP64))
        oracle.check_gradients(oracle.Outcome(None, None, grads), expected, oracle.gradient_tolerance(BF16))


@pytest.mark.parametrize("upstream", [0.25, -8.0, 2.0**-30])
def test_a_power_of_two_leaves_every_digit_alone(kernel, sizes, upstream):
    inputs = make(sizes, BF16)
    for scaled, plain in zip(gradients(kernel, inputs, upstream), gradients(kernel, inputs, 1.0)):
        oracle.assert_same_bits(scaled, plain * upstream)


@pytest.mark.parametrize("upstream", [1.0, 0.7, -3.0, 1e3])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_errors_by_upstream(kernel, sizes, dtype, upstream):
    """Of bf16 dX is rounded twice by the others than 1: within the bound all the same, and up as often as down (were
    the second rounding a cut, the mean would be off by 2e-3)."""
    inputs = make(sizes, dtype)
    grads = gradients(kernel, inputs, upstream)
    expected = oracle.reference(*inputs.positional(), upstream=torch.tensor(upstream, dtype=FP64))
    oracle.check_gradients(oracle.Outcome(None, None, grads), expected, oracle.gradient_tolerance(dtype))
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

    workspace = oracle.workspace_for(kernel, "forward", inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2], workspace=workspace)
    before = [t.clone() for t in saved[:3]]
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, upstream), retain_graph=kept)
    for grad, tensor, copy in zip(grads, saved, before):
        in_place = not kept and tensor.dtype == dtype
        assert (grad.data_ptr() == tensor.data_ptr()) == in_place
        if not in_place:
            oracle.assert_same_bits(tensor, copy)
        scaled = copy.float() * torch.tensor(upstream, device=copy.device)
        oracle.assert_same_bits(grad, scaled.to(dtype))


def retried(kernel, inputs, fail) -> tuple:
    """(gradients, right ones) of a backward whose first try fails."""
    leaves = inputs.leaves()
    workspace = oracle.workspace_for(kernel, "forward", inputs)
    loss = kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2], workspace=workspace)
    upstream = torch.full_like(loss, 0.7)
    expected = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    with pytest.raises(torch.OutOfMemoryError), fail(loss):
        torch.autograd.grad(loss, leaves, upstream)
    return torch.autograd.grad(loss, leaves, upstream), expected


def test_a_backward_can_run_again_after_memory_ran_out(kernel, sizes, monkeypatch):
    @contextlib.contextmanager
    def no_memory(loss):
        def empty_like(*args, **options):
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", empty_like)
            yield

    for grad, right in zip(*retried(kernel, make(sizes, BF16), no_memory)):
        oracle.assert_same_bits(grad, right)


def test_a_backward_that_failed_too_late_says_so(kernel, sizes):
    """Autograd would let it run again, over gradients that are scaled."""

    @contextlib.contextmanager
    def late(loss):
        def hook(*about):
            raise torch.OutOfMemoryError("no memory")

        handle = loss.grad_fn.register_hook(hook)
        yield
        handle.remove()

    with pytest.raises(RuntimeError, match="run the forward again"):
        retried(kernel, make(sizes, BF16), late)


def test_what_a_hook_unpacks_is_not_written_to(kernel, sizes):
    inputs = make(sizes, FP32)
    leaves = inputs.leaves()
    store = []

    def pack(tensor):
        store.append(tensor.clone())
        return len(store) - 1

    workspace = oracle.workspace_for(kernel, "forward", inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: store[index]):
        loss = kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2], workspace=workspace)
    before = [t.clone() for t in store]
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, 0.5))
    for tensor, copy in zip(store, before):
        oracle.assert_same_bits(tensor, copy)
    for grad, copy in zip(grads, before):
        torch.testing.assert_close(grad, copy * 0.5, rtol=1e-6, atol=0)


def test_a_compiled_mean_divides_in_the_forward(kernel, sizes):
    """As an eager one: its gradients are those of the mean itself, and no division rounds a bf16 dX again."""
    inputs = make(sizes, BF16)
    workspace = oracle.workspace_for(kernel, "forward", inputs)
    items = torch.tensor(37.0, device=inputs.hidden.device)

    def loss(hidden, weight, bias):
        return kernel.fused_linear_cross_entropy(
            hidden, weight, inputs.targets, bias, num_items=items, workspace=workspace
        )

    leaves = inputs.leaves()
    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    oracle.assert_same_bits(compiled[0], eager[0])
