"""Every check of the package and every message it raises; nothing else in the package raises for bad input.

Checks of shapes, dtypes and options cost nothing and run before anything is computed. Checks of *values* (a target
outside the vocabulary) would cost a synchronisation on an accelerator, so they run only where the data is on the CPU;
elsewhere such a row becomes NaN (see rows.py).
"""

import math
from typing import Optional

import torch

REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = ("log_probs", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _dense_tensor(name: str, value) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if type(value).__name__ == "DTensor":
        raise TypeError(
            f"{name} is a DTensor: this kernel works on one device's whole tensors. Gather it first with "
            f"{name}.full_tensor() (its gradient is then sharded and reduced by DTensor's own autograd)"
        )
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        raise TypeError(f"{name} must be a dense strided tensor, got layout {value.layout}")


def _floating(name: str, value) -> None:
    _dense_tensor(name, value)
    if value.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {value.dtype}")


def _same_device(name: str, value: torch.Tensor, hidden: torch.Tensor) -> None:
    if value.device != hidden.device:
        raise ValueError(f"{name} is on {value.device} but hidden is on {hidden.device}: move them to one device")


def check_tensors(hidden, weight, targets, bias) -> None:
    """hidden (..., H), weight (V, H), targets (...), bias (V,) or None."""
    _floating("hidden", hidden)
    _floating("weight", weight)
    _dense_tensor("targets", targets)
    if targets.dtype not in _INTEGERS:
        raise TypeError(f"targets must hold class indices as integers, got {targets.dtype}")
    if hidden.dim() == 0:
        raise ValueError("hidden must have shape (..., hidden_size), got a 0-d tensor")
    if weight.numel() == 0:
        partition = getattr(weight, "ds_shape", None)
        if weight.dim() == 2 and partition is None:
            raise ValueError(
                f"weight must have one class and one hidden unit at least, got shape {tuple(weight.shape)}"
            )
        what = f" (a DeepSpeed ZeRO-3 partition of a weight of shape {tuple(partition)})" if partition else ""
        raise ValueError(
            f"weight has no elements, shape {tuple(weight.shape)}{what}: gather it first, e.g. inside "
            "deepspeed.zero.GatheredParameters, in the forward and again in the backward pass"
        )
    if weight.dim() != 2:
        raise ValueError(f"weight must have shape (vocab, hidden_size), got {tuple(weight.shape)}")
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has hidden_size {hidden.shape[-1]}, of shape {tuple(hidden.shape)}, but weight has "
            f"{weight.shape[1]}, of shape {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must have hidden's leading shape {tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}"
        )
    _same_device("weight", weight, hidden)
    _same_device("targets", targets, hidden)
    if bias is not None:
        _floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        _same_device("bias", bias, hidden)


def check_compute_dtypes(hidden, weight, bias, autocast: bool) -> None:
    """Without autocast the operands of a linear layer share one dtype, as in torch.nn.functional.linear."""
    if autocast:
        return
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise TypeError(
                f"hidden is {hidden.dtype} but {name} is {value.dtype}: cast one of them, or call under torch.autocast"
            )


