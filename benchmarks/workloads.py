"""What is timed: shapes, scenarios and the tensors of one case."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from .trained import trained_inputs

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    vocab: int
    hidden: int
    model: str = ""

    def __str__(self) -> str:
        return f"{self.tokens} x {self.vocab} x {self.hidden}"


SHAPES = {
    s.name: s
    for s in (
        Shape("A", 16384, 151936, 1024, "Qwen3-0.6B"),
        Shape("B", 16384, 262144, 640, "gemma-3-270m"),
        Shape("C", 16384, 128256, 2048, "Llama-3.2-1B"),
        Shape("D", 8192, 151936, 4096, "Qwen3-8B"),
        Shape("E", 4096, 128256, 4096, "Llama-3.1-8B"),
        Shape("F", 2048, 151936, 4096, "Qwen3-8B, a LoRA step"),
        Shape("G", 65536, 151936, 1024, "Qwen3-0.6B, long batch"),
        Shape("cpu", 4096, 32000, 512, "CPU"),
    )
}


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or any `tokens x vocab x hidden` written like 128x151936x1024."""
    if text in SHAPES:
        return SHAPES[text]
    if match := re.fullmatch(r"(\d+)x(\d+)x(\d+)", text):
        return Shape(text, *map(int, match.groups()))
    raise ValueError(f"unknown shape {text!r}: use one of {', '.join(SHAPES)} or <tokens>x<vocab>x<hidden>")


@dataclass(frozen=True)
class Scenario:
    """One way to call the loss. `gemms` is what it cannot do without, and therefore what its floor runs."""

    name: str
    title: str
    hidden_grad: bool = True
    weight_grad: bool = True
    reduction: str = "mean"
    softcap: float | None = None
    bias: bool = False
    valid: float = 1.0
    autocast: bool = False

    @property
    def backward(self) -> bool:
        return self.hidden_grad or self.weight_grad

    @property
    def gemms(self) -> tuple[str, ...]:
        return ("logits",) + ("dX",) * self.hidden_grad + ("dW",) * self.weight_grad


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("fwd_bwd", "forward + backward, mean"),
        Scenario("fwd", "forward only (no_grad)", hidden_grad=False, weight_grad=False),
        Scenario("frozen_head", "forward + backward, frozen head (LoRA)", weight_grad=False),
        Scenario("frozen_hidden", "forward + backward, frozen hidden states", hidden_grad=False),
        Scenario("none", 'forward + backward, reduction="none", random per-token upstream', reduction="none"),
        Scenario("softcap_bias", "forward + backward, softcap 30 and a bias", softcap=30.0, bias=True),
        Scenario("valid30", "forward + backward, 30 % of the rows valid", valid=0.3),
        Scenario("autocast", "forward + backward, fp32 tensors under bf16 autocast", autocast=True),
    )
}


@dataclass
class Case:
    """One shape, scenario and input set, with its tensors on the device."""

    shape: Shape
    scenario: Scenario
    inputs: str
    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    bias: torch.Tensor | None
    upstream: torch.Tensor | None
    valid_rows: int
    leaves: tuple[torch.Tensor, ...] = field(default=())

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def gemm_dtype(self) -> torch.dtype:
        """What the matrix units read: the tensors' dtype, or autocast's."""
        return torch.bfloat16 if self.scenario.autocast else self.hidden.dtype

    def reset(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def random_inputs(shape: Shape, device: torch.device, gen: torch.Generator):
    """Normal hidden states, and a weight scaled so that the logits have unit standard deviation."""
    hidden = torch.randn(shape.tokens, shape.hidden, device=device, generator=gen)
    weight = torch.randn(shape.vocab, shape.hidden, device=device, generator=gen).mul_(shape.hidden**-0.5)
    targets = torch.randint(shape.vocab, (shape.tokens,), device=device, generator=gen)
    return hidden, weight, targets


INPUTS = {"random": random_inputs, "trained": trained_inputs}


def make_case(
    shape: Shape,
    scenario: Scenario,
    inputs: str = "random",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    device = torch.device(device)
    dtype = torch.float32 if scenario.autocast else (dtype or default_dtype(device))
    gen = torch.Generator(device).manual_seed(seed)
    hidden, weight, targets = INPUTS[inputs](shape, device, gen)
    hidden, weight = hidden.to(dtype), weight.to(dtype)

    bias = None
    if scenario.bias:
        bias = torch.randn(shape.vocab, device=device, generator=gen).mul_(0.1).to(dtype)
    valid_rows = shape.tokens
    if scenario.valid < 1:
        valid_rows = max(1, round(scenario.valid * shape.tokens))
        ignored = torch.randperm(shape.tokens, device=device, generator=gen)[valid_rows:]
        targets[ignored] = IGNORE_INDEX
    upstream = None
    if scenario.reduction == "none":
        # of the size that a mean over the rows would send, with both signs as in policy-gradient losses
        upstream = torch.randn(shape.tokens, device=device, generator=gen) / valid_rows

    hidden.requires_grad_(scenario.hidden_grad)
    weight.requires_grad_(scenario.weight_grad)
    if bias is not None:
        bias.requires_grad_(scenario.weight_grad)
    leaves = tuple(t for t in (hidden, weight, bias) if t is not None)
    return Case(shape, scenario, inputs, hidden, weight, targets, bias, upstream, valid_rows, leaves)
