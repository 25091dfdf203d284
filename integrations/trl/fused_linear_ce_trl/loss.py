"""The loss itself: from hidden states, head and labels to the sums that a trainer logs, by the kernel's scalar path.

A trainer differentiates one scalar, and the kernel then needs 3 GEMMs in place of 4. So everything here is a sum over
the batch's tokens; per-token values are never asked for.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial

from .host import gather_zero3
from .kernel import load_kernel

IGNORE_INDEX = -100
LEAST_EXPONENTIALS = 640 << 20  # bytes
LEAST_ROWS = 768  # of a chunk: with fewer than 640 the kernel recomputes the logits


class Sums(NamedTuple):
    """0-d tensors on the head's device, over the tokens that are not ignored. Only `nll` is differentiable."""

    nll: torch.Tensor  # float32, nats
    num_correct: torch.Tensor  # float32
    entropy: torch.Tensor  # float32, nats
    num_valid: torch.Tensor  # int64


def cut_cross_entropy_loss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    chunk_size: int,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    lm_head_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Next-token cross-entropy of an LM head by the fused kernel: the signature and results of TRL's
    `_chunked_cross_entropy_loss` (TRL 1.4 to 1.14).

    It is the fused path: the first call without a local build DOWNLOADS AND RUNS CODE, see `load_kernel`, which must
    have been allowed to. Ignored positions are not projected. Under autocast the GEMMs run in its dtype, otherwise in
    that of hidden_states. After Cut Your Losses (arXiv 2411.09009).

    Args:
        hidden_states: (B, S, H), the backbone's output.
        lm_head_weight: (V, H).
        chunk_size: of no effect: the kernel plans its own chunks.
        labels: (B, S), -100 is ignored; position i predicts labels[i + 1].
        shift_labels: (B, S), -100 is ignored; position i predicts shift_labels[i]. It wins over labels.
        num_items_in_batch: divides the summed loss; None stands for the number of tokens that are not ignored.
        logit_scale: multiplies the logits.
        final_logit_softcapping: then caps them as cap * tanh(logits / cap); None stands for no cap.
        lm_head_bias: (V,), added to the logits before they are scaled.

    Returns:
        loss (float32, 0 if every label is ignored), number of correct predictions (float32), sum of entropies
        (float32, nats), number of tokens that are not ignored (int64): 0-d, over this process's batch.

    Raises:
        ValueError: neither labels nor shift_labels is given; or the kernel may not be downloaded.
    """
    sums = loss_sums(
        load_kernel(), hidden_states, lm_head_weight, lm_head_bias, labels, shift_labels, logit_scale,
        final_logit_softcapping,
    )  # fmt: skip
    return mean_loss(sums, num_items_in_batch), sums.num_correct, sums.entropy, sums.num_valid


def loss_sums(
    kernel: ModuleType,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    logit_scale: float,
    softcap: float | None,
) -> Sums:
    """The sums of one batch; the tensors are those of cut_cross_entropy_loss."""
    if labels is None and shift_labels is None:
        raise ValueError("At least one of `labels` or `shift_labels` must be provided.")
    if shift_labels is None:
        hidden, targets = hidden[..., :-1, :], labels[..., 1:]
    else:
        targets = shift_labels
    weight, bias = _whole(weight), _whole(bias)
    # With the model on several devices the backbone can end on another one than the head's.
    hidden, targets = hidden.to(weight.device), targets.to(weight.device)
    if hasattr(weight, "ds_id"):
        with gather_zero3(weight, bias):
            nll, correct, entropy, count = _Zero3Loss.apply(
                kernel, hidden, weight, bias, targets, logit_scale, softcap, workspace(kernel, hidden, weight, bias)
            )
    else:
        if not torch.is_autocast_enabled(hidden.device.type):
            # e.g. a head that PEFT keeps in float32 on a bfloat16 model
            weight, bias = (None if t is None else t.to(hidden.dtype) for t in (weight, bias))
        nll, metrics = kernel.fused_linear_cross_entropy(
            hidden, weight, targets, bias, IGNORE_INDEX, logit_scale, softcap, "sum", return_metrics=True,
            workspace=workspace(kernel, hidden, weight, bias),
        )  # fmt: skip
        correct, entropy, count = _counts(metrics)
    return Sums(nll.float(), correct.float(), entropy.float(), count)


def workspace(
    kernel: ModuleType, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> int | None:
    """The kernel's `workspace`, in bytes, with which a step takes about the memory that it takes with TRL's own loss;
    None stands for the kernel's default.

    TRL holds the gradient of a trained head in float32 and a block of logits beside it. The kernel holds the same
    accumulator, or none for few tokens, and a batch's exponentials, by default of 4096 tokens and more. Here these may
    take as many bytes as the accumulator, and LEAST_EXPONENTIALS in any case, about what TRL's block takes, or what
    LEAST_ROWS tokens take: that binds at hidden sizes below 2048, of long batches below 4096, and with a frozen head.
    The loss is then slower, by 4 to 6 per cent at a hidden size of 1024 and 12 at 640. On other devices, and while
    torch.compile traces, the default stays.
    """
    device = hidden.device.type
    if device not in ("cuda", "xpu") or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    needs = (hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    return _smaller_workspace(
        kernel, hidden.numel() // hidden.shape[-1], *weight.shape, dtype, device, hidden.dtype, weight.dtype, needs
    )


@functools.lru_cache(maxsize=256)
def _smaller_workspace(kernel, n_tokens, vocab, width, dtype, device, hidden_dtype, weight_dtype, needs) -> int | None:
    ask = functools.partial(
        kernel.plan, n_tokens, vocab, width, dtype, device_type=device, hidden_dtype=hidden_dtype,
        weight_dtype=weight_dtype, needs=needs,
    )  # fmt: skip
    row = vocab * dtype.itemsize
    accumulator = 4 * vocab * width if needs[1] else 0
    most = max(max(accumulator, LEAST_EXPONENTIALS) // row, LEAST_ROWS)
    plan = ask()
    held, allowed = {
        "none": (0, 0),
        "forward": (plan.chunk_rows, most),
        "backward": (plan.kept_rows, most + accumulator // row),  # all exponentials, and no accumulator
    }[plan.gradients]
    if held <= allowed:
        return None
    # Label smoothing makes a plan with an accumulator of any number of tokens: the one whose chunks can be cut.
    plan = ask(label_smoothing=True)
    budget = plan.workspace_bytes
    while plan.chunk_rows > most:
        budget -= (plan.chunk_rows - most) * row
        plan = ask(label_smoothing=True, workspace=budget)
    return budget


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A DTensor (FSDP2, tensor parallelism) in one gather, any other tensor as it is.

    The gradient is averaged over the ranks, as FSDP averages those of the parameters that it gathers itself:
    full_tensor alone would take each rank's gradient for everyone's and keep a slice of it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


def mean_loss(sums: Sums, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """The loss over num_items_in_batch, or over the tokens that count; a batch without any is 0 and not 0 / 0."""
    count = sums.num_valid if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, torch.Tensor):
        return sums.nll / count.to(sums.nll.device).clamp(min=1)
    return sums.nll / max(count, 1)


def _counts(metrics: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return metrics["num_correct_tokens"], metrics["entropy_sum"], metrics["num_valid_tokens"]


class _Zero3Loss(torch.autograd.Function):
    """The summed loss of a head that DeepSpeed ZeRO-3 has partitioned.

    To be applied while weight and bias are gathered. They are partitioned again until backward, so backward gathers
    them once more; on every rank one gather a pass, however many tokens it has.
    """

    @staticmethod
    def forward(ctx, kernel, hidden, weight, bias, targets, logit_scale, softcap, workspace):
        device = hidden.device.type
        ctx.kernel, ctx.bias, ctx.transform, ctx.workspace = kernel, bias, (logit_scale, softcap), workspace
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        nll, metrics, saved = kernel.fused_linear_cross_entropy_forward(
            *_operands(hidden, weight, targets, bias, ctx.autocast), IGNORE_INDEX, logit_scale, softcap, "sum", True,
            workspace=workspace, needs_grad=ctx.needs_input_grad[1:4],
        )  # fmt: skip
        ctx.weight = weight  # the parameter itself: DeepSpeed gathers by its attributes
        ctx.save_for_backward(hidden, targets, *saved)
        counts = _counts(metrics)
        ctx.mark_non_differentiable(*counts)
        return nll, *counts

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, targets, *saved = ctx.saved_tensors
        with gather_zero3(ctx.weight, ctx.bias), torch.autocast(*ctx.autocast):
            grads = ctx.kernel.fused_linear_cross_entropy_backward(
                grad, tuple(saved), *_operands(hidden, ctx.weight, targets, ctx.bias, ctx.autocast), IGNORE_INDEX,
                *ctx.transform, "sum", workspace=ctx.workspace, needs_grad=ctx.needs_input_grad[1:4],
            )  # fmt: skip
            grads = (
                None if g is None else g.to(t.dtype) for g, t in zip(grads, (hidden, ctx.weight, ctx.bias))
            )
            return None, *grads, None, None, None, None


def _operands(hidden, weight, targets, bias, autocast):
    """(hidden, weight, targets, bias) in one dtype; under autocast the kernel sees to that."""
    if not autocast[2]:
        weight, bias = (None if t is None else t.to(hidden.dtype) for t in (weight, bias))
    return hidden, weight, targets, bias
