"""ops.py: what torch.library, torch.compile, autograd and CUDA graphs see of the operators."""

import types

import pytest
import torch
import torch._dynamo.utils
from torch.utils.checkpoint import checkpoint

from .conftest import submodule

N, VOCAB, HIDDEN = 40, 19, 8
FOR_TOKENS = 192 * N  # what a plan counts for targets, statistics and coefficients, plan.TOKEN_BYTES


@pytest.fixture
def ops(kernel):
    return submodule(kernel, "ops")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def inputs(n=N, dtype=torch.float32, ignored=3, device="cpu", seed=0, vocab=VOCAB, width=HIDDEN):
    """hidden, weight, bias that require gradients, and targets of which `ignored` are."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    targets = torch.randint(0, vocab, (n,), generator=generator)
    targets[torch.randperm(n, generator=generator)[:ignored]] = -100
    return new(n, width), new(vocab, width), new(vocab), targets.to(device)


def gradients(loss, *tensors, upstream=None):
    return torch.autograd.grad(loss, tensors, upstream)


class TestOpcheck:
    """torch.library.opcheck: schema, mutation, fake tensors, autograd, AOT dispatch with dynamic shapes."""

    WEIGHTS = (torch.linspace(0.1, 2, VOCAB), torch.linspace(0, 1, N))
    # class and token weights?, num_items, scale, softcap, smoothing, z, metrics, mean?, needs, workspace
    LOSSES = [
        (False, None, 1.0, None, 0.0, 0.0, False, True, (True, True, False), None),
        (True, None, 0.7, None, 0.1, 0.01, True, True, (True, True, True), None),
        (True, torch.tensor(31), 0.7, 5.0, 0.0, 0.01, True, True, (False, True, True), 9000),
        (False, None, 1.0, 5.0, 0.0, 0.0, False, False, (True, False, False), None),
    ]

    @pytest.mark.parametrize("options", LOSSES, ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_loss_forward(self, ops, options, dtype):
        weighted, num_items, scale, softcap, smoothing, z_loss, metrics, mean, needs, workspace = options
        hidden, weight, bias, targets = inputs(dtype=dtype)
        hidden, weight, bias = (t if need else t.detach() for t, need in zip((hidden, weight, bias), needs))
        weights = self.WEIGHTS if weighted else (None, None)
        torch.library.opcheck(ops.loss_forward, (
            hidden, weight, targets, bias if weighted else None, *weights, num_items, -100, scale, softcap, smoothing,
            z_loss, metrics, mean, dtype, *needs[:2], needs[2] and weighted, workspace, weighted,
        ))  # fmt: skip

    @pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float16)], ids=str)
    @pytest.mark.parametrize("frozen", [False, True])
    def test_loss_backward(self, ops, dtypes, frozen):
        saved = (torch.randn(N, HIDDEN), torch.randn(VOCAB, HIDDEN)[: 0 if frozen else None], torch.randn(VOCAB))
        parameters = (torch.randn(N, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB))
        parameters = [p.to(dtype) for p, dtype in zip(parameters, dtypes)]
        torch.library.opcheck(ops.loss_backward, (torch.tensor(0.3), *saved, *parameters))

    # class weights?, softcap, (entropy, sum_log_probs, log_sum_sq, is_top1), needs, row_scaled, workspace
    STATISTICS = [
        (True, 5.0, (True, True, True, True), (True, True, True), False, None),
        (False, None, (False, False, False, False), (True, True, False), True, None),
        (True, None, (False, True, False, True), (True, False, True), True, None),
        (True, None, (True, False, True, False), (False, True, True), False, 2500 + FOR_TOKENS),
        (False, 5.0, (True, True, True, True), (False, False, False), True, None),
    ]

    def statistics(self, options, dtype, ignored):
        weighted, softcap, wants, needs, row_scaled, workspace = options
        hidden, weight, bias, targets = inputs(dtype=dtype, ignored=ignored)
        tensors = [t if need else t.detach() for t, need in zip((hidden, weight, bias), needs)]
        hidden, weight, bias = tensors
        class_weight = self.WEIGHTS[0] if weighted else None
        return (
            hidden, weight, targets, bias, class_weight, -100, 0.7, softcap, *wants, dtype, *needs, row_scaled,
            workspace,
        )  # fmt: skip

    @pytest.mark.parametrize("options", STATISTICS, ids=str)
    @pytest.mark.parametrize("dtype, ignored", [(torch.float32, 0), (torch.float32, 3), (torch.bfloat16, 3)])
    def test_token_forward(self, ops, options, dtype, ignored):
        torch.library.opcheck(ops.token_forward, self.statistics(options, dtype, ignored))

    @pytest.mark.parametrize("options", STATISTICS[:4], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("known", ["nothing", "rows", "masked"])
    def test_token_backward(self, ops, options, dtype, known):
        wants, needs, row_scaled = options[2:5]
        args = self.statistics(options, dtype, ignored=3)
        with torch.no_grad():
            out = ops.token_forward(*args)
            rows = ops._token_pass(*args)[1]
        selected = {
            "nothing": (), "rows": (rows.index, rows.targets, False), "masked": (None, None, False)
        }[known]  # fmt: skip
        hidden, weight, targets, bias, class_weight = (None if t is None else t.detach() for t in args[:5])
        grads = (torch.randn(N), torch.randn(N) if wants[0] else None, None, torch.randn(N) if wants[1] else None)
        torch.library.opcheck(ops.token_backward, (
            *grads, hidden, weight, targets, bias, class_weight, out[1], *out[6:], -100, 0.7, options[1],
            dtype, *needs, row_scaled, args[-1], *selected,
        ))  # fmt: skip


# Calls of the public functions that take different ways through the package.
CALLS = {
    "mean": lambda k, h, w, b, y: k.fused_linear_cross_entropy(h, w, y, b),
    "sum with options": lambda k, h, w, b, y: k.fused_linear_cross_entropy(
        h, w, y, b, -100, 0.7, 5.0, "sum", label_smoothing=0.1, z_loss=0.01
    ),
    "none": lambda k, h, w, b, y: k.fused_linear_cross_entropy(h, w, y, b, reduction="none").square().sum(),
    "mean and metrics": lambda k, h, w, b, y: (
        lambda loss, m: loss * 2 + 0.0 * (m["entropy_sum"] + m["num_correct_tokens"] + m["num_valid_tokens"])
    )(*k.fused_linear_cross_entropy(h, w, y, b, return_metrics=True)),
    "log_probs": lambda k, h, w, b, y: k.fused_linear_log_probs(h, w, y, b).log_probs.square().sum(),
    "entropy": lambda k, h, w, b, y: sum(
        o.square().sum() for o in k.fused_linear_log_probs(h, w, y, b, outputs=("log_probs", "entropy", "lse"))[:3]
    ),
}


class TestCompile:
    def compile(self, function, backend="aot_eager"):
        """fullgraph: a graph break is an error."""
        return torch.compile(function, fullgraph=True, backend=backend)

    @property
    def graphs(self) -> int:
        """How many were compiled in this test."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def compare(self, compiled, eager, tensors, rtol=1e-5, atol=1e-6):
        differentiable = [t for t in tensors if t.requires_grad]
        actual, expected = compiled(*tensors), eager(*tensors)
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(
            gradients(actual, *differentiable), gradients(expected, *differentiable), rtol=rtol, atol=atol
        )

    @pytest.mark.parametrize("name", CALLS)
    def test_equals_eager_without_recompiling_for_another_number_of_tokens(self, kernel, name):
        def eager(h, w, b, y):
            return CALLS[name](kernel, h, w, b, y)

        compiled = self.compile(eager)
        for n, ignored in ((40, 3), (24, 0), (41, 41), (7, 2)):
            tensors = inputs(n, ignored=ignored, seed=n)
            for t in (tensors[0], tensors[3]):
                torch._dynamo.mark_dynamic(t, 0)
            self.compare(compiled, eager, tensors)
        assert self.graphs == 1

    @pytest.mark.parametrize("name", ["mean", "none"])
    def test_automatic_dynamic_shapes_recompile_once(self, kernel, name):
        def eager(h, w, b, y):
            return CALLS[name](kernel, h, w, b, y)

        compiled = self.compile(eager)
        for n in (40, 24, 41, 8, 56):
            self.compare(compiled, eager, inputs(n, seed=n))
        assert self.graphs <= 2

    def test_the_number_of_ignored_rows_is_data(self, kernel):
        def eager(h, w, b, y):
            return CALLS["mean"](kernel, h, w, b, y)

        compiled = self.compile(eager)
        for ignored in (0, 5, 39, 40, 1):
            self.compare(compiled, eager, inputs(ignored=ignored, seed=ignored))
        assert self.graphs == 1

    @pytest.mark.parametrize("name", ["mean", "none", "log_probs"])
    @pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
    def test_autocast(self, kernel, name, inside):
        """fp32 parameters, bf16 GEMMs: the gradients come back in fp32, and are those of eager autocast."""

        def call(h, w, b, y):
            if inside:
                with torch.autocast("cpu", torch.bfloat16):
                    return CALLS[name](kernel, h, w, b, y)
            return CALLS[name](kernel, h, w, b, y)

        compiled = self.compile(call)
        tensors = inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            self.compare(compiled, call, tensors)
        actual = compiled(*tensors) if inside else None
        with torch.autocast("cpu", torch.bfloat16):
            actual = compiled(*tensors) if actual is None else actual
        grads = gradients(actual, *tensors[:3])
        assert {g.dtype for g in grads} == {torch.float32}
        exact = [t.detach().double().requires_grad_() for t in tensors[:3]]
        expected = gradients(CALLS[name](kernel, *exact, tensors[3]), *exact)
        for g, e in zip(grads, expected):
            assert (g.double() - e).norm() / e.norm() < 2e-2
        assert self.graphs == 1

    def test_autocast_inside_and_outside_are_two_graphs(self, kernel):
        def eager(h, w, b, y):
            return CALLS["mean"](kernel, h, w, b, y)

        compiled = self.compile(eager)
        tensors = inputs()
        self.compare(compiled, eager, tensors)
        with torch.autocast("cpu", torch.bfloat16):
            self.compare(compiled, eager, tensors)
        self.compare(compiled, eager, tensors)

    def test_num_items_as_a_changing_int(self, kernel):
        def eager(h, w, y, num_items):
            return kernel.fused_linear_cross_entropy(h, w, y, num_items=num_items)

        compiled = self.compile(eager)
        hidden, weight, _, targets = inputs()
        for num_items in (21, 40, 7, 1000, 3):
            loss = compiled(hidden, weight, targets, num_items)
            expected = eager(hidden, weight, targets, num_items)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(
                gradients(loss, hidden, weight), gradients(expected, hidden, weight), rtol=1e-5, atol=1e-7
            )
        assert self.graphs <= 2

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
    def test_num_items_as_a_tensor(self, kernel, dtype):
        def eager(h, w, y, num_items):
            return kernel.fused_linear_cross_entropy(h, w, y, num_items=num_items)

        compiled = self.compile(eager)
        hidden, weight, _, targets = inputs()
        for value in (21, 40, 7):
            num_items = torch.tensor(value, dtype=dtype)
            loss = compiled(hidden, weight, targets, num_items)
            torch.testing.assert_close(loss, eager(hidden, weight, targets, num_items), rtol=1e-6, atol=0)
        assert self.graphs == 1

    @pytest.mark.parametrize("option", ["logit_scale", "softcap", "label_smoothing", "z_loss"])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_python_floats(self, kernel, option, reduction):
        """Whether torch.compile bakes them in or makes them inputs of the graph, in whatever precision."""

        def eager(h, w, y, value):
            return kernel.fused_linear_cross_entropy(h, w, y, reduction=reduction, **{option: value}).sum()

        compiled = self.compile(eager)
        hidden, weight, _, targets = inputs()
        for value in (0.1, 0.3, 0.7, 0.9):
            loss, expected = compiled(hidden, weight, targets, value), eager(hidden, weight, targets, value)
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(
                gradients(loss, hidden, weight), gradients(expected, hidden, weight), rtol=1e-5, atol=1e-6
            )

    def test_no_gradients(self, kernel):
        def eager(h, w, b, y):
            return CALLS["mean"](kernel, h, w, b, y)

        compiled = self.compile(eager)
        tensors = inputs()
        with torch.no_grad():
            torch.testing.assert_close(compiled(*tensors), eager(*tensors))
        with torch.inference_mode():
            torch.testing.assert_close(compiled(*tensors), eager(*tensors))
        assert self.graphs <= 2

    def test_frozen_weight(self, kernel):
        def eager(h, w, b, y):
            return CALLS["mean"](kernel, h, w, b, y)

        compiled = self.compile(eager)
        hidden, weight, bias, targets = inputs()
        self.compare(compiled, eager, (hidden, weight.detach(), bias.detach(), targets))
        assert self.graphs == 1

    def test_in_a_larger_graph(self, kernel):
        """hidden is not a leaf, and its gradient flows on."""

        def eager(x, w, b, y):
            return CALLS["mean"](kernel, torch.tanh(x @ x.T @ x), w, b, y) + x.square().sum()

        compiled = self.compile(eager)
        self.compare(compiled, eager, inputs(), rtol=1e-4)
        assert self.graphs == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["mean and metrics", "entropy"])
    def test_inductor(self, kernel, name):
        def eager(h, w, b, y):
            return CALLS[name](kernel, h, w, b, y)

        compiled = self.compile(eager, "inductor")
        for n in (24, 40, 7):
            tensors = inputs(n, seed=n)
            for t in (tensors[0], tensors[3]):
                torch._dynamo.mark_dynamic(t, 0)
            self.compare(compiled, eager, tensors)
        assert self.graphs == 1

    @pytest.mark.gpu
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["mean and metrics", "log_probs"])
    def test_inductor_on_a_gpu(self, kernel, device, name):
        def eager(h, w, b, y):
            return CALLS[name](kernel, h, w, b, y)

        compiled = self.compile(eager, "inductor")
        for n in (64, 200, 33):
            tensors = inputs(n, torch.bfloat16, device=device, seed=n, vocab=1000, width=64)
            for t in (tensors[0], tensors[3]):
                torch._dynamo.mark_dynamic(t, 0)
            self.compare(compiled, eager, tensors, rtol=2e-2, atol=2e-3)
        assert self.graphs == 1


