"""The public functions on the Triton backend, as only a GPU can run them: large shapes, early starts, bad targets."""

import dataclasses

import pytest
import torch

from .. import oracle
from ..conftest import submodule
from ..oracle import relative_error

triton = pytest.importorskip("triton")

from .reference import BF16, FP32, FP64, Where, overflowing

pytestmark = pytest.mark.gpu


class TestOnlyOnAGpu:
    @pytest.mark.parametrize("rows, vocab, width", [(130, 50257, 80), (513, 5003, 136), (64, 128, 64), (1, 151936, 8)])
    @pytest.mark.parametrize("dtype", [BF16, FP32])
    def test_larger_shapes(self, forced, device, rows, vocab, width, dtype):
        where = Where(device, rows, vocab, width)
        chunk = where.chunk(dtype)
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        loss = forced.fused_linear_cross_entropy(*tensors, chunk.targets, reduction="none")
        exact = [t.detach().to(FP64).requires_grad_() for t in tensors]
        expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, chunk.targets, reduction="none")
        torch.testing.assert_close(loss.to(FP64), expected, rtol=2e-5, atol=2e-5)
        for g, e in zip(torch.autograd.grad(loss.sum(), tensors), torch.autograd.grad(expected.sum(), exact)):
            assert relative_error(g, e) < (1e-5 if dtype == FP32 else 3.5e-3)

    @pytest.mark.parametrize("share", [0.0, 0.0005, 0.1, 0.4, 1.0])
    @pytest.mark.parametrize("rows_at_once", [None, 256])
    def test_first_rows_start_before_they_are_counted(self, forced, device, share, rows_at_once):
        """N is large enough for it; fewer rows may count than have started. NaN in the others reaches nothing."""
        inputs = oracle.make_inputs(device, BF16, (2600,), 777, 136, ignored=0.0)
        hidden = inputs.hidden.detach().clone()
        ignored = torch.rand(2600, generator=torch.Generator().manual_seed(0)) >= share
        targets = inputs.targets.clone()
        targets[ignored.to(device)] = -100
        hidden[ignored.to(device)] = torch.nan
        inputs = dataclasses.replace(inputs, hidden=hidden, targets=targets)
        workspace = None
        if rows_at_once:
            workspace = (2600 + 777) * 136 * 4 + rows_at_once * (3 * 777 + 8 * 136)
            assert 128 <= oracle.plan_of(forced, inputs, workspace).chunk_rows <= 512
        outcome = oracle.run(forced, inputs, return_metrics=True, workspace=workspace)
        expected = oracle.reference(hidden.nan_to_num(), inputs.weight, targets, inputs.bias)
        oracle.check(outcome, expected, BF16)

    def test_a_changing_number_of_tokens_compiles_nothing_new(self, forced, device, monkeypatch):
        """The first two numbers are a multiple of 16 and an odd one, which combine_kernel tells apart."""
        if device != "cuda":
            pytest.skip("the interpreter compiles nothing")
        compiled = []

        def call(tokens):
            inputs = oracle.make_inputs(device, BF16, (tokens,), 1000, 64)
            workspace = (tokens + 1000) * 64 * 4 + 700 * (3 * 1000 + 8 * 64)  # chunks of some 600 rows
            forced.fused_linear_cross_entropy(*inputs.leaves()[:2], inputs.targets, workspace=workspace).backward()
            forced.fused_linear_cross_entropy(*inputs.leaves()[:2], inputs.targets, reduction="none").sum().backward()
            with torch.no_grad():
                forced.fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets)

        for tokens in (2048, 1501):
            call(tokens)
        hook = lambda *args, **about: compiled.append(about["repr"])  # noqa: E731
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
        for tokens in (1, 7, 128, 130, 1777, 2304, 2600):
            call(tokens)
        assert not [name for name in compiled if "combine_kernel" not in name], compiled

    def test_under_a_default_device(self, forced, device):
        """Small tensors that belong on the host stay there."""
        chunk = Where(device, 37, 300, 64).chunk(BF16)
        with torch.device(device):
            loss = forced.fused_linear_cross_entropy(chunk.x.requires_grad_(), chunk.weight, chunk.targets)
            loss.backward()
        assert loss.isfinite() and chunk.x.grad.isfinite().all()

    def test_the_repair_needs_no_synchronisation(self, forced, device):
        if device != "cuda":
            pytest.skip("needs torch.cuda.set_sync_debug_mode")
        where = Where(device, 261, 1031, 72)
        chunk = overflowing(where, BF16, (0, 5, 200))
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        call = forced.fused_linear_cross_entropy
        call(*tensors, chunk.targets).backward()
        passes = submodule(forced, "passes")
        base, ops = submodule(forced, "backends.base"), submodule(forced, "ops")
        needs = (True, True, False)
        problem = passes.Problem(
            chunk.x.detach(), chunk.head(base), chunk.targets, -100,
            ops.make_call(chunk.x, chunk.weight, BF16, needs, True, None), in_forward=True,
        )  # fmt: skip
        assert len(problem.rows) == where.rows  # the one wait of a call
        options = submodule(forced, "loss").LossOptions(0.0, 0.0, where.vocab)
        needs = submodule(forced, "plan").Needs(*needs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():  # as inside of the operator
                result = passes.loss_and_gradients(
                    problem, needs, options, None, torch.full((), 31.0, device=device), True, mean=True, dense=True
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert result.loss.isfinite() and result.grad_weight.isfinite().all()

    def test_a_target_outside_the_vocabulary_poisons_its_row_alone(self, forced, device):
        where = Where(device, 261, 1031, 72)
        chunk = where.chunk(BF16)
        bad = {3: 1031, 50: -1, 77: 2**40, 78: -(2**40), 200: 1055}  # the last is inside the tail tile
        targets = chunk.targets.clone()
        for row, value in bad.items():
            targets[row] = value
        hidden = chunk.x.requires_grad_()
        loss = forced.fused_linear_cross_entropy(hidden, chunk.weight, targets, reduction="none")
        loss.sum().backward()
        rows = torch.zeros(where.rows, dtype=torch.bool, device=device)
        rows[list(bad)] = True
        assert torch.equal(loss.isnan(), rows)
        assert torch.equal(hidden.grad.isnan().any(1), rows)
        assert torch.equal(hidden.grad.isnan().all(1), rows)


def chunked_lse(hidden, weight, step):
    """logsumexp of each row's logits, from plain fp32 matrix products of `step` rows."""
    parts = [torch.logsumexp(h.float() @ weight.float().T, 1) for h in hidden.split(step)]
    return torch.cat(parts)


class TestMoreThan31BitsOfOffsets:
    """N * V, V * H and N * H above 2^31, compared on the last rows and classes, where the offsets are largest."""

    def check(self, forced, device, n, vocab, width, reduction, workspace=None, transposed=False, step=4096):
        generator = torch.Generator(device).manual_seed(0)
        new = {"generator": generator, "device": device, "dtype": BF16}
        hidden = torch.randn(n, width, **new)
        weight = torch.randn(width, vocab, **new).t() if transposed else torch.randn(vocab, width, **new)
        weight.mul_(width**-0.5)
        targets = torch.randint(0, vocab, (n,), generator=generator, device=device)
        targets[-5:] = torch.arange(vocab - 5, vocab, device=device)
        tensors = (hidden.requires_grad_(), weight.requires_grad_())
        loss = forced.fused_linear_cross_entropy(*tensors, targets, reduction=reduction, workspace=workspace)
        grads = torch.autograd.grad(loss.sum(), tensors)
        hidden, weight = hidden.detach(), weight.detach()
        with torch.no_grad():
            lse = chunked_lse(hidden, weight, step)
            rows, classes = torch.arange(n - 32, n, device=device), torch.arange(vocab - 32, vocab, device=device)
            chunks = list(zip(hidden.split(step), targets.split(step), lse.split(step)))
            expected = lse - torch.cat([(h.float() * weight[t].float()).sum(1) for h, t, _ in chunks])
            if reduction == "none":
                torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(loss, expected.sum(), rtol=1e-5, atol=0)
            # dX of the last rows
            p = torch.softmax(hidden[rows].float() @ weight.float().T, 1)
            p[torch.arange(32, device=device), targets[rows]] -= 1
            assert relative_error(grads[0][rows], p @ weight.float()) < 3.5e-3
            # dW of the last classes
            total = torch.zeros(32, width, device=device)
            for h, t, s in chunks:
                p = torch.exp(h.float() @ weight[classes].float().T - s[:, None])
                p -= (t[:, None] == classes).float()
                total += p.T @ h.float()
            assert relative_error(grads[1][classes], total) < 3.5e-3

    @pytest.mark.parametrize("reduction", ["sum", "none"])
    def test_tokens_times_classes(self, forced, device, reduction):
        """All rows' exponentials in one buffer of 2.2e9 elements."""
        n, vocab = 16640, 131085
        assert n * vocab > 2**31
        self.check(forced, device, n, vocab, 16, reduction, workspace=16 << 30)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_classes_times_width(self, forced, device, transposed):
        vocab, width = 1_100_003, 2000
        assert vocab * width > 2**31
        self.check(forced, device, 64, vocab, width, "sum", transposed=transposed, step=64)

    def test_tokens_times_width(self, forced, device):
        n, width = 1_100_003, 2000
        assert n * width > 2**31
        self.check(forced, device, n, 250, width, "sum", workspace=64 << 30, step=65536)
