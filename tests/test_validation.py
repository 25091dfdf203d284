"""Every message about wrong input: its type, the argument it names, and the value it shows."""

import math
import re

import pytest
import torch

from .conftest import submodule
from .oracle import make_inputs, plan_of, unchanged

N, V, H = 6, 11, 4


def arguments(**changes) -> dict:
    """Right ones, with changes."""
    i = make_inputs(lead=(2, 3), vocab=V, hidden_size=H, ignored=0.2)
    return {"hidden": i.hidden, "weight": i.weight, "targets": i.targets, "bias": i.bias, **changes}


def zeros(*shape, **options) -> torch.Tensor:
    return torch.zeros(shape, **options)


# What both functions, and the four raw ones, refuse: (error, what the message says in this order, the argument)
SHARED = {
    "hidden is no tensor": (TypeError, ["hidden", "torch.Tensor", "list"], {"hidden": [[1.0]]}),
    "weight is no tensor": (TypeError, ["weight", "torch.Tensor", "ndarray"], {"weight": zeros(V, H).numpy()}),
    "targets is no tensor": (TypeError, ["targets", "torch.Tensor", "int"], {"targets": 3}),
    "bias is no tensor": (TypeError, ["bias", "torch.Tensor", "float"], {"bias": 0.5}),
    "hidden holds integers": (TypeError, ["hidden", "float32", "torch.int64"], {"hidden": zeros(2, 3, H).long()}),
    "weight is complex": (TypeError, ["weight", "float32", "complex64"], {"weight": zeros(V, H) * 1j}),
    "bias holds bools": (TypeError, ["bias", "float32", "torch.bool"], {"bias": zeros(V).bool()}),
    "weight is float8": (TypeError, ["weight", "float8"], {"weight": zeros(V, H).to(torch.float8_e4m3fn)}),
    "targets hold floats": (TypeError, ["targets", "integers", "torch.float32"], {"targets": zeros(2, 3)}),
    "targets hold bools": (TypeError, ["targets", "integers", "torch.bool"], {"targets": zeros(2, 3).bool()}),
    "weight is sparse": (TypeError, ["weight", "dense", "sparse"], {"weight": zeros(V, H).to_sparse()}),
    "hidden is nested": (
        TypeError, ["hidden", "dense"], {"hidden": torch.nested.nested_tensor([zeros(2, H), zeros(3, H)])},
    ),
    "hidden has no dimension": (ValueError, ["hidden", "0-d"], {"hidden": torch.tensor(1.0)}),
    "weight has one dimension": (ValueError, ["weight", "(vocab, hidden_size)", "(44,)"], {"weight": zeros(44)}),
    "weight has three dimensions": (ValueError, ["weight", "(1, 11, 4)"], {"weight": zeros(1, V, H)}),
    "weight is empty": (ValueError, ["weight", "(0, 4)"], {"weight": zeros(0, H)}),
    "sizes differ": (ValueError, ["hidden", "4", "(2, 3, 4)", "weight", "5", "(11, 5)"], {"weight": zeros(V, 5)}),
    "targets are flat": (ValueError, ["targets", "(2, 3)", "(6,)"], {"targets": zeros(6).long()}),
    "targets are one short": (ValueError, ["targets", "(2, 3)", "(2, 2)"], {"targets": zeros(2, 2).long()}),
    "targets are one-hot": (ValueError, ["targets", "(2, 3)", "(2, 3, 11)"], {"targets": zeros(2, 3, V).long()}),
    "bias is too long": (ValueError, ["bias", "(11,)", "(12,)"], {"bias": zeros(12)}),
    "bias is a matrix": (ValueError, ["bias", "(11,)", "(1, 11)"], {"bias": zeros(1, V)}),
    "weight is elsewhere": (ValueError, ["weight", "meta", "hidden", "cpu"], {"weight": zeros(V, H, device="meta")}),
    "bias is elsewhere": (ValueError, ["bias", "meta", "hidden", "cpu"], {"bias": zeros(V, device="meta")}),
    "targets are elsewhere": (
        ValueError, ["targets", "meta", "hidden", "cpu"], {"targets": zeros(2, 3, device="meta").long()},
    ),
    "dtypes differ": (TypeError, ["hidden", "float32", "weight", "float64"], {"weight": zeros(V, H).double()}),
    "bias differs": (TypeError, ["hidden", "float32", "bias", "bfloat16"], {"bias": zeros(V).bfloat16()}),
    "a target is outside": (
        IndexError, ["targets", "11", "position 5", "[0, 11)", "ignore_index=-100"],
        {"targets": torch.tensor([[0, 1, 2], [3, -100, 11]])},
    ),
    "a target is negative": (
        IndexError, ["targets", "-1", "position 0", "[0, 11)", "ignore_index=-100"],
        {"targets": torch.tensor([[-1, 1, 2], [3, -100, 10]])},
    ),
    "ignore_index is a float": (TypeError, ["ignore_index", "int", "float", "-100.0"], {"ignore_index": -100.0}),
    "ignore_index is beyond int64": (ValueError, ["ignore_index", "64 bits", str(2**63)], {"ignore_index": 2**63}),
    "ignore_index is a bool": (TypeError, ["ignore_index", "int", "bool", "True"], {"ignore_index": True}),
    "ignore_index is None": (TypeError, ["ignore_index", "int", "None"], {"ignore_index": None}),
    "logit_scale is a string": (TypeError, ["logit_scale", "number", "'1'"], {"logit_scale": "1"}),
    "logit_scale is a tensor": (TypeError, ["logit_scale", "number", "Tensor"], {"logit_scale": torch.ones(())}),
    "logit_scale is None": (TypeError, ["logit_scale", "number", "None"], {"logit_scale": None}),
    "logit_scale is NaN": (ValueError, ["logit_scale", "finite", "nan"], {"logit_scale": math.nan}),
    "logit_scale is infinite": (ValueError, ["logit_scale", "finite", "inf"], {"logit_scale": math.inf}),
    "softcap is zero": (ValueError, ["softcap", "positive", "None", "0.0"], {"softcap": 0}),
    "softcap is negative": (ValueError, ["softcap", "positive", "-3.0"], {"softcap": -3.0}),
    "softcap is infinite": (ValueError, ["softcap", "finite", "inf"], {"softcap": math.inf}),
    "softcap is a bool": (TypeError, ["softcap", "number", "False"], {"softcap": False}),
    "workspace is zero": (ValueError, ["workspace", "positive", "0"], {"workspace": 0}),
    "workspace is negative": (ValueError, ["workspace", "positive", "-1"], {"workspace": -1}),
    "workspace is a float": (TypeError, ["workspace", "int", "float"], {"workspace": 1e9}),
    "workspace is a string": (TypeError, ["workspace", "int", "str"], {"workspace": "1GiB"}),
    "workspace is a bool": (TypeError, ["workspace", "int", "bool"], {"workspace": True}),
}  # fmt: skip

