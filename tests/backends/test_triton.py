"""The Triton backend's functions against float64: tiny shapes under Triton's interpreter, larger ones on a GPU."""

import itertools
import sys

import pytest
import torch

from .. import oracle
from ..conftest import submodule
from ..oracle import HALF, relative_error

pytest.importorskip("triton")
import triton
import triton.language as tl

from . import reference
from .reference import BF16, FP16, FP32, FP64, check_forward, make_chunk, overflowing, run_forward

STORED = {"rtol": 2**-8, "atol": 1e-7}  # scale * E, with E in bf16


OPTIONS = [
    {},
    {"bias": True, "class_weight": True},
    {"logit_scale": -0.3, "softcap": 4.0},
    {"bias": True, "logit_scale": 1.7, "softcap": 9.0, "class_weight": True},
]
ALL = (True, True, True, True)


class TestForward:
    @pytest.mark.parametrize("store", [False, True])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    def test_statistics_and_exponentials(self, where, backend, base, dtype, options, store):
        exps = where.exps(dtype) if store else None
        close = {} if dtype == FP32 else {"exps_tolerance": STORED}
        check_forward(backend, base, where.chunk(dtype, **options), base.Wants(*ALL), exps, **close)

    @pytest.mark.parametrize("wants", [c for c in itertools.product((False, True), repeat=4) if sum(c) < 2])
    def test_only_what_is_asked_for(self, where, backend, base, wants):
        for exps in (None, where.exps()):
            check_forward(backend, base, where.chunk(), base.Wants(*wants), exps)

    @pytest.mark.parametrize("vocab, width", [(1, 1), (3, 1), (33, 7), (97, 16), (128, 13), (64, 40)])
    def test_odd_sizes(self, where, backend, base, vocab, width):
        """Rows, classes and widths that fill no tile; a vocabulary smaller than the reference's classes."""
        for rows, store in ((1, True), (17, False), (17, True)):
            chunk = make_chunk(rows, vocab, width, device=where.device, bias=True)
            exps = where.exps(rows=rows, vocab=vocab) if store else None
            check_forward(backend, base, chunk, base.Wants(*ALL), exps)

    @pytest.mark.parametrize("store", [False, True])
    @pytest.mark.parametrize("logit_scale", [1.0, 0.3])
    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    def test_a_certain_row_has_no_loss_at_all(self, where, backend, base, dtype, logit_scale, store):
        """As in torch: no digit of a log-probability of 0 comes from the reference, which is computed by itself; nor
        one of the entropy, of whose gradient that would be all."""
        chunk = where.chunk(dtype, logit_scale=logit_scale)
        weight = chunk.weight.float() + torch.randn_like(chunk.weight, dtype=FP32)
        weight = torch.nn.functional.normalize(weight, dim=1)
        x = 700 * weight[chunk.targets.clamp(min=0)]
        chunk = chunk._replace(x=x.to(dtype), weight=weight.to(dtype))
        others = chunk.z.scatter(1, chunk.targets[:, None], -torch.inf).amax(1)
        certain = chunk.z.gather(1, chunk.targets[:, None])[:, 0] - others > 25
        assert certain.sum() > 3
        wants = base.Wants(entropy=True, log_sum_sq=True)
        stats = run_forward(backend, base, chunk, wants, where.exps(dtype) if store else None)
        assert (stats.log_prob[certain] == 0).all()
        entropy = reference.statistics(chunk.z, chunk.targets)["entropy"][certain]
        assert (stats.entropy >= 0).all() and (stats.entropy[certain] - entropy).abs().max() < 1e-10
        assert (stats.log_sum_sq <= 0).all() and (stats.log_sum_sq[certain] > -1e-9).all()

    def test_no_row(self, where, backend, base):
        chunk = where.chunk()
        chunk = chunk._replace(x=chunk.x[:0], targets=chunk.targets[:0])
        stats = run_forward(backend, base, chunk, base.Wants(*ALL), where.exps()[:0])
        assert stats.max.numel() == 0

    @pytest.mark.parametrize("first, last", [(0, 64), (40, 150), (0, 128), (7, 8)])
    @pytest.mark.parametrize("store", [False, True])
    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_classes_at_minus_infinity(self, where, backend, base, dtype, first, last, store):
        """A few of a tile, a whole tile, the first tiles, the last ones."""
        chunk = where.chunk(dtype, bias=True)
        last = where.vocab if last == 150 else last
        chunk.bias[first:last] = -torch.inf
        masked = (chunk.targets >= first) & (chunk.targets < last)
        chunk.targets[masked] = where.vocab - 1 if last < where.vocab else 0
        wants = base.Wants(entropy=True, log_sum_sq=True, is_top1=True)
        close = {} if dtype == FP32 else {"exps_tolerance": STORED}
        stats = check_forward(backend, base, chunk, wants, where.exps(dtype) if store else None, **close)
        assert stats.log_sum.isfinite().all()

    @pytest.mark.parametrize("store", [False, True])
    def test_a_masked_target(self, where, backend, base, store):
        """Its log-probability is -inf; the row's other statistics are what they are."""
        chunk = where.chunk(bias=True)
        chunk.targets[2] = 5
        chunk.bias[5] = -torch.inf
        chunk.targets[3:][chunk.targets[3:] == 5] = 6
        exps = where.exps() if store else None
        stats = run_forward(backend, base, chunk, base.Wants(entropy=True, is_top1=True), exps)
        assert stats.log_prob[2].item() == -torch.inf
        assert not stats.is_top1[2]
        expected = reference.statistics(chunk.z, chunk.targets)
        for name in ("max", "log_sum", "entropy"):
            torch.testing.assert_close(getattr(stats, name).to(FP64), expected[name], **reference.EXACT)

    def test_a_masked_target_above_logits_of_minus_30000(self, where, backend, base):
        """The columns beyond the vocabulary, in the last tile, must not pass for the maximum."""
        chunk = where.chunk(bias=True)
        chunk.weight.mul_(8).round_().div_(8)
        chunk.x.mul_(8).round_().div_(8)
        chunk.bias.fill_(-3e4)
        chunk.bias[chunk.targets[2]] = -torch.inf
        assert where.vocab % 32
        stats = run_forward(backend, base, chunk, base.Wants(entropy=True), where.exps())
        assert stats.log_prob[2].item() == -torch.inf and stats.scale.isfinite().all()
        expected = reference.statistics(chunk.z, chunk.targets)
        for name in ("max", "log_sum", "entropy"):
            torch.testing.assert_close(getattr(stats, name).to(FP64), expected[name], **reference.EXACT)

    @pytest.mark.parametrize("store", [False, True])
    def test_a_row_of_minus_infinity_is_nan(self, where, backend, base, store):
        chunk = where.chunk(bias=True)
        chunk.bias.fill_(-torch.inf)
        stats = run_forward(backend, base, chunk, base.Wants(entropy=True), where.exps() if store else None)
        assert stats.log_prob.isnan().all()
        assert stats.entropy.isnan().all()

    @pytest.mark.parametrize("store", [False, True])
    def test_a_row_without_a_class_is_nan_and_no_other(self, where, backend, base, store):
        exps = where.exps() if store else None
        chunk = where.chunk()
        expected = run_forward(backend, base, chunk, base.Wants(*ALL), exps)
        poisoned = chunk._replace(targets=chunk.targets.clone())
        poisoned.targets[[0, 7]] = -1
        stats = run_forward(backend, base, poisoned, base.Wants(*ALL), exps)
        others = [i for i in range(where.rows) if i not in (0, 7)]
        names = ["log_sum", "entropy", "sum_log_probs", "log_sum_sq"] + ["scale"] * store
        for name in names:
            value = getattr(stats, name)
            assert value[[0, 7]].isnan().all(), name
            assert torch.equal(value[others], getattr(expected, name)[others])
        assert stats.log_prob[[0, 7]].isnan().all() and stats.lse[[0, 7]].isnan().all()
        assert not stats.is_top1[[0, 7]].any()
        assert torch.equal(stats.is_top1[others], expected.is_top1[others])

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("store", [False, True])
    def test_nan_and_infinity_stay_in_their_row(self, where, backend, base, store, value):
        chunk = where.chunk()
        exps = where.exps() if store else None
        expected = run_forward(backend, base, chunk, base.Wants(*ALL), exps)
        chunk.x[4, 2] = value
        stats = run_forward(backend, base, chunk, base.Wants(*ALL), exps)
        assert stats.log_prob.isnan().tolist() == [i == 4 for i in range(where.rows)]
        assert not stats.is_top1[4]
        others = [i for i in range(where.rows) if i != 4]
        for name in ("log_sum", "target", "entropy"):
            torch.testing.assert_close(getattr(stats, name)[others], getattr(expected, name)[others])

    @pytest.mark.parametrize("store", [False, True])
    def test_the_first_of_equal_maxima_is_the_prediction(self, where, backend, base, store):
        """Ties within a tile and across tiles, in exact arithmetic."""
        chunk = where.chunk()
        chunk.x.copy_(chunk.x.sign())
        chunk.weight.copy_(chunk.weight.sign())
        last = where.vocab - 1
        chunk.weight[[5, 6, 40, last]] = 2.0
        chunk.x[:8] = 1.0
        chunk.targets[:8] = torch.tensor([4, 5, 6, 40, last, 5, 5, 0])
        stats = check_forward(backend, base, chunk, base.Wants(is_top1=True), where.exps() if store else None)
        assert stats.is_top1[:8].tolist() == [False, True, False, False, False, True, True, False]
        chunk.weight[[5, 6]] = 0.0
        stats = check_forward(backend, base, chunk, base.Wants(is_top1=True), where.exps() if store else None)
        assert stats.is_top1[:8].tolist() == [False, False, False, True, False, False, False, False]

    @pytest.mark.parametrize("store", [False, True])
    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    def test_a_row_does_not_depend_on_the_others(self, where, backend, base, dtype, store):
        """Under a softcap too: equal products of a row are equal logits in whichever tiles they stand, and stay so
        when another row has far larger ones."""
        last = where.vocab - 1
        chunk = where.chunk(dtype, softcap=30.0)
        for operand in (chunk.x, chunk.weight):
            operand.zero_()
        chunk.x[:, 0] = torch.linspace(4, 20, where.rows)
        chunk.weight[[5, last], 0] = 1.0
        chunk.weight[7, 1] = 28.0
        found = []
        for target, large in ((5, 1.0), (last, 1.0), (5, 0.0)):
            chunk.x[0, 1] = large
            chunk.targets.fill_(target)
            stats = run_forward(backend, base, chunk, base.Wants(*ALL), where.exps(dtype) if store else None)
            assert (stats.is_top1[1:] == (target == 5)).all()
            found.append(stats)
        for name in ("max", "log_sum", "target", "entropy", "sum_log_probs", "log_sum_sq"):
            assert torch.equal(getattr(found[0], name)[1:], getattr(found[2], name)[1:]), name

    @pytest.mark.parametrize("offset", [1e4, -1e4])
    @pytest.mark.parametrize("store", [False, True])
    def test_a_common_offset_costs_no_digits(self, where, backend, base, store, offset):
        chunk = where.chunk(bias=True)
        chunk.bias.zero_()
        chunk.weight.mul_(8).round_().div_(8)
        chunk.x.mul_(8).round_().div_(8)
        exps = where.exps() if store else None
        plain = run_forward(backend, base, chunk, base.Wants(entropy=True, log_sum_sq=True), exps)
        chunk.bias.fill_(offset)
        moved = run_forward(backend, base, chunk, base.Wants(entropy=True, log_sum_sq=True), exps)
        for name in ("log_sum", "target", "entropy", "log_sum_sq"):
            torch.testing.assert_close(getattr(moved, name), getattr(plain, name), rtol=2e-4, atol=2e-3)

    @pytest.mark.parametrize("softcap", [1e4, 1e8, 1e30])
    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    def test_a_softcap_far_above_the_logits_is_none(self, where, backend, base, dtype, softcap):
        chunk = where.chunk(dtype, softcap=softcap)
        check_forward(backend, base, chunk, base.Wants(entropy=True))

    @pytest.mark.parametrize("softcap", [0.5, 30.0])
    @pytest.mark.parametrize("dtype, relative", [(FP32, 2e-6), (FP16, None)])
    def test_tanh(self, where, backend, base, dtype, relative, softcap):
        """z alone, from a vocabulary of one class: to a few ulp for fp32, absolutely to 1e-6 for half precision."""
        ratio = torch.cat([torch.logspace(-6, 2, 60), torch.linspace(0.14, 0.16, 20), torch.tensor([0.0, 1e3])])
        x = (torch.cat([ratio, -ratio]) * softcap).to(where.device, dtype)[:, None]
        weight = torch.ones(1, 1, dtype=dtype, device=where.device)
        targets = torch.zeros(x.shape[0], dtype=torch.int64, device=where.device)
        chunk = reference.Chunk(x, targets, weight, softcap=softcap, compute_dtype=dtype)
        stats = run_forward(backend, base, chunk, base.Wants())
        expected = chunk.z[:, 0]
        close = {"rtol": relative, "atol": 0} if relative else {"rtol": 0, "atol": 1e-6 * softcap}
        torch.testing.assert_close(stats.max.to(FP64), expected, **close)


