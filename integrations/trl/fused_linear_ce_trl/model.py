"""A causal LM whose forward computes the fused loss instead of logits."""

import functools
import inspect
import os
import types
from dataclasses import dataclass
from types import ModuleType

import torch
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


def patch_cce_lm_head(model: PreTrainedModel, trust_remote_code: bool = False, on_labels: bool = True) -> None:
    """Make a call of `model` with `labels` or `shift_labels` return a CutCrossEntropyOutput, by the fused path.

    Loads the kernel, which may DOWNLOAD AND RUN CODE, see `load_kernel`. Calls without labels, `generate` among them,
    take the model's own forward. Backbone and head are looked up at every call, since PEFT and FSDP replace them.

    Args:
        model: a causal LM; of a PeftModel, its `get_base_model()`.
        trust_remote_code: whether the kernel may be downloaded and run.
        on_labels: False leaves calls with labels alone too; the fused path is then only for SFTTrainer's own calls,
            which pass fused_lm_head=True and cce_sums=True.

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
            return _loss_forward(kernel, self, **kwargs)
        return self._forward_before_cce(**kwargs)

    model.forward = types.MethodType(forward, model)


def _loss_forward(
    kernel: ModuleType, model: PreTrainedModel, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs
) -> CutCrossEntropyOutput:
    config = model.config.get_text_config()
    kwargs["use_cache"] = False
    if kwargs.get("output_router_logits") is None:
        kwargs.pop("output_router_logits", None)
        if getattr(config, "output_router_logits", False):
            kwargs["output_router_logits"] = True
    outputs = model.base_model(**kwargs)
    weight, bias = _head(model)
    sums = loss_sums(
        kernel, outputs.last_hidden_state, weight, bias, labels, shift_labels, *logit_transform(model.config)
    )
    loss = mean_loss(sums, num_items_in_batch)
    aux_loss = None
    if kwargs.get("output_router_logits"):
        aux_loss = _aux_loss(outputs.router_logits, config, kwargs.get("attention_mask")).to(loss.device)
        loss = loss + config.router_aux_loss_coef * aux_loss
    return CutCrossEntropyOutput(loss, None, *sums, aux_loss)


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

    One forward of 8 tokens, in which the head's output is replaced by values from -100 to 100, so that a cap that no
    logit of today reaches is seen as well. Not possible while parameters are on the meta device or partitioned by
    ZeRO-3: the model is then taken at its word, as it is if the environment variable FUSED_LINEAR_CE_CHECK is 0.
    """
    if os.environ.get(CHECK_VARIABLE) == "0" or any(p.is_meta or hasattr(p, "ds_id") for p in model.parameters()):
        return
    seen = {}

    def keep_hidden(module, args, output):
        seen["hidden"] = output.last_hidden_state

    def replace_logits(module, args, output):
        seen["input"] = args[0]
        # float32, whatever the model's dtype: what the model does to it is then seen to float32's digits
        seen["raw"] = torch.linspace(-100, 100, output.shape[-1], device=output.device).expand(output.shape)
        return seen["raw"].clone()

    def refuse(what: str, cause: Exception | None = None):
        raise ValueError(
            f"loss_type='cce' cannot compute the loss of {type(model).__name__} from its LM head's weight: {what}"
        ) from cause

    forward = getattr(model, "_forward_before_cce", model.forward)
    hooks = [
        model.base_model.register_forward_hook(keep_hidden),
        model.get_output_embeddings().register_forward_hook(replace_logits),
    ]
    training = {module for module in model.modules() if module.training}
    model.eval()
    try:
        logits = forward(input_ids=_probe_ids(model), use_cache=False).logits
    except Exception as error:
        refuse(
            f"a forward of 8 tokens, to compare them, failed with {type(error).__name__}: {error} ({CHECK_VARIABLE}=0 "
            "skips this check)",
            error,
        )
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    if "raw" not in seen or "hidden" not in seen:
        refuse("its forward does not call its backbone and its output embeddings as modules")
    # NaN where a rank holds no weights yet
    if not torch.allclose(seen["input"], seen["hidden"].to(seen["input"]), rtol=0, atol=0, equal_nan=True):
        refuse("the head's input is not the backbone's last hidden state")
    scale, softcap = logit_transform(model.config)
    expected = seen["raw"] * scale
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


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """(1, 8) token ids that stand for text: none that the configuration singles out, such as an image's."""
    configs = [model.config, model.config.get_text_config()]
    special = {value for config in configs for key, value in config.to_dict().items() if "token" in key
               and isinstance(value, int)}  # fmt: skip
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = [i for i in range(vocab) if i not in special][:8]
    return torch.tensor([ids], device=model.get_input_embeddings().weight.device)
