"""Few tokens on an accelerator: E of all of them is kept, and dW is one GEMM in the backward (Call.in_one_gemm)."""

import pytest
import torch

from .. import oracle
from ..conftest import submodule
from .conftest import INTERPRETER

pytest.importorskip("triton")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPTIONS = [
    {},
    {"reduction": "sum", "z_loss": 0.01, "logit_scale": 0.7},
    {"softcap": 5.0},
    {"num_items": 31, "token_weight": True, "class_weight": True},
    {"label_smoothing": 0.1, "class_weight": True},
    {"reduction": "none"},
    {"reduction": "none", "label_smoothing": 0.1},
]


@pytest.fixture(params=[pytest.param("interpreter", marks=INTERPRETER), pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, device, interpreted_bf16, kernel, monkeypatch) -> tuple:
    """(device, N, V, H). In the interpreter the backend and this way are forced on shapes that it can run."""
    if request.param == "gpu":
        return device, 300, 33_000, 256
    if device != "cpu":
        pytest.skip("this machine has a GPU, so Triton compiles the kernels for it")
    request.getfixturevalue("forced")
    monkeypatch.setattr(submodule(kernel, "plan"), "LEAST_UNSPLIT", 0)
    return "cpu", 40, 90, 24


def make(where, dtype=BF16, ignored=0.25, **options):
    device, tokens, vocab, width = where
    inputs = oracle.make_inputs(device, dtype, (tokens,), vocab, width, ignored=ignored)
    options = dict(options)
    if options.get("class_weight"):
        options["class_weight"] = torch.rand(vocab, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    if options.get("token_weight"):
        options["token_weight"] = torch.linspace(0, 2, tokens, device=device)
    return inputs, options


@pytest.fixture
def gemms(kernel, where, monkeypatch) -> list:
    """(dtype of the result, whether it is added to, rows) of every GEMM of a dW."""
    backend, made = submodule(kernel, "backends.triton"), []
    original = backend.grad_weight

    def grad_weight(e, x, out, accumulate, *bias):
        made.append((out.dtype, accumulate, e.shape[0]))
        original(e, x, out, accumulate, *bias)

    monkeypatch.setattr(backend, "grad_weight", grad_weight)
    return made


@pytest.fixture
def accumulators(kernel, monkeypatch) -> list:
    """The shapes of all buffers in the accumulation dtype."""
    made, problem = [], submodule(kernel, "passes").Problem
    original = problem.new_accumulator
    monkeypatch.setattr(problem, "new_accumulator", lambda self, *s: (made.append(s), original(self, *s))[1])
    return made


def check_gradients(grads, expected: oracle.Reference) -> None:
    assert all(grad is not None for grad in grads)
    oracle.check_gradients(oracle.Outcome(None, None, grads), expected, oracle.gradient_tolerance(BF16))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_the_gradients_are_right(kernel, where, gemms, options):
    inputs, options = make(where, **options)
    assert oracle.kind_of(oracle.plan_of(kernel, inputs)) == "kept"
    per_token = options.get("reduction") == "none"
    g = oracle.random((where[1],), where[0]) if per_token else torch.tensor(-1.5, device=where[0])
    outcome = oracle.run(kernel, inputs, upstream=g, return_metrics=True, **options)
    oracle.check(outcome, oracle.reference(*inputs.positional(), upstream=g, **options), BF16)
    valid = int((inputs.targets != -100).sum())
    accumulator = FP32 if "label_smoothing" in options else BF16  # its constant term is added to dW
    assert gemms == [(accumulator, False, valid)]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_by_the_dtype_of_the_weight(kernel, where, gemms, dtype):
    """An fp16 dW can't be the result of a GEMM of bf16 operands: its gradients are made in the forward."""
    inputs, _ = make(where, dtype)
    assert oracle.kind_of(oracle.plan_of(kernel, inputs)) == ("forward" if dtype == FP16 else "kept")
    oracle.check(oracle.run(kernel, inputs), oracle.reference(*inputs.positional()), dtype)
    assert [kind for kind, *_ in gemms] == [BF16 if dtype == BF16 else FP32]


def test_under_autocast_the_gemm_writes_the_fp32_gradient(kernel, where, gemms, accumulators):
    inputs, _ = make(where, FP32)
    leaves = inputs.leaves()
    with torch.autocast(where[0], BF16):
        loss = kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2])
    grads = torch.autograd.grad(loss, leaves)
    rounded = inputs.replace(**{n: getattr(inputs, n).to(BF16) for n in ("hidden", "weight", "bias")})
    assert {grad.dtype for grad in grads} == {FP32}
    check_gradients(grads, oracle.reference(*rounded.positional()))
    assert [kind for kind, *_ in gemms] == [FP32]
    assert tuple(inputs.weight.shape) not in accumulators


def test_no_accumulator_of_the_weights_size(kernel, where, accumulators):
    inputs, _ = make(where)
    oracle.run(kernel, inputs)
    assert accumulators and tuple(inputs.weight.shape) not in accumulators


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("captured", [False, True])
def test_rows_are_selected_once(kernel, where, monkeypatch, ignored, captured):
    """The backward knows them from the forward."""
    passes, selected = submodule(kernel, "passes"), []
    monkeypatch.setattr(passes, "capturing", lambda t: captured)
    backend = submodule(kernel, "backends.triton")
    for module, name in ((passes, "select_rows"), (backend, "select")):
        original = getattr(module, name)
        spy = lambda *a, original=original: (selected.append(1), original(*a))[1]  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    inputs, _ = make(where, ignored=ignored)
    oracle.check(oracle.run(kernel, inputs), oracle.reference(*inputs.positional()), BF16)
    assert len(selected) == 1


