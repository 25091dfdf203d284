"""passes.py and rows.py: which rows run, what masks them under capture, and the arithmetic around the GEMMs."""

import pytest
import torch

from .conftest import submodule

N, VOCAB, HIDDEN = 37, 29, 8
FOR_TOKENS = 192 * N  # what a plan counts for targets, statistics and coefficients, plan.TOKEN_BYTES


@pytest.fixture
def passes(kernel):
    return submodule(kernel, "passes")


@pytest.fixture
def capturing(passes, monkeypatch):
    """Rows are masked instead of dropped, as while a CUDA graph is captured."""
    monkeypatch.setattr(passes, "capturing", lambda tensor: True)


def inputs(dtype=torch.float32, ignored=(0, 4, 5, 36)):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (N,), generator=generator)
    targets[list(ignored)] = -100
    return hidden, weight, targets, bias


class TestSelectRows:
    def test_all_rows_when_none_is_ignored(self, passes):
        targets = torch.tensor([3, 0, 4])
        rows = passes.select_rows(targets, -100, 5)
        assert rows.index is None and rows.live is None
        assert rows.targets.tolist() == [3, 0, 4]
        assert len(rows) == 3

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
    def test_the_kept_rows_stay_in_order(self, passes, dtype):
        targets = torch.tensor([-100, 3, -100, -100, 0, 4, -100], dtype=dtype)
        rows = passes.select_rows(targets, -100, 5)
        assert rows.index.tolist() == [1, 4, 5]
        assert rows.targets.tolist() == [3, 0, 4]
        assert rows.targets.dtype == torch.int64

    def test_ignore_index_inside_the_vocabulary(self, passes):
        rows = passes.select_rows(torch.tensor([2, 3, 2, 1], dtype=torch.uint8), 2, 5)
        assert rows.index.tolist() == [1, 3]

    def test_no_row(self, passes):
        assert len(passes.select_rows(torch.tensor([-1, -1]), -1, 5)) == 0
        assert len(passes.select_rows(torch.empty(0, dtype=torch.int64), -1, 5)) == 0

    @pytest.mark.parametrize("bad", [-1, 5, -101, 2**40])
    def test_a_target_outside_the_vocabulary_is_named(self, passes, bad):
        with pytest.raises(IndexError, match=rf"{bad} at flat position 2\b"):
            passes.select_rows(torch.tensor([0, -100, bad]), -100, 5)

    def test_masks_while_capturing(self, passes):
        rows = passes.select_rows(torch.tensor([1, -100, 4]), -100, 5, masked=True)
        assert rows.index is None
        assert rows.live.tolist() == [True, False, True]
        assert len(rows) == 3
        assert ((rows.targets >= 0) & (rows.targets < 5)).all()
        assert rows.targets[rows.live].tolist() == [1, 4]

    @pytest.mark.gpu
    def test_a_target_outside_the_vocabulary_has_no_class_on_a_gpu(self, passes, device):
        rows = passes.select_rows(torch.tensor([0, -100, 7, -3], device=device), -100, 5)
        assert rows.index.tolist() == [0, 2, 3]
        assert rows.targets.tolist() == [0, -1, -1]


