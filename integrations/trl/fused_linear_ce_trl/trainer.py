"""TRL's SFTTrainer with loss_type="cce": as a subclass, or, by enable(), in TRL's own class.

TRL's code runs unchanged. While it does, it is shown a loss type that it knows, and where it would patch the model's
forward for that loss, patch_cce_lm_head is called in its place.
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator

import torch
import trl
from trl import SFTConfig

from . import host
from .kernel import KERNEL_ID, load_kernel
from .model import HEAD_ADAPTER, check_logit_transform, patch_cce_lm_head

LOSS_TYPE = "cce"
_INIT = inspect.signature(trl.SFTTrainer.__init__)

_HELP = (
    f" `'cce'` (cross-entropy by the Hub kernel {KERNEL_ID}, for throughput: the same loss in a faster step; it "
    "downloads and runs code, which --trust_remote_code allows)."
)


class SFTTrainer(trl.SFTTrainer):
    """trl.SFTTrainer that knows loss_type="cce" as well; every other loss type is TRL's own.

    "cce" DOWNLOADS AND RUNS CODE from the Hub: set SFTConfig(trust_remote_code=True), or see `load_kernel`. The
    arguments are those of trl.SFTTrainer. Not with a PEFT adapter on the LM head, label smoothing, compute_loss_func,
    nn.DataParallel, Liger's own fused cross-entropy or a quantised head; all of these raise a ValueError.
    """

    # functools.wraps: TRL and its tools read the signatures
    @functools.wraps(trl.SFTTrainer.__init__)
    def __init__(self, *args, **kwargs):
        _init(self, super().__init__, args, kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return _compute_loss(self, super().compute_loss, model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return _prediction_step(self, super().prediction_step, model, inputs, prediction_loss_only, ignore_keys)


def _init(trainer, init: Callable, args: tuple, kwargs: dict) -> None:
    """init: TRL's __init__, bound."""
    given = _INIT.bind(trainer, *args, **kwargs).arguments
    config = given.get("args")
    if getattr(config, "loss_type", None) != LOSS_TYPE:
        init(*args, **kwargs)
        return
    _check_arguments(config, given.get("compute_loss_func"))
    load_kernel(config.trust_remote_code)  # now, not after hours of data preparation
    patched = []

    def patch(model, *_, **__):
        patch_cce_lm_head(model, on_labels=False, activation_offloading=config.activation_offloading)
        patched.append(model)

    trl_patch = getattr(host.sft_trainer, host.PATCH)
    setattr(host.sft_trainer, host.PATCH, patch)
    try:
        with _shown_as(config, host.LOSS_TYPE):
            init(*args, **kwargs)
    except ValueError as error:
        text = _named_cce(str(error))
        if text is None:
            raise
        raise ValueError(text) from error
    finally:
        setattr(host.sft_trainer, host.PATCH, trl_patch)
    if trainer.args.n_gpu > 1:
        raise ValueError(DATA_PARALLEL)
    if not patched:
        raise RuntimeError(
            f"TRL {trl.__version__} did not call {host.PATCH}; loss_type='cce' was tested with TRL {host.TESTED}"
        )
    check_logit_transform(patched[0])


DATA_PARALLEL = (
    "loss_type='cce' does not support nn.DataParallel, which Trainer uses when one process sees several GPUs. Use "
    "`accelerate launch` or `torchrun`, or show it one GPU with CUDA_VISIBLE_DEVICES"
)


