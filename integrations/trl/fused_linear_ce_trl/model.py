"""A causal LM whose forward computes the fused loss instead of logits."""

import contextlib
import functools
import inspect
import itertools
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput

from .kernel import load_kernel
from .loss import loss_sums, mean_loss

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CHECK_VARIABLE = "FUSED_LINEAR_CE_CHECK"


@dataclass
class CutCrossEntropyOutput(ModelOutput):
    """What the fused forward returns: sums over the tokens that are not ignored, never per-token values.

    Args:
        loss: 0-d float32: nll_sum over num_items_in_batch (or num_valid_tokens), plus the weighted auxiliary loss.
        logits: always None.
        nll_sum, entropy_sum: 0-d float32, nats. num_correct_tokens: 0-d float32. num_valid_tokens: 0-d int64.
        aux_loss: 0-d, the load-balancing loss of a mixture of experts, not yet weighted.

    TRL >= 1.15 reads per-token fields of its own head's output and does nothing with them but to sum them. The
    properties below answer to those names with the sums, which are their own sums.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    nll_sum: torch.Tensor | None = None
    num_correct_tokens: torch.Tensor | None = None
    entropy_sum: torch.Tensor | None = None
    num_valid_tokens: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None

    @property
    def log_probs(self) -> torch.Tensor:
        return -self.nll_sum

    @property
    def entropy(self) -> torch.Tensor:
        return self.entropy_sum

    @property
    def is_top1(self) -> torch.Tensor:
        return self.num_correct_tokens

    @property
    def label_mask(self) -> torch.Tensor:
        return self.num_valid_tokens


def patch_cce_lm_head(
    model: PreTrainedModel,
    trust_remote_code: bool = False,
    on_labels: bool = True,
    activation_offloading: bool = False,
) -> None:
    """Make a call of `model` with `labels` or `shift_labels` return a CutCrossEntropyOutput, by the fused path.

    Loads the kernel, which may DOWNLOAD AND RUN CODE, see `load_kernel`. Calls without labels, `generate` among them,
    take the model's own forward. Backbone and head are looked up at every call, since PEFT and FSDP replace them.

    Args:
        model: a causal LM; of a PeftModel, its `get_base_model()`.
        trust_remote_code: whether the kernel may be downloaded and run.
        on_labels: False leaves calls with labels alone too; the fused path is then only for SFTTrainer's own calls,
            which pass fused_lm_head=True and cce_sums=True.
        activation_offloading: True keeps hooks on saved tensors off the loss. What it saves (gradients, or the
            exponentials of few tokens) is as large as the head and needed at once: offloading would only move it to
            the host and back.

    Raises:
        ValueError: the kernel may not be downloaded; or the model's head is not a plain linear layer.
    """
    kernel = load_kernel(trust_remote_code)
    _head(model)
    if model.base_model is model:
        raise ValueError(f"loss_type='cce' needs a backbone under a head; {type(model).__name__} has no base_model")
    if not hasattr(model, "_forward_before_cce"):
        # On the model, not in a closure: a deep copy of the model then has a forward of its own.
        model._forward_before_cce = model.forward
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    # wraps: `generate` and Trainer read the signature
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, cce_sums=False, **kwargs):
        kwargs.update(zip(names, args))
        if fused_lm_head and not cce_sums:
            raise ValueError(
                "fused_lm_head=True asks for per-token log-probabilities, and loss_type='cce' only has their sum. "
                "Call the model without it for the logits, or use fused_linear_log_probs of the kernel"
            )
        labelled = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        if fused_lm_head or (on_labels and labelled):
            return _loss_forward(kernel, self, activation_offloading, **kwargs)
        return self._forward_before_cce(**kwargs)

    model.forward = types.MethodType(forward, model)


def _loss_forward(
    kernel: ModuleType, model: PreTrainedModel, offloading: bool, labels=None, shift_labels=None,
    num_items_in_batch=None, **kwargs,
) -> CutCrossEntropyOutput:  # fmt: skip
    config = model.config.get_text_config()
    kwargs["use_cache"] = False
    if kwargs.get("output_router_logits") is None:
        kwargs.pop("output_router_logits", None)
        if getattr(config, "output_router_logits", False):
            kwargs["output_router_logits"] = True
    outputs = model.base_model(**kwargs)
    weight, bias = _head(model)
    with saved_tensors_hooks(_as_it_is, _as_it_is) if offloading else contextlib.nullcontext():
        sums = loss_sums(
            kernel, outputs.last_hidden_state, weight, bias, labels, shift_labels, *logit_transform(model.config)
        )
    loss = mean_loss(sums, num_items_in_batch)
    aux_loss = None
    if kwargs.get("output_router_logits"):
        aux_loss = _aux_loss(outputs.router_logits, config, kwargs.get("attention_mask")).to(loss.device)
        loss = loss + config.router_aux_loss_coef * aux_loss
    return CutCrossEntropyOutput(loss, None, *sums, aux_loss)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _aux_loss(router_logits, config, attention_mask) -> torch.Tensor:
    """Mixtral's load-balancing loss, which every family of transformers takes over."""
    num_experts = getattr(config, "num_experts", None) or config.num_local_experts
    return load_balancing_loss_func(router_logits, num_experts, config.num_experts_per_tok, attention_mask)


