"""The whole space of options, drawn at random, against the float64 result.

FUSED_LINEAR_CE_EXAMPLES sets the number of examples of each property (default: 300 on the CPU, 30 on an accelerator,
where a new combination of options is a new kernel). Without it the same examples are drawn in every run; with it, new
ones. A failure prints what reproduces it.
"""

import math
import os

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from . import oracle
from .conftest import DEVICES

EXAMPLES = os.environ.get("FUSED_LINEAR_CE_EXAMPLES")
SETTINGS = {
    "deadline": None,
    "derandomize": EXAMPLES is None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
    # Without a database of failures; `explain` would run every failure many times over.
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
    **({"database": None} if EXAMPLES is None else {}),
}
ACCELERATOR = DEVICES[1]
RUNS = [
    ("cpu", int(EXAMPLES or 300), ()),
    (ACCELERATOR.values[0], int(EXAMPLES or 30), ACCELERATOR.marks),
]
RUNS = [pytest.param(device, examples, id=device, marks=marks) for device, examples, marks in RUNS]


@st.composite
def leading_shapes(draw) -> tuple[int, ...]:
    """Shapes of 1 to about 40 tokens, and now and then none."""
    lead = draw(
        st.one_of(
            st.tuples(st.integers(1, 40)),
            st.tuples(st.integers(1, 6), st.integers(1, 7)),
            st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
            st.sampled_from([(), (0,), (2, 0)]),
        )
    )
    return lead


LAYOUTS = {
    "contiguous": lambda t: t,
    "misaligned": lambda t: torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t),
    "strided": lambda t: torch.stack((t, torch.zeros_like(t)), -1)[..., 0],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "padded": lambda t: torch.cat((t, torch.zeros_like(t)), -1)[..., : t.shape[-1]] if t.dim() else t,
}


@st.composite
def problems(draw, device: str) -> tuple[oracle.Inputs, dict]:
    """Inputs, and the options that both functions have."""
    lead = draw(leading_shapes())
    vocab = draw(st.one_of(st.integers(1, 300), st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257])))
    hidden_size = draw(st.one_of(st.integers(1, 48), st.sampled_from([8, 16, 32, 64])))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    ignore_index = draw(st.one_of(st.sampled_from([-100, -1, vocab, 10**6]), st.integers(0, vocab - 1)))
    inputs = oracle.make_inputs(
        device, dtype, lead, vocab, hidden_size,
        bias=draw(st.booleans()),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        ignore_index=ignore_index,
        spread=draw(st.sampled_from([0.1, 1.0, 3.0])),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip
    if inputs.bias is not None and vocab > 2 and draw(st.booleans()):
        # Mask some classes, none of them a target (z_y = -inf is a test of its own).
        g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
        masked = (torch.rand(vocab, generator=g) < draw(st.sampled_from([0.1, 0.9]))).to(device)
        masked[inputs.targets[(inputs.targets >= 0) & (inputs.targets < vocab)].long()] = False
        masked[draw(st.integers(0, vocab - 1))] = False
        inputs.bias[masked] = -math.inf
    layouts = [LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(4)]
    inputs = oracle.Inputs(*(None if t is None else f(t) for f, t in zip(layouts, inputs.positional())))
    return inputs, {
        "ignore_index": ignore_index,
        "logit_scale": draw(st.sampled_from([1.0, 1.0, 0.5, 1.7])),
        "softcap": draw(st.sampled_from([None, None, 2.0, 30.0])),
    }


@st.composite
def workspaces(draw, kernel, inputs, needs, **how) -> "int | None":
    """The default, or from the smallest that such a call admits to a thousand times that."""
    if not any(needs) or draw(st.booleans()):
        return None
    least = oracle.smallest_workspace(kernel, inputs, needs=needs, **how)
    return least + int(least * draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 1000.0])))


def needed(inputs) -> st.SearchStrategy:
    """Which of (hidden, weight, bias) want a gradient: mostly all."""
    some = st.tuples(st.booleans(), st.booleans(), st.booleans())
    needs = st.one_of(st.just((True, True, True)), some)
    return needs.map(lambda n: (n[0], n[1], n[2] and inputs.bias is not None))


def noise(dtype: torch.dtype, device: str) -> float:
    """What a sum whose terms cancel may be off by, as a part of those terms: a few roundings of each."""
    if dtype in oracle.HALF and device != "cpu":
        return 4e-3  # the exponentials are bf16 there
    return 1e-14 if dtype == torch.float64 else 2e-6


def tolerance(dtype: torch.dtype) -> float:
    """The contract's, but for bfloat16's own rounding of a single element, which no average makes smaller here."""
    return 2.0**-8 if dtype == torch.bfloat16 else oracle.gradient_tolerance(dtype)


def masks(inputs) -> bool:
    return inputs.bias is not None and bool((inputs.bias == -math.inf).any())


