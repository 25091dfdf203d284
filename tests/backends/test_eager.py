"""The torch backend's six functions against float64."""

import itertools

import pytest
import torch

from ..conftest import submodule
from ..oracle import relative_error
from . import reference
from .reference import BF16, FP16, FP32, FP64, check_forward, make_chunk, run_forward

ROWS, VOCAB, WIDTH = 23, 53, 11
ALL = (True, True, True, True)


@pytest.fixture(params=["whole", "panels and slabs"])
def eager(kernel, monkeypatch, request):
    """The backend, also with panels of 3 rows, slabs of 7 classes and GEMMs of 5."""
    module = submodule(kernel, "backends.eager")
    if request.param != "whole":
        monkeypatch.setattr(module, "_PANEL_BYTES", 3 * VOCAB * 4)
        monkeypatch.setattr(module, "UPCAST_BYTES", 7 * WIDTH * 4)
        monkeypatch.setattr(module, "_GEMM_BYTES", 5 * WIDTH * 4)
        monkeypatch.setattr(module, "_GEMM_MULTIPLE", 1)
    return module


def chunk_of(dtype=FP32, **options):
    """x is held in the accumulation dtype: this backend upcasts."""
    options.setdefault("x_dtype", FP64 if dtype == FP64 else FP32)
    return make_chunk(ROWS, VOCAB, WIDTH, dtype=dtype, **options)


def new_exps(dtype=FP32, vocab=VOCAB):
    return torch.empty(ROWS, vocab, dtype=FP64 if dtype == FP64 else FP32)


OPTIONS = [
    {},
    {"bias": True},
    {"logit_scale": 0.3},
    {"softcap": 4.0},
    {"bias": True, "logit_scale": -1.7, "softcap": 2.0, "class_weight": True},
]


