"""The public functions on the Triton backend, forward and backward, against float64."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from .. import oracle
from ..conftest import submodule
from ..oracle import HALF, mean_signed_error, relative_error

pytest.importorskip("triton")

from . import reference
from .reference import BF16, FP16, FP32, FP64, Where


class Case(NamedTuple):
    """A call of the public function, and what its plan must look like; a workspace is looked for that makes it so."""

    options: dict
    bias: bool = False
    weighted: bool = False
    plan: Callable = None

    def workspace(self, kernel, where, dtype, weight_dtype, tensor_dtype):
        if self.plan is None:
            return None
        how = {
            "upstream": oracle.upstream_of(self.options.get("reduction", "mean")),
            "row_scaled": oracle.row_scaled(self.options),
        }
        for workspace in (int(5000 * 1.03**i) for i in range(400)):
            try:
                plan = kernel.plan(
                    where.rows, where.vocab, where.width, dtype, hidden_dtype=tensor_dtype, weight_dtype=weight_dtype,
                    device_type=where.device, needs=(True, True, self.bias), workspace=workspace, **how,
                )  # fmt: skip
            except ValueError:
                continue
            if plan.gradients == "backward" and self.plan(plan):
                return workspace
        raise AssertionError(f"no workspace gives the plan of {self}")


CASES = {
    "plain": Case({}),
    "everything": Case(
        {"logit_scale": 0.7, "label_smoothing": 0.1, "z_loss": 0.01, "reduction": "sum"}, bias=True, weighted=True
    ),
    "softcap": Case({"softcap": 5.0, "z_loss": 0.01}, bias=True),
    "kept": Case({"reduction": "none", "label_smoothing": 0.1}, bias=True, weighted=True),
    "kept and recomputed": Case(
        {"reduction": "none"}, bias=True, plan=lambda p: 16 <= p.kept_rows <= p.n_tokens - 8 and p.slab == p.vocab
    ),
    "recomputed": Case({"reduction": "none", "softcap": 5.0, "label_smoothing": 0.1}, bias=True, weighted=True),
    "slabs": Case(
        {"label_smoothing": 0.1, "softcap": 5.0}, bias=True, weighted=True, plan=lambda p: 30 < p.slab < p.vocab - 30
    ),
}


def _several_slabs(plan) -> bool:
    return plan.vocab < 6 * plan.slab < 5 * plan.vocab


# Ways in which dlogits are recomputed, and rounded where the GEMMs are of half precision.
RECOMPUTED = {
    "rows": Case(
        {"reduction": "none", "label_smoothing": 0.1, "softcap": 5.0},  # no factor per row, hence nothing to keep
        bias=True, plan=lambda p: p.kept_rows == 0 and p.slab == p.vocab,
    ),
    "slabs": Case({}, bias=True, plan=_several_slabs),
    "smoothed": Case({"label_smoothing": 0.1}, bias=True, plan=_several_slabs),
    "softcap": Case({"softcap": 5.0}, bias=True, plan=_several_slabs),
    "scaled": Case({"logit_scale": -0.9, "z_loss": 0.01}, bias=True, plan=_several_slabs),
}


class TestPublicFunctions:
    """Forward and backward through the operators with this backend, against float64."""

    def compare(self, where, forced, case, dtype, weight_dtype=None, autocast=None, change=lambda *t: t):
        if case is CASES["kept and recomputed"] and not where.on_gpu:
            where = where._replace(rows=45)
        workspace = case.workspace(forced, where, autocast or dtype, weight_dtype or dtype, dtype)
        chunk = where.chunk(dtype, weight_dtype=weight_dtype, bias=case.bias, class_weight=case.weighted)
        targets = chunk.targets.clone()
        targets[[2, 3, 11]] = -100
        hidden, weight, bias = change(chunk.x, chunk.weight, chunk.bias)
        tensors = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
        token_weight = torch.linspace(0, 2, where.rows, device=where.device) if case.weighted else None
        options = {**case.options, "class_weight": chunk.class_weight, "token_weight": token_weight}
        with torch.autocast(where.device, autocast or FP16, enabled=autocast is not None):
            loss = forced.fused_linear_cross_entropy(hidden, weight, targets, bias, **options, workspace=workspace)
        upstream = torch.linspace(0.5, 1.5, loss.numel(), device=where.device).reshape(loss.shape)
        expected = oracle.reference(hidden, weight, targets, bias, **options, upstream=upstream, round_to=autocast)
        torch.testing.assert_close(loss.to(FP64).cpu(), expected.loss, rtol=2e-5, atol=1e-5)
        grads = torch.autograd.grad(loss, tensors, upstream)
        limit = 1e-5 if autocast is None and dtype == FP32 else 3.5e-3
        for tensor, g, e in zip(tensors, grads, expected.grads):
            assert g.dtype == tensor.dtype
            assert relative_error(g, e) < limit

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_cases(self, where, forced, name, dtype):
        self.compare(where, forced, CASES[name], dtype)

    @pytest.mark.parametrize("name", ["plain", "kept and recomputed", "slabs"])
    def test_fp16(self, where, forced, name):
        self.compare(where, forced, CASES[name], FP16)

    @pytest.mark.parametrize("name", ["plain", "recomputed", "slabs"])
    @pytest.mark.parametrize("autocast", HALF)
    def test_fp32_parameters_under_autocast(self, where, forced, name, autocast):
        self.compare(where, forced, CASES[name], FP32, autocast=autocast)

    @pytest.mark.parametrize("name", ["everything", "kept", "slabs"])
    @pytest.mark.parametrize("layout", ["transposed", "every other", "expanded bias"])
    def test_strided_tensors(self, where, forced, name, layout):
        """hidden, weight and bias (and the case's class weights) of any strides."""

        def change(hidden, weight, bias):
            if layout == "transposed":
                return hidden.t().contiguous().t(), weight.t().contiguous().t(), bias
            if layout == "every other":
                return [torch.stack([t, t + 1], -1)[..., 0].detach() for t in (hidden, weight, bias)]
            return hidden, weight, bias[:1].detach().expand(where.vocab)

        self.compare(where, forced, CASES[name], FP32, change=change)

    @pytest.mark.parametrize("name", ["everything", "kept", "slabs"])
    def test_strided_class_weights(self, where, forced, monkeypatch, name):
        make = Where.chunk

        def chunk(self, *args, **options):
            made = make(self, *args, **options)
            return made._replace(class_weight=torch.stack([made.class_weight, made.class_weight + 1], 1)[:, 0])

        monkeypatch.setattr(Where, "chunk", chunk)
        self.compare(where, forced, CASES[name], FP32)

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_log_probs_and_their_gradients(self, where, forced, dtype):
        names = ("log_probs", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1")
        chunk = where.chunk(dtype)
        targets = chunk.targets.clone()
        targets[4] = -100
        valid = targets != -100
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        out = forced.fused_linear_log_probs(*tensors, targets, outputs=names)
        exact = [t.detach().to(FP64).requires_grad_() for t in tensors]
        z = exact[0] @ exact[1].T
        expected = reference.statistics(z, torch.where(valid, targets, 0))
        lse = torch.logsumexp(z, 1)
        wanted = {
            "log_probs": z.gather(1, torch.where(valid, targets, 0)[:, None])[:, 0] - lse,
            "entropy": lse - (torch.softmax(z, 1) * z).sum(1),
            "lse": lse,
            "mean_logits": z.mean(1),
            "log_sum_sq_probs": expected["log_sum_sq"],
        }
        for name, value in wanted.items():
            actual = getattr(out, name)
            torch.testing.assert_close(actual.to(FP64)[valid], value[valid], **reference.EXACT)
            assert actual[4] == 0
        assert torch.equal(out.is_top1[valid], expected["is_top1"][valid])
        upstream = [torch.linspace(a, b, where.rows, device=where.device) for a, b in ((1, 2), (-1, 1), (0.5, 0))]
        objective = sum((u * o).sum() for u, o in zip(upstream, out[:3]))
        reference_objective = sum(
            (u.to(FP64) * wanted[n])[valid].sum() for u, n in zip(upstream, ("log_probs", "entropy", "lse"))
        )
        grads = torch.autograd.grad(objective, tensors)
        for g, e in zip(grads, torch.autograd.grad(reference_objective, exact)):
            assert relative_error(g, e) < (1e-5 if dtype == FP32 else 3.5e-3)

    def test_the_targets_own_logit(self, where, forced):
        """log_probs + lse: nothing but the target's element of each row."""
        chunk = where.chunk()
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        out = forced.fused_linear_log_probs(*tensors, chunk.targets, outputs=("log_probs", "lse"))
        (out.log_probs + out.lse).sum().backward()
        assert relative_error(chunk.x.grad, chunk.weight.detach()[chunk.targets]) < 1e-5
        expected = torch.zeros_like(chunk.weight).to(FP64).index_add_(0, chunk.targets, chunk.x.detach().to(FP64))
        assert relative_error(chunk.weight.grad, expected) < 1e-5

    def test_the_targets_own_logit_under_thousands_of_far_larger_ones(self, where, forced):
        """A row just below the repair's limit: 59.9 nats over its reference in each of 8064 classes, with a = 0."""
        x, weight = torch.eye(2, 4), 0.1 * torch.randn(8192, 4, generator=torch.Generator().manual_seed(0))
        weight[:, 0] = 59.9
        weight[:128, 0] = 0.0
        targets = torch.tensor([3, 5], device=where.device)
        tensors = [t.to(where.device).requires_grad_() for t in (x, weight)]
        out = forced.fused_linear_log_probs(*tensors, targets, outputs=("log_probs", "lse"))
        (out.log_probs + out.lse).sum().backward()
        torch.testing.assert_close(tensors[0].grad, tensors[1].detach()[targets], rtol=1e-5, atol=1e-6)
        expected = torch.zeros(8192, 4)
        expected[3, 0] = expected[5, 1] = 1.0
        torch.testing.assert_close(tensors[1].grad.cpu(), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "name, dtype",
        [("rows", BF16), ("slabs", BF16)]
        + [pytest.param(name, BF16, marks=pytest.mark.slow) for name in ("smoothed", "softcap", "scaled")]
        + [pytest.param("slabs", FP16, marks=pytest.mark.slow)],
    )
    def test_the_rounding_of_recomputed_gradients_is_not_biased(self, where, forced, dtype, name):
        """Where p_y is below 2^-9, bf16 has no number between -1 and p_y - 1. Each gradient here shows whether
        p_y was lost: the target's weight is 0, so that dX comes from the other classes alone."""
        case, where = RECOMPUTED[name], where._replace(rows=40, vocab=600)
        workspace = case.workspace(forced, where, dtype, FP32, FP32)
        chunk = where.chunk(dtype, x_dtype=FP32)
        hidden, bias = chunk.x.abs(), torch.zeros(600, device=where.device)
        weight = (0.2 * chunk.weight).to(dtype).to(FP32)
        targets = torch.full_like(chunk.targets, 7)
        weight[7] = 0
        p_y = torch.softmax(hidden.to(FP64) @ weight.to(FP64).T * case.options.get("logit_scale", 1.0), 1)[:, 7]
        assert p_y.min() > 1e-3 and p_y.max() < 2**-9
        tensors = [t.requires_grad_() for t in (hidden, weight, bias)]
        with torch.autocast(where.device, dtype):  # fp32 gradients of half-precision GEMMs
            loss = forced.fused_linear_cross_entropy(
                hidden, weight, targets, bias, workspace=workspace, **case.options
            )
        grads = torch.autograd.grad(loss.sum(), tensors)
        wanted = oracle.reference(hidden, weight, targets, bias, **case.options).grads
        for g, e in zip(grads, wanted):
            assert relative_error(g, e) < 3.5e-3
        assert abs(mean_signed_error(grads[0], wanted[0])) < 4e-4
        assert abs(mean_signed_error(grads[1][7], wanted[1][7])) < 4e-4
        assert grads[2][7].item() == pytest.approx(wanted[2][7].item(), rel=1e-5)

    @pytest.mark.parametrize("name", RECOMPUTED)
    def test_a_nan_row_stays_nan_where_gradients_are_recomputed_and_rounded(self, where, forced, name):
        case = RECOMPUTED[name]
        case = case._replace(options={**case.options, "reduction": "none"})
        chunk = where.chunk(BF16, bias=True)
        chunk.x[5, 1] = torch.nan
        tensors = [t.requires_grad_() for t in (chunk.x, chunk.weight, chunk.bias)]
        loss = forced.fused_linear_cross_entropy(
            *tensors[:2], chunk.targets, tensors[2], workspace=case.workspace(forced, where, BF16, BF16, BF16),
            **case.options,
        )  # fmt: skip
        dx, dw, db = torch.autograd.grad(loss.sum(), tensors)
        assert dx.isnan().any(1).tolist() == loss.isnan().tolist() == [i == 5 for i in range(where.rows)]
        assert dx[5].isnan().all() and dw.isnan().all() and db.isnan().all()

    @pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.slow), BF16])
    @pytest.mark.parametrize("name", ["plain", "kept", *RECOMPUTED])
    def test_rows_are_masked_while_capturing(self, where, forced, monkeypatch, name, dtype):
        """What a CUDA graph records, with anything in the ignored rows."""
        case = {"plain": Case({"reduction": "sum"}), "kept": Case({"reduction": "none"}), **RECOMPUTED}[name]
        workspace = case.workspace(forced, where, dtype, dtype, dtype)
        results = []
        passes = submodule(forced, "passes")
        for capturing in (False, True):
            monkeypatch.setattr(passes, "capturing", lambda tensor, value=capturing: value)
            chunk = where.chunk(dtype, bias=True)
            targets = chunk.targets.clone()
            targets[[2, 3, 11]] = -100
            chunk.x[[2, 3, 11]] = torch.nan
            tensors = [t.requires_grad_() for t in (chunk.x, chunk.weight, chunk.bias)]
            loss = forced.fused_linear_cross_entropy(
                *tensors[:2], targets, tensors[2], workspace=workspace, **case.options
            )
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), tensors)))
        if dtype == FP32:
            torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
            return
        # In bf16 an element of E may round the other way: a logit's last bit can depend on its row's place in a tile.
        torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
        for masked, dropped in zip(results[1][1:], results[0][1:]):
            assert relative_error(masked, dropped) < 1e-3

    def test_masked_rows_beside_a_divisor_of_zero(self, where, forced, monkeypatch):
        """The loss is infinite, and so are the gradients of the rows that count; the others still get none."""
        monkeypatch.setattr(submodule(forced, "passes"), "capturing", lambda tensor: True)
        chunk = where.chunk(FP32)
        targets = chunk.targets.clone()
        targets[[2, 3, 11]] = -100
        hidden, zero = chunk.x.requires_grad_(), torch.zeros((), device=where.device)
        loss = forced.fused_linear_cross_entropy(hidden, chunk.weight, targets, num_items=zero)
        loss.backward()
        assert loss == torch.inf
        assert (hidden.grad[[2, 3, 11]] == 0).all() and not hidden.grad[[0, 1, 4]].isfinite().any()

    @pytest.mark.parametrize("tokens, output", [(19, "loss"), (1, "log_probs"), (1, "lse"), (1, "entropy")])
    def test_lazily_negated_upstream_gradients(self, where, forced, tokens, output):
        """Kernels read memory, where they still have the other sign (a longer one is made contiguous anyway)."""
        chunk = where.chunk(FP32)
        x, targets = chunk.x[:tokens].clone().requires_grad_(), chunk.targets[:tokens]
        if output == "loss":
            out = forced.fused_linear_cross_entropy(x, chunk.weight, targets)
        else:
            out = getattr(forced.fused_linear_log_probs(x, chunk.weight, targets, outputs=(output,)), output)
        ones = torch.ones_like(out)
        upstream = torch.complex(ones, ones).conj().imag
        assert upstream.is_neg() and upstream.is_contiguous()
        (expected,) = torch.autograd.grad(out, x, -ones, retain_graph=True)
        (grad,) = torch.autograd.grad(out, x, upstream)
        torch.testing.assert_close(grad, expected)

    def test_all_tokens_ignored(self, where, forced):
        chunk = where.chunk(BF16)
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        for reduction in ("mean", "none"):
            targets = torch.full_like(chunk.targets, -100)
            loss = forced.fused_linear_cross_entropy(*tensors, targets, reduction=reduction)
            grads = torch.autograd.grad(loss.sum(), tensors)
            assert (loss == 0).all() and all((g == 0).all() for g in grads)

    def test_runs_are_bitwise_equal(self, where, forced):
        chunk = where.chunk(BF16)
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        results = []
        for _ in range(2):
            loss = forced.fused_linear_cross_entropy(*tensors, chunk.targets)
            results.append((loss.detach(), *torch.autograd.grad(loss, tensors)))
        assert all(torch.equal(a, b) for a, b in zip(*results))
