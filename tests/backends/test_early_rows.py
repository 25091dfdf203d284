"""The first rows' forward is launched before the rows are counted (Problem.early_rows): the same results, whatever the
count turns out to be. On a GPU: test_triton_gpu.py. Here the selection on the device is forced in the interpreter."""

import pytest
import torch

from .. import oracle
from ..conftest import submodule
from .conftest import INTERPRETER

pytest.importorskip("triton")
pytestmark = INTERPRETER

TOKENS, VOCAB, WIDTH = 48, 90, 24
EARLY = 8  # of a quarter, 12, the whole tiles of 8
IGNORED = [0.0, 0.3, 0.9, 1.0]
WAYS = {
    "one chunk": {},
    "several chunks": {"workspace": "forward"},
    "kept": {"reduction": "none"},
    "kept and recomputed": {"reduction": "none", "workspace": "kept"},
    "recomputed": {"reduction": "none", "softcap": 5.0, "label_smoothing": 0.1},
}


@pytest.fixture
def launched(forced, kernel, device, interpreted_bf16, monkeypatch) -> list:
    """Rows and stored of every forward launch, in order; "counted" where the host waits."""
    if device != "cpu":
        pytest.skip("this machine has a GPU, so Triton compiles the kernels for it")
    monkeypatch.setattr(submodule(kernel, "plan"), "LEAST_UNSPLIT", 0)
    passes, backend = submodule(kernel, "passes"), submodule(kernel, "backends.triton")
    monkeypatch.setattr(passes, "_selects_on_device", lambda plan, targets: True)
    monkeypatch.setattr(passes, "_LEAST_EARLY_ROWS", 1)
    monkeypatch.setattr(passes, "ROW_MULTIPLE", EARLY)
    events, forward, select = [], backend.forward, backend.select

    def logged_forward(x, targets, head, wants, stats, exps=None, tiles=None):
        events.append((x.shape[0], exps is not None))
        forward(x, targets, head, wants, stats, exps, tiles)

    def logged_select(*args):
        found = select(*args)
        return found._replace(count=lambda: (events.append("counted"), found.count())[1])

    monkeypatch.setattr(backend, "forward", logged_forward)
    monkeypatch.setattr(backend, "select", logged_select)
    return events


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_results(kernel, launched, way, ignored):
    inputs = oracle.make_inputs("cpu", torch.bfloat16, (TOKENS,), VOCAB, WIDTH, ignored=ignored)
    options = dict(WAYS[way])
    reduction = options.setdefault("reduction", "mean")
    if "workspace" in options:
        options["workspace"] = oracle.workspace_for(
            kernel, options["workspace"], inputs, upstream=oracle.upstream_of(reduction)
        )
    g = oracle.random((TOKENS,), "cpu") if reduction == "none" else torch.tensor(-1.5)
    outcome = oracle.run(kernel, inputs, upstream=g, return_metrics=True, **options)
    workspace = options.pop("workspace", None)
    oracle.check(outcome, oracle.reference(*inputs.positional(), upstream=g, **options), torch.bfloat16)
    (early, stored), *rest = launched
    assert rest[0] == "counted"
    assert early <= EARLY and stored == (way != "recomputed")
    if workspace is None:
        assert early == EARLY
        valid = int((inputs.targets != -100).sum())
        assert [e for e in rest if e != "counted"] == ([(valid - EARLY, stored)] if valid > EARLY else [])


def test_of_a_long_batch_as_many_as_keep_the_device_busy(kernel, launched, monkeypatch):
    monkeypatch.setattr(submodule(kernel, "passes"), "_MOST_EARLY_ROWS", 5)
    inputs = oracle.make_inputs("cpu", torch.bfloat16, (TOKENS,), VOCAB, WIDTH, ignored=0.0)
    oracle.check(oracle.run(kernel, inputs), oracle.reference(*inputs.positional()), torch.bfloat16)
    assert launched == [(5, True), "counted", (TOKENS - 5, True)]


@pytest.mark.parametrize("ignored", IGNORED)
def test_forward_only(kernel, launched, ignored):
    inputs = oracle.make_inputs("cpu", torch.bfloat16, (TOKENS,), VOCAB, WIDTH, ignored=ignored)
    with torch.no_grad():
        out = kernel.fused_linear_log_probs(*inputs.positional(), outputs=oracle.PER_TOKEN)
    expected, _ = oracle.reference_log_probs(*inputs.positional())
    oracle.check_log_probs({n: getattr(out, n) for n in oracle.PER_TOKEN}, expected, torch.bfloat16)
    assert launched[:2] == [(EARLY, False), "counted"]