def test_every_backward_of_a_graph_has_its_own_upstream(kernel, where):
    inputs, _ = make(where)
    leaves = inputs.leaves()
    loss = kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2])
    for scale in (1.0, -3.0, 0.0, 1.0):
        g = torch.full_like(loss, scale)
        grads = torch.autograd.grad(loss, leaves, g, retain_graph=True)
        check_gradients(grads, oracle.reference(*inputs.positional(), upstream=g))
        for grad in grads:
            grad.fill_(torch.nan)


@pytest.mark.parametrize("captured", ["forward", "backward", "both"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_backward_knows_the_rows_of_its_forward(kernel, where, monkeypatch, captured, reduction):
    """Captured into a CUDA graph or not, rows are where the forward put them."""
    passes = submodule(kernel, "passes")
    inputs, _ = make(where)
    leaves = [oracle.as_leaf(t, True) for t in (inputs.hidden, inputs.weight, inputs.bias)]
    g = oracle.random((where[1],), where[0]) if reduction == "none" else torch.tensor(-1.5, device=where[0])
    monkeypatch.setattr(passes, "capturing", lambda t: captured != "backward")
    loss = kernel.fused_linear_cross_entropy(*leaves[:2], inputs.targets, leaves[2], reduction=reduction)
    monkeypatch.setattr(passes, "capturing", lambda t: captured != "forward")
    grads = torch.autograd.grad(loss, leaves, g)
    expected = oracle.reference(*inputs.positional(), reduction=reduction, upstream=g)
    check_gradients(grads, expected)


@pytest.mark.parametrize("captured", ["forward", "backward", "both"])
def test_a_raw_backward_knows_the_rows_of_its_forward_or_raises(kernel, where, monkeypatch, captured):
    passes = submodule(kernel, "passes")
    inputs, _ = make(where)
    monkeypatch.setattr(passes, "capturing", lambda t: captured != "backward")
    loss, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional())
    monkeypatch.setattr(passes, "capturing", lambda t: captured != "forward")
    backward = lambda: kernel.fused_linear_cross_entropy_backward(  # noqa: E731
        torch.full_like(loss, 2.0), saved, *inputs.positional()
    )
    if captured == "backward":  # a capture can't wait for the number of rows
        with pytest.raises(RuntimeError, match="capture both"):
            backward()
        return
    expected = oracle.reference(*inputs.positional(), upstream=torch.tensor(2.0))
    check_gradients(backward(), expected)


@pytest.mark.parametrize("captured", [False, True])
def test_a_traced_raw_pair_is_captured_when_it_runs(kernel, where, monkeypatch, captured):
    """While tracing it is not known yet whether rows will be masked."""
    inputs, _ = make(where)
    g = oracle.random((where[1],), where[0])
    with oracle.tracing():
        how = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), reduction="none")[2][0]
    monkeypatch.setattr(submodule(kernel, "passes"), "capturing", lambda t: captured)
    *_, (_, *saved) = kernel.fused_linear_cross_entropy_forward(*inputs.positional(), reduction="none")
    grads = kernel.fused_linear_cross_entropy_backward(g, (how, *saved), *inputs.positional(), reduction="none")
    expected = oracle.reference(*inputs.positional(), reduction="none", upstream=g)
    check_gradients(grads, expected)


@pytest.mark.parametrize("names", [None, ("log_probs", "entropy")])
def test_a_raw_backward_computes_in_the_dtype_of_its_forward(kernel, where, names):
    """Autocast is on in the forward alone, as around a torch.autograd.Function."""
    inputs, _ = make(where, FP32)
    rounded = inputs.replace(**{n: getattr(inputs, n).to(BF16) for n in ("hidden", "weight", "bias")})
    with torch.autocast(where[0], BF16):
        if names is None:
            loss, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional())
        else:
            _, saved = kernel.fused_linear_log_probs_forward(*inputs.positional(), outputs=names)
    if names is None:
        grads = kernel.fused_linear_cross_entropy_backward(torch.ones_like(loss), saved, *inputs.positional())
        expected = oracle.reference(*rounded.positional())
    else:
        upstream = {n: oracle.random((where[1],), where[0], seed=k) for k, n in enumerate(names)}
        grads = kernel.fused_linear_log_probs_backward(
            kernel.LogProbs(**upstream), saved, *inputs.positional(), outputs=names
        )
        expected = oracle.reference_log_probs(*rounded.positional(), upstream=upstream)[1]
    check_gradients(grads, expected)


@pytest.mark.parametrize("compiled", ["forward", "backward", "neither"])
def test_a_raw_backward_takes_what_its_forward_saved(kernel, where, compiled):
    """Compiled or not: a compiled forward makes the gradients, as its graph is not to be specialised on N."""
    inputs, _ = make(where)
    with oracle.tracing(compiled == "forward"):
        loss, _, saved = kernel.fused_linear_cross_entropy_forward(*inputs.positional())
    copies = [t.clone() for t in saved]
    with oracle.tracing(compiled == "backward"):
        grads = kernel.fused_linear_cross_entropy_backward(torch.full_like(loss, 2.0), saved, *inputs.positional())
    expected = oracle.reference(*inputs.positional(), upstream=torch.tensor(2.0))
    check_gradients(grads, expected)
    for before, after in zip(copies, saved):
        oracle.assert_same_bits(after, before)
