"""cut_cross_entropy_loss: values, gradients and corner cases, against float64 on the same inputs."""

import importlib
import inspect
import re

import pytest
import torch
import torch.nn.functional as F

from fused_linear_ce_trl import cut_cross_entropy_loss, load_kernel, loss
from fused_linear_ce_trl.loss import IGNORE_INDEX

IGNORED = 0.3
TRANSFORMS = {
    "plain": {},
    "bias": dict(bias=True),
    "scale": dict(logit_scale=0.0625),
    "scale 0": dict(logit_scale=0.0),
    "softcap 30": dict(final_logit_softcapping=30.0),
    "softcap 50": dict(final_logit_softcapping=50.0),
    "scale and softcap": dict(logit_scale=0.25, final_logit_softcapping=5.0),
    "all": dict(bias=True, logit_scale=0.5, final_logit_softcapping=5.0),
}


def batch(bias=False, vocab=130, hidden_size=24, dtype=torch.float32, shape=(3, 11), seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, hidden_size, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=g).to(dtype).requires_grad_()
    offset = torch.randn(vocab, generator=g).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(vocab, shape, generator=g)
    labels[torch.rand(shape, generator=g) < IGNORED] = IGNORE_INDEX
    return hidden, weight, offset, labels


def oracle(hidden, weight, bias, targets, num_items=None, logit_scale=1.0, final_logit_softcapping=None):
    """(loss, num_correct, entropy_sum, n_valid) and gradients, from float64 logits; targets are shifted already."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logits = leaves[0] @ leaves[1].T
    if bias is not None:
        logits = logits + leaves[2]
    logits = logits * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    valid = targets != IGNORE_INDEX
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    loss = total / (valid.sum().clamp(min=1) if num_items is None else num_items)
    loss.backward()
    p = logits.softmax(-1)
    entropy = (-(p * logits.log_softmax(-1)).sum(-1))[valid].sum()
    correct = (logits.argmax(-1) == targets)[valid].sum()
    return (loss, correct, entropy, valid.sum()), [leaf.grad for leaf in leaves]


def run(hidden, weight, bias, labels=None, **options):
    out = cut_cross_entropy_loss(hidden, weight, 256, labels=labels, lm_head_bias=bias, **options)
    out[0].backward()
    return out, [t.grad for t in (hidden, weight, bias) if t is not None]


def assert_close(got, expected, rtol=1e-5):
    values, grads = got
    for value, reference in zip(values, expected[0]):
        torch.testing.assert_close(value.double(), reference.double(), rtol=rtol, atol=1e-6)
    for grad, reference in zip(grads, expected[1]):
        error = (grad.double() - reference.reshape(grad.shape)).norm() / reference.norm().clamp(min=1e-12)
        assert error <= rtol or reference.norm() < 1e-9, error


@pytest.mark.parametrize("name", TRANSFORMS)
def test_k1_k2_k5_k6_r10_float32_against_float64(name):
    options = dict(TRANSFORMS[name])
    tensors = batch(bias=options.pop("bias", False))
    got = run(*tensors, **options)
    hidden, weight, bias, labels = tensors
    # The gradient of a whole (B, S, H): its last positions predict nothing.
    assert got[1][0][:, -1].abs().max() == 0
    got = got[0], [got[1][0][:, :-1], *got[1][1:]]
    assert_close(got, oracle(hidden[:, :-1], weight, bias, labels[:, 1:], **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_k1_half_precision_no_worse_than_full_logits(dtype):
    hidden, weight, _, labels = batch(dtype=dtype, vocab=500, hidden_size=64, shape=(4, 40))
    (loss, *_), grads = run(hidden, weight, None, labels)
    reference, reference_grads = oracle(hidden[:, :-1], weight, None, labels[:, 1:])
    logits = (hidden[:, :-1] @ weight.T).float().reshape(-1, 500)
    full = F.cross_entropy(logits, labels[:, 1:].reshape(-1)).double()
    assert (loss.double() - reference[0]).abs() <= (full - reference[0]).abs() + 1e-5 * reference[0]
    for grad, exact in zip((grads[0][:, :-1], grads[1]), reference_grads):
        assert (grad.double() - exact).norm() / exact.norm() <= 3.5e-3


def test_k3_accuracy_counts_first_argmax_only():
    """Classes 1 and 3 tie at the top: torch.argmax takes the first."""
    weight = torch.tensor([[0.0], [1.0], [0.5], [1.0]])
    hidden = torch.ones(1, 3, 1)
    _, correct, _, n_valid = cut_cross_entropy_loss(hidden, weight, 256, shift_labels=torch.tensor([[1, 3, 2]]))
    assert (correct, n_valid) == (1, 3)


@pytest.mark.parametrize("vocab", [200_000, 32_000, 150_000])
def test_k4_accuracy_is_exact_at_large_vocabularies(vocab):
    hidden, weight, _, _ = batch(vocab=vocab, hidden_size=16, shape=(1, 33))
    with torch.no_grad():
        argmax = (hidden @ weight.T).argmax(-1)
        targets = argmax.clone()
        targets[0, ::4] = (targets[0, ::4] + 1) % vocab
        _, correct, _, n_valid = cut_cross_entropy_loss(hidden, weight, 256, shift_labels=targets)
    assert (correct, n_valid) == ((targets == argmax).sum(), 33)


@pytest.mark.parametrize(("shape", "vocab", "hidden_size"), [((1, 2), 130, 24), ((1, 1), 8, 3), ((2, 7), 1023, 17)])
def test_k8_odd_sizes(shape, vocab, hidden_size):
    hidden, weight, _, labels = batch(shape=shape, vocab=vocab, hidden_size=hidden_size)
    labels = labels.clamp(min=0)
    expected = oracle(hidden, weight, None, labels)
    assert_close(run(hidden, weight, None, shift_labels=labels), expected)


def test_k9_strided_inputs():
    hidden, weight, _, labels = batch()
    expected = oracle(hidden, weight, None, labels)
    wide = torch.stack([hidden.detach(), hidden.detach()], -1)[..., 0].requires_grad_()
    columns = weight.detach().T.contiguous().T.requires_grad_()
    assert not wide.is_contiguous() and not columns.is_contiguous()
    assert_close(run(wide, columns, None, shift_labels=labels), expected)


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_k11_f6_head_is_cast_to_the_hidden_states_dtype(hidden_dtype, weight_dtype):
    """As TRL does; without autocast the kernel itself refuses two dtypes."""
    hidden, weight, bias, labels = batch(bias=True)
    hidden, weight, bias = (
        t.detach().to(d).requires_grad_()
        for t, d in ((hidden, hidden_dtype), (weight, weight_dtype), (bias, weight_dtype))
    )
    expected = oracle(hidden, weight.to(hidden_dtype), bias.to(hidden_dtype), labels)
    got = run(hidden, weight, bias, shift_labels=labels)
    assert [g.dtype for g in got[1]] == [hidden_dtype, weight_dtype, weight_dtype]
    assert_close(got, expected, rtol=5e-3)


def test_k7_autocast_does_not_round_a_float32_head_gradient():
    """The hidden states may be bfloat16 already; dW is float32 from the accumulator to the parameter."""
    hidden, weight, _, labels = batch(vocab=500, hidden_size=64, shape=(4, 40))
    half = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *_ = cut_cross_entropy_loss(half, weight, 256, shift_labels=labels)
    loss.backward()
    assert (weight.grad != weight.grad.bfloat16()).float().mean() > 0.9
    _, (_, exact) = oracle(half, weight.bfloat16(), None, labels)
    assert (weight.grad - exact).norm() <= 3.5e-3 * exact.norm()


def test_k12_ignored_positions_contribute_nothing_even_if_nan():
    hidden, weight, _, labels = batch()
    expected = oracle(hidden, weight, None, labels)
    poisoned = torch.where((labels == IGNORE_INDEX)[..., None], torch.nan, hidden.detach()).requires_grad_()
    got = run(poisoned, weight, None, shift_labels=labels)
    assert_close(got, expected)
    assert got[1][0][labels == IGNORE_INDEX].abs().max() == 0


def test_k12_targets_outside_the_vocabulary_raise():
    hidden, weight, _, labels = batch()
    labels[0, 0] = 130
    with pytest.raises(IndexError, match="130"):
        cut_cross_entropy_loss(hidden, weight, 256, shift_labels=labels)


def test_k13_a_common_offset_costs_no_digits():
    hidden, weight, _, labels = batch()
    expected = oracle(hidden, weight, torch.full((130,), 1e4), labels)
    (loss, *_), _ = run(hidden, weight, torch.full((130,), 1e4, requires_grad=True), shift_labels=labels)
    # the logits themselves are rounded to 1e4 * 2**-24
    torch.testing.assert_close(loss.double(), expected[0][0], rtol=1e-4, atol=1e-3)


def test_k14_masked_classes():
    hidden, weight, _, labels = batch()
    labels = labels.clamp(max=99)
    bias = torch.zeros(130)
    bias[100:] = -torch.inf
    (loss, correct, entropy, _), grads = run(hidden, weight, bias, shift_labels=labels)
    expected, _ = oracle(hidden, weight[:100], None, labels)
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy.double(), expected[2], rtol=1e-5, atol=0)
    assert correct == expected[1] and all(g.isfinite().all() for g in grads if g is not None)


@pytest.mark.parametrize("frozen", [False, True])
def test_k15_a_frozen_head_has_no_gradient_and_no_buffer(frozen):
    vocab, size = 40_000, 64
    hidden, weight, _, labels = batch(vocab=vocab, hidden_size=size)
    weight.requires_grad_(not frozen)
    sizes = allocations(lambda: run(hidden, weight, None, shift_labels=labels))
    assert any(nbytes >= vocab * size * 4 for nbytes in sizes) is not frozen
    assert (weight.grad is None) is frozen


def test_k16_no_grad_keeps_nothing():
    hidden, weight, _, labels = batch()
    with torch.no_grad():
        loss, *_ = cut_cross_entropy_loss(hidden, weight, 256, shift_labels=labels)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss.double(), oracle(hidden, weight, None, labels)[0][0], rtol=1e-5, atol=0)


def test_k17_two_runs_are_equal_to_the_bit():
    runs = [run(*batch(bias=True)) for _ in range(2)]
    for a, b in zip(*(values + tuple(grads) for values, grads in runs)):
        assert torch.equal(a, b)


def test_k18_compiles_without_a_graph_break():
    hidden, weight, bias, labels = batch(bias=True)
    kernel = load_kernel()

    def f(hidden, weight, bias):
        from fused_linear_ce_trl.loss import loss_sums, mean_loss

        sums = loss_sums(kernel, hidden, weight, bias, labels, None, 1.0, 30.0)
        return mean_loss(sums, None)

    eager = torch.autograd.grad(f(hidden, weight, bias), (hidden, weight, bias))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(hidden, weight, bias), (hidden, weight, bias)), eager):
        torch.testing.assert_close(a, b)


def test_k19_backward_twice_raises_torchs_error():
    hidden, weight, _, labels = batch()
    loss, *_ = cut_cross_entropy_loss(hidden, weight, 256, labels=labels)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


# ---- the contract of TRL's _chunked_cross_entropy_loss


def test_f9_signature_is_that_of_chunked_cross_entropy_loss():
    from trl.trainer import sft_trainer

    parameters = inspect.signature(cut_cross_entropy_loss).parameters
    assert list(parameters) == [
        "hidden_states", "lm_head_weight", "chunk_size", "labels", "shift_labels", "num_items_in_batch", "logit_scale",
        "final_logit_softcapping", "lm_head_bias",
    ]  # fmt: skip
    theirs = getattr(sft_trainer, "_chunked_cross_entropy_loss", None)
    if theirs is not None:  # TRL <= 1.14
        assert [(p.name, p.default) for p in parameters.values()] == [
            (p.name, p.default) for p in inspect.signature(theirs).parameters.values()
        ]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_f9_equals_chunked_cross_entropy_loss(name):
    from trl.trainer import sft_trainer

    theirs = getattr(sft_trainer, "_chunked_cross_entropy_loss", None)
    if theirs is None:
        pytest.skip("gone since TRL 1.15")
    options = dict(TRANSFORMS[name])
    bias = options.pop("bias", False)
    ours = run(*batch(bias), num_items_in_batch=torch.tensor(40), **options)
    hidden, weight, offset, labels = batch(bias)
    out = theirs(hidden, weight, 8, labels=labels, num_items_in_batch=torch.tensor(40), lm_head_bias=offset, **options)
    out[0].backward()
    for a, b in zip(ours[0], out):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours[1], [t.grad for t in (hidden, weight, offset) if t is not None]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_items", [17, torch.tensor(17), torch.tensor([17])[0], torch.tensor(17.0)])
def test_r10_num_items_in_batch_divides(num_items):
    hidden, weight, _, labels = batch()
    expected = oracle(hidden, weight, None, labels, num_items=17)
    assert_close(run(hidden, weight, None, shift_labels=labels, num_items_in_batch=num_items), expected)


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0), 5])
def test_r5_r8_all_ignored_is_a_connected_zero(num_items):
    hidden, weight, bias, labels = batch(bias=True)
    labels.fill_(IGNORE_INDEX)
    (loss, correct, entropy, count), grads = run(hidden, weight, bias, labels, num_items_in_batch=num_items)
    assert (loss, correct, entropy, count) == (0, 0, 0, 0)
    assert len(grads) == 3 and all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_r8_one_dtype_per_output(dtype, empty):
    hidden, weight, _, labels = batch(dtype=dtype)
    labels = torch.full_like(labels, IGNORE_INDEX) if empty else labels
    out = cut_cross_entropy_loss(hidden, weight, 256, labels=labels)
    assert [t.dtype for t in out] == [torch.float32, torch.float32, torch.float32, torch.int64]
    assert all(t.shape == () for t in out)


def test_r5_all_ignored_allocates_no_float32_head():
    """Nothing is as large as float32 (V, H); the bfloat16 gradient that is returned has half of it."""
    vocab, size = 65_536, 64
    hidden = torch.zeros(1, 8, size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocab, size, dtype=torch.bfloat16, requires_grad=True)
    sizes = allocations(lambda: run(hidden, weight, None, torch.full((1, 8), IGNORE_INDEX)))
    assert max(sizes) == vocab * size * 2


def test_f3_logits_are_never_materialised():
    """Peak memory, the weight's gradient included, below a quarter of the float32 logits."""
    tokens, vocab, size = 1024, 262_144, 16
    hidden, weight, _, labels = batch(vocab=vocab, hidden_size=size, shape=(1, tokens))
    sizes = allocations(lambda: run(hidden, weight, None, shift_labels=labels.clamp(min=0)))
    held = peak = 0
    for nbytes in sizes:
        held += nbytes
        peak = max(peak, held)
    assert peak < tokens * vocab * 4 / 4