@pytest.mark.parametrize(("device", "examples"), RUNS)
def test_loss_and_gradients(kernel, device, examples):
    @settings(max_examples=examples, **SETTINGS)
    @given(st.data())
    def holds(data):
        inputs, options = data.draw(problems(device), label="problem")
        dtype = inputs.hidden.dtype
        exact = oracle.value_dtype(dtype)
        vocab, lead = inputs.weight.shape[0], tuple(inputs.targets.shape)
        options["reduction"] = data.draw(st.sampled_from(["mean", "sum", "none"]))
        if options["reduction"] == "mean":
            items = st.sampled_from([None, 7, 7.5, torch.tensor(9), torch.tensor([3.0], device=device)])
            options["num_items"] = data.draw(items)
        # smoothing over a masked class costs infinity, as in torch; a softcap unmasks
        if not masks(inputs) or options["softcap"] is not None:
            options["label_smoothing"] = data.draw(st.sampled_from([0.0, 0.0, 0.1, 1.0]))
        options["z_loss"] = data.draw(st.sampled_from([0.0, 0.0, 1e-3, 0.5]))
        if data.draw(st.booleans(), label="class_weight"):
            options["class_weight"] = oracle.random((vocab,), device, exact, seed=5).abs() + 0.1
        if data.draw(st.booleans(), label="token_weight"):
            options["token_weight"] = oracle.random(lead, device, exact, seed=6).abs()
        needs = data.draw(needed(inputs), label="needs")
        upstream = {
            "mean": st.sampled_from([None, 0.0, 1.0, -2.5]),
            "none": st.sampled_from(["random", "ones", "expanded"]),
        }[options["reduction"] if options["reduction"] == "none" else "mean"]
        g = data.draw(upstream, label="upstream")
        if options["reduction"] == "none":
            ones = torch.ones((), device=device, dtype=exact)
            g = {
                "random": oracle.random(lead, device, exact, seed=7),
                "ones": torch.ones(lead, device=device, dtype=exact),
                "expanded": (2 * ones).expand(lead),
            }[g]
        elif g is not None:
            g = torch.tensor(g, device=device, dtype=exact)
        how = {"upstream": oracle.upstream_of(options["reduction"]), "row_scaled": oracle.row_scaled(options)}
        options["workspace"] = data.draw(workspaces(kernel, inputs, needs, **how), label="workspace")
        hypothesis.note(f"sizes {inputs.sizes}, {dtype}; {options}; needs {needs}; upstream {g}")
        if any(needs):
            hypothesis.note(str(oracle.plan_of(kernel, inputs, options["workspace"], needs=needs, **how)))

        outcome = oracle.run(kernel, inputs, upstream=g, needs=needs, return_metrics=True, **options)
        expected = oracle.reference(*inputs.positional(), upstream=g, **options)
        oracle.check(outcome, expected, dtype, tolerance=tolerance(dtype), noise=noise(dtype, device))

    holds()


@pytest.mark.parametrize(("device", "examples"), RUNS)
def test_log_probs_with_an_upstream_gradient_for_every_output(kernel, device, examples):
    @settings(max_examples=examples, **SETTINGS)
    @given(st.data())
    def holds(data):
        inputs, options = data.draw(problems(device), label="problem")
        dtype = inputs.hidden.dtype
        exact = oracle.value_dtype(dtype)
        names = [
            n for n in oracle.PER_TOKEN if n != "mean_logits" or not masks(inputs) or options["softcap"] is not None
        ]
        outputs = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True), label="outputs"))
        needs = data.draw(needed(inputs), label="needs")
        candidates = [name for name in outputs if name in oracle.DIFFERENTIABLE]
        chosen = data.draw(st.lists(st.sampled_from(candidates), unique=True), label="upstream") if candidates else []
        upstream = {}
        for name in chosen:
            upstream[name] = oracle.random(
                tuple(inputs.targets.shape), device, exact, seed=data.draw(st.integers(0, 9), label=f"seed of {name}")
            )
        how = {"upstream": "token", "row_scaled": "entropy" not in outputs or not any(needs)}
        options["workspace"] = data.draw(workspaces(kernel, inputs, needs, **how), label="workspace")
        hypothesis.note(f"sizes {inputs.sizes}, {dtype}; {options}; needs {needs}")

        values, outcome = oracle.run_log_probs(
            kernel, inputs, outputs=outputs, upstream=upstream, needs=needs, **options
        )
        expected, gradients = oracle.reference_log_probs(*inputs.positional(), upstream=upstream, **options)
        # a log-probability of nearly 0 is a difference of logits of this size
        size = float(expected["lse"].abs().max()) if expected["lse"].numel() else 0.0
        oracle.check_log_probs(values, expected, dtype, noise=(1e-15 if dtype == torch.float64 else 1e-6) * (1 + size))
        if upstream and any(needs):
            oracle.check_gradients(outcome, gradients, tolerance(dtype), noise=noise(dtype, device))

    holds()
