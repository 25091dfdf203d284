"""What a call allocates: never the logits, nothing for gradients that are not wanted, and no more than `workspace`."""

import gc
import itertools
from typing import NamedTuple

import pytest
import torch

from .conftest import submodule
from .oracle import memory_changes

MIB = 1 << 20
BF16, FP32 = torch.bfloat16, torch.float32
# Of torch's GPU allocator: it does not split off less than 1 MiB of a block, and rounds small ones up to 512 bytes.
ROUNDING = 3 * MIB // 2


class Allocations(NamedTuple):
    """Bytes that a function allocated on the CPU, beyond what was there before it ran."""

    sizes: list  # of every allocation
    peak: int
    end: int  # still held when it returned

    def at_least(self, size: int) -> list:
        return [s for s in self.sizes if s >= size]


def allocations(function) -> Allocations:
    gc.disable()  # what a collection would free is not the function's
    try:
        changes = memory_changes(function)
    finally:
        gc.enable()
    held = list(itertools.accumulate(changes, initial=0))
    return Allocations([c for c in changes if c > 0], max(held), held[-1])


class Run(NamedTuple):
    """A forward and its backward."""

    forward: Allocations
    backward: Allocations
    outputs: int  # bytes of the gradients

    @property
    def sizes(self) -> list:
        return self.forward.sizes + self.backward.sizes

    def at_least(self, size: int) -> list:
        return self.forward.at_least(size) + self.backward.at_least(size)

    @property
    def extra(self) -> int:
        """Most bytes held at once beyond the gradients that the backward returns, what is saved for it included."""
        return max(self.forward.peak, self.forward.end + self.backward.peak - self.outputs)


class Problem:
    """Tensors of a call, and the call with its memory recorded."""

    def __init__(self, kernel, n, vocab, width, dtype=FP32, needs=(True, True), ignored=0):
        self.kernel = kernel
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(n, width, generator=generator).to(dtype).requires_grad_(needs[0])
        self.weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_(needs[1])
        self.targets = torch.randint(0, vocab, (n,), generator=generator)
        self.targets[:ignored] = -100
        self.needs, self.dtype = needs, dtype
        self.logits = n * vocab * 4
        self.vocab_by_width = vocab * width * 4
        self.tokens_by_width = n * width * 4

    def loss(self, **options):
        return self.kernel.fused_linear_cross_entropy(self.hidden, self.weight, self.targets, **options)

    def log_probs(self, **options):
        out = self.kernel.fused_linear_log_probs(self.hidden, self.weight, self.targets, **options)
        return sum(o.sum() for o in out if o is not None and o.requires_grad)

    def run(self, function=None, upstream=0.5, autocast=False, retain_graph=False, **options) -> Run:
        kept = []

        def forward():
            with torch.autocast("cpu", BF16, enabled=autocast):
                kept.append((function or self.loss)(**options))

        recorded = allocations(forward)
        loss = kept.pop()
        if not any(self.needs):
            return Run(recorded, Allocations([], 0, 0), 0)
        upstream = torch.full_like(loss, upstream)
        backward = allocations(lambda: loss.backward(upstream, retain_graph=retain_graph))
        leaves = [t for t, needed in zip((self.hidden, self.weight), self.needs) if needed]
        outputs = sum(t.grad.numel() * t.grad.element_size() for t in leaves)
        return Run(recorded, backward, outputs)


@pytest.fixture
def small_defaults(kernel, monkeypatch):
    """The torch backend's constants scaled down with the shapes of these tests: 4 MiB of E, panels of 64 KiB."""
    monkeypatch.setitem(submodule(kernel, "plan").DEFAULT_CHUNK, "cpu", 4 * MIB)
    eager = submodule(kernel, "backends.eager")
    monkeypatch.setattr(eager, "_PANEL_BYTES", 1 << 16)
    monkeypatch.setattr(eager, "UPCAST_BYTES", 1 << 18)
    monkeypatch.setattr(submodule(kernel, "plan"), "UPCAST_BYTES", 1 << 18)


def test_the_recorder_sees_temporaries_inside_operators():
    def work():
        x = torch.ones(MIB, dtype=torch.uint8)
        y = (x.to(FP32) + 1).sum()  # 4 MiB, and 4 MiB more
        return x, y

    recorded = allocations(work)
    assert recorded.peak == pytest.approx(9 * MIB, rel=0.01)
    assert recorded.end == pytest.approx(0, abs=MIB * 1.01)
    assert len(recorded.at_least(4 * MIB)) == 2


