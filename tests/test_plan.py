"""plan.py: which way a call runs, in G and bytes, from its sizes alone."""

import itertools
import re
import types

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from . import oracle
from .conftest import submodule

MIB = 1 << 20
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
QWEN = (16384, 151936, 1024)  # N, V, H
ALL_NEEDS = list(itertools.product((False, True), repeat=3))


@pytest.fixture
def plan(kernel):
    return kernel.plan


@pytest.fixture
def module(kernel):
    return submodule(kernel, "plan")


class TestWhichWay:
    def test_scalar_losses_make_their_gradients_in_the_forward(self, plan):
        p = plan(*QWEN)
        assert (p.gradients, p.flop_g, p.kept_rows, p.slab) == ("forward", 3.0, 0, QWEN[1])

    def test_scalar_losses_of_few_tokens_keep_their_exponentials(self, plan):
        """Their dW is then one GEMM, without an accumulator to scale: for accelerators, dtypes and sizes that gain."""
        pytest.importorskip("triton")
        n, v, h = 2048, *QWEN[1:]
        p = plan(n, v, h)
        assert (p.gradients, p.flop_g, p.kept_rows, p.slab) == ("backward", 3.0, n, v)
        ways = {
            "autocast": plan(n, v, h, weight_dtype=FP32).gradients,
            "without dX": plan(n, v, h, needs=(False, True, False)).gradients,
            "enough workspace": plan(n, v, h, workspace=2048 * MIB).gradients,
            "more tokens": plan(16384, v, h).gradients,
            "more tokens, larger accumulator": plan(8192, v, 4096).gradients,
            "little workspace": plan(n, v, h, workspace=1024 * MIB).gradients,
            "frozen head": plan(n, v, h, needs=(True, False, False)).gradients,
            "fp16": plan(n, v, h, FP16).gradients,
            "small weight": plan(n, 4096, 512).gradients,
            "CPU": plan(512, 4096, 4096, FP32, device_type="cpu").gradients,
            "no token": plan(0, v, h).gradients,
        }
        assert ways == {
            "autocast": "backward", "without dX": "backward", "enough workspace": "backward",
            "more tokens": "forward", "more tokens, larger accumulator": "backward", "little workspace": "forward",
            "frozen head": "forward", "fp16": "forward", "small weight": "forward", "CPU": "forward",
            "no token": "forward",
        }  # fmt: skip

    def test_few_tokens_never_pay_for_more_workspace(self, module, plan):
        """Where a few rows more would fit than there are tokens."""
        pytest.importorskip("triton")
        _, v, h = QWEN
        call = module.Call(v, h, BF16, BF16, BF16, "cuda", module.Needs(True, True, False), True, 1 << 30)
        for n in (1, 16, 20, 31, 32, 40):
            least = call.accumulator_bytes(n)
            costs = [plan(n, v, h, workspace=least + rows * call.row).flop_g for rows in range(1, 80)]
            assert costs == sorted(costs, reverse=True) and costs[-1] == 3.0

    @pytest.mark.parametrize("n, h", [(128, 1024), (2048, 1024), (4096, 1024), (2048, 4096), (8192, 4096)])
    def test_keeping_them_takes_no_more_than_the_accumulator_would(self, kernel, module, n, h):
        pytest.importorskip("triton")
        call = module.Call(151936, h, BF16, BF16, BF16, "cuda", module.Needs(True, True, False), True, None)
        assert not call.gradients_in_forward(n)
        kept, scaled = (module.decide(call, n, in_forward, constant=False) for in_forward in (False, True))
        assert kept.kept_rows == n
        assert kept == kernel.plan(n, 151936, h)
        assert kept.workspace_bytes <= scaled.workspace_bytes
        smoothed = kernel.plan(n, 151936, h, label_smoothing=True)  # the constant term needs the accumulator anyway
        assert smoothed == scaled and smoothed.gradients == "forward"
        per_token = (kernel.plan(n, 151936, h, upstream="token", label_smoothing=s) for s in (False, True))
        assert [p.workspace_bytes for p in per_token] == [kept.workspace_bytes, kept.workspace_bytes + call.acc_weight]

    @pytest.mark.parametrize("needs", ALL_NEEDS, ids=str)
    @pytest.mark.parametrize("upstream", ["scalar", "token"])
    def test_a_gradient_that_is_not_wanted_costs_nothing(self, plan, needs, upstream):
        p = plan(256, 32000, 512, FP32, device_type="cpu", needs=needs, upstream=upstream)
        gradients = 0 if not any(needs) else needs[0] + needs[1]
        assert p.flop_g == 1.0 + gradients
        assert p.gradients == ("none" if not any(needs) else {"scalar": "forward", "token": "backward"}[upstream])

    def test_per_token_losses_keep_what_fits_and_recompute_the_rest(self, plan):
        small = plan(1024, *QWEN[1:], upstream="token")
        assert (small.gradients, small.kept_rows, small.flop_g) == ("backward", 1024, 3.0)
        batch = plan(*QWEN, upstream="token")
        assert (batch.kept_rows, batch.flop_g) == (QWEN[0], 3.0), "a default workspace holds E of a usual batch"
        n = 4 * QWEN[0]
        large = plan(n, *QWEN[1:], upstream="token")
        assert large.gradients == "backward" and 0 < large.kept_rows < n
        assert large.flop_g == pytest.approx(4 - large.kept_rows / n)

    @pytest.mark.parametrize("upstream", ["scalar", "token"])
    def test_gradients_that_are_no_row_factor_recompute_everything(self, plan, upstream):
        p = plan(*QWEN, upstream=upstream, row_scaled=False)
        assert (p.gradients, p.kept_rows, p.flop_g) == ("backward", 0, 4.0)

    def test_forward_only_needs_one_gemm_whatever_the_options(self, plan):
        for upstream, row_scaled in itertools.product(("scalar", "token"), (True, False)):
            p = plan(*QWEN, needs=(False, False, False), upstream=upstream, row_scaled=row_scaled)
            assert (p.gradients, p.flop_g, p.kept_rows) == ("none", 1.0, 0)

    def test_a_vocabulary_of_millions_keeps_no_row_rather_than_fewer_than_none(self, plan):
        """A row's exponentials are larger than a sixteenth of the default workspace."""
        p = plan(1000, 2_000_000, 16, FP32, device_type="cpu", upstream="token")
        assert (p.kept_rows, p.flop_g) == (0, 4.0)

    def test_a_small_workspace_goes_by_slabs_of_classes(self, plan):
        _, v, h = QWEN
        for upstream in ("scalar", "token"):
            p = plan(*QWEN, upstream=upstream, workspace=256 * MIB)
            assert (p.gradients, p.flop_g) == ("backward", 4.0)
            assert 0 < p.slab < v
            assert p.workspace_bytes <= 256 * MIB < v * h * 4

    def test_ways_in_the_order_of_the_workspace(self, plan):
        for upstream, last in (("scalar", "forward"), ("token", "backward")):
            ways = [plan(*QWEN, upstream=upstream, workspace=w * MIB) for w in (256, 640, 1280)]
            assert [(p.gradients, p.slab < QWEN[1]) for p in ways] == [
                ("backward", True), ("backward", True), (last, False),
            ]  # fmt: skip
            assert [p.flop_g for p in ways] == sorted((p.flop_g for p in ways), reverse=True)

    @pytest.mark.parametrize("upstream", ["scalar", "token"])
    @pytest.mark.parametrize("n, v, h", [QWEN, (16384, 262144, 640), (16384, 128256, 2048), (8192, 151936, 4096)])
    def test_an_accelerator_has_no_small_chunks_beside_the_accumulator(self, plan, n, v, h, upstream):
        """With few rows a chunk, reading and writing the accumulator would take most of the time: on an H200 a call
        with 16 rows took 30 times as long as one with a few MiB less, which goes by slabs."""
        slabs = 0
        for mib in range(256, 4096, 8):
            p = plan(n, v, h, upstream=upstream, workspace=mib * MIB)
            slabs += p.slab < v
            assert p.slab < v or p.chunk_rows >= 640
        assert 0 < slabs < 400

    @pytest.mark.parametrize("n, v, h, dtype", [
        (600, 151936, 1024, torch.float16), (1200, 151936, 1024, torch.float16), (1200, 8000, 1000, BF16),
    ])  # fmt: skip
    def test_a_workspace_for_all_exponentials_keeps_them(self, module, plan, n, v, h, dtype):
        """Then no chunk is recomputed, for which there would have to be room as well."""
        call = module.Call(v, h, dtype, dtype, dtype, "cuda", module.Needs(True, True, False), True, 1 << 40)
        least = call.accumulator_bytes(n) + n * call.row
        p = plan(n, v, h, dtype, upstream="token", workspace=least)
        assert (p.gradients, p.kept_rows, p.flop_g) == ("backward", n, 3.0)
        assert plan(n, v, h, dtype, upstream="token", workspace=least - 1).flop_g > 3.0

    def test_the_statistics_of_slabs_are_made_within_the_workspace(self, plan):
        """The torch backend holds the logits of the rows whose statistics it makes, in fp32."""
        p = plan(512, 65536, 16, FP32, device_type="cpu", workspace=4 * MIB)
        assert p.slab < 65536 and 0 < p.statistics_rows * 65536 * 4 <= 4 * MIB
        assert plan(*QWEN).statistics_rows == plan(*QWEN).chunk_rows

    @pytest.mark.parametrize("n, v, h", [QWEN, (16384, 262144, 640), (16384, 128256, 2048), (8192, 151936, 4096)])
    @pytest.mark.parametrize("mib", [256, 384, 512, 1000])
    def test_slabs_fill_the_multiprocessors(self, plan, n, v, h, mib):
        """132 of them: the tiles of a chunk's part of a slab, 128 x 256, take few waves more than they need."""
        pytest.importorskip("triton")
        p = plan(n, v, h, upstream="token", workspace=mib * MIB)
        assert p.slab < v
        tiles = (p.chunk_rows / 128) * (p.slab / 256)
        waves = -(-(p.chunk_rows // 128) * -(-p.slab // 256) // 132)
        assert p.chunk_rows == 4096 and tiles / (132 * waves) > 0.9

    @pytest.mark.parametrize("n, v, h, dtype, needs", [
        (4000, 2100, 8192, BF16, (False, True, False)),
        (4096, 1100, 16384, BF16, (False, True, False)),
        (81, 12, 6804, FP32, (True, False, False)),
        (357, 180, 7431, FP32, (True, True, False)),
        (100, 2, 4096, BF16, (False, True, False)),
        (100, 1, 4096, BF16, (False, True, False)),
    ])  # fmt: skip
    def test_slabs_are_never_the_whole_vocabulary(self, module, plan, n, v, h, dtype, needs):
        """Which would run as chunks of rows, and those hold more: a second copy of x, and a dX of their own."""
        call = module.Call(v, h, dtype, dtype, dtype, "cuda", module.Needs(*needs), True, 1 << 40)
        whole = call.whole_bytes(n)
        assert plan(n, v, h, dtype, needs=needs, upstream="token", workspace=whole).slab == v
        if v == 1:
            with pytest.raises(ValueError, match=f"needs {whole} bytes"):
                plan(n, v, h, dtype, needs=needs, upstream="token", workspace=whole - 1)
            return
        p = plan(n, v, h, dtype, needs=needs, upstream="token", workspace=whole - 1)
        assert p.gradients == "backward" and p.kept_rows == 0 and p.slab < v

    def test_forward_only_copies_no_weight_at_the_expense_of_most_rows(self, plan):
        """fp32 weights under autocast: with a copy and 16 rows at a time, the copy would be read a thousand times."""
        pytest.importorskip("triton")
        n, v, h = 16384, 151936, 1024
        options = dict(hidden_dtype=FP32, weight_dtype=FP32, needs=(False, False, False))
        plans = [plan(n, v, h, BF16, workspace=mib * MIB, **options) for mib in (64, 128, 256, 304, 320, 512, 2048)]
        assert [p.copies_weight for p in plans] == sorted(p.copies_weight for p in plans)
        assert not plans[0].copies_weight and plans[-1].copies_weight
        assert all(p.chunk_rows >= 640 for p in plans)

    @pytest.mark.parametrize("upstream", ["scalar", "token"])
    def test_slabs_are_no_slivers_on_an_accelerator(self, plan, upstream):
        """A few MiB above the least there are some hundred rows and half as many classes at least, not 16 rows of
        thousands."""
        for n, v, h, least in ((16384, 151936, 1024, 64), (16384, 128256, 2048, 128), (8192, 151936, 4096, 128)):
            for mib in (least + 24, least + 64, 256):
                p = plan(n, v, h, upstream=upstream, workspace=mib * MIB)
                assert 512 <= p.chunk_rows <= 2 * p.slab < v

    def test_small_chunks_where_they_cost_little(self, plan):
        """No accumulator, slow GEMMs, one that fits into a cache, slabs that would need more than it, few tokens."""
        for n, v, h, options in (
            (16384, 151936, 1024, {"needs": (True, False, False), "workspace": 128 * MIB}),
            (16384, 151936, 1024, {"dtype": FP32, "workspace": (594 + 64 + 32) * MIB}),
            (16384, 16000, 1024, {"upstream": "token", "workspace": (63 + 32) * MIB}),
            (65536, 8000, 4096, {"upstream": "token", "workspace": (125 + 32) * MIB}),
            (100, 151936, 1024, {"upstream": "token", "workspace": (594 + 100) * MIB}),
        ):
            p = plan(n, v, h, **options)
            assert (p.slab, p.chunk_rows < 640) == (v, True), options

    def test_backend_by_device_and_dtype(self, plan):
        pytest.importorskip("triton")
        assert plan(*QWEN).backend == "triton"
        assert plan(*QWEN, device_type="xpu").backend == "triton"
        assert plan(*QWEN, device_type="cpu").backend == "eager"
        assert plan(*QWEN, FP64).backend == "eager"

    def test_each_gpu_of_a_mixed_machine_has_its_own_backend(self, kernel, monkeypatch):
        """By the tensors' device, whatever the current one is; a type alone stands for the current one."""
        backends, ops = submodule(kernel, "backends"), submodule(kernel, "ops")
        monkeypatch.setattr(backends, "HAS_TRITON", True)
        majors = {0: backends.MIN_CAPABILITY - 1, 1: backends.MIN_CAPABILITY}
        current = [0]
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties",
            lambda index: types.SimpleNamespace(major=majors[current[0] if index is None else index]),
        )  # fmt: skip
        for current[0] in majors:
            for index, backend in enumerate(("eager", "triton")):
                device = torch.device("cuda", index)
                assert backends.choose(device, False) == backend
                tensor = types.SimpleNamespace(shape=(8, 4), dtype=BF16, device=device)
                assert ops.make_call(tensor, tensor, BF16, (True, True, False), True, None).backend == backend
            assert kernel.plan(*QWEN).backend == ("eager", "triton")[current[0]]
        assert backends.choose(torch.device("cuda", 1), True) == "eager"
        assert backends.choose(torch.device("cpu"), False) == "eager"

    def test_the_same_sizes_are_decided_once(self, kernel):
        module = submodule(kernel, "plan")
        targets = torch.arange(5)
        for misses, (rows, workspace) in enumerate([(5, None), (5, 100_000), (3, 100_000)], start=1):
            for _ in range(2):
                hidden, weight = torch.zeros(rows, 4, requires_grad=True), torch.zeros(9, 4, requires_grad=True)
                kernel.fused_linear_cross_entropy(hidden, weight, targets[:rows], workspace=workspace).backward()
            assert module.known_plan.cache_info().misses == misses
        assert module.known_call.cache_info().misses == 2

    def test_without_triton_the_torch_backend_runs(self, kernel, monkeypatch):
        backends = submodule(kernel, "backends")
        monkeypatch.setattr(backends, "HAS_TRITON", False)
        assert kernel.plan(*QWEN).backend == "eager"

    def test_copies_of_the_weight_where_the_gemms_want_another_dtype(self, plan):
        pytest.importorskip("triton")
        v, h = QWEN[1:]
        same = plan(*QWEN, workspace=4096 * MIB)
        autocast = plan(*QWEN, BF16, hidden_dtype=FP32, weight_dtype=FP32)
        assert not same.copies_weight and autocast.copies_weight
        assert plan(*QWEN, FP16).copies_weight  # its exponentials are bf16
        assert not plan(*QWEN, FP16, needs=(False, False, False)).copies_weight
        assert autocast.workspace_bytes >= v * h * (4 + 2)


class TestWorkspace:
    GRID = [1 << k for k in range(16, 34)] + [3 << k for k in range(16, 32)]

    @pytest.mark.parametrize("needs", ALL_NEEDS, ids=str)
    @pytest.mark.parametrize("upstream, row_scaled", [("scalar", True), ("token", True), ("token", False)])
    @pytest.mark.parametrize("device_type, dtypes", [
        ("cuda", (BF16, BF16, BF16)), ("cuda", (FP16, FP16, FP16)), ("cuda", (BF16, FP32, FP32)),
        ("cuda", (FP32, FP32, FP32)), ("cpu", (FP32, FP32, FP32)), ("cpu", (BF16, BF16, FP32)),
        ("cpu", (FP64, FP64, FP64)),
    ])  # fmt: skip
    def test_is_never_exceeded_and_more_of_it_never_costs_more(
        self, plan, needs, upstream, row_scaled, device_type, dtypes
    ):
        dtype, hidden_dtype, weight_dtype = dtypes
        flops = []
        for workspace in sorted(self.GRID):
            try:
                p = plan(
                    4096, 50257, 256, dtype, hidden_dtype=hidden_dtype, weight_dtype=weight_dtype, needs=needs,
                    device_type=device_type, upstream=upstream, row_scaled=row_scaled, workspace=workspace,
                )  # fmt: skip
            except ValueError:
                assert not flops, "a larger workspace was refused after a smaller one was enough"
                continue
            assert p.workspace_bytes <= workspace
            flops.append(p.flop_g)
        assert flops == sorted(flops, reverse=True)
        assert flops[-1] == 1 + needs[0] + needs[1] + (any(needs) and not row_scaled)

    @pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False), (False,) * 3])
    @pytest.mark.parametrize("n, v, h", [QWEN, (5, 1000, 64), (1, 3, 1)])
    @pytest.mark.parametrize("dtype", [BF16, FP32])
    def test_too_small_a_one_is_refused_with_the_bytes_that_are_needed(self, plan, needs, n, v, h, dtype):
        with pytest.raises(ValueError, match=r"workspace=1 bytes .* needs \d+ bytes") as error:
            plan(n, v, h, dtype, needs=needs, workspace=1)
        needed = int(re.search(r"needs (\d+) bytes", str(error.value))[1])
        assert plan(n, v, h, dtype, needs=needs, workspace=needed).workspace_bytes <= needed
        if needed > 1:  # it is the smallest one
            with pytest.raises(ValueError, match="workspace"):
                plan(n, v, h, dtype, needs=needs, workspace=needed - 1)

    @pytest.mark.parametrize("bad, error", [(0, ValueError), (-5, ValueError), (1.5, TypeError), (True, TypeError)])
    def test_must_be_a_positive_number_of_bytes(self, plan, bad, error):
        with pytest.raises(error, match="workspace"):
            plan(*QWEN, workspace=bad)

    def test_frozen_weights_drop_their_buffers(self, plan):
        n, v, h = QWEN
        both = plan(*QWEN, needs=(True, True, False))
        lora = plan(*QWEN, needs=(True, False, False))
        head = plan(*QWEN, needs=(False, True, False))
        assert both.workspace_bytes - lora.workspace_bytes == v * h * 4
        assert both.workspace_bytes - head.workspace_bytes == n * h * 4
        assert lora.workspace_bytes < 2048 * MIB
        # with the head frozen a small workspace is enough for the fast way
        assert plan(*QWEN, needs=(True, False, False), workspace=256 * MIB).gradients == "forward"

    def test_the_bias_gradient_costs_no_buffer_of_its_own(self, plan):
        assert plan(*QWEN, needs=(True, True, True)).workspace_bytes == plan(*QWEN).workspace_bytes

    def test_default_is_bounded_independently_of_the_number_of_tokens(self, plan):
        """Beyond the fp32 gradients, which the forward must hold until the backward."""
        v, h = QWEN[1:]
        for n in (1 << 10, 1 << 14, 1 << 18):
            p = plan(n, v, h)
            assert p.workspace_bytes - (v + n) * h * 4 <= (2816 if n > 1 << 15 else 2560) * MIB
            assert plan(n, v, h, upstream="token").workspace_bytes - v * h * 4 <= 6144 * MIB

    def test_a_long_batch_is_eight_chunks_where_each_of_them_costs_the_accumulator(self, plan):
        v, h = QWEN[1:]
        for n, rows in ((32768, 4096), (32769, 6144), (49152, 6144), (65520, 8192), (65536, 8192), (1 << 20, 8192)):
            assert plan(n, v, h).chunk_rows == rows
        assert plan(65536, v, h, needs=(True, False, False)).chunk_rows == 4096  # no dW, nothing to accumulate
        assert plan(65536, 262144, 640).chunk_rows == 4096  # 6144 rows would be more than 2816 MiB
        assert plan(65536, 32000, 2048).chunk_rows == plan(32768, 32000, 2048).chunk_rows == 12288  # at least 1 GiB

    def test_more_bytes_than_equal_chunks_take_are_left(self, plan):
        """10240 rows at a time would be two chunks, and so are 8192."""
        assert plan(*QWEN, workspace=4096 * MIB).chunk_rows == 8192