def _head(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight (V, H), bias (V,) or None) of the model's output embeddings, whatever their name is."""
    head = model.get_output_embeddings()
    name = type(model).__name__
    if head is None:
        raise ValueError(f"loss_type='cce' needs a linear LM head; {name}.get_output_embeddings() returns None")
    if hasattr(head, "base_layer"):
        raise ValueError(HEAD_ADAPTER)
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in _DTYPES:
        found = "no weight" if weight is None else f"a weight of {getattr(weight, 'dtype', type(weight).__name__)}"
        raise ValueError(
            f"loss_type='cce' needs the LM head's weight in float32, bfloat16 or float16; the head of {name}, a "
            f"{type(head).__name__}, has {found}. Leave the head out of the quantisation, or use loss_type='nll'"
        )
    return weight, getattr(head, "bias", None)


HEAD_ADAPTER = (
    "loss_type='cce' is not supported with a PEFT adapter on the LM head (target_modules='all-linear' leaves it out; "
    "an explicit list must too): the loss is computed from the head's weight, so the adapter would be ignored and "
    "never trained. Remove the head from target_modules, or train it whole with modules_to_save"
)


def logit_transform(config) -> tuple[float, float | None]:
    """(logit_scale, softcap) of a model configuration; `check_logit_transform` tells whether they are all there is."""
    config = config.get_text_config()
    scale = next((s for s in (getattr(config, name, None) for name in _SCALES) if s is not None), None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies.
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    softcap = next((c for c in (getattr(config, name, None) for name in _SOFTCAPS) if c is not None), None)
    return 1.0 if scale is None else scale, softcap


@torch.no_grad()
def check_logit_transform(model: PreTrainedModel) -> None:
    """Raise ValueError unless the model's logits are softcap * tanh(scale * head(hidden) / softcap) of its backbone's
    output, with the scale and softcap that its configuration names.

    One call of the model's forward in which backbone and head are replaced by functions that return known values: it
    costs nothing, needs no parameter to be there (ZeRO-3), and, as the head's output runs from -100 to 100, it also
    sees a cap that no logit of today reaches. On the meta device, and if the environment variable
    FUSED_LINEAR_CE_CHECK is 0, the model is taken at its word.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    if os.environ.get(CHECK_VARIABLE) == "0" or embedding.is_meta:
        return
    vocab, width = getattr(head.weight, "ds_shape", head.weight.shape)  # ds_shape: of a ZeRO-3 partition
    ids = _text_ids(model)
    hidden = torch.linspace(-1, 1, len(ids) * width, device=embedding.device).reshape(1, len(ids), width)
    raw = torch.linspace(-100, 100, vocab, device=embedding.device).expand(1, len(ids), vocab)
    head_inputs = []

    def head_forward(x, *args, **kwargs):
        head_inputs.append(x)
        return raw.clone()

    def refuse(what: str, cause: Exception | None = None):
        raise ValueError(
            f"loss_type='cce' cannot compute the loss of {type(model).__name__} from its LM head's weight: {what}"
        ) from cause

    forward = getattr(model, "_forward_before_cce", model.forward)
    backbone_forward = lambda *args, **kwargs: _BackboneOutput(hidden)  # noqa: E731
    try:
        with _forward_of(model.base_model, backbone_forward), _forward_of(head, head_forward):
            logits = forward(input_ids=torch.tensor([ids], device=embedding.device), use_cache=False).logits
    except Exception as error:
        refuse(
            f"its forward, called to compare them, raised {type(error).__name__}: {error} ({CHECK_VARIABLE}=0 skips "
            "this check)",
            error,
        )
    if len(head_inputs) != 1:
        refuse(f"its forward calls its output embeddings {len(head_inputs)} times")
    if head_inputs[0].shape != hidden.shape or not torch.equal(head_inputs[0].float(), hidden):
        refuse("the head's input is not the backbone's last hidden state")
    scale, softcap = logit_transform(model.config)
    expected = raw * scale
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    if logits.shape != expected.shape:
        refuse(f"its logits have shape {tuple(logits.shape)}, its head's output {tuple(expected.shape)}")
    if not torch.allclose(logits.float(), expected, rtol=8 * torch.finfo(logits.dtype).eps, atol=1e-4):
        worst = (logits.float() - expected).abs().max().item()
        refuse(
            f"its logits are not scale {scale} and softcap {softcap} of its head's output (they differ by up to "
            f"{worst:.3g} where the head's output runs from -100 to 100)"
        )


class _BackboneOutput:
    """last_hidden_state, and None for whatever else a forward hands on."""

    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]


@contextlib.contextmanager
def _forward_of(module: torch.nn.Module, function: Callable) -> Iterator[None]:
    """Let calls of `module` call `function` instead of its own forward."""
    own = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _text_ids(model: PreTrainedModel) -> list[int]:
    """8 token ids that stand for text: none that the configuration singles out, such as an image's."""
    configs = [model.config.to_dict(), model.config.get_text_config().to_dict()]
    special = {value for config in configs for key, value in config.items() if "token" in key}
    ids = (i for i in range(model.config.get_text_config().vocab_size) if i not in special)
    return list(itertools.islice(ids, 8))
