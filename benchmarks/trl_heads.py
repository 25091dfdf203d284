"""The loss heads that `python -m benchmarks.trl_step` puts on one and the same model.

Each is a small class whose `attach` patches the model's forward as its trainer does and returns the trainer's
`compute_loss`, metrics and their host synchronisation included. `load` imports; what it raises is the reason of its
absence. The two bounds, `none` and `floor`, run under TRL's own compute_loss as well, so that a step differs from
another in nothing but the head.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from . import peers
from .trl_rows import IGNORE_INDEX, Row, causal_lm

CHUNKED_TRL = "1.14.2"  # the last release with `_chunked_cross_entropy_loss`
ADAPTER = Path(__file__).resolve().parents[1] / "integrations" / "trl"  # holds the package fused_linear_ce_trl
ComputeLoss = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]  # (inputs, num_items_in_batch) -> loss


@dataclass
class Options:
    build: Path | None = None  # folder with the kernel's built variants
    chunked_trl: Path | None = None  # folder with TRL 1.14.2, which is not the TRL on the path


class Head:
    name: str
    title: str

    def load(self, options: Options) -> str:
        """Import what attach needs; returns where it came from."""
        raise NotImplementedError

    def attach(self, model: nn.Module, row: Row, batch: dict[str, torch.Tensor]) -> ComputeLoss:
        raise NotImplementedError


# --- TRL's trainers --------------------------------------------------------------------------------------------------


def _tokenizer():
    """SFTTrainer insists on one; the batches here are made of ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_trainer(trainer_class, config_class, model: nn.Module, row: Row, **config):
    """An SFTTrainer around a model that is on its device already; only its compute_loss will be used."""
    from datasets import Dataset

    device = next(model.parameters()).device
    args = config_class(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        report_to="none",
        bf16=row.autocast is not None,
        use_cpu=device.type == "cpu",
        # the run switches checkpointing on and off itself, for all heads alike
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        **config,
    )
    data = Dataset.from_list([{"input_ids": [0, 1], "labels": [0, 1]}])
    return trainer_class(model=model, args=args, train_dataset=data, processing_class=_tokenizer())


def trainer_loss(trainer) -> ComputeLoss:
    def compute_loss(inputs, num_items):
        loss = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=num_items)
        for metrics in trainer._metrics.values():
            metrics.clear()
        return loss

    return compute_loss


class TRL(Head):
    """The installed TRL's default loss."""

    name = "nll"

    @property
    def title(self) -> str:
        return f"TRL {peers.version('trl')} nll"

    def load(self, options: Options) -> str:
        self.trl = importlib.import_module("trl")
        if not hasattr(importlib.import_module("trl.trainer.utils"), "FusedCausalLMOutput"):
            raise ImportError(f"TRL {peers.version('trl')} has no fused head; it came with 1.15")
        return "trl.SFTTrainer, loss_type='nll'"

    def trainer(self, model: nn.Module, row: Row):
        return make_trainer(self.trl.SFTTrainer, self.trl.SFTConfig, model, row, loss_type="nll")

    def attach(self, model, row, batch):
        return trainer_loss(self.trainer(model, row))


class CCE(Head):
    """This project: the adapter's trainer with the kernel of a local build."""

    name = "cce"
    title = "cce"

    def load(self, options: Options) -> str:
        build = options.build or peers.DEFAULT_BUILD
        if f"{peers.REPO_ID}=" not in os.environ.get("LOCAL_KERNELS", ""):
            if not build.is_dir():
                raise FileNotFoundError(f"no build in {build.name}/: make one (make build) or name it with --build")
            os.environ["LOCAL_KERNELS"] = f"{peers.REPO_ID}={build.resolve()}"
        if str(ADAPTER) not in sys.path:
            sys.path.insert(0, str(ADAPTER))
        self.adapter = importlib.import_module("fused_linear_ce_trl")
        self.config = importlib.import_module("trl").SFTConfig
        return "fused_linear_ce_trl.SFTTrainer, loss_type='cce', local build"

    def attach(self, model, row, batch):
        return trainer_loss(make_trainer(self.adapter.SFTTrainer, self.config, model, row, loss_type="cce"))


def load_beside(folder: Path, package: str) -> types.ModuleType:
    """Import `package.trainer.sft_trainer` from a folder while another version of the package is loaded and stays."""
    if not (folder / package).is_dir():
        raise ModuleNotFoundError(f"no {package} in {folder.name}/")

    def take() -> dict[str, types.ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}

    loaded = take()
    sys.path.insert(0, str(folder.resolve()))
    try:
        return importlib.import_module(f"{package}.trainer.sft_trainer")
    finally:
        sys.path.remove(str(folder.resolve()))
        take()
        sys.modules.update(loaded)


class Chunked(Head):
    """The chunked cross-entropy that was TRL's default until 1.14."""

    name = "chunked"
    title = f"TRL {CHUNKED_TRL} chunked_nll"

    def load(self, options: Options) -> str:
        if options.chunked_trl is None:
            raise ModuleNotFoundError(f"name a folder that holds TRL {CHUNKED_TRL} with --chunked-trl")
        self.module = load_beside(options.chunked_trl, "trl")
        return f"trl.SFTTrainer of {CHUNKED_TRL}, loss_type='chunked_nll'"

    def attach(self, model, row, batch):
        classes = self.module.SFTTrainer, self.module.SFTConfig
        return trainer_loss(make_trainer(*classes, model, row, loss_type="chunked_nll"))