LOSS = {
    "reduction is unknown": (ValueError, ["reduction", "mean", "sum", "none", "'avg'"], {"reduction": "avg"}),
    "reduction is None": (ValueError, ["reduction", "None"], {"reduction": None}),
    "return_metrics is an int": (TypeError, ["return_metrics", "bool", "int"], {"return_metrics": 1}),
    "num_items without a mean": (
        ValueError, ["num_items", "mean", "'sum'"], {"num_items": 3, "reduction": "sum"},
    ),
    "num_items with no reduction": (
        ValueError, ["num_items", "mean", "'none'"], {"num_items": 3, "reduction": "none"},
    ),
    "num_items has two elements": (ValueError, ["num_items", "one", "(2,)"], {"num_items": zeros(2)}),
    "num_items has none": (ValueError, ["num_items", "one", "(0,)"], {"num_items": zeros(0)}),
    "num_items is negative": (ValueError, ["num_items", "negative", "-5"], {"num_items": -5}),
    "num_items is NaN": (ValueError, ["num_items", "finite", "nan"], {"num_items": math.nan}),
    "num_items is a string": (TypeError, ["num_items", "number", "'3'"], {"num_items": "3"}),
    "num_items is a bool": (TypeError, ["num_items", "number", "True"], {"num_items": True}),
    "num_items holds a bool": (TypeError, ["num_items", "torch.bool"], {"num_items": torch.tensor(True)}),
    "num_items is complex": (TypeError, ["num_items", "complex64"], {"num_items": torch.tensor(1j)}),
    "num_items requires grad": (
        ValueError, ["num_items", "requires grad"], {"num_items": torch.tensor(3.0, requires_grad=True)},
    ),
    "label_smoothing is negative": (ValueError, ["label_smoothing", "0", "1", "-0.1"], {"label_smoothing": -0.1}),
    "label_smoothing is too large": (ValueError, ["label_smoothing", "0", "1", "1.5"], {"label_smoothing": 1.5}),
    "label_smoothing is NaN": (ValueError, ["label_smoothing", "nan"], {"label_smoothing": math.nan}),
    "label_smoothing is None": (TypeError, ["label_smoothing", "number", "None"], {"label_smoothing": None}),
    "z_loss is negative": (ValueError, ["z_loss", "negative", "-1.0"], {"z_loss": -1.0}),
    "z_loss is infinite": (ValueError, ["z_loss", "finite", "inf"], {"z_loss": math.inf}),
    "z_loss is a string": (TypeError, ["z_loss", "number", "'big'"], {"z_loss": "big"}),
    "class_weight is a list": (TypeError, ["class_weight", "torch.Tensor", "list"], {"class_weight": [1.0] * V}),
    "class_weight holds integers": (TypeError, ["class_weight", "int64"], {"class_weight": zeros(V).long()}),
    "class_weight is too short": (ValueError, ["class_weight", "(11,)", "(10,)"], {"class_weight": zeros(10)}),
    "class_weight is elsewhere": (
        ValueError, ["class_weight", "meta", "cpu"], {"class_weight": zeros(V, device="meta")},
    ),
    "class_weight requires grad": (
        ValueError, ["class_weight", "requires grad", "detach"], {"class_weight": zeros(V, requires_grad=True)},
    ),
    "token_weight is a number": (TypeError, ["token_weight", "torch.Tensor", "float"], {"token_weight": 0.5}),
    "token_weight holds bools": (TypeError, ["token_weight", "torch.bool"], {"token_weight": zeros(2, 3).bool()}),
    "token_weight is flat": (ValueError, ["token_weight", "(2, 3)", "(6,)"], {"token_weight": zeros(6)}),
    "token_weight is elsewhere": (
        ValueError, ["token_weight", "meta", "cpu"], {"token_weight": zeros(2, 3, device="meta")},
    ),
    "token_weight requires grad": (
        ValueError, ["token_weight", "requires grad", "detach"], {"token_weight": zeros(2, 3, requires_grad=True)},
    ),
}  # fmt: skip