def _check_arguments(config: SFTConfig, compute_loss_func) -> None:
    if compute_loss_func is not None:
        raise ValueError("loss_type='cce' computes the loss itself: it cannot be used with compute_loss_func")
    if config.label_smoothing_factor != 0:
        raise ValueError(
            f"loss_type='cce' does not support label_smoothing_factor={config.label_smoothing_factor}: use 0, or "
            "loss_type='nll'"
        )
    if not config.use_liger_kernel:
        return
    if not host.FUSED_HEAD:
        raise ValueError(
            f"loss_type='cce' is not compatible with use_liger_kernel=True on TRL {trl.__version__}, which computes "
            "Liger's loss instead. From TRL 1.15 on, Liger's layer kernels can be used with it"
        )
    if (config.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
        raise ValueError(
            "loss_type='cce' is not compatible with liger_kernel_config={'fused_linear_cross_entropy': True}, which "
            "replaces the same forward"
        )


def _named_cce(text: str) -> str | None:
    """In place of an error of TRL about its own loss, the same about the loss type that the user asked for."""
    if "PEFT adapter" in text and "lm_head" in text:
        return HEAD_ADAPTER
    return DATA_PARALLEL if "nn.DataParallel" in text else None


def _compute_loss(trainer, compute_loss: Callable, model, inputs, return_outputs, num_items_in_batch):
    if trainer.args.loss_type != LOSS_TYPE:
        return compute_loss(model, inputs, return_outputs, num_items_in_batch)
    inputs = {**inputs, "cce_sums": True}
    if not host.FUSED_HEAD:  # from 1.15 on TRL says this itself
        inputs["fused_lm_head"] = True
    with _shown_as(trainer.args, host.LOSS_TYPE):
        return compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _prediction_step(trainer, prediction_step: Callable, model, inputs, prediction_loss_only, ignore_keys):
    """(loss, logits, labels). Logits come from a second forward, as in TRL >= 1.15."""
    if trainer.args.loss_type != LOSS_TYPE or prediction_loss_only or host.FUSED_HEAD:
        return prediction_step(model, inputs, prediction_loss_only, ignore_keys)
    inputs = trainer._prepare_inputs(inputs)
    loss, _, _ = prediction_step(model, dict(inputs), True, ignore_keys)
    labels = inputs.pop("labels", None)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits = model(**inputs).logits
    return loss, logits, labels


@contextlib.contextmanager
def _shown_as(config: SFTConfig, loss_type: str) -> Iterator[None]:
    given, config.loss_type = config.loss_type, loss_type
    try:
        yield
    finally:
        config.loss_type = given


# ---- the second door: TRL's own classes

_replaced: dict[str, object] = {}


def enable(trust_remote_code: bool = False) -> None:
    """Teach TRL's own SFTTrainer and SFTConfig loss_type="cce", also where they were imported before.

    For scripts that import from `trl`, and for TRL's command-line parser, which then lists "cce". Calling it again
    changes nothing; disable() takes everything back. Other trainers are not touched.

    Args:
        trust_remote_code: load the kernel now, which DOWNLOADS AND RUNS CODE; without it a trainer with
            loss_type="cce" needs SFTConfig(trust_remote_code=True) or a local build.
    """
    if trust_remote_code:
        load_kernel(trust_remote_code=True)
    if _replaced:
        return
    cls = trl.SFTTrainer
    init, compute_loss, prediction_step = cls.__init__, cls.compute_loss, cls.prediction_step
    field = SFTConfig.__dataclass_fields__["loss_type"]
    _replaced.update(__init__=init, compute_loss=compute_loss, prediction_step=prediction_step)
    _replaced["metadata"] = field.metadata

    @functools.wraps(init)
    def cce_init(self, *args, **kwargs):
        _init(self, init.__get__(self), args, kwargs)

    @functools.wraps(compute_loss)
    def cce_compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return _compute_loss(self, compute_loss.__get__(self), model, inputs, return_outputs, num_items_in_batch)

    @functools.wraps(prediction_step)
    def cce_prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return _prediction_step(
            self, prediction_step.__get__(self), model, inputs, prediction_loss_only, ignore_keys
        )

    cls.__init__, cls.compute_loss, cls.prediction_step = cce_init, cce_compute_loss, cce_prediction_step
    metadata = {**field.metadata, "help": field.metadata["help"] + _HELP}
    if "choices" in metadata:
        metadata["choices"] = [*metadata["choices"], LOSS_TYPE]
    field.metadata = types.MappingProxyType(metadata)


def disable() -> None:
    """Undo enable()."""
    if not _replaced:
        return
    SFTConfig.__dataclass_fields__["loss_type"].metadata = _replaced.pop("metadata")
    for name, original in _replaced.items():
        setattr(trl.SFTTrainer, name, original)
    _replaced.clear()
