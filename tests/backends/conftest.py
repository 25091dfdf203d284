"""Fixtures of the backends' tests."""

import types

import pytest
import torch

from ..conftest import submodule
from .reference import Where

NOTHING = types.SimpleNamespace(params={})
# The interpreter's arithmetic is numpy's, which warns of the NaN and inf that these tests provoke.
INTERPRETER = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:numpy"),
]


def pytest_collection_modifyitems(items):
    """Tiles in parts once more in bf16, fp16 with other roundings under the interpreter, are for the slow run."""
    for item in items:
        parameters = getattr(item, "callspec", NOTHING).params.values()
        if item.path.name == "test_epilogues.py" and torch.bfloat16 in parameters:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def base(kernel):
    return submodule(kernel, "backends.base")


@pytest.fixture
def backend(kernel):
    return submodule(kernel, "backends.triton")


@pytest.fixture
def launches(backend, monkeypatch):
    """The launches of the GEMM kernels, as they were set up."""
    made = []

    class Launch(backend._Launch):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(backend, "_Launch", Launch)
    return made


@pytest.fixture
def coefficients_type(kernel):
    return submodule(kernel, "loss").Coefficients


@pytest.fixture
def forced(kernel, monkeypatch):
    """The public functions with the Triton backend, whatever the device."""
    backends = submodule(kernel, "backends")
    monkeypatch.setattr(backends, "choose", lambda device, float64: "eager" if float64 else "triton")
    return kernel


@pytest.fixture(params=[pytest.param("interpreter", marks=INTERPRETER), pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, device, interpreted_bf16) -> Where:
    """The Triton backend's kernels under Triton's interpreter, or compiled for the GPU."""
    if request.param == "gpu":
        return Where(device, 261, 1031, 72)
    if device != "cpu":
        pytest.skip("this machine has a GPU, so Triton compiles the kernels for it")
    return Where("cpu", 19, 150, 24)


@pytest.fixture
def interpreted_bf16(monkeypatch, device):
    """Makes Triton's interpreter compute with bf16 as a GPU does.

    It holds bf16 as the integers of its bits; its dot product multiplies these, and its rounding truncates.
    """
    if device != "cpu":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, d, *precision):
        return dot(self, widen(a), widen(b), d, *precision)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return handle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