WAYS = [
    pytest.param({"reduction": "sum"}, id="forward"),
    pytest.param({"reduction": "mean"}, id="forward, mean"),
    pytest.param({"reduction": "none"}, id="kept"),
    pytest.param({"reduction": "none", "workspace": 6000 + FOR_TOKENS}, id="kept and recomputed"),
    pytest.param({"reduction": "none", "softcap": 4.0, "label_smoothing": 0.1}, id="exact"),
    pytest.param({"reduction": "sum", "workspace": 1600 + FOR_TOKENS}, id="slabs"),
]


def test_the_ways_are_different_ones(kernel):
    options = {"device_type": "cpu", "needs": (True, True, True)}

    def plan(**more):
        return kernel.plan(N, VOCAB, HIDDEN, torch.float32, **options, **more)

    assert plan().gradients == "forward"
    assert plan(upstream="token").kept_rows == N
    assert 0 < plan(upstream="token", workspace=6000 + FOR_TOKENS).kept_rows < N
    assert plan(upstream="token", row_scaled=False).kept_rows == 0
    assert plan(workspace=1600 + FOR_TOKENS).slab < VOCAB


class TestAutograd:
    def call(self, kernel, tensors, way):
        hidden, weight, bias, targets = tensors
        return kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, **way)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
    def test_differentiating_twice_raises(self, kernel, way, name):
        """It must not pass as zero: here a gradient penalty beside a term that has a gradient of its own."""
        tensors = inputs()
        x = dict(zip(("hidden", "weight", "bias"), tensors))[name]
        loss = self.call(kernel, tensors, way).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError):
            (g.square().sum() + x.sum()).backward()

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_a_second_backward_gives_the_same_gradients_again(self, kernel, way, scale):
        tensors = inputs()
        loss = self.call(kernel, tensors, way)
        first = torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, scale), retain_graph=True)
        copies = [g.clone() for g in first]
        second = torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, 2.0), retain_graph=True)
        for g, copy, other in zip(first, copies, second):
            assert torch.equal(g, copy)
            torch.testing.assert_close(other, copy * (2.0 / scale), rtol=1e-5, atol=1e-7)
        third = torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, scale))
        assert all(torch.equal(g, copy) for g, copy in zip(third, copies))

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    def test_returned_gradients_belong_to_the_caller(self, kernel, way, scale):
        """They can be changed in place, as clipping does, without harm to a second backward."""
        tensors = inputs()
        loss = self.call(kernel, tensors, way)
        upstream = torch.full_like(loss, scale)
        first = torch.autograd.grad(loss, tensors[:3], upstream, retain_graph=True)
        copies = [g.clone() for g in first]
        for g in first:
            g.mul_(0.5)
        second = torch.autograd.grad(loss, tensors[:3], upstream)
        assert all(torch.equal(g, copy) for g, copy in zip(second, copies))

    @pytest.mark.parametrize("way", WAYS)
    def test_accumulates_into_grad(self, kernel, way):
        tensors = inputs()
        self.call(kernel, tensors, way).sum().backward()
        once = [t.grad.clone() for t in tensors[:3]]
        loss = self.call(kernel, tensors, way).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        for t, g in zip(tensors[:3], once):
            torch.testing.assert_close(t.grad, 3 * g, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("way", [w for w in WAYS if "none" in w.values[0].values()])
    @pytest.mark.parametrize("layout", ["expanded", "strided", "reversed", "float64"])
    def test_upstream_gradients_of_any_layout(self, kernel, way, layout):
        tensors = inputs()
        values = torch.linspace(-1, 2, N)
        upstream = {
            "expanded": torch.tensor(0.7).expand(N),
            "strided": torch.stack([values, values], 1).flatten()[::2],
            "reversed": values.flip(0),
            "float64": values,
        }[layout]
        loss = self.call(kernel, tensors, way)
        if layout == "float64":
            loss, upstream = loss.double(), upstream.double()
        actual = torch.autograd.grad(loss, tensors[:3], upstream)
        expected = torch.autograd.grad(
            self.call(kernel, tensors, way), tensors[:3], upstream.float().clone(memory_format=torch.contiguous_format)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("way", WAYS)
    def test_saved_tensors_may_be_moved_away_and_back(self, kernel, way):
        tensors = inputs()
        expected = torch.autograd.grad(self.call(kernel, tensors, way).sum(), tensors[:3])
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            loss = self.call(kernel, tensors, way).sum()
        actual = torch.autograd.grad(loss, tensors[:3])
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing(self, kernel, way, reentrant):
        tensors = inputs()
        expected = torch.autograd.grad(self.call(kernel, tensors, way).sum(), tensors[:3])
        loss = checkpoint(lambda *t: self.call(kernel, t, way).sum(), *tensors, use_reentrant=reentrant)
        loss.backward()
        torch.testing.assert_close([t.grad for t in tensors[:3]], list(expected), rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_batched_upstream_gradients(self, kernel, reduction):
        """torch.autograd.grad(..., is_grads_batched=True), which torch.autograd.functional's vectorize uses."""
        tensors = inputs()
        hidden, weight, bias, targets = tensors
        loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction)
        upstream = torch.randn(3, *loss.shape, generator=torch.Generator().manual_seed(0))
        batched = torch.autograd.grad(loss, tensors[:3], upstream, retain_graph=True, is_grads_batched=True)
        for index, one in enumerate(upstream):
            expected = torch.autograd.grad(loss, tensors[:3], one, retain_graph=True)
            torch.testing.assert_close([g[index] for g in batched], list(expected))

    def test_a_trace_serves_other_masks(self, kernel):
        """torch.jit.trace records the operator, not what one mask made of it."""
        hidden, weight, bias, targets = inputs()
        hidden, weight, bias = (t.detach() for t in (hidden, weight, bias))
        call = kernel.fused_linear_cross_entropy
        traced = torch.jit.trace(lambda h, y: call(h, weight, y, bias, reduction="sum"), (hidden, targets))
        other = torch.where(torch.arange(len(targets)) % 2 == 0, targets.clamp(min=0), -100)
        torch.testing.assert_close(traced(hidden, other), call(hidden, weight, other, bias, reduction="sum"))

    def test_lazily_negated_views(self, kernel):
        hidden, weight, bias, targets = inputs()
        hidden, weight, bias = (t.detach() for t in (hidden, weight, bias))
        negated = torch.complex(weight, weight).conj().imag
        assert negated.is_neg()
        call = kernel.fused_linear_cross_entropy
        torch.testing.assert_close(call(hidden, negated, targets, bias), call(hidden, -weight, targets, bias))

    @pytest.mark.parametrize("way", WAYS)
    def test_runs_are_bitwise_equal(self, kernel, way):
        tensors = inputs()
        results = []
        for _ in range(2):
            loss = self.call(kernel, tensors, way)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), tensors[:3])))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_metrics_and_plain_statistics_have_no_gradient(self, kernel):
        tensors = inputs()
        hidden, weight, bias, targets = tensors
        _, metrics = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, return_metrics=True)
        assert not any(m.requires_grad for m in metrics.values())
        names = ("log_probs", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1")
        out = kernel.fused_linear_log_probs(hidden, weight, targets, bias, outputs=names)
        assert [getattr(out, n).requires_grad for n in names] == [True, True, True, False, False, False]


class TestDevices:
    @pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    def test_every_launch_is_under_the_guard_of_its_tensors(self, kernel, device, monkeypatch):
        """All Triton kernels of a call, forward and backward, on the torch device of x."""
        pytest.importorskip("triton")
        triton_backend = submodule(kernel, "backends.triton")
        monkeypatch.setattr(submodule(kernel, "backends"), "choose", lambda *_: "triton")
        guarded, launched = [], []

        class Guard:
            def __init__(self, tensor):
                self.device = tensor.device

            def __enter__(self):
                guarded.append(self.device)

            def __exit__(self, *_):
                guarded.pop()

        class Kernel:
            def __init__(self, name, function):
                self.name, self.function = name, function

            def __getitem__(self, grid):
                assert guarded, f"{self.name} is launched outside of a device guard"
                assert guarded[-1].type == device
                launched.append(self.name)
                return self.function[grid]

        monkeypatch.setattr(triton_backend, "_guard", Guard)
        for module in (triton_backend.fwd, triton_backend.bwd):
            for name in vars(module).copy():
                if name.endswith("_kernel"):
                    monkeypatch.setattr(module, name, Kernel(name, getattr(module, name)))
        tensors = inputs(6, device=device)
        for way in ({"reduction": "sum"}, {"reduction": "none"}, {"reduction": "sum", "workspace": 1600 + 6 * 192}):
            hidden, weight, bias, targets = tensors
            loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, **way).sum()
            gradients(loss * 2, hidden, weight, bias)
        expected = {"reference_kernel", "forward_kernel", "combine_kernel", "dlogits_kernel", "column_sum_kernel",
                    "scale_kernel"}  # fmt: skip
        assert expected <= set(launched)
        assert not guarded

    @pytest.mark.parametrize("type_", ["cuda", "xpu"])
    def test_the_guard_is_torchs_own(self, kernel, monkeypatch, type_):
        pytest.importorskip("triton")
        entered = []
        monkeypatch.setattr(getattr(torch, type_), "device", lambda d: entered.append(d))
        monkeypatch.setattr(getattr(torch, type_), "current_device", lambda: 0)
        guard = submodule(kernel, "backends.triton")._guard
        guard(types.SimpleNamespace(device=torch.device(type_, 1)))
        assert entered == [torch.device(type_, 1)]
        with guard(types.SimpleNamespace(device=torch.device(type_, 0))):  # it is the current one
            assert entered == [torch.device(type_, 1)]

    @pytest.mark.gpu
    @pytest.mark.parametrize("way", WAYS)
    def test_tensors_on_another_device_than_the_current_one(self, kernel, device, way):
        if device != "cuda" or torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        results = []
        for index in (0, 1):
            tensors = inputs(device=f"cuda:{index}")
            assert torch.cuda.current_device() == 0
            hidden, weight, bias, targets = tensors
            loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, **way)
            grads = torch.autograd.grad(loss.sum(), tensors[:3])
            assert loss.device.index == index
            results.append([t.cpu() for t in (loss.detach(), *grads)])
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.gpu
class TestCudaGraphs:
    CALLS = {
        "mean": lambda k, h, w, y: k.fused_linear_cross_entropy(h, w, y),
        "num_items": lambda k, h, w, y: k.fused_linear_cross_entropy(h, w, y, num_items=31),
        "metrics": lambda k, h, w, y: k.fused_linear_cross_entropy(h, w, y, z_loss=0.01, return_metrics=True)[0],
        "none": lambda k, h, w, y: (k.fused_linear_cross_entropy(h, w, y, reduction="none") ** 2).sum(),
        "entropy": lambda k, h, w, y: sum(
            o.sum() for o in k.fused_linear_log_probs(h, w, y, outputs=("log_probs", "entropy"))[:2]
        ),
    }

    def test_a_backward_of_its_own_can_be_replayed_again(self, kernel, device):
        """It scales nothing where it is, though its graph was not kept while it was captured."""
        if device != "cuda":
            pytest.skip("needs CUDA graphs")
        hidden, weight, _, targets = inputs(130, torch.float32, 0, device, vocab=1000, width=64)
        upstream = torch.tensor(0.7, device=device)

        def forward():
            return kernel.fused_linear_cross_entropy(hidden, weight, targets)

        expected = torch.autograd.grad(forward(), (hidden, weight), upstream)
        forward_graph, backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward_graph):
            loss = forward()
        with torch.cuda.graph(backward_graph, pool=forward_graph.pool()):
            grads = torch.autograd.grad(loss, (hidden, weight), upstream)
        forward_graph.replay()
        for _ in range(3):
            backward_graph.replay()
            for grad, right in zip(grads, expected):
                torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("name", CALLS)
    @pytest.mark.parametrize("ignored", [0, 20], ids=["no row ignored", "rows ignored"])
    @pytest.mark.parametrize("vocab, width", [(1000, 64), (33_000, 256)])  # the larger dW is one GEMM in the backward
    def test_capture_and_replay_with_new_contents(self, kernel, device, name, ignored, vocab, width):
        if device != "cuda":
            pytest.skip("needs CUDA graphs")
        call = self.CALLS[name]

        def new(seed, ignored):
            h, w, _, y = inputs(130, torch.bfloat16, ignored, device, seed, vocab=vocab, width=width)
            return h, w, y

        hidden, weight, targets = new(0, ignored)

        def step():
            hidden.grad = weight.grad = None
            loss = call(kernel, hidden, weight, targets)
            loss.backward()
            return loss

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for seed in (1, 2):
            # another number of ignored rows is data of the graph, and so is what they hold
            h, w, y = new(seed, ignored // seed)
            with torch.no_grad():
                hidden.copy_(h)
                hidden[y == -100] = torch.nan
                weight.copy_(w)
                targets.copy_(y)
            graph.replay()
            expected = call(kernel, h, w, y)
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            for actual, reference in ((hidden.grad, h.grad), (weight.grad, w.grad)):
                assert actual.isfinite().all()
                error = (actual.double() - reference.double()).norm() / reference.double().norm()
                assert error < 4e-3