LOG_PROBS = {
    "outputs is unknown": (ValueError, ["outputs", "log_probs", "is_top1", "'logits'"], {"outputs": ("logits",)}),
    "outputs is an unknown string": (ValueError, ["outputs", "'loss'"], {"outputs": "loss"}),
    "outputs is empty": (ValueError, ["outputs", "at least one", "log_probs"], {"outputs": ()}),
    "outputs is None": (TypeError, ["outputs", "None"], {"outputs": None}),
    "outputs is a number": (TypeError, ["outputs", "5"], {"outputs": 5}),
}


def refused(call, error, parts, **options) -> None:
    tensors = [value for value in options.values() if isinstance(value, torch.Tensor) and value.device.type == "cpu"]
    tensors = [t for t in tensors if not t.is_nested and t.layout == torch.strided]
    with unchanged(*tensors), pytest.raises(error) as raised:
        call(**options)
    message = str(raised.value)
    assert type(raised.value) is error, f"a {type(raised.value).__name__} from somewhere below"
    assert re.search(".*".join(map(re.escape, parts)), message, re.DOTALL), f"{message!r} lacks one of {parts}"


@pytest.mark.parametrize("name", [*SHARED, *LOSS])
def test_the_loss_refuses(kernel, name):
    error, parts, changes = {**SHARED, **LOSS}[name]
    refused(kernel.fused_linear_cross_entropy, error, parts, **arguments(**changes))
    refused(kernel.fused_linear_cross_entropy_forward, error, parts, **arguments(**changes))


@pytest.mark.parametrize("name", [*SHARED, *LOG_PROBS])
def test_the_log_probs_refuse(kernel, name):
    error, parts, changes = {**SHARED, **LOG_PROBS}[name]
    refused(kernel.fused_linear_log_probs, error, parts, **arguments(**changes))
    refused(kernel.fused_linear_log_probs_forward, error, parts, **arguments(**changes))