# --- Liger -----------------------------------------------------------------------------------------------------------


class Liger(Head):
    """Liger's fused linear cross-entropy alone, without its layer kernels: the backbone is the same for all heads.

    TRL >= 1.15 switches it off. What is called here is what SFTTrainer up to 1.14 calls with use_liger_kernel=True:
    the loss and the token accuracy; there is no entropy.
    """

    name = "liger"

    @property
    def title(self) -> str:
        return f"Liger {peers.version('liger-kernel')}"

    def load(self, options: Options) -> str:
        self.patches = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
        return "liger_kernel.transformers, fused_linear_cross_entropy only"

    def attach(self, model, row, batch):
        base = causal_lm(model)
        if next(base.parameters()).device.type == "cpu":
            raise peers.Unsupported("needs a GPU")
        patch = self.patches[base.config.model_type]
        switches = {n: False for n, p in inspect.signature(patch).parameters.items() if isinstance(p.default, bool)}
        patch(**{**switches, "fused_linear_cross_entropy": True}, model=base)

        def compute_loss(inputs, num_items):
            outputs = model(**inputs, use_cache=False, num_items_in_batch=num_items, return_token_accuracy=True)
            outputs.token_accuracy.item()
            return outputs.loss

        return compute_loss


# --- the bounds ------------------------------------------------------------------------------------------------------


class Bound(TRL):
    """TRL's trainer, with the head replaced by `total`, whose value is no loss."""

    def total(self, hidden: torch.Tensor, head: nn.Module, tied: bool, rows: torch.Tensor) -> torch.Tensor:
        """hidden (tokens, H) and the indices of the rows with a label -> a scalar with the gradients of the bound."""
        raise NotImplementedError

    def load(self, options: Options) -> str:
        super().load(options)
        self.output = importlib.import_module("trl.trainer.utils").FusedCausalLMOutput
        return "benchmarks/trl_heads.py, under trl.SFTTrainer.compute_loss"

    def attach(self, model, row, batch):
        trainer = self.trainer(model, row)
        base = causal_lm(model)
        mask = batch["labels"][:, 1:] != IGNORE_INDEX
        zeros = torch.zeros(mask.shape, device=mask.device)
        # known beforehand: a bound waits for nothing
        rows = nn.functional.pad(mask, (0, 1)).flatten().nonzero().flatten()
        head = base.get_output_embeddings()
        tied = head.weight is base.get_input_embeddings().weight

        def forward(*args, fused_lm_head, labels, **kwargs):
            hidden = base.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)
            log_probs = zeros - self.total(hidden, head, tied, rows) / mask.numel()
            return self.output(log_probs=log_probs, entropy=zeros, is_top1=zeros, label_mask=mask)

        base.forward = forward
        return trainer_loss(trainer)


class NoHead(Bound):
    name = "none"
    title = "no loss head"

    def total(self, hidden, head, tied, rows):
        total = hidden.sum(dtype=torch.float32)
        # A head of its own takes part in the optimizer's step of every loss, so it gets a gradient, of zeros.
        return total if tied else total + head.weight[0].sum() * 0


class Gemms(torch.autograd.Function):
    """logits, dX and dW as three plain GEMMs in chunks of rows; the logits stand for their gradient."""

    ROWS = peers.FLOOR_ROWS

    @staticmethod
    def forward(ctx, hidden, weight, autocast):
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype = autocast or hidden.dtype
        h, w = hidden.to(dtype), weight.to(dtype)
        ctx.dtypes = hidden.dtype, weight.dtype
        logits = torch.empty(min(Gemms.ROWS, len(h)), len(w), dtype=dtype, device=h.device)
        dx = torch.empty_like(h) if needs_hidden else None
        dw = torch.empty_like(w) if needs_weight else None
        scale = 1 / (len(w) * max(len(h), 1))  # small enough that no gradient overflows in the backbone
        for i in range(0, len(h), Gemms.ROWS):
            rows = h[i : i + Gemms.ROWS]
            z = logits[: len(rows)]
            torch.mm(rows, w.T, out=z)
            if needs_hidden:
                chunk = dx[i : i + Gemms.ROWS]
                torch.addmm(chunk, z, w, beta=0, alpha=scale, out=chunk)
            if needs_weight:
                torch.addmm(dw, z.T, rows, beta=0, alpha=scale, out=dw)
        ctx.save_for_backward(dx, dw)
        return torch.zeros((), device=h.device)

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        of_hidden, of_weight = ctx.dtypes
        return None if dx is None else dx.to(of_hidden), None if dw is None else dw.to(of_weight), None


class Floor(Bound):
    name = "floor"
    title = "three GEMMs (the floor)"

    def total(self, hidden, head, tied, rows):
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return Gemms.apply(hidden.index_select(0, rows), head.weight, autocast)


HEADS: dict[str, Head] = {head.name: head for head in (CCE(), TRL(), Chunked(), Liger(), NoHead(), Floor())}
BOUNDS = ("none", "floor")


@contextlib.contextmanager
def own_forward(model: nn.Module):
    """Within, the model's forward may be patched; afterwards it is what it was."""
    base = causal_lm(model)
    before = base.__dict__.pop("forward", None)
    try:
        yield base
    finally:
        base.__dict__.pop("forward", None)
        if before is not None:
            base.forward = before
