"""The contenders: this kernel, the implementations it is compared with, and the bare GEMMs.

Each is a small class. `load` imports what it needs and returns where it came from; whatever it raises is reported as
the reason of its absence. `build` returns a function without arguments that computes (loss, metrics) of a case; it
raises `Unsupported` for what the implementation cannot do. Nothing here falls back silently to another implementation.

`metrics` says what a contender computes besides the loss. Peers that offer less than accuracy and entropy are timed in
their cheapest form, without any: the comparison favours them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F

from .workloads import IGNORE_INDEX, Case

REPO_ID = "trl-lib/fused-linear-ce"
FLOOR_ROWS = 4096
DEFAULT_BUILD = Path(__file__).resolve().parents[1] / "build"
Step = Callable[[], tuple[torch.Tensor | None, dict | None]]


class Unsupported(Exception):
    """The contender exists but cannot run this case."""


@dataclass
class Options:
    build: Path | None = None  # folder with the built variants


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Contender:
    name: str
    title: str  # short, for tables; "{version}" becomes the installed one
    package: str | None = None  # distribution whose version is reported
    metrics: tuple[str, ...] = ()
    needs_gpu = False
    is_gemm = False  # a bare GEMM: no loss to check, no backward to call
    captured = False  # the whole step is recorded into a CUDA graph, and a call replays it

    def load(self, options: Options) -> str:
        return "torch"

    def build(self, case: Case) -> Step:
        raise NotImplementedError

    def version(self) -> str | None:
        return None if self.package is None else version(self.package)

    def label(self) -> str:
        """For tables: with the version that was timed."""
        return " ".join(self.title.format(version=self.version() or "").split()).replace(" ,", ",")


# --- the floor -------------------------------------------------------------------------------------------------------


class Gemms(Contender):
    """The GEMMs that a scenario cannot do without, as plain matrix products in row chunks, and nothing else.

    dX and dW read the logits in place of their gradient: the values do not change what a GEMM does, only what power it
    draws, and so its clock at full load (NOTES.md). Rows whose target is ignored need no GEMM. Under autocast one cast
    of the weight is added, which any implementation has to make.
    """

    is_gemm = True

    def __init__(self, name: str, title: str, only: tuple[str, ...] | None = None) -> None:
        self.name, self.title, self.only = name, title, only

    def build(self, case: Case) -> Step:
        gemms = self.only or case.scenario.gemms
        dtype = case.gemm_dtype
        hidden = case.hidden.detach()[case.targets != IGNORE_INDEX].to(dtype)
        full_weight = case.weight.detach()
        rows = min(FLOOR_ROWS, len(hidden))
        weight_cast = full_weight.to(dtype)

        def run():
            # allocated here, so that they are not there while the other contenders' memory is measured
            logits = torch.empty(rows, case.shape.vocab, device=case.device, dtype=dtype)
            dx = torch.empty_like(hidden) if "dX" in gemms else None
            dw = torch.empty_like(weight_cast) if "dW" in gemms else None
            weight = weight_cast
            if case.scenario.autocast and self.only is None:
                weight = full_weight.to(dtype)
            for i in range(0, len(hidden), rows):
                h = hidden[i : i + rows]
                z = logits[: len(h)]
                torch.mm(h, weight.T, out=z)
                if dx is not None:
                    torch.mm(z, weight, out=dx[i : i + rows])
                if dw is not None:
                    torch.mm(z.T, h, out=dw)
            return None, None

        return run


# --- this kernel -----------------------------------------------------------------------------------------------------


def build_backend() -> str:
    """The variant that fits this torch: the loader's rule, for machines without the `kernels` package."""
    if torch.version.cuda:
        return "cuda"
    if torch.version.hip:
        return "rocm"
    return "xpu" if getattr(torch.version, "xpu", None) else "cpu"