class TestRows:
    """take, put and scatter in the three states of Rows."""

    def rows(self, passes, state):
        targets = torch.zeros(5, dtype=torch.int64)
        if state == "all":
            return passes.Rows(None, None, targets)
        if state == "some":
            return passes.Rows(torch.tensor([0, 2, 3]), None, targets[:3])
        return passes.Rows(None, torch.tensor([True, False, True, True, False]), targets)

    @pytest.mark.parametrize(
        "state, expected",
        [("all", [1, 2, 3, 4, 5]), ("some", [1, 3, 4]), ("masked", [1, 0, 3, 4, 0])],
    )
    @pytest.mark.parametrize("shape", [(), (2,)])
    def test_take(self, passes, state, expected, shape):
        rows = self.rows(passes, state)
        values = torch.arange(1.0, 6.0).view(5, *[1] * len(shape)).expand(5, *shape)
        flat = rows.take(values).reshape(len(expected), -1)[:, 0]
        assert flat.tolist() == expected
        assert rows.take(values, 1, 3).reshape(2, -1)[:, 0].tolist() == expected[1:3]
        assert rows.take(None) is None

    def test_take_keeps_nan_of_masked_rows_out(self, passes):
        values = torch.tensor([1.0, torch.nan, 3.0, torch.inf, torch.nan])
        taken = self.rows(passes, "masked").take(values)
        assert taken.tolist() == [1, 0, 3, torch.inf, 0]

    @pytest.mark.parametrize(
        "state, expected",
        [("all", [7, 8, 9, -1, -1]), ("some", [7, -1, 8, 9, -1]), ("masked", [7, 8, 9, -1, -1])],
    )
    def test_put(self, passes, state, expected):
        rows = self.rows(passes, state)
        out = torch.full((5, 2), -1.0, dtype=torch.float64)
        for start, values in ((0, [7.0, 8.0]), (2, [9.0])):
            rows.put(torch.tensor(values)[:, None].expand(-1, 2), out, start, start + len(values))
        assert out[:, 0].tolist() == expected
        assert out[:, 1].tolist() == expected

    def test_put_rounds_once_to_the_dtype_of_out(self, passes):
        out = torch.zeros(5, dtype=torch.bfloat16)
        self.rows(passes, "some").put(torch.tensor([1.0 + 2**-7 + 2**-8 + 2**-12] * 3), out, 0, 3)
        assert out.tolist() == [1.015625, 0, 1.015625, 1.015625, 0]

    @pytest.mark.parametrize(
        "state, values, expected",
        [
            ("all", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
            ("some", [1, 2, 3], [1, 0, 2, 3, 0]),
            ("masked", [1, torch.nan, 2, 3, torch.inf], [1, 0, 2, 3, 0]),
        ],
    )
    def test_scatter(self, passes, state, values, expected):
        rows = self.rows(passes, state)
        values = torch.tensor(values, dtype=torch.float32)
        assert rows.scatter(values, 5).tolist() == expected
        flags = rows.scatter(values > 1, 5)
        assert flags.dtype == torch.bool and flags.tolist() == [v > 1 for v in expected]


class TestMaskedRows:
    """What a captured graph computes is what an eager call computes, with anything in the ignored rows."""

    CALLS = [
        {"reduction": "mean", "return_metrics": True},
        {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01},
        {"reduction": "mean", "weighted": True, "label_smoothing": 0.2},
        {"reduction": "none", "weighted": True},
        {"reduction": "none", "softcap": 3.0, "label_smoothing": 0.1},
        {"reduction": "sum", "workspace": 6000 + FOR_TOKENS},
    ]

    def run(self, kernel, call, ignored):
        call = dict(call)
        hidden, weight, targets, bias = inputs(ignored=ignored)
        with torch.no_grad():
            hidden[targets == -100] = torch.nan
        if call.pop("weighted", False):
            generator = torch.Generator().manual_seed(1)
            call["class_weight"] = torch.rand(VOCAB, generator=generator)
            token_weight = torch.rand(N, generator=generator)
            call["token_weight"] = torch.where(targets == -100, torch.nan, token_weight)
        result = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, **call)
        loss, metrics = result if call.get("return_metrics") else (result, {})
        loss.backward(torch.linspace(-1, 1, loss.numel()).reshape(loss.shape) + 0.5)
        return loss.detach(), metrics, hidden.grad, weight.grad, bias.grad

    @pytest.mark.parametrize("call", CALLS, ids=str)
    @pytest.mark.parametrize("ignored", [(0, 4, 5, 36), (), tuple(range(N))], ids=["some", "none", "all"])
    def test_loss(self, kernel, passes, monkeypatch, call, ignored):
        expected = self.run(kernel, call, ignored)
        monkeypatch.setattr(passes, "capturing", lambda tensor: True)
        masked = self.run(kernel, call, ignored)
        torch.testing.assert_close(masked, expected, rtol=1e-5, atol=1e-6)
        for gradient in masked[2:]:
            assert gradient.isfinite().all()
        assert (masked[2][list(ignored)] == 0).all()

    @pytest.mark.parametrize("entropy", [False, True])
    def test_log_probs(self, kernel, passes, monkeypatch, entropy):
        names = ("log_probs", "lse", "mean_logits", "log_sum_sq_probs", "is_top1") + ("entropy",) * entropy

        def run():
            hidden, weight, targets, bias = inputs()
            with torch.no_grad():
                hidden[targets == -100] = torch.inf
            out = kernel.fused_linear_log_probs(hidden, weight, targets, bias, outputs=names)
            total = (out.log_probs * torch.linspace(-1, 1, N)).sum() + 0.3 * out.lse.sum()
            if entropy:
                total = total + (out.entropy * torch.linspace(1, 2, N)).sum()
            total.backward()
            return tuple(o.detach() for o in out if o is not None), hidden.grad, weight.grad, bias.grad

        expected = run()
        monkeypatch.setattr(passes, "capturing", lambda tensor: True)
        torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-6)

    def test_the_number_of_tokens_counts_the_live_rows(self, kernel, capturing):
        hidden, weight, targets, bias = inputs()
        _, metrics = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, return_metrics=True)
        assert metrics["num_valid_tokens"].item() == N - 4