def allocations(f) -> list[int]:
    """Bytes of every CPU allocation of torch while f runs, in order; negative where memory was returned."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        f()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


# tokens x vocab x hidden size, whether the head trains -> rows of exponentials at once; None: the kernel's default
ROWS = {
    (16384, 151936, 1024, True): 2048,
    (16384, 262144, 640, True): 1280,
    (5000, 151936, 1024, True): 2048,  # by default all exponentials are kept
    (4096, 262144, 640, True): 1024,
    (8192, 50257, 768, True): None,
    (4096, 151936, 1024, True): None,  # all are kept, in the bytes of accumulator and chunk
    (16384, 128256, 2048, True): None,
    (8192, 151936, 4096, True): None,
    (8192, 151936, 4096, False): 2048,
    (2048, 151936, 4096, False): None,
    (16384, 1_000_000, 64, True): 768,
}


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_r12_exponentials_take_what_trls_loss_takes(case, weight_dtype):
    """On a GPU, by the kernel's own plan."""
    (*sizes, trained), rows = case, ROWS[case]
    kernel, bf16, needs = load_kernel(), torch.bfloat16, (True, trained, False)
    workspace = loss._smaller_workspace(kernel, *sizes, bf16, "cuda", bf16, weight_dtype, needs)
    if rows is None:
        assert workspace is None
        return
    default = kernel.plan(*sizes, bf16, weight_dtype=weight_dtype, needs=needs)
    plan = kernel.plan(*sizes, bf16, weight_dtype=weight_dtype, needs=needs, workspace=workspace)
    assert plan.gradients == "forward" and plan.flop_g == default.flop_g
    assert plan.chunk_rows == rows < max(default.chunk_rows, default.kept_rows)
    assert rows * sizes[1] * 2 <= max(sizes[1] * sizes[2] * 4, loss.LEAST_EXPONENTIALS) or rows <= loss.LEAST_ROWS
    assert plan.workspace_bytes < default.workspace_bytes


