"""Tile shapes of the GEMM kernels: shipped configurations for tuned devices, a conservative table for all others.

Nothing is measured when a kernel is called. `benchmarks/tune.py` writes configs/<device>.json; a device without a file
takes HEURISTICS, which were not timed on anything but the H200.
"""

import functools
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """How a persistent GEMM kernel is cut and scheduled."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int  # row tiles that share a column of weight tiles
    loads: str  # how operands come in: "pointers", "descriptors" (bulk tensor copies) or "pipeline" (hopper.py's)


# For the few rows that hopper.py's kernel leaves to forward_kernels.py's: the same column tile, and few rows, since
# the first call of all waits for its compilation.
REPAIR = Tiles(32, 256, 32, 8, 2, 16, "pointers")

# By the kind of operands. Small tiles for fp32, whose dot has no tensor core unless TF32 is allowed.
HEURISTICS = {
    "half": Tiles(128, 128, 32, 8, 3, 8, "pointers"),
    "float32": Tiles(64, 64, 32, 4, 2, 8, "pointers"),
    # sm_100, with descriptors
    "half_descriptors": Tiles(128, 256, 64, 8, 3, 16, "descriptors"),
    # sm_90: the tile is hopper.py's own. 16 row tiles of 128 by 132 / 16 column tiles of 256: as square as it gets.
    "half_pipeline": Tiles(128, 256, 64, 4, 4, 16, "pipeline"),
}


@functools.cache
def _shipped(device_name: str) -> dict:
    path = Path(__file__).parent / "configs" / (device_name.replace(" ", "_") + ".json")
    return json.loads(path.read_text()) if path.is_file() else {}


class _Device(NamedTuple):
    name: str
    multiprocessors: int
    best: str  # of Tiles.loads


@functools.cache
def _device(device: torch.device) -> _Device:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # Hopper and data-center Blackwell; the consumer chips after them lack the shared memory for those tiles.
        best = {9: "pipeline", 10: "descriptors"}.get(properties.major, "pointers")
        best = "pointers" if torch.version.hip else best
        if best == "pipeline" and not _has_pipeline():
            best = "descriptors"
        return _Device(properties.name, properties.multi_processor_count, best)
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        return _Device(properties.name, properties.gpu_subslice_count, "pointers")
    return _Device("interpreter", 2, "descriptors")


@functools.cache
def _has_pipeline() -> bool:
    """Whether this Triton's Gluon is one that hopper.py is written for; without it Hopper is slower, not wrong."""
    try:
        from . import hopper  # noqa: F401
    except (ImportError, AttributeError) as error:
        warnings.warn(f"fused-linear-ce runs its slower kernels: Triton's Gluon can't be used ({error})", stacklevel=2)
        return False
    return True


def multiprocessors(device: torch.device) -> int:
    return _device(device).multiprocessors


def best_loads(device: torch.device) -> str:
    """The best of Tiles.loads that the device has."""
    return _device(device).best


def tiles(device: torch.device, dtype: torch.dtype, hidden_size: int, aligned: bool, store: bool) -> Tiles:
    """The tiles of forward_kernel and dlogits_kernel.

    aligned: all operands can be read by tensor descriptors. store: the kernel writes an (R, V) result.
    """
    name, _, best = _device(device)
    if name == "interpreter":
        return Tiles(16, 32, 16, 4, 1, 2, "descriptors" if aligned else "pointers")
    if dtype == torch.float32:
        return HEURISTICS["float32"]
    if best == "pointers" or not aligned:
        return HEURISTICS["half"]
    for entry in _shipped(name).get("store" if store else "forward", []):
        if hidden_size <= entry["max_hidden_size"] and entry["tiles"]["loads"] == best:
            return Tiles(**entry["tiles"])
    return HEURISTICS[f"half_{best}"]


def weight_tile(hidden_size: int) -> tuple[int, int]:
    """(classes, columns) of a tile of hopper.weight_kernel: the wide one needs less of the shared memory's bandwidth,
    the narrow one wastes less at the edge."""
    wasted = -hidden_size % 256
    return (256, 128) if wasted >= 128 and hidden_size < 4096 else (128, 256)
