"""LinearCrossEntropy: a layer by the rules of `kernels`, and the function with the module's own weight.

That `kernels.kernelize` puts it into a model is tested with the build.
"""

import inspect

import pytest
import torch
from torch import nn

from .conftest import DEVICES
from .oracle import as_leaf, assert_same_bits, gradient_tolerance, make_inputs, reference, relative_error


class Head(nn.Module):
    """A module as it would be replaced, whose own forward must not run any more."""

    def __init__(self, weight, bias=None, with_bias_attribute=True):
        super().__init__()
        self.weight = nn.Parameter(weight)
        if with_bias_attribute:
            self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the module's own forward ran")


@pytest.fixture
def layer(kernel):
    return kernel.layers.LinearCrossEntropy


def replaced(layer, head):
    """What kernelize does."""
    head.forward = layer.forward.__get__(head)
    return head


@pytest.mark.parametrize("dev", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False, None], ids=["bias", "bias None", "no bias attribute"])
@pytest.mark.parametrize("lead", [(12,), (3, 4)], ids=str)
def test_it_equals_the_function(kernel, layer, dev, dtype, bias, lead):
    i = make_inputs(dev, dtype, lead, bias=bool(bias))
    head = replaced(layer, Head(i.weight.clone(), i.bias, with_bias_attribute=bias is not None))
    hidden = as_leaf(i.hidden, True)
    loss = head(hidden, i.targets)
    # with the same gradients wanted: what else a call computes may cost the loss its last bit
    x, w, b = i.leaves()
    same = kernel.fused_linear_cross_entropy(x, w, i.targets, b)
    assert_same_bits(loss.detach(), same.detach())
    loss.backward()
    expected = reference(*i.positional())
    assert relative_error(loss, expected.loss) <= 1e-5
    for grad, want in zip((hidden.grad, *(p.grad for p in head.parameters())), expected.grads):
        assert relative_error(grad, want) <= gradient_tolerance(dtype)


def test_it_follows_a_weight_that_changes(layer):
    """A layer has no state: a tied, replaced or updated weight is what it uses."""
    i = make_inputs(bias=False)
    head = replaced(layer, Head(i.weight.clone()))
    first = head(i.hidden, i.targets)
    with torch.no_grad():
        head.weight.mul_(0.5)
    second = head(i.hidden, i.targets)
    head.weight = nn.Parameter(i.weight)
    assert second != first
    assert_same_bits(head(i.hidden, i.targets).detach(), first.detach())


def test_it_is_a_pure_layer(layer):
    assert issubclass(layer, nn.Module) and layer.__bases__ == (nn.Module,)
    assert layer.__init__ is nn.Module.__init__, "a layer has no constructor"
    own = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert own <= {"has_backward", "can_torch_compile"}, "a layer has no members of its own"
    assert layer.has_backward is True and layer.can_torch_compile is True


def test_its_forward_takes_what_the_docstring_says(layer):
    parameters = inspect.signature(layer.forward).parameters
    assert list(parameters) == ["self", "hidden", "targets"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters.values())


def test_kernels_accepts_it(layer):
    """The check that kernelize makes, by kernels' own function."""
    module = pytest.importorskip("kernels.layer.layer", reason="needs the kernels package")
    module._validate_layer(check_cls=Head, cls=layer, repo="trl-lib/fused-linear-ce")


def test_it_compiles(layer):
    i = make_inputs(lead=(3, 4))
    head = replaced(layer, Head(i.weight.clone(), i.bias))
    expected = head(i.hidden, i.targets)
    expected_gradients = torch.autograd.grad(expected, list(head.parameters()))
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    loss = compiled(i.hidden, i.targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, list(head.parameters())), expected_gradients)