def test_r12_a_workspace_changes_no_result(monkeypatch):
    """It reaches the kernel, and the gradients are those of the default."""
    results, asked = [], []

    def bounded(*operands):
        asked.append(operands)
        return 1 << 20

    for function in (loss.workspace, bounded):
        monkeypatch.setattr(loss, "workspace", function)
        results.append(run(*batch(bias=True, shape=(8, 129), vocab=500)))
    assert len(asked) == 1
    assert_close(results[1], results[0])


def test_r12_the_workspace_of_a_cpu_is_the_default():
    hidden, weight, _, _ = batch()
    assert loss.workspace(load_kernel(), hidden, weight, None) is None


def test_r7_labels_or_shift_labels_are_required():
    hidden, weight, _, _ = batch()
    with pytest.raises(ValueError, match=re.escape("At least one of `labels` or `shift_labels` must be provided.")):
        cut_cross_entropy_loss(hidden, weight, 256)


def test_r7_i9_shift_labels_win():
    hidden, weight, _, labels = batch()
    shifted = labels.roll(-1)
    expected = oracle(hidden, weight, None, shifted)
    assert_close(run(hidden, weight, None, labels, shift_labels=shifted), expected)


def test_r6_the_last_position_of_a_row_is_not_projected():
    """Nor may it reach anything: NaN there would."""
    hidden, weight, _, labels = batch()
    expected = oracle(hidden[:, :-1], weight, None, labels[:, 1:])
    hidden = hidden.detach().clone()
    hidden[:, -1] = torch.nan
    hidden.requires_grad_()
    values, grads = run(hidden, weight, None, labels)
    assert_close((values, [grads[0][:, :-1], grads[1]]), expected)


@pytest.mark.parametrize("shift", [False, True])
def test_r2_exactly_the_valid_rows_are_projected(monkeypatch, shift):
    hidden, weight, _, labels = batch(shape=(4, 50))
    eager = importlib.import_module(f"{load_kernel().__name__}.backends.eager")
    project, rows = eager._project, []
    monkeypatch.setattr(eager, "_project", lambda x, *args: rows.append(len(x)) or project(x, *args))
    _, _, _, n_valid = cut_cross_entropy_loss(
        hidden, weight, 256, **({"shift_labels": labels} if shift else {"labels": labels})
    )
    assert sum(rows) == n_valid == ((labels if shift else labels[:, 1:]) != IGNORE_INDEX).sum()
    assert 0 < n_valid < 0.8 * labels.numel()


def test_r9_arguments_are_documented_in_order():
    doc = cut_cross_entropy_loss.__doc__
    assert "fused path" in doc
    args = re.search(r"Args:\n(.*?)\n\n", doc, re.DOTALL).group(1)
    documented = re.findall(r"^ {8}(\w+):", args, re.MULTILINE)
    assert documented == list(inspect.signature(cut_cross_entropy_loss).parameters)