class TestForward:
    @pytest.mark.parametrize("store", [False, True])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64])
    def test_statistics_and_exponentials(self, eager, base, dtype, options, store):
        exact = {"rtol": 1e-12, "atol": 1e-11} if dtype == FP64 else reference.EXACT
        exps = new_exps(dtype) if store else None
        check_forward(eager, base, chunk_of(dtype, **options), base.Wants(*ALL), exps, exact)

    @pytest.mark.parametrize("wants", list(itertools.product((False, True), repeat=4)))
    def test_only_what_is_asked_for(self, eager, base, wants):
        check_forward(eager, base, chunk_of(), base.Wants(*wants), new_exps())

    def test_weight_of_another_dtype_is_rounded_to_the_compute_dtype(self, eager, base):
        chunk = chunk_of(BF16, weight_dtype=FP32, bias=True)
        assert not torch.equal(chunk.weight, chunk.weight.bfloat16().float())
        check_forward(eager, base, chunk, base.Wants(*ALL), new_exps())

    @pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
    def test_weight_of_any_strides(self, eager, base, layout):
        chunk = chunk_of()
        weight = {
            "transposed": chunk.weight.t().contiguous().t(),
            "sliced": torch.stack([chunk.weight, -chunk.weight], 2).flatten(1)[:, ::2],
            "expanded": chunk.weight[:1].expand(VOCAB, WIDTH),
        }[layout]
        check_forward(eager, base, chunk._replace(weight=weight), base.Wants(*ALL[:3]), new_exps())

    @pytest.mark.parametrize("store", [False, True])
    def test_minus_infinity(self, eager, base, store):
        chunk = chunk_of(bias=True)
        chunk.bias[:30] = -torch.inf
        chunk.bias[50:] = -torch.inf
        chunk.targets.clamp_(30, 49)
        wants = base.Wants(entropy=True, log_sum_sq=True, is_top1=True)
        check_forward(eager, base, chunk, wants, new_exps() if store else None)

    def test_a_class_of_weight_zero_adds_nothing_to_the_sum_also_at_minus_infinity(self, eager, base):
        chunk = chunk_of(bias=True, class_weight=True)
        chunk.bias[5:9] = -torch.inf
        chunk.class_weight[5:9] = 0.0
        chunk.targets.clamp_(min=9)
        stats = run_forward(eager, base, chunk, base.Wants(sum_log_probs=True))
        expected = reference.statistics(chunk.z, chunk.targets, chunk.class_weight)["sum_log_probs"]
        torch.testing.assert_close(stats.sum_log_probs.to(FP64), expected, rtol=1e-5, atol=1e-3)

    @pytest.mark.parametrize("offset", [1e4, -1e4])
    def test_a_common_offset_costs_no_digits(self, eager, base, offset):
        """Of the differences; the logits themselves have the digits that fp32 has at 1e4."""
        chunk = chunk_of(bias=True)
        chunk.bias.zero_()
        chunk.weight.mul_(8).round_().div_(8)
        chunk.x.mul_(8).round_().div_(8)
        plain = run_forward(eager, base, chunk, base.Wants(entropy=True, log_sum_sq=True))
        chunk.bias.fill_(offset)
        moved = run_forward(eager, base, chunk, base.Wants(entropy=True, log_sum_sq=True))
        for name in ("log_sum", "target", "entropy", "log_sum_sq"):
            torch.testing.assert_close(getattr(moved, name), getattr(plain, name), rtol=2e-4, atol=2e-3)
        torch.testing.assert_close(moved.max - offset, plain.max, rtol=0, atol=2e-3)

    @pytest.mark.parametrize("dtype, digits", [(FP32, 1e-5), (FP64, 1e-13)])
    @pytest.mark.parametrize("store", [False, True])
    @pytest.mark.parametrize("target", ["largest", "another"])
    def test_confident_rows_keep_their_digits(self, eager, base, dtype, digits, store, target):
        """nll, entropy and sum p^2 of rows whose largest p is 0.4 to 1 - 1e-11, each to its own digits."""
        gap = torch.linspace(3.0, 28.0, ROWS, dtype=dtype)
        weight = torch.linspace(-1.0, 0.0, VOCAB, dtype=dtype)[:, None].expand(-1, 2).contiguous()
        weight[20] = 1.0
        weight[:, 0] = 0.0
        weight[20, 0] = 1.0
        x = torch.stack([gap, torch.full_like(gap, 0.5)], 1)
        y = 20 if target == "largest" else 3
        chunk = reference.Chunk(x, torch.full((ROWS,), y), weight, compute_dtype=dtype)
        wants = base.Wants(entropy=True, log_sum_sq=True)
        stats = run_forward(eager, base, chunk, wants, new_exps(dtype) if store else None)
        # in float64 log_softmax itself has lost these digits
        others = torch.exp(chunk.z - chunk.z[:, 20:21])
        others[:, 20] = 0.0
        log_sum = torch.log1p(others.sum(1))
        assert log_sum.max() > 0.4 and log_sum.min() < 2e-11
        distance = chunk.z[:, 20:21] - chunk.z
        expected = {
            "log_sum": log_sum,
            "log_prob": -distance[:, y] - log_sum,
            "entropy": log_sum + (others * distance).sum(1) * torch.exp(-log_sum),
            "log_sum_sq": torch.log1p(others.square().sum(1)) - 2 * log_sum,
        }
        for name, value in expected.items():
            torch.testing.assert_close(
                getattr(stats, name).to(FP64), value, rtol=digits, atol=0, msg=reference.message(name)
            )

    def test_a_row_without_a_class_is_nan_and_no_other(self, eager, base):
        chunk = chunk_of()
        expected = run_forward(eager, base, chunk, base.Wants(*ALL), new_exps())
        poisoned = chunk._replace(targets=chunk.targets.clone())
        poisoned.targets[[0, 7]] = -1
        stats = run_forward(eager, base, poisoned, base.Wants(*ALL), new_exps())
        others = [i for i in range(ROWS) if i not in (0, 7)]
        for name in ("log_sum", "scale", "entropy", "sum_log_probs", "log_sum_sq"):
            value = getattr(stats, name)
            assert value[[0, 7]].isnan().all(), name
            assert torch.equal(value[others], getattr(expected, name)[others])
        assert stats.log_prob[[0, 7]].isnan().all() and stats.lse[[0, 7]].isnan().all()
        assert not stats.is_top1[[0, 7]].any()
        assert torch.equal(stats.is_top1[others], expected.is_top1[others])

    def test_nan_stays_in_its_row(self, eager, base):
        chunk = chunk_of()
        chunk.x[4, 2] = torch.nan
        stats = run_forward(eager, base, chunk, base.Wants(*ALL), new_exps())
        assert stats.log_prob.isnan().tolist() == [i == 4 for i in range(ROWS)]
        assert not stats.is_top1[4]

    @pytest.mark.parametrize("store", [False, True])
    def test_the_first_of_equal_maxima_is_the_prediction(self, eager, base, store):
        chunk = chunk_of()
        chunk.x.copy_(chunk.x.sign())
        chunk.weight.copy_(chunk.weight.sign())
        chunk.weight[[5, 6, 20, 52]] = 2 * torch.ones(WIDTH)
        chunk.x[:8] = 1.0
        chunk.targets[:8] = torch.tensor([4, 5, 6, 20, 52, 5, 5, 0])
        stats = check_forward(eager, base, chunk, base.Wants(is_top1=True), new_exps() if store else None)
        assert stats.is_top1[:8].tolist() == [False, True, False, False, False, True, True, False]

    def test_one_row_and_one_class(self, eager, base):
        chunk = make_chunk(1, 1, 3)
        stats = check_forward(eager, base, chunk, base.Wants(*ALL), torch.empty(1, 1))
        assert stats.log_prob.item() == 0 and stats.is_top1.item()


