"""The training steps that `python -m benchmarks.trl_step` times: models from configuration, and what a step is.

The configurations are those of the published models of the same names (their config.json on the Hub); the weights are
random, so nothing is downloaded. What a step costs does not depend on what the model knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Row:
    """One training step: a model, how it is trained, and the batch."""

    name: str
    model: str
    batch: int  # sequences a step
    length: int = 2048  # tokens of a sequence
    lora_rank: int | None = None  # None: full fine-tuning
    valid: float = 1.0  # share of the tokens with a label, at the end of each sequence: completion-only training
    # None: bfloat16 weights and states. bfloat16: float32 weights under bfloat16 autocast, TRL's default
    autocast: torch.dtype | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def title(self) -> str:
        how = "full" if self.lora_rank is None else f"LoRA r{self.lora_rank}"
        valid = "" if self.valid == 1 else f", {self.valid:.0%} of the tokens valid"
        cast = "" if self.autocast is None else ", fp32 weights under bf16 autocast"
        return f"{self.model}, {how}, {self.batch} x {self.length}{valid}{cast}"


def _gemma3_270m():
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=32768,
        query_pre_attn_scalar=256, tie_word_embeddings=True,
    )  # fmt: skip


def _llama32_1b():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip


def _qwen3(**shape):
    from transformers import Qwen3Config

    return Qwen3Config(vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=40960, **shape)


def _qwen3_06b():
    return _qwen3(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True,
    )  # fmt: skip


def _qwen3_8b():
    return _qwen3(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False,
    )  # fmt: skip


def _tiny():
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip


CONFIGS: dict[str, Callable] = {
    "gemma-3-270m": _gemma3_270m,
    "Llama-3.2-1B": _llama32_1b,
    "Qwen3-0.6B": _qwen3_06b,
    "Qwen3-8B": _qwen3_8b,
    "tiny": _tiny,
}

ROWS = {
    row.name: row
    for row in (
        Row("gemma-3-270m", "gemma-3-270m", 8),
        Row("qwen3-0.6b", "Qwen3-0.6B", 8),
        Row("llama-3.2-1b", "Llama-3.2-1B", 8),
        Row("qwen3-0.6b-completion", "Qwen3-0.6B", 8, valid=0.3),
        Row("qwen3-8b-lora-8k", "Qwen3-8B", 4, lora_rank=16),
        Row("qwen3-8b-lora-2k", "Qwen3-8B", 1, lora_rank=16),
        Row("qwen3-8b", "Qwen3-8B", 4),
        Row("qwen3-0.6b-autocast", "Qwen3-0.6B", 8, autocast=torch.bfloat16),
        # for machines without a GPU, and for the tests
        Row("tiny", "tiny", 2, length=32),
        Row("tiny-lora", "tiny", 2, length=32, lora_rank=4),
        Row("tiny-completion", "tiny", 2, length=32, valid=0.3),
    )
}
GPU_ROWS = [name for name in ROWS if not name.startswith("tiny")]


def build_model(row: Row, device: torch.device, seed: int = 0) -> nn.Module:
    """The row's model on the device, in training mode, with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    # bf16 on a GPU; on a CPU, where this only shows that it runs, fp32
    dtype = torch.float32 if row.autocast is not None or device.type == "cpu" else torch.bfloat16
    with device:  # initialised where it will live: an 8B model would take minutes on the host
        model = AutoModelForCausalLM.from_config(CONFIGS[row.model](), dtype=dtype, attn_implementation="sdpa")
    if row.lora_rank is not None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=row.lora_rank, lora_alpha=2 * row.lora_rank, target_modules="all-linear")
        # adapters in the model's dtype: fp32 ones would run fp32 GEMMs, as there is no autocast here
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        model.enable_input_require_grads()  # or checkpointed layers would see no input that needs a gradient
    return model.train()


def causal_lm(model: nn.Module) -> nn.Module:
    """The model itself, without PEFT around it: the one whose forward computes the loss."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def make_batch(row: Row, vocab: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels, each (batch, length), as TRL's collator makes them of full sequences."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (row.batch, row.length), generator=generator)
    labels = ids.clone()
    labels[:, : round((1 - row.valid) * row.length)] = IGNORE_INDEX
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}
