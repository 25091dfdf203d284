"""Tile shapes of the GEMM kernels: shipped configurations for tuned devices, a conservative table for all others.

Nothing is measured when a kernel is called. `benchmarks/tune.py` writes configs/<device>.json; a device without a file
takes HEURISTICS, which were not timed on anything but the H200.
"""

import functools
import json
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
    flatten: bool  # software-pipeline across tiles
    descriptors: bool  # bulk tensor copies; needs sm_90 and aligned operands


# By the kind of operands. Small tiles for fp32, whose dot has no tensor core unless TF32 is allowed.
HEURISTICS = {
    "half": Tiles(128, 128, 32, 8, 3, 8, False, False),
    "float32": Tiles(64, 64, 32, 4, 2, 8, False, False),
    # sm_90 and sm_100, with descriptors
    "half_descriptors": Tiles(128, 256, 64, 8, 3, 16, False, True),
}


@functools.cache
def _shipped(device_name: str) -> dict:
    path = Path(__file__).parent / "configs" / (device_name.replace(" ", "_") + ".json")
    return json.loads(path.read_text()) if path.is_file() else {}


@functools.cache
def _device(device: torch.device) -> tuple[str, int, bool]:
    """(name, multiprocessors, has bulk tensor copies)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # Hopper and data-center Blackwell; the consumer chips after them lack the shared memory for those tiles.
        descriptors = torch.version.hip is None and properties.major in (9, 10)
        return properties.name, properties.multi_processor_count, descriptors
    if device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        return properties.name, properties.gpu_subslice_count, False
    return "interpreter", 2, True


def multiprocessors(device: torch.device) -> int:
    return _device(device)[1]


def has_descriptors(device: torch.device) -> bool:
    """Whether the device copies tiles in bulk and has the shared memory for large ones."""
    return _device(device)[2]


def tiles(device: torch.device, dtype: torch.dtype, hidden_size: int, aligned: bool, store: bool) -> Tiles:
    """The tiles of forward_kernel and dlogits_kernel.

    aligned: both operands can be read by tensor descriptors. store: the kernel writes an (R, V) result.
    """
    name, _, descriptors = _device(device)
    if name == "interpreter":
        return Tiles(16, 32, 16, 4, 1, 2, False, aligned)
    if dtype == torch.float32:
        return HEURISTICS["float32"]
    if not (descriptors and aligned):
        return HEURISTICS["half"]
    shipped = _shipped(name).get("store" if store else "forward", [])
    for entry in shipped:
        if hidden_size <= entry["max_hidden_size"]:
            return Tiles(**entry["tiles"])
    return HEURISTICS["half_descriptors"]
