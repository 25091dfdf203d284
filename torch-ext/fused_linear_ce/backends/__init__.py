"""Backends: the same seven functions (base.py), in torch operations (eager.py) and as Triton kernels (triton/)."""

import functools
import importlib
import importlib.util
from typing import Union

import torch

from .base import accumulation_dtype

TRITON_DEVICES = ("cuda", "xpu")  # ROCm's torch calls its devices "cuda" too


HAS_TRITON = importlib.util.find_spec("triton") is not None
MIN_CAPABILITY = 8  # NVIDIA's Ampere: below it there is no bf16 tensor core for E


def choose(device: Union[torch.device, str], float64: bool) -> str:
    """Name of the backend for tensors on a device: by device, never by how torch was built.

    Of a device's type alone ("cuda"), it is the backend for the current device of that type.
    """
    device_type, index = (device, None) if isinstance(device, str) else (device.type, device.index)
    if float64 or device_type not in TRITON_DEVICES or not HAS_TRITON:
        return "eager"
    if device_type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        # (get_device_properties, which torch.compile folds into a constant)
        properties = torch.cuda.get_device_properties(index)
        return "triton" if properties.major >= MIN_CAPABILITY else "eager"
    return "triton"


@functools.cache
def load(name: str):
    """The backend's module. Triton is imported here, on first use, so that importing the package never needs it."""
    return importlib.import_module(f".{name}", __package__)


def operand_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """dtype of the x that forward and dlogits take: the torch backend upcasts, the Triton backend does not."""
    return compute_dtype if name == "triton" else accumulation_dtype(compute_dtype)


def exps_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """dtype of E and dlogits, and of the x of grad_weight. Half precision's E is bf16 in the Triton backend, also for
    fp16 inputs: unnormalised exponentials need bf16's range."""
    half = compute_dtype in (torch.bfloat16, torch.float16)
    return torch.bfloat16 if name == "triton" and half else accumulation_dtype(compute_dtype)


def padded_vocab(name: str, vocab: int) -> int:
    """Row stride of an (R, V) buffer, in elements: whole 128-byte lines for the Triton backend's block stores."""
    return -(-vocab // 64) * 64 if name == "triton" else vocab
