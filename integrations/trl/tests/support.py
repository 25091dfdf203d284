"""Tiny models of many kinds, a tokenizer and a text, all made on the spot, and short trainings on them."""

import functools
from pydoc_data import topics

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

import fused_linear_ce_trl

# TRL's own loss that cce has to reproduce: up to 1.14 from the model's full logits, from 1.15 on its fused head.
REFERENCE = "nll"
VOCAB = 512


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCAB tokens, learnt from the help that ships with Python."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(
        list(topics.topics.values())[:20],
        trainers.BpeTrainer(
            vocab_size=VOCAB, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<pad>", "<eos>"],
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def texts(n: int = 32, min_tokens: int = 8) -> list[list[int]]:
    """n token sequences of different lengths, of 7 different tokens: after a step some are predicted right."""
    paragraphs = (p for text in topics.topics.values() for p in text.split("\n\n") if len(p) > 60)
    rows = (tokenizer()(p)["input_ids"] for p in paragraphs)
    rows = [row for _, row in zip(range(n), rows)]
    return [[4 + token % 7 for token in row[: min_tokens + 5 * i % 24]] for i, row in enumerate(rows)]


def dataset(n: int = 32) -> Dataset:
    """Prompts are ignored: of each row the first quarter has label -100."""
    rows = texts(n)
    return Dataset.from_dict(
        {"input_ids": rows, "labels": [[-100] * (len(row) // 4) + row[len(row) // 4 :] for row in rows]}
    )


_COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=1,
)  # fmt: skip
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1,
            output_router_logits=True, router_aux_loss_coef=0.1)  # fmt: skip

ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(head_dim=8)),
    "gemma2": ("Gemma2Config", dict(head_dim=8, final_logit_softcapping=2.0, sliding_window=16)),  # tied, softcap
    "gemma3": ("Gemma3TextConfig", dict(head_dim=8, sliding_window=16)),
    "cohere": ("CohereConfig", dict(logit_scale=0.0625)),  # tied
    "granite": ("GraniteConfig", dict(logits_scaling=4.0)),
    "phi": ("PhiConfig", {}),  # bias
    "gptneox": ("GPTNeoXConfig", {}),  # embed_out
    "mpt": ("MptConfig", dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=128)),  # logit_scale None
    "qwen3moe": ("Qwen3MoeConfig", dict(head_dim=8, **_MOE)),
    "falconmamba": ("FalconMambaConfig", dict(state_size=4, num_hidden_layers=1)),  # no past_key_values
    "recurrentgemma": (  # a softcap under another name
        "RecurrentGemmaConfig",
        dict(head_dim=8, lru_width=32, attention_window_size=32, logits_soft_cap=2.0),
    ),
}


def make_model(kind: str = "llama", seed: int = 0, dtype=torch.float32, **changes):
    name, options = ARCHITECTURES[kind]
    config = getattr(transformers, name)(**{**_COMMON, **options, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():  # away from uniform predictions, so that entropy and accuracy say something
        model.get_output_embeddings().weight.normal_(std=0.4)
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            model.get_output_embeddings().bias.normal_()
    return model


def config(tmp_path, loss_type: str = "cce", **changes) -> SFTConfig:
    """fp32 on the CPU, 3 steps of 4 rows, everything logged, nothing saved.

    Plain SGD: Adam would forgive a gradient of the wrong size, and turn rounding into steps of full size.
    """
    options = dict(
        output_dir=str(tmp_path), loss_type=loss_type, max_steps=3, per_device_train_batch_size=4, optim="sgd",
        learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=64,
        seed=0, dataloader_pin_memory=False,
    )  # fmt: skip
    return SFTConfig(**{**options, **changes})


def make_trainer(model, args: SFTConfig, cls=None, **kwargs):
    cls = cls or (fused_linear_ce_trl.SFTTrainer if args.loss_type == "cce" else trl.SFTTrainer)
    kwargs.setdefault("train_dataset", dataset())
    kwargs.setdefault("processing_class", tokenizer())
    return cls(model, args=args, **kwargs)


def train(model, args: SFTConfig, **kwargs) -> list[dict]:
    """The logged steps."""
    trainer = make_trainer(model, args, **kwargs)
    trainer.train()
    return steps(trainer)


def steps(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def differences(a: list[dict], b: list[dict], key: str) -> list[float]:
    assert len(a) == len(b) > 0
    return [x[key] - y[key] for x, y in zip(a, b)]


def assert_same_curves(a: list[dict], b: list[dict], rtol=1e-6, grad_norm=1e-5, accuracy=1e-7):
    """Two logs agree: relative for loss and grad_norm, absolute for the rest."""
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        bounds = dict(
            loss=rtol * y["loss"], entropy=1e-5, mean_token_accuracy=accuracy, num_tokens=0,
            grad_norm=grad_norm * y["grad_norm"],
        )  # fmt: skip
        for key, bound in bounds.items():
            assert abs(x[key] - y[key]) <= bound, f"{key}: {x[key]} and {y[key]}"


_VISION_IDS = dict(image_token_id=504, video_token_id=505, vision_start_token_id=506, vision_end_token_id=507)


def make_vlm(kind: str, **text_changes):
    """A tiny vision-language model for images of 16 x 16 pixels, which become 4 tokens of id 504."""
    text = {**_COMMON, **text_changes}
    if kind == "qwen2.5-vl":
        vision = dict(
            depth=2, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, patch_size=4,
            spatial_merge_size=2, temporal_patch_size=1, window_size=16, fullatt_block_indexes=[1],
        )  # fmt: skip
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_VISION_IDS)
        cls = transformers.Qwen2_5_VLForConditionalGeneration
    else:
        vision = dict(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=4,
        )  # fmt: skip
        text.update(head_dim=8, sliding_window=16)
        config = transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=504, boi_token_index=506,
            eoi_token_index=507,
        )  # fmt: skip
        cls = transformers.Gemma3ForConditionalGeneration
    torch.manual_seed(0)
    return cls(config)


def vlm_batch(kind: str) -> dict:
    ids = torch.tensor([[5, 506, 504, 504, 504, 504, 507, 6, 7, 8, 9]])
    torch.manual_seed(1)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.masked_fill(ids >= 504, -100))
    if kind == "qwen2.5-vl":
        return inputs | dict(pixel_values=torch.randn(16, 3 * 4 * 4), image_grid_thw=torch.tensor([[1, 4, 4]]))
    return inputs | dict(pixel_values=torch.randn(1, 3, 16, 16), token_type_ids=(ids == 504).long())