class TestTokenWeight:
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("poison", [torch.nan, torch.inf])
    def test_of_ignored_rows_is_never_read(self, kernel, reduction, poison):
        results = []
        for filler in (1.0, poison):
            hidden, weight, targets, bias = inputs()
            token_weight = torch.linspace(0.5, 2, N)
            token_weight[targets == -100] = filler
            loss = kernel.fused_linear_cross_entropy(
                hidden, weight, targets, bias, reduction=reduction, token_weight=token_weight
            )
            loss.sum().backward()
            results.append((loss.detach(), hidden.grad, weight.grad, bias.grad))
        assert all(r.isfinite().all() for r in results[1])
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)

    @pytest.mark.parametrize("reduction", ["sum", "none"])
    def test_of_zero_gives_exactly_no_gradient(self, kernel, reduction):
        hidden, weight, targets, bias = inputs(ignored=())
        token_weight = torch.zeros(N)
        token_weight[3] = 1.0
        loss = kernel.fused_linear_cross_entropy(
            hidden, weight, targets, bias, reduction=reduction, token_weight=token_weight
        )
        loss.sum().backward()
        others = [i for i in range(N) if i != 3]
        assert (hidden.grad[others] == 0).all() and (hidden.grad[3] != 0).any()


class TestRowFactors:
    """A row as a times its elements of E: p_j, and p_y - 1 + r / a at the target, also where a is 0."""

    @pytest.fixture
    def eager(self, kernel):
        return submodule(kernel, "backends.eager")

    @pytest.mark.parametrize(
        "a, r",
        [(1.0, 0.0), (-0.25, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 2.0), (-0.0, 2.0), (0.0, -2.0), (1e-12, 1.0),
         (-1e-30, -3.0), (1e-5, 1.0), (3.0, 3.0), (1.0, 1e-9)],
    )  # fmt: skip
    @pytest.mark.parametrize("dtype, nudge", [(torch.float32, 1e-9), (torch.float64, 1e-18)])
    def test_restores_the_row(self, eager, a, r, dtype, nudge):
        """All elements but the target's to `nudge` of r, the target's to the dtype's digits, also where p_y is 1."""
        a, r = torch.tensor([a], dtype=dtype), torch.tensor([r], dtype=dtype)
        factor, ratio = (v.double() for v in eager.row_factors(a, r))
        assert factor.isfinite().all() and ratio.isfinite().all()
        p = torch.softmax(torch.linspace(-3, 3, 7, dtype=torch.float64), 0)
        torch.testing.assert_close(factor * p, a.double() * p, rtol=0, atol=nudge * r.abs().item())
        for missing in (1 - p[4].item(), 0.0):
            here, expected = factor * (ratio - missing), r.double() - a.double() * missing
            digits = torch.finfo(dtype).eps * (a.abs() * missing + r.abs()).item()
            torch.testing.assert_close(here, expected, rtol=0, atol=digits + nudge * r.abs().item() * missing)

    def test_other_rows_are_left_alone(self, eager):
        a = torch.tensor([1.0, -2.0, 1e-6])
        r = torch.tensor([-1.0, 2.0, 1.0])
        factor, ratio = eager.row_factors(a, r)
        assert torch.equal(factor, a)
        assert torch.equal(ratio, r / a)

    @pytest.mark.parametrize(
        "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float64, 1e-13)]
    )
    @pytest.mark.parametrize("workspace", [None, 10_000 + FOR_TOKENS], ids=["kept", "recomputed"])
    def test_the_targets_own_logit(self, kernel, dtype, tolerance, workspace):
        """log_probs + lse is the target's logit: a = 0 and r = 1, a gradient of one element per row."""
        hidden, weight, targets, bias = inputs(dtype)
        out = kernel.fused_linear_log_probs(
            hidden, weight, targets, bias, outputs=("log_probs", "lse"), workspace=workspace
        )
        upstream = torch.linspace(0.5, 1.5, N, dtype=out.lse.dtype)
        ((out.log_probs + out.lse) * upstream).sum().backward()

        exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
        valid = targets != -100
        y = targets[valid]
        z_y = (exact[0][valid] * exact[1][y]).sum(1) + exact[2][y]
        (z_y * upstream[valid].double()).sum().backward()
        for tensor, reference in zip((hidden, weight, bias), exact):
            error = (tensor.grad.double() - reference.grad).norm() / reference.grad.norm()
            assert error < tolerance
        others = torch.ones(VOCAB, dtype=torch.bool)
        others[y] = False
        assert others.any()
        assert weight.grad[others].abs().max() <= (1e-17 if dtype == torch.float64 else 1e-8)

    @pytest.mark.parametrize("reduction", ["sum", "none"])
    def test_a_confident_row_keeps_the_digits_of_p_minus_one(self, kernel, reduction):
        """nll is 1e-6, and p_y - 1 = expm1(-nll); as differences of fp32 numbers they would have one digit."""
        hidden = torch.tensor([[1.0]])
        weight = torch.tensor([[13.815510557964274], [0.0]], requires_grad=True)  # log(1e6)
        loss = kernel.fused_linear_cross_entropy(hidden, weight, torch.tensor([0]), reduction=reduction)
        loss.sum().backward()
        expected = torch.expm1(-loss.detach().double()).item()
        assert expected == pytest.approx(-1 / (1e6 + 1), rel=1e-5)
        assert weight.grad[0].item() == pytest.approx(expected, rel=1e-5)
        assert weight.grad[1].item() == pytest.approx(1 / (1e6 + 1), rel=1e-5)