@pytest.mark.parametrize("name", [name for name in SHARED if "a target is" not in name])
def test_the_raw_backwards_refuse(kernel, name):
    error, parts, changes = SHARED[name]
    *_, saved = kernel.fused_linear_cross_entropy_forward(**arguments(), reduction="none")
    refused(
        kernel.fused_linear_cross_entropy_backward, error, parts, grad_loss=zeros(2, 3), saved=saved,
        reduction="none", **arguments(**changes),
    )  # fmt: skip
    _, saved = kernel.fused_linear_log_probs_forward(**arguments())
    refused(
        kernel.fused_linear_log_probs_backward, error, parts, grads=kernel.LogProbs(log_probs=zeros(2, 3)),
        saved=saved, **arguments(**changes),
    )  # fmt: skip


@pytest.mark.parametrize("reduction, shape", [("none", (3, 2)), ("none", ()), ("mean", (2, 3)), ("sum", (1,))])
def test_upstream_gradients_of_another_shape_are_refused(kernel, reduction, shape):
    *_, saved = kernel.fused_linear_cross_entropy_forward(**arguments(), reduction=reduction)
    refused(
        kernel.fused_linear_cross_entropy_backward, ValueError, ["grad_loss", str(shape)], grad_loss=zeros(*shape),
        saved=saved, reduction=reduction, **arguments(),
    )  # fmt: skip
    _, saved = kernel.fused_linear_log_probs_forward(**arguments())
    refused(
        kernel.fused_linear_log_probs_backward, ValueError, ["grads.log_probs", "(50,)"],
        grads=kernel.LogProbs(log_probs=zeros(50)), saved=saved, **arguments(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, value",
    [("n_tokens", -1), ("n_tokens", 2.5), ("vocab", 0), ("hidden_size", 0), ("dtype", torch.int8), ("dtype", "bf16"),
     ("weight_dtype", torch.int64), ("device_type", "cuda:0"), ("upstream", "foo"),
     ("needs", (True,)), ("needs", (1, 1, 0)), ("label_smoothing", 0.1), ("row_scaled", "no")],
)  # fmt: skip
def test_plan_refuses(kernel, name, value):
    sizes = {"n_tokens": 10, "vocab": 20, "hidden_size": 4, name: value}
    error = TypeError if name.endswith("dtype") or name in ("label_smoothing", "row_scaled") else ValueError
    refused(kernel.plan, error, [f"{name} must be", str(value)], **sizes)


@pytest.mark.parametrize(
    "forward, backward, parts",
    [
        ({}, {"reduction": "avg"}, ["reduction", "'avg'"]),
        ({"reduction": "none"}, {"reduction": "mean"}, ["reduction='mean'", '"none"']),
        ({"reduction": "sum"}, {"reduction": "none"}, ["reduction='none'", '"mean" or "sum"']),
        ({"needs_grad": (True, False, False)}, {}, ["needs_grad", "weight's gradient"]),
        ({"needs_grad": (False, True, True)}, {}, ["needs_grad", "hidden's gradient"]),
        ({}, {"needs_grad": ("yes", 1, None)}, ["needs_grad must be", "('yes', 1, None)"]),
        ({}, {"saved": ()}, ["saved must be", "a tuple of 0"]),
        ({}, {"saved": None}, ["saved must be", "NoneType"]),
        ({}, {"saved": (None,) * 5}, ["saved must be", "a tuple of 5"]),
    ],
)
def test_a_raw_backward_refuses_what_its_forward_did_not_do(kernel, forward, backward, parts):
    *_, saved = kernel.fused_linear_cross_entropy_forward(**arguments(), **forward)
    reduction = backward.get("reduction", forward.get("reduction", "mean"))
    grad_loss = zeros(2, 3) if reduction == "none" else zeros()
    given = {"saved": saved, "grad_loss": grad_loss, "reduction": reduction, **backward}
    refused(kernel.fused_linear_cross_entropy_backward, ValueError, parts, **arguments(), **given)


@pytest.mark.parametrize("saved", [(), None, [zeros(1)] * 5])
def test_the_log_probs_backward_refuses_what_no_forward_returned(kernel, saved):
    refused(
        kernel.fused_linear_log_probs_backward, ValueError, ["saved must be"], saved=saved,
        grads=kernel.LogProbs(log_probs=zeros(2, 3)), **arguments(),
    )  # fmt: skip


def test_a_number_of_items_below_zero_is_refused_where_its_value_is_at_hand(kernel):
    for value in (-3, torch.tensor(-3), torch.tensor([-0.5])):
        refused(kernel.fused_linear_cross_entropy, ValueError, ["num_items", "negative"], **arguments(num_items=value))


def test_an_upstream_gradient_that_leads_nowhere_is_refused(kernel):
    _, saved = kernel.fused_linear_log_probs_forward(**arguments(), outputs=("log_probs", "mean_logits"))
    for name in ("mean_logits", "log_sum_sq_probs", "is_top1"):
        refused(
            kernel.fused_linear_log_probs_backward, ValueError, ["grads", name, "no gradient"],
            grads=kernel.LogProbs(**{name: zeros(2, 3)}), saved=saved, outputs=("log_probs", "mean_logits"),
            **arguments(),
        )  # fmt: skip
    refused(
        kernel.fused_linear_log_probs_backward, ValueError, ["grads", "entropy", "outputs", "('log_probs',)"],
        grads=kernel.LogProbs(entropy=zeros(2, 3)), saved=saved, outputs=("log_probs",), **arguments(),
    )  # fmt: skip


def test_every_argument_has_an_error(kernel):
    """What is checked here keeps up with the signatures."""
    import inspect

    tested = {name for _, _, changes in {**SHARED, **LOSS}.values() for name in changes}
    assert tested == set(inspect.signature(kernel.fused_linear_cross_entropy).parameters)
    tested = {name for _, _, changes in {**SHARED, **LOG_PROBS}.values() for name in changes}
    assert tested == set(inspect.signature(kernel.fused_linear_log_probs).parameters)


def test_nothing_of_this_is_refused(kernel):
    """The values next to those above."""
    for changes in (
        {"label_smoothing": 0}, {"label_smoothing": 1}, {"z_loss": 0}, {"logit_scale": 2}, {"logit_scale": -1.0},
        {"softcap": 1}, {"num_items": 3.5}, {"num_items": zeros(1, 1) + 2}, {"bias": None},
        {"class_weight": zeros(V).bfloat16() + 1}, {"token_weight": zeros(2, 3).double()}, {"workspace": 1 << 40},
        {"targets": torch.tensor([[0, 1, 2], [3, -100, 10]], dtype=torch.int16)},
        {"targets": torch.tensor([[0, 1, 2], [3, 3, 10]]), "ignore_index": 3},
    ):  # fmt: skip
        assert kernel.fused_linear_cross_entropy(**arguments(**changes)).isfinite(), changes


def test_autocast_lifts_the_error_about_dtypes_and_no_other(kernel):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernel.fused_linear_cross_entropy(**arguments(weight=zeros(V, H).bfloat16()))
        refused(
            kernel.fused_linear_cross_entropy, TypeError, ["hidden", "float32", "weight", "float64"],
            **arguments(weight=zeros(V, H).double()),
        )  # fmt: skip
        refused(
            kernel.fused_linear_cross_entropy, ValueError, ["weight", "(11, 5)"], **arguments(weight=zeros(V, 5))
        )


def test_a_workspace_that_is_too_small_says_what_is_needed(kernel):
    i = make_inputs()
    refused(
        kernel.fused_linear_cross_entropy, ValueError, ["workspace=1000", "needs", "bytes"],
        hidden=i.hidden.requires_grad_(), weight=i.weight, targets=i.targets, workspace=1000,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"workspace=1000 .* needs \d+ bytes"):
        plan_of(kernel, i, 1000)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"workspace.*{wrong}"):
            plan_of(kernel, i, wrong)
    with pytest.raises(TypeError, match="workspace"):
        plan_of(kernel, i, 1e6)


def test_errors_come_before_any_work(kernel, monkeypatch):
    """A wrong option is found before anything is projected, whatever the sizes."""
    passes = submodule(kernel, "passes")
    monkeypatch.setattr(passes, "Problem", lambda *a, **k: pytest.fail("work was begun"))
    for name, (error, _, changes) in {**SHARED, **LOSS}.items():
        if error is not IndexError:
            with pytest.raises(error):
                kernel.fused_linear_cross_entropy(**arguments(**changes))
                pytest.fail(name)
