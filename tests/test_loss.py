"""loss.py's formulas against torch.nn.functional.cross_entropy and against autograd, in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from .conftest import submodule

ROWS, VOCAB = 6, 11
OPTIONS = list(itertools.product((0.0, 0.3, 1.0), (0.0, 0.2), (False, True), (False, True)))


@pytest.fixture
def loss(kernel):
    return submodule(kernel, "loss")


@pytest.fixture
def rows():
    """(logits, targets, class weights, token weights, upstream gradients); one class and one token of weight 0."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    class_weight, token_weight = new(VOCAB).abs(), new(ROWS)
    class_weight[2] = token_weight[1] = 0.0
    targets = torch.tensor([0, 2, 10, 3, 3, 7])
    return (3 * new(ROWS, VOCAB)).requires_grad_(), targets, class_weight, token_weight, new(ROWS)


def statistics(z, targets, class_weight):
    """(log_prob, entropy, lse, sum_log_probs) of each row."""
    lse = torch.logsumexp(z, 1)
    weights = 1.0 if class_weight is None else class_weight
    log_prob = z.gather(1, targets[:, None])[:, 0] - lse
    return log_prob, lse - (torch.softmax(z, 1) * z).sum(1), lse, (weights * torch.log_softmax(z, 1)).sum(1)


def family(z, targets, c, class_weight):
    """dz of loss.py's gradient family."""
    log_p = torch.log_softmax(z, 1)
    p = log_p.exp()
    b = 0.0 if c.b is None else c.b[:, None]
    entropy = -(p * log_p).sum(1, keepdim=True)
    dz = p * (c.a[:, None] + b * (log_p + entropy)) + (c.r - c.a)[:, None] * F.one_hot(targets, VOCAB)
    if c.d is not None:
        dz = dz + c.d[:, None] * (1.0 if class_weight is None else class_weight)
    return dz


@pytest.mark.parametrize("smoothing, z_loss, weighted, token_weighted", OPTIONS)
def test_token_loss_and_its_derivative(loss, rows, smoothing, z_loss, weighted, token_weighted):
    z, targets, class_weight, token_weight, grad = rows
    class_weight = class_weight if weighted else None
    token_weight = token_weight if token_weighted else None
    target_weight = class_weight[targets] if weighted else None
    options = loss.LossOptions(smoothing, z_loss, VOCAB)
    log_prob, _, lse, sum_log_probs = statistics(z, targets, class_weight)

    value = loss.token_loss(log_prob, lse, sum_log_probs, target_weight, token_weight, options)
    expected = F.cross_entropy(z, targets, class_weight, label_smoothing=smoothing, reduction="none")
    expected = expected + z_loss * lse**2
    expected = expected * token_weight if token_weighted else expected
    torch.testing.assert_close(value, expected)

    (autograd,) = torch.autograd.grad((grad * value).sum(), z)
    with torch.no_grad():
        upstream = loss.token_loss_upstream(grad, lse, target_weight, token_weight, options)
        assert upstream.entropy is None
        assert (upstream.sum_log_probs is None) == (smoothing == 0)
        assert (upstream.lse is None) == (z_loss == 0)
        c = loss.coefficients(upstream, class_weight.sum() if weighted else VOCAB, like=lse)
        dz = family(z, targets, c, class_weight)
    torch.testing.assert_close(dz, autograd)


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=4)))
def test_coefficients_of_every_mix_of_upstream_gradients(loss, rows, present):
    z, targets, class_weight, _, _ = rows
    generator = torch.Generator().manual_seed(1)
    names = ("log_prob", "entropy", "lse", "sum_log_probs")
    grads = [torch.randn(ROWS, generator=generator, dtype=torch.float64) if used else None for used in present]
    values = statistics(z, targets, class_weight)
    objective = sum((g * v).sum() for g, v in zip(grads, values) if g is not None) + 0.0 * z.sum()
    (autograd,) = torch.autograd.grad(objective, z)
    with torch.no_grad():
        c = loss.coefficients(loss.Upstream(**dict(zip(names, grads))), class_weight.sum(), like=values[0])
        assert (c.b is None) == (not present[1])
        assert (c.d is None) == (not present[3])
        dz = family(z, targets, c, class_weight)
    torch.testing.assert_close(dz, autograd)


def test_coefficients_take_their_form_from_like(loss):
    like = torch.ones(3, dtype=torch.float64)
    c = loss.coefficients(loss.Upstream(), None, like)
    for value in (c.a, c.r):
        assert value.dtype == torch.float64
        assert value.tolist() == [0, 0, 0]
    assert c.b is None and c.d is None


def test_smoothing_is_spread_over_all_classes(loss):
    assert loss.LossOptions(0.1, 0.0, 5).smoothing_per_class == 0.02


def test_formulas_do_not_change_their_arguments(loss):
    tensors = [torch.linspace(-2, 2, 5) for _ in range(6)]
    copies = [t.clone() for t in tensors]
    options = loss.LossOptions(0.1, 0.1, 7)
    loss.token_loss(*tensors[:5], options)
    upstream = loss.token_loss_upstream(tensors[5], tensors[1], *tensors[3:5], options)
    loss.coefficients(upstream, 7, tensors[0])
    for tensor, copy in zip(tensors, copies):
        assert torch.equal(tensor, copy)