class TestDlogits:
    def run(self, eager, base, coefficients_type, chunk, terms):
        acc = base.accumulation_dtype(chunk.compute_dtype)
        generator = torch.Generator().manual_seed(3)
        c = coefficients_type(
            *(torch.randn(ROWS, generator=generator).to(acc) if name in terms else None for name in "abrd")
        )
        stats = run_forward(eager, base, chunk, base.Wants(entropy=True))
        out = torch.empty(ROWS, VOCAB, dtype=acc)
        eager.dlogits(chunk.x, chunk.targets, chunk.head(base), stats, c, out)
        return out, reference.dlogits(chunk, *c)

    @pytest.mark.parametrize("terms", ["ar", "abr", "ard", "abrd"])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
    def test_every_term(self, eager, base, coefficients_type, dtype, options, terms):
        out, expected = self.run(eager, base, coefficients_type, chunk_of(dtype, **options), terms)
        assert relative_error(out, expected) < (1e-12 if dtype == FP64 else 3e-6)

    def test_minus_infinity(self, eager, base, coefficients_type):
        chunk = chunk_of(bias=True)
        chunk.bias[:30] = -torch.inf
        chunk.targets.clamp_(min=30)
        out, expected = self.run(eager, base, coefficients_type, chunk, "abr")
        assert relative_error(out, expected) < 3e-6
        assert (out[:, :30] == 0).all()

    def test_a_slab_of_the_classes(self, eager, base, coefficients_type):
        """Targets relative to the slab; those of another slab have no column in it."""
        chunk = chunk_of(bias=True, class_weight=True, softcap=5.0)
        expected = self.run(eager, base, coefficients_type, chunk, "abrd")[0]
        stats = run_forward(eager, base, chunk, base.Wants(entropy=True))
        generator = torch.Generator().manual_seed(3)
        c = coefficients_type(*(torch.randn(ROWS, generator=generator) for _ in "abrd"))
        for start, stop in ((0, 20), (20, 21), (21, VOCAB)):
            out = torch.empty(ROWS, stop - start)
            head = chunk.head(base).columns(start, stop)
            eager.dlogits(chunk.x, chunk.targets - start, head, stats, c, out)
            torch.testing.assert_close(out, expected[:, start:stop], rtol=1e-5, atol=1e-6)

    def test_a_confident_target_keeps_its_digits(self, eager, base, coefficients_type):
        """p_y - 1 for p_y = 1 - 1e-6, from the row's own log-probability."""
        chunk = reference.Chunk(
            torch.tensor([[1.0]]), torch.tensor([0]), torch.tensor([[13.8155105579642740], [0.0]])
        )
        stats = run_forward(eager, base, chunk, base.Wants())
        out = torch.empty(1, 2)
        c = coefficients_type(torch.ones(1), None, torch.zeros(1), None)
        eager.dlogits(chunk.x, chunk.targets, chunk.head(base), stats, c, out)
        assert out[0, 0].item() == pytest.approx(torch.expm1(stats.log_prob.double()).item(), rel=1e-6)
        assert out[0, 1].item() == pytest.approx(1e-6, rel=1e-5)


class TestGradients:
    @pytest.mark.parametrize("accumulate", [False, True])
    @pytest.mark.parametrize("dtype, weight_dtype", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP64, FP64)])
    def test_grad_hidden(self, eager, accumulate, dtype, weight_dtype):
        acc = FP64 if dtype == FP64 else FP32
        e = torch.randn(ROWS, VOCAB + 3, dtype=acc)[:, :VOCAB]
        weight = torch.randn(VOCAB, WIDTH).to(weight_dtype)
        out = torch.randn(ROWS, WIDTH, dtype=acc) if accumulate else torch.full((ROWS, WIDTH), torch.nan, dtype=acc)
        expected = e.to(FP64) @ weight.to(dtype).to(FP64) + (out.to(FP64) if accumulate else 0)
        eager.grad_hidden(e, weight, dtype, out, accumulate)
        assert relative_error(out, expected) < 1e-6

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_grad_weight(self, eager, accumulate):
        e, x = torch.randn(ROWS, VOCAB + 3)[:, :VOCAB], torch.randn(ROWS, WIDTH)
        out = torch.randn(VOCAB, WIDTH) if accumulate else torch.full((VOCAB, WIDTH), torch.nan)
        expected = e.to(FP64).T @ x.to(FP64) + (out.to(FP64) if accumulate else 0)
        eager.grad_weight(e, x, out, accumulate)
        assert relative_error(out, expected) < 1e-6

    def test_grad_bias_adds_to_what_is_there(self, eager):
        e, scale, out = torch.randn(ROWS, VOCAB + 3)[:, :VOCAB], torch.randn(ROWS), torch.randn(VOCAB)
        expected = out.to(FP64) + e.to(FP64).T @ scale.to(FP64)
        eager.grad_bias(e, scale, out)
        assert relative_error(out, expected) < 1e-6

    @pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
    def test_scale_rounds_once(self, eager, dtype):
        source, out = torch.randn(5, 7), torch.empty(5, 7, dtype=dtype)
        eager.scale(source, torch.tensor(0.3), out)
        assert torch.equal(out, (source * torch.tensor(0.3)).to(dtype))

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("rows, width", [(0, 3), (3, 0), (1, 1), (1200, 500)])
    def test_scale_by_rows(self, eager, dtype, rows, width):
        source, factor, out = torch.randn(rows, width), torch.randn(rows), torch.empty(rows, width, dtype=dtype)
        eager.scale(source, factor, out)
        assert torch.equal(out, (source * factor[:, None]).to(dtype))
        if dtype == source.dtype:
            eager.scale(source, factor, source)
            assert torch.equal(out, source)