class TestChunks:
    def problem(self, kernel, hidden, weight, targets, workspace, class_weight=None, needs=(True, True, False)):
        ops, base = submodule(kernel, "ops"), submodule(kernel, "backends.base")
        dtype = hidden.dtype
        call = ops.make_call(hidden, weight, dtype, needs, True, workspace)
        head = base.Head(weight, None, 1.0, None, class_weight, dtype)
        return submodule(kernel, "passes").Problem(hidden, head, targets, -100, call, in_forward=True)

    def test_cover_the_rows_that_run_once(self, kernel):
        hidden, weight, targets, _ = inputs()
        problem = self.problem(kernel, hidden.detach(), weight.detach(), targets, 7000)
        assert problem.plan.chunk_rows < len(problem.rows) == N - 4
        seen = [i for start, stop in problem.chunks() for i in range(start, stop)]
        assert seen == list(range(N - 4))
        assert [i for start, stop in problem.chunks(3, 9) for i in range(start, stop)] == list(range(3, 9))

    def test_x_is_contiguous_and_rounded_to_the_compute_dtype(self, kernel):
        hidden, weight, targets, _ = inputs()
        strided = hidden.detach().t().contiguous().t()
        problem = self.problem(kernel, strided, weight.detach(), targets, None)
        x = problem.x(2, 6)
        assert x.is_contiguous()
        assert torch.equal(x, hidden.detach()[targets != -100][2:6])

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("workspace", [None, 3000])
    def test_no_token_has_no_chunk(self, kernel, reduction, workspace):
        hidden, weight, _, bias = inputs()
        empty = hidden.detach()[:0].requires_grad_()
        loss = kernel.fused_linear_cross_entropy(
            empty, weight, torch.empty(0, dtype=torch.int64), bias, reduction=reduction, workspace=workspace
        )
        grads = torch.autograd.grad(loss.sum(), (empty, weight, bias))
        assert loss.sum() == 0 and all((g == 0).all() for g in grads)

    @pytest.mark.parametrize("weighted", [False, True])
    def test_weighted_row_sum(self, kernel, weighted):
        hidden, weight, targets, _ = inputs()
        class_weight = torch.linspace(0, 2, VOCAB) if weighted else None
        problem = self.problem(kernel, hidden.detach(), weight.detach(), targets, None, class_weight)
        exact = weight.detach().double()
        expected = class_weight.double() @ exact if weighted else exact.sum(0)
        torch.testing.assert_close(problem.weighted_row_sum().double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"z_loss": 0.1}], ids=str
    )
    @pytest.mark.parametrize("ignored", [(), (0, 4, 36)], ids=["dense", "ignored"])
    def test_dx_of_several_gemms(self, kernel, passes, monkeypatch, dtype, options, ignored):
        backend, rows = submodule(kernel, "backends.eager"), []
        grad_hidden = backend.grad_hidden

        def watched(e, weight, compute_dtype, out, accumulate):
            rows.append(e.shape[0])
            return grad_hidden(e, weight, compute_dtype, out, accumulate)

        def run():
            hidden, weight, targets, bias = inputs(dtype, ignored=ignored)
            loss = kernel.fused_linear_cross_entropy(hidden, weight, targets, bias, **options)
            (loss * torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)).sum().backward()
            return hidden.grad, weight.grad, bias.grad

        expected = run()
        monkeypatch.setattr(backend, "grad_hidden", watched)
        monkeypatch.setattr(passes, "GEMM_ROWS", 10)
        monkeypatch.setattr(passes, "WAVE_ROWS", 5)
        tolerance = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(run(), expected, **tolerance)
        assert [r for r in rows if r > 1] == ([10, 10, 14] if ignored else [10, 10, 10, 7])

    @pytest.mark.parametrize("reduction", ["sum", "none"])
    def test_errors_do_not_grow_with_the_number_of_chunks(self, kernel, reduction):
        """bf16: dW is accumulated in fp32 over 1 to 64 chunks and rounded once, at the end."""
        generator = torch.Generator().manual_seed(0)
        n, vocab, width = 1024, 96, 32
        hidden = torch.randn(n, width, generator=generator).bfloat16().requires_grad_()
        weight = torch.randn(vocab, width, generator=generator).bfloat16().requires_grad_()
        targets = torch.randint(0, vocab, (n,), generator=generator)
        exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum").backward()
        errors, chunks = [], []
        for workspace in (None, *(192 * n + room for room in (330_000, 180_000))):
            needs = dict(needs=(True, True, False), upstream="scalar" if reduction == "sum" else "token")
            plan = kernel.plan(n, vocab, width, torch.bfloat16, device_type="cpu", workspace=workspace, **needs)
            chunks.append(-(-n // plan.chunk_rows))
            hidden.grad = weight.grad = None
            loss = kernel.fused_linear_cross_entropy(
                hidden, weight, targets, reduction=reduction, workspace=workspace
            )
            loss.sum().backward()
            for tensor, reference in zip((hidden, weight), exact):
                errors.append(((tensor.grad.double() - reference.grad).norm() / reference.grad.norm()).item())
        assert max(errors) < 3.5e-3
        assert max(chunks) >= 4 * min(chunks)
        assert max(errors[1::2]) < 1.05 * min(errors[1::2])


@pytest.mark.parametrize("names", [("log_probs",), ("log_probs", "lse")])
@pytest.mark.parametrize("entropy", [False, True])
def test_backward_leaves_what_the_forward_saved_as_it_was(kernel, entropy, names):
    hidden, weight, targets, bias = inputs()
    outputs = names + ("entropy",) * entropy
    tensors = [t.detach() for t in (hidden, weight)]
    _, saved = kernel.fused_linear_log_probs_forward(*tensors, targets, bias.detach(), outputs=outputs)
    copies = [s.clone() for s in saved]
    upstream = kernel.LogProbs(**{name: torch.linspace(-1, 1, N) for name in outputs})
    results = [
        kernel.fused_linear_log_probs_backward(upstream, saved, *tensors, targets, bias.detach(), outputs=outputs)
        for _ in range(2)
    ]
    for tensor, copy in zip(saved, copies):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