def check_ignore_index(ignore_index) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__} {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be an int of 64 bits, as targets are, got {ignore_index}")


def _real(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    value = float(value)
    if not -math.inf < value < math.inf:  # (math.isfinite breaks graphs of torch.compile)
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def check_logit_transform(logit_scale, softcap) -> tuple[float, Optional[float]]:
    """The two numbers as floats. softcap None means none; 0 would divide by zero and is refused."""
    logit_scale = _real("logit_scale", logit_scale)
    if softcap is not None:
        softcap = _real("softcap", softcap)
        if softcap <= 0:
            raise ValueError(f"softcap must be positive (or None for no cap), got {softcap}")
    return logit_scale, softcap


def check_reduction(reduction, num_items=None, return_metrics=False) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if not isinstance(return_metrics, bool):
        raise TypeError(f"return_metrics must be a bool, got {type(return_metrics).__name__} {return_metrics!r}")
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f"num_items is the divisor of reduction='mean' and means nothing with {reduction!r}")
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items must be a number or a one-element tensor, got shape {tuple(num_items.shape)}")
        if num_items.requires_grad:
            raise ValueError("num_items requires grad, but the loss is not differentiated with respect to it")
        if num_items.dtype.is_complex or num_items.dtype == torch.bool:
            raise TypeError(f"num_items must be an integer or floating-point tensor, got {num_items.dtype}")
        # As with targets, the value is looked at where that costs nothing (and where there is one: not in a trace).
        here = type(num_items) is torch.Tensor and num_items.device.type == "cpu"
        if here and not torch.compiler.is_compiling() and bool((num_items < 0).any()):
            raise ValueError(f"num_items must not be negative, got {num_items.item()}")
    elif _real("num_items", num_items) < 0:
        raise ValueError(f"num_items must not be negative, got {num_items}")


def check_label_smoothing(label_smoothing) -> float:
    label_smoothing = _real("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    return label_smoothing


def check_z_loss(z_loss) -> float:
    z_loss = _real("z_loss", z_loss)
    if z_loss < 0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}")
    return z_loss


def check_weights(hidden, weight, targets, class_weight, token_weight) -> None:
    """class_weight (V,) and token_weight (targets' shape): constants, never differentiated."""
    for name, value, shape in (
        ("class_weight", class_weight, weight.shape[:1]),
        ("token_weight", token_weight, targets.shape),
    ):
        if value is None:
            continue
        _floating(name, value)
        if value.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        _same_device(name, value, hidden)
        if value.requires_grad:
            raise ValueError(
                f"{name} requires grad, but the loss is not differentiated with respect to it: detach it, "
                "or multiply the per-token losses of reduction='none' yourself"
            )


def check_outputs(outputs) -> tuple[str, ...]:
    if not isinstance(outputs, (str, tuple, list)):
        raise TypeError(f"outputs must be a tuple of names, got {type(outputs).__name__} {outputs!r}")
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    for name in names:
        if name not in OUTPUTS:
            raise ValueError(f"outputs may name {OUTPUTS}, got {name!r}")
    if not names:
        raise ValueError(f"outputs must name at least one of {OUTPUTS}")
    return names


def check_workspace(workspace) -> None:
    if workspace is None:
        return
    if isinstance(workspace, bool) or not isinstance(workspace, int):
        raise TypeError(
            f"workspace must be a number of bytes (int) or None, got {type(workspace).__name__} {workspace!r}"
        )
    if workspace <= 0:
        raise ValueError(f"workspace must be a positive number of bytes, got {workspace}")


def workspace_too_small(workspace: int, needed: int) -> ValueError:
    return ValueError(
        f"workspace={workspace} bytes is too small for this call: its smallest plan needs {needed} bytes "
        f"(within {-(-needed >> 20)} MiB) beyond the outputs"
    )


def captured_alone() -> RuntimeError:
    return RuntimeError(
        "a CUDA graph is being captured but this backward's forward ran outside of it: capture both, or neither"
    )


def check_target_values(targets: torch.Tensor, ignore_index: int, vocab: int) -> None:
    """Only for targets whose values can be read without synchronising with an accelerator."""
    bad = ((targets < 0) | (targets >= vocab)) & (targets != ignore_index)
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        raise IndexError(
            f"targets holds {int(targets[position])} at flat position {position}: a class index must be in "
            f"[0, {vocab}) or equal ignore_index={ignore_index}"
        )


def check_upstream(name: str, value, shape: torch.Size) -> None:
    """An upstream gradient handed to a raw backward."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.shape != shape:
        raise ValueError(f"{name} must have its output's shape {tuple(shape)}, got {tuple(value.shape)}")


def check_needs(name: str, needs) -> None:
    """needs_grad of the raw pairs, needs of plan()."""
    three = isinstance(needs, (tuple, list)) and len(needs) == 3
    if not three or not all(isinstance(need, bool) for need in needs):
        raise ValueError(f"{name} must be three bools, for hidden, weight and bias, got {needs!r}")


def check_saved(saved, lengths: tuple[int, ...]) -> None:
    """What a raw forward has returned for its backward."""
    tensors = isinstance(saved, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in saved)
    if not tensors or len(saved) not in lengths:
        what = f"a {type(saved).__name__}" + (f" of {len(saved)}" if isinstance(saved, (tuple, list)) else "")
        raise ValueError(f"saved must be the tuple of tensors that the forward returned last, got {what}")


def check_saved_gradients(gradients, needs) -> None:
    """Of a raw forward that made the gradients: those that the backward is asked for were made."""
    for name, gradient, need in zip(("hidden", "weight", "bias"), gradients, needs):
        if need and gradient.shape == (0,):
            raise ValueError(
                f"needs_grad asks for {name}'s gradient, but the forward that made saved was told not to make it: "
                "give both the same needs_grad"
            )


def check_same_reduction(reduction: str, per_token: bool) -> None:
    """Of a raw backward: whether its forward returned a loss for each token."""
    if (reduction == "none") != per_token:
        made = 'reduction="none"' if per_token else 'reduction "mean" or "sum"'
        raise ValueError(f"reduction={reduction!r}, but the forward that made saved ran with {made}")


def check_plan(sizes: dict, dtypes: dict, device_type, needs, upstream, row_scaled, label_smoothing) -> None:
    """plan()'s arguments."""
    for name, size in sizes.items():
        least = 0 if name == "n_tokens" else 1
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {size!r}")
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:
            raise TypeError(f"{name} must be one of {', '.join(map(str, _FLOATS))}, got {dtype!r}")
    if not isinstance(device_type, str) or not device_type.isalnum():
        raise ValueError(f'device_type must be a type of device without an index, such as "cuda", got {device_type!r}')
    check_needs("needs", needs)
    if not isinstance(row_scaled, bool):
        raise TypeError(f"row_scaled must be True or False, got {row_scaled!r}")
    if upstream not in ("scalar", "token"):
        raise ValueError(f'upstream must be "scalar" or "token", got {upstream!r}')
    if not isinstance(label_smoothing, bool):
        raise TypeError(f"label_smoothing must be True or False for a plan (any or none), got {label_smoothing!r}")


def check_grads(grads, outputs: tuple[str, ...], shape: torch.Size) -> None:
    """Upstream gradients of the log-probabilities' backward: only of differentiable outputs that were asked for."""
    if not hasattr(grads, "_asdict"):
        raise TypeError(f"grads must be a LogProbs, got {type(grads).__name__}")
    for name, value in grads._asdict().items():
        if value is None:
            continue
        if name not in ("log_probs", "entropy", "lse"):
            raise ValueError(f"grads.{name}: {name} has no gradient")
        if name == "entropy" and name not in outputs:
            raise ValueError(f"grads.entropy is given but outputs={outputs} does not name 'entropy'")
        check_upstream(f"grads.{name}", value, shape)