def load_kernel(build: Path | None) -> tuple[types.ModuleType, str]:
    """The kernel as a user loads it, from a local build; without the `kernels` package straight from the folder.

    Without a folder the build that LOCAL_KERNELS names is taken, and else the one that `make build` writes.
    """
    given = os.environ.get("LOCAL_KERNELS")
    if build is None and f"{REPO_ID}=" not in (given or ""):
        build = DEFAULT_BUILD
    if build is not None and not build.is_dir():
        raise FileNotFoundError(f"no build in {build.name}/: make one (make build) or name it with --build")

    if importlib.util.find_spec("kernels") is not None:
        from kernels import get_kernel

        try:
            if build is not None:
                os.environ["LOCAL_KERNELS"] = f"{REPO_ID}={build.resolve()}"
            module = get_kernel(REPO_ID, version=1)
        finally:
            os.environ.pop("LOCAL_KERNELS", None)
            if given is not None:
                os.environ["LOCAL_KERNELS"] = given
        return module, f"get_kernel, local build {module.__name__}"

    if build is None:
        raise ModuleNotFoundError("LOCAL_KERNELS is for the kernels package, which is not installed: use --build")
    variant = build.resolve() / f"torch-{build_backend()}"
    if not (variant / "__init__.py").is_file():
        raise FileNotFoundError(f"no {variant.name} in {build.name}/: make one (make build) or name it with --build")
    spec = importlib.util.spec_from_file_location(
        "fused_linear_ce_benchmarked", variant / "__init__.py", submodule_search_locations=[str(variant)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    build_id = "unknown"
    with contextlib.suppress(OSError, KeyError, ValueError):
        build_id = json.loads((variant / "metadata.json").read_text())["id"]
    return module, f"imported from the build folder, as the kernels package is not installed; build {build_id}"


class Ours(Contender):
    metrics = ("accuracy", "entropy")
    modules: ClassVar[dict[Path | None, tuple[types.ModuleType, str]]] = {}  # loaded once for all workspaces

    def __init__(self, name: str = "ours", workspace: int | None = None) -> None:
        self.name, self.workspace = name, workspace
        self.title = "fused-linear-ce" + (f", workspace {name.split('@')[1]}" if workspace else "")

    def load(self, options: Options) -> str:
        if options.build not in self.modules:
            self.modules[options.build] = load_kernel(options.build)
        self.module, source = self.modules[options.build]
        return source

    def build(self, case: Case) -> Step:
        kwargs = {} if self.workspace is None else {"workspace": self.workspace}
        s = case.scenario

        def run():
            return self.module.fused_linear_cross_entropy(
                case.hidden,
                case.weight,
                case.targets,
                bias=case.bias,
                softcap=s.softcap,
                reduction=s.reduction,
                return_metrics=True,
                **kwargs,
            )

        return run


class OursCaptured(Ours):
    """What a step of few tokens takes the GPU: launching it takes the host longer than that."""

    needs_gpu = captured = True

    def __init__(self) -> None:
        super().__init__("ours-graph")
        self.title = "fused-linear-ce in a CUDA graph"


# --- torch -----------------------------------------------------------------------------------------------------------


def full_logits_loss(hidden, weight, bias, targets, softcap, reduction):
    """What a Hugging Face model computes without any fused loss: logits, upcast to fp32, cross-entropy."""
    logits = F.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction=reduction)


class FullLogits(Contender):
    def __init__(self, name: str, title: str, compiled: bool) -> None:
        self.name, self.title, self.compiled = name, title, compiled

    def build(self, case: Case) -> Step:
        s = case.scenario
        fn = torch.compile(full_logits_loss, dynamic=False, fullgraph=True) if self.compiled else full_logits_loss
        return lambda: (fn(case.hidden, case.weight, case.bias, case.targets, s.softcap, s.reduction), None)


class TorchChunked(Contender):
    name = "torch"
    title = "torch F.linear_cross_entropy"

    def version(self) -> str:
        return torch.__version__

    def load(self, options: Options) -> str:
        if not hasattr(F, "linear_cross_entropy"):
            raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy (it came with 2.13)")
        return "torch.nn.functional.linear_cross_entropy"

    def build(self, case: Case) -> Step:
        s = case.scenario
        if s.softcap is not None:
            raise Unsupported("no softcap")
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda: (
            F.linear_cross_entropy(
                case.hidden,
                case.weight,
                case.targets,
                linear_bias=case.bias,
                reduction=s.reduction,
                options=options,
            ),
            None,
        )


# --- TRL -------------------------------------------------------------------------------------------------------------


def _load_trl_file() -> types.ModuleType:
    """`trl/kernels/chunked_logprob.py` alone, for a machine that lacks what `trl.trainer.utils` imports.

    Its backward takes one function from there, `maybe_gather_lm_head_ctx`, which returns a null context unless
    DeepSpeed ZeRO-3 is on. So a stand-in package with that null context is enough; what is timed is TRL's own code.
    """
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'trl'")
    path = Path(spec.submodule_search_locations[0]) / "kernels" / "chunked_logprob.py"
    root = "trl_kernel_file"
    for name in (root, f"{root}.kernels", f"{root}.trainer", f"{root}.trainer.utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[f"{root}.trainer.utils"].maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
    spec = importlib.util.spec_from_file_location(f"{root}.kernels.chunked_logprob", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TRL(Contender):
    """TRL's fused LM head, with the entropy and the top-1 flag that SFTTrainer asks for."""

    name = "trl"
    title = "TRL {version} fused head"
    package = "trl"
    metrics = ("accuracy", "entropy")
    VOCAB_CHUNK = 32768  # TRL's _CHUNKED_LOGPROB_CHUNK_SIZE

    def load(self, options: Options) -> str:
        try:
            self.module = importlib.import_module("trl.kernels.chunked_logprob")
            importlib.import_module("trl.trainer.utils")  # the backward imports it
            return "trl.kernels.ChunkedLogProbFunction"
        except Exception as error:
            self.module = _load_trl_file()
            return f"trl/kernels/chunked_logprob.py imported as a file, the package failed: {reason(error)}"

    def build(self, case: Case) -> Step:
        """The lines of TRL's `add_fused_lm_head` and of `SFTTrainer.compute_loss` around the function."""
        s = case.scenario
        function = self.module.ChunkedLogProbFunction
        # on Triton devices TRL scores the valid positions only, elsewhere all of them
        compact = self.module._use_triton(case.device)

        def run():
            mask = case.targets != IGNORE_INDEX
            outputs = function.apply(
                case.hidden[mask] if compact else case.hidden,
                case.weight,
                case.bias,
                case.targets[mask] if compact else case.targets.clamp(min=0),
                1.0,
                self.VOCAB_CHUNK,
                s.softcap,
                1.0,
                ("entropy", "is_top1"),
            )
            if compact:
                outputs = (None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x) for x in outputs)
            else:
                outputs = (None if x is None else x.masked_fill(~mask, 0) for x in outputs)
            log_probs, entropy, _, _, is_top1 = outputs
            metrics = {"entropy_sum": entropy.detach().sum(), "num_correct_tokens": is_top1.sum()}
            loss = -log_probs
            return (loss if s.reduction == "none" else loss.sum() / mask.sum().clamp(min=1)), metrics

        return run


# --- Triton and CuTe kernels -----------------------------------------------------------------------------------------


class Liger(Contender):
    package = "liger-kernel"
    needs_gpu = True

    def __init__(self, name: str, chunk_mem_const: int) -> None:
        self.name, self.chunk_mem_const = name, chunk_mem_const
        self.title = "Liger {version}" + (f", chunk_mem_const={chunk_mem_const}" if chunk_mem_const != 1 else "")

    def load(self, options: Options) -> str:
        module = importlib.import_module("liger_kernel.transformers.functional")
        self.function = module.liger_fused_linear_cross_entropy
        return "liger_kernel.transformers.functional.liger_fused_linear_cross_entropy"

    def build(self, case: Case) -> Step:
        s = case.scenario
        if s.weight_grad and not s.hidden_grad:
            raise Unsupported("leaves weight.grad None when the hidden states are frozen")
        return lambda: (
            self.function(
                case.hidden,
                case.weight,
                case.targets,
                bias=case.bias,
                reduction=s.reduction,
                softcap=s.softcap,
                chunk_mem_const=self.chunk_mem_const,
            ),
            None,
        )


class CutCrossEntropy(Contender):
    """The default filter drops gradient entries below 2^-12 in bf16; filter_eps=None computes them all."""

    package = "cut-cross-entropy"
    needs_gpu = True

    def __init__(self, name: str, title: str, **kwargs) -> None:
        self.name, self.title, self.kwargs = name, title, kwargs

    def load(self, options: Options) -> str:
        self.function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return "cut_cross_entropy.linear_cross_entropy"

    def build(self, case: Case) -> Step:
        s = case.scenario
        if case.bias is not None:
            raise Unsupported("no bias")
        return lambda: (
            self.function(
                case.hidden, case.weight, case.targets, softcap=s.softcap, reduction=s.reduction, **self.kwargs
            ),
            None,
        )


class Quack(Contender):
    name = "quack"
    title = "quack {version}"
    package = "quack-kernels"
    needs_gpu = True

    def load(self, options: Options) -> str:
        self.function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        return "quack.linear_cross_entropy.chunked_linear_cross_entropy"

    def build(self, case: Case) -> Step:
        s = case.scenario
        if s.bias or s.softcap is not None or s.reduction == "none":
            raise Unsupported('no bias, softcap or reduction="none"')
        return lambda: (self.function(case.hidden, case.weight, case.targets, reduction=s.reduction), None)


# --- the register ----------------------------------------------------------------------------------------------------

FLOORS: tuple[Contender, ...] = (
    Gemms("floor", "the scenario's GEMMs alone"),
    Gemms("logits-gemm", "the logits GEMM alone", only=("logits",)),
)
CONTENDERS: tuple[Contender, ...] = (
    Ours(),
    FullLogits("logits", "full logits, eager", compiled=False),
    FullLogits("logits-compiled", "full logits, compiled", compiled=True),
    TorchChunked(),
    TRL(),
    Liger("liger", 1),
    Liger("liger-16", 16),
    CutCrossEntropy("cce", "cut-cross-entropy {version}, filtered"),
    CutCrossEntropy("cce-exact", "cut-cross-entropy {version}, exact", filter_eps=None),
    Quack(),
    OursCaptured(),
)
# Only by name: it autotunes for every new shape; of interest for few tokens alone.
OPTIONAL = ("quack", "ours-graph")


def contender(name: str) -> Contender:
    """By name; `ours@256MiB` is this kernel with that workspace."""
    if match := re.fullmatch(r"ours@(\d+)(MiB|GiB)", name):
        return Ours(name, int(match[1]) << {"MiB": 20, "GiB": 30}[match[2]])
    for c in CONTENDERS:
        if c.name == name:
            return c
    known = ", ".join(c.name for c in CONTENDERS)
    raise ValueError(f"unknown contender {name!r}: use {known}, or ours@<n>MiB")


def reason(error: BaseException) -> str:
    """One line that says what failed, without the folders of the machine it failed on."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return re.sub(r"(?:/[\w.+@-]+)+/", "", text)[:240]