@pytest.mark.usefixtures("small_defaults")
class TestTorchBackend:
    WAYS = [
        pytest.param({"reduction": "mean"}, id="mean"),
        pytest.param({"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.1}, id="smooth"),
        pytest.param({"reduction": "none"}, id="none"),
        pytest.param({"reduction": "none", "softcap": 5.0, "label_smoothing": 0.1}, id="recomputed"),
        pytest.param({"reduction": "sum", "workspace": 2 * MIB}, id="slabs"),
    ]

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_never_holds_the_logits(self, kernel, way, dtype):
        """Less than a quarter of them beside the gradients, in one piece or in several."""
        problem = Problem(kernel, 1024, 8192, 64, dtype)
        run = problem.run(**way)
        assert problem.logits == 32 * MIB
        assert run.extra < problem.logits / 4
        assert max(run.sizes) <= 4 * MIB

    @pytest.mark.parametrize("names", [("log_probs",), ("log_probs", "entropy", "lse", "is_top1", "log_sum_sq_probs")])
    def test_log_probs_never_hold_the_logits(self, kernel, names):
        problem = Problem(kernel, 1024, 8192, 64)
        assert problem.run(problem.log_probs, outputs=names).extra < problem.logits / 4

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("metrics", [False, True])
    def test_forward_only_holds_neither_the_logits_nor_anything_of_the_weights_size(self, kernel, dtype, metrics):
        problem = Problem(kernel, 1024, 8192, 256, dtype)
        with torch.no_grad():
            recorded = allocations(lambda: problem.loss(return_metrics=metrics))
        assert max(recorded.sizes) <= 4 * MIB < problem.vocab_by_width
        assert recorded.peak < 6 * MIB
        assert recorded.end < MIB / 8

    @pytest.mark.parametrize("way", WAYS)
    def test_a_frozen_head_has_no_buffer_of_its_size(self, kernel, way):
        problem = Problem(kernel, 512, 8192, 256, needs=(True, False))
        run = problem.run(**way)
        assert problem.vocab_by_width == 8 * MIB
        assert not run.at_least(5 * MIB)

    @pytest.mark.parametrize("way", WAYS)
    def test_frozen_hidden_states_have_no_buffer_of_their_size(self, kernel, way, monkeypatch):
        monkeypatch.setitem(submodule(kernel, "plan").DEFAULT_CHUNK, "cpu", MIB)
        problem = Problem(kernel, 8192, 256, 128, needs=(False, True))
        run = problem.run(**way)
        assert problem.tokens_by_width == 4 * MIB
        assert not run.at_least(3 * MIB)

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[4]])
    @pytest.mark.parametrize("upstream", [1.0, 0.5])
    def test_a_batch_without_targets_makes_nothing_but_the_zero_gradients(self, kernel, dtype, way, upstream):
        problem = Problem(kernel, 8, 8192, 256, dtype, ignored=8)
        run = problem.run(upstream=upstream, **way)
        size = problem.weight.numel() * problem.weight.element_size()
        assert run.at_least(MIB) == [size]  # the gradient itself
        assert problem.weight.grad.count_nonzero() == 0

    @pytest.mark.parametrize(
        "n, vocab, width",
        [
            (4096, 1000, 256),
            pytest.param(3000, 4000, 512, marks=pytest.mark.slow),
            (2000, 500, 2000),
            (1000, 300, 4000),
        ],
    )
    @pytest.mark.parametrize("dtype", [FP32, BF16])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_wide_hidden_states_stay_within_the_plan(self, kernel, n, vocab, width, dtype, reduction):
        """The copies of x and the dX of a chunk count, beside logits that are not much larger."""
        upstream = "token" if reduction == "none" else "scalar"
        options = dict(device_type="cpu", needs=(True, True, False), upstream=upstream)
        workspace = kernel.plan(n, vocab, width, dtype, **options).workspace_bytes
        for ignored in (0, 1, n // 4):
            problem = Problem(kernel, n, vocab, width, dtype, ignored=ignored)
            run = problem.run(reduction=reduction, workspace=workspace)
            assert run.extra <= workspace + 8 * (1 << 16)

    @pytest.mark.parametrize("dtype", [FP32, BF16])
    def test_the_constant_term_of_smoothing_copies_no_weight(self, kernel, dtype):
        problem = Problem(kernel, 64, 16384, 256, dtype)
        plain, smooth = (problem.run(label_smoothing=eps).extra for eps in (0.0, 0.1))
        assert smooth < plain + problem.vocab_by_width / 8

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("upstream", [1.0, 0.5])
    def test_a_plain_backward_scales_what_the_forward_made_where_it_is(self, kernel, reduction, upstream):
        """In fp32 there is nothing to copy, unless the graph is kept for another backward."""
        problem = Problem(kernel, 512, 8192, 64)
        run = problem.run(reduction=reduction, upstream=upstream)
        assert run.forward.at_least(problem.vocab_by_width)
        assert not run.backward.at_least(problem.tokens_by_width)
        kept = problem.run(reduction=reduction, upstream=upstream, retain_graph=True)
        assert kept.backward.at_least(problem.vocab_by_width), "this measures nothing"

    def test_memory_follows_the_tokens_that_count(self, kernel):
        sparse = Problem(kernel, 4096, 8192, 64, ignored=4032).run()
        dense = Problem(kernel, 64, 8192, 64).run()
        assert sparse.extra < dense.extra + 3 * 4096 * 64 * 4

    WORKSPACES = [0.75, 1.5, 3, 4.5, 8]  # MiB
    NEEDS = [(True, True), (True, False), (False, True), (False, False)]
    CALLS = [
        pytest.param({"reduction": "sum"}, id="scalar"),
        pytest.param({"reduction": "none"}, id="token"),
        pytest.param({"reduction": "none", "softcap": 5.0, "label_smoothing": 0.1}, id="exact"),
        pytest.param({"reduction": "sum", "z_loss": 0.1, "softcap": 5.0}, id="softcap"),
    ]

    def check_workspaces(self, kernel, call, needs, dtype, ignored, autocast=False):
        n = 256
        temporaries = 8 * (1 << 16)  # of panels
        used, exceeded = 0, []
        for mib in self.WORKSPACES:
            problem = Problem(kernel, n, 4096, 128, dtype, needs, ignored)
            workspace = int(mib * MIB)
            try:
                run = problem.run(workspace=workspace, autocast=autocast, **call)
            except ValueError as error:
                assert "too small" in str(error) and mib < 2
                continue
            used += 1
            if run.extra > workspace + temporaries:
                exceeded.append(f"{mib} MiB: {run.extra / MIB:.2f} MiB")
        assert not exceeded
        assert used >= 3

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("needs", NEEDS, ids=str)
    def test_workspace_is_respected(self, kernel, call, needs):
        self.check_workspaces(kernel, call, needs, FP32, ignored=90)

    @pytest.mark.parametrize("call", CALLS[:2])
    def test_workspace_is_respected_where_all_tokens_count(self, kernel, call):
        self.check_workspaces(kernel, call, (True, True), FP32, ignored=0)

    @pytest.mark.parametrize("n, vocab, width, dtype, ignored, mib", [
        (512, 65536, 16, FP32, 0, 4),  # few rows of statistics fit, for many rows of a slab
        (512, 65536, 64, BF16, 200, 8),
        (512, 32768, 512, FP32, 200, 3),  # an fp32 dX, in which the rows that count are in front for a while
    ])  # fmt: skip
    def test_workspace_is_respected_by_slabs_of_a_wide_vocabulary(self, kernel, n, vocab, width, dtype, ignored, mib):
        problem = Problem(kernel, n, vocab, width, dtype, ignored=ignored)
        workspace = int(mib * MIB)
        sizes = (n, vocab, width, dtype)
        plan = kernel.plan(*sizes, device_type="cpu", workspace=workspace)
        assert plan.slab < vocab and plan.workspace_bytes <= workspace
        assert problem.run(workspace=workspace).extra <= workspace + 8 * (1 << 16)

    @pytest.mark.parametrize("call", CALLS[:2])
    @pytest.mark.parametrize("needs", [(True, True), (False, False)], ids=str)
    @pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
    def test_workspace_is_respected_in_half_precision(self, kernel, monkeypatch, call, needs, autocast):
        """With the backend's own size of the slabs of weight that it upcasts."""
        monkeypatch.undo()
        monkeypatch.setattr(submodule(kernel, "backends.eager"), "_PANEL_BYTES", 1 << 16)
        self.check_workspaces(kernel, call, needs, FP32 if autocast else BF16, 90, autocast)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_quarter_of_the_logits_at_the_shape_that_is_promised(kernel, reduction):
    problem = Problem(kernel, 4096, 32000, 512)
    assert problem.run(reduction=reduction).extra < problem.logits / 4


@pytest.mark.gpu
class TestGpu:
    """The same on a GPU: peaks of torch's caching allocator, after a first call that compiled the kernels."""

    def problem(self, kernel, device, n, vocab, width, dtype=BF16, needs=(True, True), ignored=0):
        if device != "cuda":
            pytest.skip("needs torch.cuda's memory statistics")
        problem = Problem.__new__(Problem)
        generator = torch.Generator(device).manual_seed(0)
        problem.kernel, problem.needs, problem.dtype = kernel, needs, dtype
        new = dict(generator=generator, device=device, dtype=dtype)
        problem.hidden = torch.randn(n, width, **new).requires_grad_(needs[0])
        problem.weight = torch.randn(vocab, width, **new).mul_(width**-0.5).requires_grad_(needs[1])
        problem.targets = torch.randint(0, vocab, (n,), generator=generator, device=device)
        problem.targets[:ignored] = -100
        problem.logits, problem.vocab_by_width = n * vocab * 4, vocab * width * 4
        return problem

    def peaks(self, problem, function, **options) -> tuple:
        """(bytes at the forward's peak, at the backward's peak beyond the gradients), both beyond the inputs."""
        outputs = 0
        for _ in range(2):
            problem.hidden.grad = problem.weight.grad = None
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = function(**options)
            torch.cuda.synchronize()
            forward = torch.cuda.max_memory_allocated() - before
            backward = 0
            if any(problem.needs):
                upstream = torch.full_like(loss, 0.5)
                torch.cuda.reset_peak_memory_stats()
                loss.backward(upstream)
                torch.cuda.synchronize()
                outputs = sum(t.grad.nbytes for t in (problem.hidden, problem.weight) if t.grad is not None)
                backward = torch.cuda.max_memory_allocated() - before - outputs
            del loss
        return forward, backward

    WAYS = [
        pytest.param({"reduction": "mean", "return_metrics": False}, id="mean"),
        pytest.param({"reduction": "none"}, id="none"),
        pytest.param({"reduction": "none", "softcap": 30.0, "label_smoothing": 0.1}, id="recomputed"),
    ]

    @pytest.mark.parametrize("way", WAYS)
    def test_never_holds_the_logits(self, kernel, device, way):
        """Per-token losses keep up to 6 GiB of exponentials, a quarter of the logits of 43691 tokens."""
        problem = self.problem(kernel, device, 65536, 151936, 256)
        assert problem.logits > 37 << 30
        assert max(self.peaks(problem, problem.loss, **way)) < problem.logits / 4

    def test_forward_only(self, kernel, device):
        problem = self.problem(kernel, device, 8192, 151936, 1024, needs=(False, False))
        forward, _ = self.peaks(problem, lambda: problem.loss(return_metrics=True)[0])
        # partial statistics of (column tiles x rows): nothing is stored
        assert forward < 192 * MIB < problem.vocab_by_width / 2

    def test_a_frozen_head_has_no_buffer_of_its_size(self, kernel, device):
        problem = self.problem(kernel, device, 2048, 151936, 1024, needs=(True, False))
        exps = 2048 * 151936 * 2
        assert max(self.peaks(problem, problem.loss)) < exps + problem.vocab_by_width / 4

    def test_a_batch_without_targets_makes_nothing_but_the_zero_gradients(self, kernel, device):
        problem = self.problem(kernel, device, 16, 151936, 1024, ignored=16)
        for reduction in ("mean", "none"):
            assert max(self.peaks(problem, problem.loss, reduction=reduction)) < 16 * MIB

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("mib", [256, 700, 1024, 2048])
    def test_workspace_is_respected(self, kernel, device, way, mib):
        problem = self.problem(kernel, device, 16384, 151936, 1024)
        assert max(self.peaks(problem, problem.loss, workspace=mib * MIB, **way)) <= mib * MIB + ROUNDING

    @pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
    @pytest.mark.parametrize("way", WAYS[:2])
    def test_workspace_is_respected_with_frozen_tensors(self, kernel, device, way, needs):
        problem = self.problem(kernel, device, 8192, 151936, 512, needs=needs, ignored=1000)
        assert max(self.peaks(problem, problem.loss, workspace=256 * MIB, **way)) <= 256 * MIB + ROUNDING

    def test_workspace_is_respected_under_autocast(self, kernel, device):
        problem = self.problem(kernel, device, 8192, 50257, 512, FP32)

        def loss(**options):
            with torch.autocast(device, BF16):
                return problem.loss(**options)

        for mib in (128, 512):
            assert max(self.peaks(problem, loss, workspace=mib * MIB)) <= mib * MIB + ROUNDING