class TestIndependence:
    def test_of_the_devices_memory(self, plan, monkeypatch):
        expected = [plan(*QWEN, workspace=w, upstream=u) for w in (None, 256 * MIB) for u in ("scalar", "token")]

        def forbidden(*args, **kwargs):
            raise AssertionError("a plan must not ask for the state of the memory")

        names = ("mem_get_info", "memory_allocated", "memory_reserved", "memory_stats", "get_device_properties")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, forbidden)
        again = [plan(*QWEN, workspace=w, upstream=u) for w in (None, 256 * MIB) for u in ("scalar", "token")]
        assert again == expected

    @pytest.mark.parametrize("needs", ALL_NEEDS[1:], ids=str)
    def test_of_the_number_of_tokens_while_compiling_with_the_default_workspace(self, module, needs):
        """Else a compiled graph would be specialised on it."""
        for row_scaled in (True, False):
            call = module.Call(151936, 1024, BF16, BF16, BF16, "cuda", module.Needs(*needs), row_scaled, None)
            with oracle.tracing():
                answers = {call.gradients_in_forward(n) for n in (0, 1, 100, 10**5, 10**9)}
            assert answers == {row_scaled}


class TestChunks:
    @pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 4096, 5000, 16384, 100_003])
    @pytest.mark.parametrize("workspace", [None, 64 * MIB, 1536 * MIB])
    def test_rows_are_whole_tiles_and_equal(self, plan, n, workspace):
        p = plan(n, *QWEN[1:], workspace=workspace, needs=(True, False, False))
        assert 1 <= p.chunk_rows <= max(n, 1)
        if 128 <= p.chunk_rows < n:
            assert p.chunk_rows % 128 == 0
            chunks = -(-n // p.chunk_rows)
            assert (chunks - 1) * p.chunk_rows < n
            multiple = 2048 if p.chunk_rows >= 2048 else 128
            assert p.chunk_rows % multiple == 0
            assert p.chunk_rows - n / chunks < multiple

    def test_whole_tiles(self, module):
        for rows, n in itertools.product((1, 16, 100, 128, 200, 1000, 5000), (1, 16, 127, 128, 1000, 4097, 16384)):
            chunk = module._whole_tiles(rows, n)
            assert 1 <= chunk <= max(rows, 1)
            assert chunk == min(rows, n) or chunk % 128 == 0

    def test_no_token_is_a_plan_too(self, plan):
        for needs, upstream in itertools.product(((True, True, True), (False, False, False)), ("scalar", "token")):
            p = plan(0, 1000, 64, needs=needs, upstream=upstream)
            assert p.kept_rows == 0 and p.chunk_rows >= 1
            assert str(p)


class TestReadable:
    CASES = [
        ({}, ["gradients in the forward", "3.00 G"]),
        ({"needs": (False, False, False)}, ["forward only", "1.00 G"]),
        ({"upstream": "token", "workspace": 2048 * MIB}, ["gradients in the backward", "recomputed"]),
        ({"workspace": 256 * MIB}, ["gradients in the backward", "4.00 G", "classes at a time"]),
        ({"needs": (True, False, False)}, ["gradients in the forward", "2.00 G"]),
    ]

    @pytest.mark.parametrize("options, words", CASES, ids=lambda c: str(c)[:40])
    def test_str_says_what_runs_and_what_it_costs(self, plan, options, words):
        p = plan(*QWEN, **options)
        text = str(p)
        for word in [*words, "16384", "151936", "1024", p.backend, "MiB", "TFLOP"]:
            assert word in text
        assert f"{p.chunk_rows} rows" in text
        assert f"{p.workspace_bytes / MIB:.0f} MiB" in text
        assert "\n" not in text and len(text) < 300

    def test_str_where_nothing_is_recomputed(self, plan):
        assert "from the kept exponentials of all rows" in str(plan(1024, *QWEN[1:], upstream="token"))

    def test_one_g_is_one_gemm(self, plan):
        assert "of 2.000 TFLOP" in str(plan(10_000, 100_000, 1000))

    def test_plans_compare_and_are_frozen(self, plan):
        p = plan(*QWEN)
        assert p == plan(*QWEN)
        with pytest.raises(AttributeError):
            p.chunk_rows = 1


SIZES = {
    "n": st.one_of(st.integers(0, 300), st.integers(0, 1 << 20)),
    "vocab": st.one_of(st.integers(1, 300), st.integers(1, 1 << 22)),
    "hidden": st.integers(1, 1 << 14),
    "dtypes": st.sampled_from([(d,) * 3 for d in (BF16, FP16, FP32, FP64)] + [(BF16, FP32, FP32), (BF16, BF16, FP32)]),
    "device_type": st.sampled_from(["cpu", "cuda"]),
    "needs": st.sampled_from(ALL_NEEDS),
    "upstream": st.sampled_from(["scalar", "token"]),
    "row_scaled": st.booleans(),
}
WORKSPACES = st.one_of(st.integers(1, 1 << 24), st.integers(1, 1 << 36))


class TestInvariants:
    def make(self, kernel, n, vocab, hidden, dtypes, **options):
        dtype, hidden_dtype, weight_dtype = dtypes
        return kernel.plan(n, vocab, hidden, dtype, hidden_dtype=hidden_dtype, weight_dtype=weight_dtype, **options)

    def check(self, p, n, vocab, needs):
        assert 1 <= p.chunk_rows <= max(n, 1)
        assert 0 <= p.kept_rows <= n
        assert 1 <= p.slab <= vocab
        assert p.workspace_bytes >= 0
        gemms = 1 + needs[0] + needs[1]
        assert gemms <= p.flop_g <= gemms + (p.gradients == "backward")
        assert p.gradients == "backward" or (p.slab == vocab and p.kept_rows == 0)
        assert (p.gradients == "none") == (not any(needs))

    @given(**SIZES)
    def test_default_workspace(self, kernel, n, vocab, needs, **sizes):
        p = self.make(kernel, n, vocab, needs=needs, **sizes)
        self.check(p, n, vocab, needs)
        assert p.slab == vocab
        if any(needs):
            scalar = sizes["upstream"] == "scalar" and sizes["row_scaled"]
            hidden, dtypes, device_type = (sizes[name] for name in ("hidden", "dtypes", "device_type"))
            module = submodule(kernel, "plan")
            call = module.Call(vocab, hidden, *dtypes, device_type, module.Needs(*needs), sizes["row_scaled"], None)
            few = n * call.row <= call.default_chunk + vocab * hidden * 4 and 0 < n * vocab < 2**31
            large = vocab * hidden >= 2**23 and dtypes[0] in (BF16, FP32)
            kept = device_type == "cuda" and needs[1] and few and large
            assert p.gradients == ("forward" if scalar and not kept else "backward")

    @given(workspace=WORKSPACES, **SIZES)
    def test_given_workspace(self, kernel, n, vocab, needs, workspace, **sizes):
        try:
            p = self.make(kernel, n, vocab, needs=needs, workspace=workspace, **sizes)
        except ValueError as error:
            needed = int(re.search(r"needs (\d+) bytes", str(error))[1])
            assert needed > workspace
            p = self.make(kernel, n, vocab, needs=needs, workspace=needed, **sizes)
            workspace = needed
        self.check(p, n, vocab, needs)
        assert p.workspace_bytes <= workspace

    @given(workspaces=st.lists(WORKSPACES, min_size=2, max_size=2), **SIZES)
    def test_more_workspace_never_costs_more(self, kernel, n, vocab, workspaces, **sizes):
        less, more = sorted(workspaces)
        try:
            p = self.make(kernel, n, vocab, workspace=less, **sizes)
        except ValueError as error:
            less = int(re.search(r"needs (\d+) bytes", str(error))[1])
            more = max(less, more)
            p = self.make(kernel, n, vocab, workspace=less, **sizes)
        assert self.make(kernel, n, vocab, workspace=more, **sizes).flop_g <= p.flop_g

    @given(workspace=st.one_of(st.none(), WORKSPACES), **SIZES)
    def test_the_operator_allocates_what_was_planned(
        self, kernel, n, vocab, hidden, dtypes, device_type, needs, upstream, row_scaled, workspace
    ):
        """passes.kept_exps_shape, which fake tensors follow, is the plan's number of rows."""
        module, passes = submodule(kernel, "plan"), submodule(kernel, "passes")
        call = module.Call(vocab, hidden, *dtypes, device_type, module.Needs(*needs), row_scaled, workspace)
        try:
            p = module.decide(call, n, False, constant=False)
        except ValueError:
            assume(False)
        rows, columns = passes.kept_exps_shape(call, n)
        assert rows == p.kept_rows
        assert vocab <= columns < vocab + 64
        if upstream == "scalar" and not call.gradients_in_forward(n):
            options = {"hidden_dtype": dtypes[1], "weight_dtype": dtypes[2], "device_type": device_type}
            more = {"needs": needs, "row_scaled": row_scaled, "workspace": workspace}
            assert kernel.plan(n, vocab, hidden, dtypes[0], **options, **more) == p