class TestOperands:
    """Which way the operands are read."""

    def test_aligned_operands_are_read_in_bulk(self, where, backend, base, launches):
        dtype = FP32 if not where.on_gpu else BF16
        check_forward(backend, base, where.chunk(dtype), base.Wants(), where.exps(dtype), exps_tolerance=STORED)
        tuning = submodule(backend, "tuning")
        assert launches[0].tiles.loads == tuning.best_loads(torch.device(where.device))

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned", "expanded", "odd width"])
    def test_other_layouts_through_pointers(self, where, backend, base, launches, layout, dtype):
        chunk = where.chunk(dtype)
        weight = chunk.weight
        if layout == "transposed":
            weight = weight.t().contiguous().t()
        elif layout == "sliced":
            weight = torch.stack([weight, -weight], 2).flatten(1)[:, ::2]
        elif layout == "misaligned":
            weight = torch.nn.functional.pad(weight, (1, 0)).flatten()[1:].as_strided(
                weight.shape, (weight.shape[1] + 1, 1)
            )  # fmt: skip
        elif layout == "expanded":
            weight = weight[:1].expand(where.vocab, -1)
        else:
            weight, chunk = weight[:, :-1].contiguous(), chunk._replace(x=chunk.x[:, :-1].contiguous())
        chunk = chunk._replace(weight=weight)
        wants = base.Wants(*ALL[:3], layout != "expanded")
        for exps in (None, where.exps(dtype)):
            check_forward(backend, base, chunk, wants, exps, exps_tolerance=STORED if dtype == BF16 else None)
        assert all(launch.tiles.loads == "pointers" for launch in launches)

    @pytest.mark.parametrize("softcap", [0.7, 3.0, 60.0])
    @pytest.mark.parametrize("dtype", HALF)
    def test_logits_on_either_side_of_the_softcap(self, where, backend, base, dtype, softcap):
        """Tiles with all, some and none of their logits beyond it."""
        chunk = where.chunk(dtype, softcap=softcap)
        chunk.x[: where.rows // 2] *= 0.1
        for exps in (None, where.exps(dtype)):
            check_forward(backend, base, chunk, base.Wants(*ALL), exps, exps_tolerance=STORED)

    @pytest.mark.parametrize("dtype", HALF)
    def test_a_weight_of_another_dtype_is_rounded_on_the_way_in(self, where, backend, base, dtype):
        chunk = where.chunk(dtype, weight_dtype=FP32, bias=True)
        assert not torch.equal(chunk.weight, chunk.weight.to(dtype).to(FP32))
        for exps in (None, where.exps(dtype)):
            check_forward(backend, base, chunk, base.Wants(*ALL), exps, exps_tolerance=STORED)

    @pytest.mark.parametrize("aligned", [False, True])
    def test_describable(self, backend, aligned):
        x = torch.zeros(4, 16, dtype=BF16)
        assert backend._describable(x)
        assert not backend._describable(x.t())
        assert not backend._describable(x[:, 1:])  # misaligned
        assert not backend._describable(x[:, ::2])
        assert not backend._describable(x[:1].expand(4, 16))
        assert not backend._describable(torch.zeros(4, 12, dtype=BF16))
        assert backend._describable(torch.zeros(4, 12))
        assert backend._describable(x[:, 8:])


class TestRepair:
    """Rows whose exponentials, taken relative to the reference, overflow."""

    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    @pytest.mark.parametrize("above", [55.0, 70.0, 100.0, 300.0])
    def test_statistics_and_exponentials(self, where, backend, base, dtype, above):
        chunk = overflowing(where, dtype, (0, 5, where.rows - 1), above)
        close = {"exps_tolerance": STORED} if dtype != FP32 else {}
        wants = base.Wants(entropy=True, sum_log_probs=True, is_top1=True)
        check_forward(backend, base, chunk, wants, where.exps(dtype), **close)

    @pytest.mark.parametrize("above", [25.0, 40.0, 50.0, 70.0])
    def test_squares_overflow_earlier(self, where, backend, base, above):
        chunk = overflowing(where, FP32, (1, 2), above)
        check_forward(backend, base, chunk, base.Wants(log_sum_sq=True), where.exps())

    @pytest.mark.parametrize("softcap", [80.0, 200.0])
    def test_with_a_softcap(self, where, backend, base, softcap):
        chunk = overflowing(where, FP32, (3, 4), 150.0)._replace(softcap=softcap)
        check_forward(backend, base, chunk, base.Wants(entropy=True), where.exps())

    def test_all_rows(self, where, backend, base):
        chunk = overflowing(where, FP32, range(where.rows))
        check_forward(backend, base, chunk, base.Wants(*ALL), where.exps())

    def test_rows_that_are_not_marked_keep_their_reference(self, where, backend, base):
        expected = run_forward(backend, base, overflowing(where, FP32, ()), base.Wants(), where.exps())
        stats = run_forward(backend, base, overflowing(where, FP32, (0,)), base.Wants(), where.exps())
        assert torch.equal(stats.scale[1:], expected.scale[1:])
        assert torch.equal(stats.log_sum[1:], expected.log_sum[1:])

    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_gradients(self, where, forced, dtype, reduction):
        chunk = overflowing(where, dtype, (0, 5, 6))
        tensors = [chunk.x.requires_grad_(), chunk.weight.requires_grad_()]
        loss = forced.fused_linear_cross_entropy(*tensors, chunk.targets, reduction=reduction)
        upstream = torch.linspace(0.5, 1.5, loss.numel(), device=where.device).reshape(loss.shape)
        expected = oracle.reference(*tensors, chunk.targets, reduction=reduction, upstream=upstream)
        torch.testing.assert_close(loss.to(FP64).cpu(), expected.loss, rtol=1e-5, atol=1e-5)
        for g, e in zip(torch.autograd.grad(loss, tensors, upstream), expected.grads):
            assert relative_error(g, e) < (1e-5 if dtype == FP32 else 3.5e-3)


class TestDlogits:
    def run(self, where, backend, base, coefficients_type, chunk, terms):
        generator = torch.Generator().manual_seed(3)
        rows = chunk.x.shape[0]
        c = coefficients_type(
            *(torch.randn(rows, generator=generator).to(where.device) if name in terms else None for name in "abrd")
        )
        stats = run_forward(backend, base, chunk, base.Wants(entropy=True))
        out = where.exps(chunk.compute_dtype)
        out.fill_(torch.nan)
        backend.dlogits(chunk.x, chunk.targets, chunk.head(base), stats, c, out)
        return out, reference.dlogits(chunk, *c)

    @pytest.mark.parametrize("terms", ["ar", "abrd"])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    def test_every_term(self, where, backend, base, coefficients_type, dtype, options, terms):
        out, expected = self.run(where, backend, base, coefficients_type, where.chunk(dtype, **options), terms)
        assert out.isfinite().all()
        assert relative_error(out, expected) < (3e-6 if dtype == FP32 else 3e-3)

    @pytest.mark.parametrize("softcap", [1e-3, 0.1, 0.5, 2.0])
    def test_a_softcap_below_the_logits(self, where, backend, base, coefficients_type, softcap):
        """At the target too, chi is that of its own logit: 1 - tanh^2 takes no error of log_sum's size.

        The products are exact in fp32, in whatever order they are added: what rounding does to them is divided by the
        softcap.
        """
        chunk = where.chunk(softcap=softcap)
        for operand in (chunk.x, chunk.weight):
            operand.mul_(64).round_().div_(64)
        out, expected = self.run(where, backend, base, coefficients_type, chunk, "ar")
        at = chunk.targets.clamp(min=0)[:, None]
        assert (out.gather(1, at) - expected.gather(1, at)).abs().max() < 2e-6

    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    def test_a_masked_class_under_a_softcap(self, where, backend, base, coefficients_type, dtype):
        """Its logit is -softcap, where chi is 0."""
        chunk = where.chunk(dtype, bias=True, softcap=30.0)
        chunk.bias[3] = -torch.inf
        out, expected = self.run(where, backend, base, coefficients_type, chunk, "ar")
        assert (out[:, 3] == 0).all() and (expected[:, 3] == 0).all()

    @pytest.mark.parametrize("terms", ["abr", "ard"])
    def test_each_term_alone(self, where, backend, base, coefficients_type, terms):
        out, expected = self.run(where, backend, base, coefficients_type, where.chunk(class_weight=True), terms)
        assert relative_error(out, expected) < 3e-6

    def test_through_pointers(self, where, backend, base, coefficients_type, launches):
        chunk = where.chunk(BF16, weight_dtype=FP32, bias=True, softcap=6.0)
        chunk = chunk._replace(weight=chunk.weight.t().contiguous().t())
        out, expected = self.run(where, backend, base, coefficients_type, chunk, "abrd")
        assert relative_error(out, expected) < 3e-3
        assert launches[-1].tiles.loads == "pointers"

    def test_minus_infinity(self, where, backend, base, coefficients_type):
        chunk = where.chunk(bias=True)
        chunk.bias[:70] = -torch.inf
        chunk.targets.clamp_(min=70)
        out, expected = self.run(where, backend, base, coefficients_type, chunk, "abr")
        assert relative_error(out, expected) < 3e-6
        assert (out[:, :70] == 0).all()

    def test_a_slab_of_the_classes(self, where, backend, base, coefficients_type):
        """Targets relative to the slab; those of another slab have no column in it."""
        chunk = where.chunk(bias=True, class_weight=True, softcap=5.0)
        expected = reference.dlogits(chunk, *self.ones(where, coefficients_type))
        stats = run_forward(backend, base, chunk, base.Wants(entropy=True))
        for start, stop in ((0, 64), (64, 97), (97, where.vocab)):
            out = where.exps(vocab=stop - start)
            head = chunk.head(base).columns(start, stop)
            backend.dlogits(chunk.x, chunk.targets - start, head, stats, self.ones(where, coefficients_type), out)
            assert relative_error(out, expected[:, start:stop]) < 3e-6

    def ones(self, where, coefficients_type):
        values = torch.linspace(0.5, 1.5, where.rows, device=where.device)
        return coefficients_type(values, -values, values.flip(0), 0.1 * values)

    def test_a_confident_target_keeps_its_digits(self, where, backend, base, coefficients_type):
        device = where.device
        weight = torch.tensor([[13.8155105579642740], [0.0]], device=device)
        targets = torch.zeros(1, dtype=torch.int64, device=device)
        chunk = reference.Chunk(torch.ones(1, 1, device=device), targets, weight)
        stats = run_forward(backend, base, chunk, base.Wants())
        out = where.exps(rows=1, vocab=2)
        c = coefficients_type(torch.ones(1, device=device), None, torch.zeros(1, device=device), None)
        backend.dlogits(chunk.x, chunk.targets, chunk.head(base), stats, c, out)
        assert out[0, 0].item() == pytest.approx(torch.expm1(stats.log_prob.double()).item(), rel=1e-5)
        assert out[0, 1].item() == pytest.approx(1e-6, rel=1e-4)

    @pytest.mark.parametrize("finished", [False, True])
    @pytest.mark.parametrize("r", [1e-3, 1e-7, -1e-12])
    def test_a_certain_target_has_r_left(self, where, backend, base, coefficients_type, r, finished):
        """With the digits of r, not of a = 1 + r; by either kernel."""
        a, rest = torch.tensor([[1 + r], [r]], device=where.device)
        chunk = reference.Chunk(a[:, None], torch.zeros_like(a, dtype=torch.int64), 60 * torch.eye(2, 1).to(a))
        out = where.exps(rows=1, vocab=2)
        stats = run_forward(backend, base, chunk, base.Wants(), out)
        if finished:
            out = out * backend.finish(out, chunk.x, chunk.targets, chunk.head(base), stats, a, rest)[:, None]
        else:
            c = coefficients_type(a, None, rest, None)
            backend.dlogits(chunk.x, chunk.targets, chunk.head(base), stats, c, out)
        assert out[0].tolist() == [pytest.approx(r, rel=1e-6), pytest.approx(0, abs=1e-24)]


@pytest.mark.parametrize("rows", [1, 6, 8, 131])
def test_statistics_begin_at_whole_16_bytes(base, device, rows):
    """Triton compiles a kernel for each combination of aligned pointers; the number of rows is not to make one."""
    stats = base.Stats.empty(rows, base.Wants(entropy=True), FP32, device)
    for values in (stats.max, stats.log_sum, stats.target, stats.scale, stats.entropy):
        assert values.shape == (rows,) and values.is_contiguous()
        assert values.data_ptr() % 16 == 0


class TestSelect:
    """Which rows count: their positions in order, their targets, their number."""

    @pytest.mark.parametrize("ignore_index", [-100, 3, 2**40])
    @pytest.mark.parametrize("tokens", [1, 31, 4096, 5000])
    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("early", [False, True])
    def test_against_nonzero(self, where, backend, tokens, ignore_index, share, early):
        vocab = 50
        generator = torch.Generator().manual_seed(tokens)
        targets = torch.randint(0, vocab, (tokens,), generator=generator)
        targets[targets == ignore_index] = 4
        targets[torch.rand(tokens, generator=generator) >= share] = ignore_index
        expected = (targets != ignore_index).nonzero().squeeze(1)
        index, classes, count = backend.select(targets.to(where.device), ignore_index, vocab, early)
        kept = count()
        assert kept == len(expected)
        assert torch.equal(index[:kept].cpu(), expected)
        assert torch.equal(classes[:kept].cpu(), targets[expected])
        assert (index[kept:] == 0).all() and (classes[kept:] == -1).all()

    def test_targets_without_a_class(self, where, backend):
        targets = torch.tensor([5, -1, 50, 49, -(2**60), 2**60, 0], device=where.device)
        _, classes, count = backend.select(targets, -100, 50)
        assert count() == 7
        assert classes.tolist() == [5, -1, -1, 49, -1, -1, 0]


class TestFinish:
    """E with the target's element put in, the factor that makes dlogits of it, and the scaled hidden states."""

    @pytest.mark.parametrize("softcap", [None, 4.0])
    @pytest.mark.parametrize("logit_scale", [1.0, -0.3])
    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    @pytest.mark.parametrize("r_is", ["nothing", "all", "more than a"])
    def test_gives_dlogits(self, where, backend, base, dtype, softcap, logit_scale, r_is):
        chunk = where.chunk(dtype, softcap=softcap, logit_scale=logit_scale)
        exps = where.exps(dtype)
        stats = run_forward(backend, base, chunk, base.Wants(), exps)
        some = torch.rand(where.rows, device=where.device) + 0.5
        none = torch.zeros_like(some)
        a, r = {"nothing": (some, none), "all": (none, -some), "more than a": (-2 * some, -3 * some)}[r_is]
        scaled = torch.full_like(chunk.x, torch.nan, dtype=exps.dtype)
        factor = backend.finish(exps, chunk.x, chunk.targets, chunk.head(base), stats, a, r, scaled)
        z = chunk.z
        onehot = torch.nn.functional.one_hot(chunk.targets, where.vocab)
        expected = a.double()[:, None] * torch.softmax(z, 1) + (r.double() - a.double())[:, None] * onehot
        if softcap is not None:
            expected = expected * (1 - (z / softcap) ** 2)
        tolerance = 1e-5 if dtype == FP32 else 3e-3
        assert relative_error(factor.double()[:, None] * exps.double(), logit_scale * expected) < tolerance
        x_expected = factor.double()[:, None] * chunk.x.double()
        assert relative_error(scaled, x_expected) < tolerance


capped = None  # logits.py's, of the kernel under test


@triton.jit
def cap(source, out, softcap, SERIES: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, capped(tl.load(source + at), softcap, SERIES))


class TestSmallKernels:
    @pytest.mark.parametrize("softcap", [2**-7, 30.0, 3e4])
    @pytest.mark.parametrize("series", [False, True])
    def test_softcap(self, where, kernel, monkeypatch, softcap, series):
        """Absolute error, times the softcap, and with the series a relative one, from near 0 to far beyond."""
        monkeypatch.setattr(sys.modules[__name__], "capped", submodule(kernel, "backends.triton.logits").capped)
        ratio = torch.cat([torch.logspace(-9, 0.5, 2044), torch.tensor([0.0, 0.75, 20.0, torch.inf])])
        y = (softcap * torch.cat([ratio, -ratio])).to(where.device)
        out = torch.full_like(y, torch.nan)
        cap[(1,)](y, out, softcap, series, y.numel())
        expected = softcap * torch.tanh(y.to(FP64) / softcap)
        error = (out - expected).abs()
        assert error.max() < (2.5e-7 if series else 6e-7) * softcap
        if series:
            assert (error / expected.abs())[expected != 0].max() < 3e-7
        assert (out[[2047, 4095]].cpu() == torch.tensor([softcap, -softcap])).all()

    SHAPES = [(37, 19, 53), (16, 16, 16), (1, 1, 1), (5, 40, 3), (33, 70, 17)]

    @pytest.mark.parametrize("m, n, k", SHAPES)
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_matmul_of_any_strides(self, where, backend, m, n, k, dtype, accumulate):
        size, depth = (64, 32) if where.on_gpu else (16, 16)

        def new(rows, columns, kind):
            return torch.randn(rows, columns, device=where.device).to(kind)

        operands = [
            (new(m, k, dtype), new(k, n, dtype)),
            (new(k, m, dtype).t(), new(k, n, dtype)),
            (new(m, 2 * k, dtype)[:, ::2], new(n, k, dtype).t()),
        ]
        for a, b in operands:
            out = new(m, n + 3, FP32)[:, :n]
            if not accumulate:
                out.fill_(torch.nan)
            expected = a.to(FP64) @ b.to(FP64) + (out.to(FP64) if accumulate else 0)
            row_tiles, column_tiles = triton.cdiv(m, size), triton.cdiv(n, size)
            backend.bwd.matmul_kernel[(row_tiles * column_tiles,)](
                a, b, out, m, n, k, row_tiles, column_tiles,
                a.stride(0), a.stride(1), b.stride(0), b.stride(1), out.stride(0),
                ROWS=size, COLUMNS=size, DEPTH=depth, GROUP=2, ACCUMULATE=accumulate,
            )  # fmt: skip
            torch.testing.assert_close(out.to(FP64), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_gradient_gemms(self, where, backend, dtype, accumulate):
        rows, vocab, width = where.rows, where.vocab, where.width
        e = where.exps(dtype)
        e.copy_(torch.randn(rows, vocab))
        x = torch.randn(rows, width, device=where.device).to(dtype)
        weight = torch.randn(vocab, width, device=where.device).to(dtype)
        start = torch.nan if not accumulate else 1.5
        for out, expected, function in (
            (torch.full((rows, width), start), e.to(FP64) @ weight.to(FP64),
             lambda out: backend.grad_hidden(e, weight, dtype, out, accumulate)),
            (torch.full((vocab, width), start), e.to(FP64).T @ x.to(FP64),
             lambda out: backend.grad_weight(e, x, out, accumulate)),
        ):  # fmt: skip
            out = out.to(where.device)
            function(out)
            assert relative_error(out, expected + (start if accumulate else 0)) < 1e-6

    @pytest.mark.parametrize("rows", [1, 64, None])
    # The last three: more tiles than run at once, of two to five for a class, which add up the bias in turn.
    @pytest.mark.parametrize("width, vocab", [(8, None), (400, None), (512, 20011), (700, 20011), (1100, 20011)])
    def test_the_bias_from_the_same_blocks(self, where, backend, rows, width, vocab):
        """Every class is added to once, whatever the tiles of the weight; nothing beyond the last class is."""
        if width > 8 and not where.on_gpu:
            pytest.skip("takes the interpreter long, which knows no such tiles")
        rows, vocab = rows or where.rows, vocab or where.vocab
        torch.manual_seed(0)
        e = where.exps(BF16, rows, vocab)
        e.copy_(torch.randn(rows, vocab))
        x = torch.randn(rows, width, device=where.device).to(BF16)
        scale = torch.randn(rows, device=where.device)
        weight = torch.full((vocab, width), torch.nan, device=where.device)
        start = torch.randn(vocab + 40, device=where.device)
        out = start.clone()
        backend.grad_weight(e, x, weight, False, scale, out[:vocab])
        backend.grad_weight(e, x, weight, True, scale, out[:vocab])
        assert relative_error(weight, 2 * (e.to(FP64).T @ x.to(FP64))) < 1e-6
        sums = e.to(FP64).T @ scale.to(FP64)
        assert relative_error(out[:vocab], start[:vocab] + 2 * sums) < 1e-6
        assert torch.equal(out[vocab:], start[vocab:])

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_column_sums_add_to_what_is_there(self, where, backend, dtype):
        e = where.exps(dtype)
        e.copy_(torch.randn(where.rows, where.vocab))
        scale, out = (torch.randn(n, device=where.device) for n in (where.rows, where.vocab))
        expected = out.to(FP64) + e.to(FP64).T @ scale.to(FP64)
        backend.grad_bias(e, scale, out)
        assert relative_error(out, expected) < 1e-6
        backend.grad_bias(e[:0], scale[:0], out)
        assert relative_error(out, expected) < 1e-6

    def test_column_sums_of_a_slice_of_the_classes(self, where, backend):
        """out is a view: nothing beside it may be written."""
        e, out = where.exps(), torch.zeros(where.vocab, device=where.device)
        e.fill_(1.0)
        backend.grad_bias(e[:, 3:40], torch.ones(where.rows, device=where.device), out[3:40])
        assert (out[3:40] == where.rows).all()
        assert out.sum() == 37 * where.rows

    @pytest.mark.parametrize("dtype", [FP32, *HALF])
    @pytest.mark.parametrize("size", [0, 1, 1023, 1024, 3000])
    @pytest.mark.parametrize("factor", [0.3, 0.0, torch.nan])
    def test_scale_rounds_once(self, where, backend, dtype, size, factor):
        source, out = torch.randn(size, device=where.device), torch.empty(size, dtype=dtype, device=where.device)
        factor = torch.tensor(factor, device=where.device)
        backend.scale(source, factor, out)
        torch.testing.assert_close(out, (source * factor).to(dtype), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("source, out, in_place", [
        (FP32, FP32, True), (FP32, FP32, False), (FP32, BF16, False), (BF16, BF16, True), (FP16, BF16, False),
    ])  # fmt: skip
    @pytest.mark.parametrize("rows, width", [(0, 5), (1, 1), (7, 1024), (5, 1025), (3, 2600)])
    def test_scale_by_rows(self, where, backend, source, out, rows, width, in_place):
        x = torch.randn(rows, width, device=where.device).to(source)
        factor = torch.randn(rows, device=where.device)
        factor[1::2] = 1.0
        factor[2::4] = torch.nan
        expected = (x.float() * factor[:, None]).to(out)
        around = torch.full((rows + 2, width), 7.0, dtype=out, device=where.device)
        result = around[1:-1]
        if in_place:
            result.copy_(x)
        backend.scale(result if in_place else x, factor, result)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert (around[0] == 7.0).all() and (around[-1] == 7.0).all()

    @pytest.mark.parametrize("rows, columns, group", [(1, 1, 8), (5, 7, 2), (8, 3, 4), (3, 4, 8)])
    def test_tile_order_visits_every_tile_once(self, where, backend, rows, columns, group):
        seen = torch.zeros(rows, columns, dtype=torch.int32, device=where.device)
        _visit[(rows * columns,)](seen, rows, columns, ORDER=backend.fwd.tile_order, GROUP=group)
        assert (seen == 1).all()


@triton.jit
def _visit(seen, rows, columns, ORDER: triton.language.constexpr, GROUP: triton.language.constexpr):
    row, column = ORDER(triton.language.program_id(0), rows, columns, GROUP)
    triton.language.atomic_add(seen + row * columns + column, 1)
