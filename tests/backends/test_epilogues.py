"""A tile in several parts, as Hopper's kernels have it: the tests of test_triton.py with each tile in quarters, under
Triton's interpreter. On a GPU there are kernels that do that by themselves."""

import sys

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl

from . import test_triton

# epilogues.py's own functions: the kernel under test is a fixture.
whole_bias = whole_statistics = whole_gradient = None


@triton.jit
def halves(tile):
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).trans(0, 2, 1).split()


@triton.jit
def quarters(tile):
    left, right = halves(tile)
    a, b = halves(left)
    c, d = halves(right)
    return a, b, c, d


@triton.jit
def quartered_bias(bias, at, column, V, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr):
    return whole_bias(bias, tl.arange(0, COLUMNS // 4), column, V, COLUMNS, HAS_BIAS, COMPUTE)


@triton.jit
def joined(left, right):
    return tl.join(left, right).trans(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@triton.jit
def quartered_statistics(
    products, at, column_tile, rows, live, y, here, any_here, c, biases, class_weight, scratch, partials,
    R, V, plane, logit_scale, softcap, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, SHIFTED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    e = whole_statistics(
        quarters(products[0]), tl.arange(0, COLUMNS // 4), column_tile, rows, live, y, here, any_here, c,
        biases, class_weight, scratch, partials, R, V, plane, logit_scale, softcap, DTYPE,
        COLUMNS, STORE, SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, ENTROPY, SQUARES, SHIFTED, COMPUTE,
    )  # fmt: skip
    return (joined(joined(e[0], e[1]), joined(e[2], e[3])),)


@triton.jit
def quartered_gradient(
    products, at, column, rows, live, y, here, any_here, coefficients, row_target, row_r, biases, class_weight,
    V, logit_scale, softcap, DTYPE: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_B: tl.constexpr, HAS_D: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    v = whole_gradient(
        quarters(products[0]), tl.arange(0, COLUMNS // 4), column, rows, live, y, here, any_here, coefficients,
        row_target, row_r, biases, class_weight, V, logit_scale, softcap, DTYPE, COLUMNS,
        SCALED, HAS_BIAS, HAS_SOFTCAP, HAS_CLASS_WEIGHT, HAS_B, HAS_D, COMPUTE,
    )  # fmt: skip
    return (joined(joined(v[0], v[1]), joined(v[2], v[3])),)


@pytest.fixture(autouse=True)
def quartered(backend, device, monkeypatch):
    if device != "cpu":
        pytest.skip("what is compiled can't be replaced")
    this = sys.modules[__name__]
    monkeypatch.setattr(this, "whole_bias", backend.fwd.tile_bias)
    monkeypatch.setattr(this, "whole_statistics", backend.fwd.tile_statistics)
    monkeypatch.setattr(this, "whole_gradient", backend.bwd.tile_gradient)
    for kernels in (backend.fwd, backend.bwd):
        monkeypatch.setattr(kernels, "tile_bias", quartered_bias)
    monkeypatch.setattr(backend.fwd, "tile_statistics", quartered_statistics)
    monkeypatch.setattr(backend.bwd, "tile_gradient", quartered_gradient)


class TestForwardInParts(test_triton.TestForward):
    pass


class TestRepairInParts(test_triton.TestRepair):
    pass


class TestDlogitsInParts(test_triton.TestDlogits):
    pass
