"""Fine-tune with TRL twice, with loss_type "nll" and "cce", and show that the curves are the same.

    make demo                                           # after train_tiny.py, this checkout's through a local Hub
    LOCAL_KERNELS="trl-lib/fused-linear-ce=$PWD/build" python examples/train_trl.py     # a local build
    FUSED_LINEAR_CE_REVISION=SHA python examples/train_trl.py --trust-remote-code       # a published commit

Model, data, order and optimizer are the same, in fp32, so loss, entropy and token accuracy must agree at every step,
or the script fails. It needs no network: the text is the help that ships with Python, the model is made from its
configuration. On a CPU the two take about as long as each other. TRL and the adapter have to be importable: `make
demo` takes them from .venv/trl and integrations/trl.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from pydoc_data import topics

# Read when the libraries are imported.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # or threads spin, which is slow where other work shares the cores

import torch
import trl
from datasets import Dataset, disable_progress_bars
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig

import fused_linear_ce_trl

METRICS = {"loss": "loss, nats", "entropy": "entropy, nats", "mean_token_accuracy": "token accuracy"}
TOLERANCE = 1e-4  # two correct fp32 implementations differ by rounding alone: a few 1e-6 here


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--seq-len", type=int, default=128)
    p.add_argument("--vocab-size", type=int, default=8192, help="at most; the text supports about 9000")
    p.add_argument("--hidden-size", type=int, default=128)
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for the plot")
    p.add_argument("--trust-remote-code", action="store_true", help="download the kernel and run its code")
    return p.parse_args()


def paragraphs() -> list[str]:
    return [text for topic in topics.topics.values() for text in topic.split("\n\n") if len(text) > 40]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<pad>", "<eos>"]}
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=1, show_progress=False, **options)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def build_model(tokenizer, hidden_size: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden_size // 4, tie_word_embeddings=True,
        initializer_range=0.05, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def train(loss_type: str, tokenizer, texts: list[str], args) -> list[dict]:
    """The logged steps of a training with packed sequences."""
    cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as out:
        config = SFTConfig(
            loss_type=loss_type,
            trust_remote_code=args.trust_remote_code,
            output_dir=out,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            max_length=args.seq_len,
            packing=True,
            packing_strategy="wrapped",
            learning_rate=3e-3,
            logging_steps=1,
            bf16=False,
            use_cpu=cpu,
            dataloader_pin_memory=not cpu,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # the one line that "cce" changes: fused_linear_ce_trl.SFTTrainer in place of trl.SFTTrainer
        trainer_class = fused_linear_ce_trl.SFTTrainer if loss_type == "cce" else trl.SFTTrainer
        trainer = trainer_class(
            build_model(tokenizer, args.hidden_size),
            args=config,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)  # one table at the end says more
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def plot(path: Path, logs: dict[str, list[dict]], title: str) -> None:
    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items()):
        for (name, log), style in zip(logs.items(), (dict(color="#7DB3E8", lw=5), dict(color="#C2410C", lw=1.2))):
            axes.plot(range(1, len(log) + 1), [entry[key] for entry in log], label=name, **style)
        axes.set(title=label, xlabel="step")
        axes.grid(axis="y", color="#E5E7EB")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, color="#6B7280")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path)


def main():
    args = parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, about options that TRL sets
    disable_progress_bars()
    console = Console(width=None if sys.stdout.isatty() else 119)  # rich takes a pipe to be 80 columns wide
    texts = paragraphs()
    tokenizer = train_tokenizer(texts, args.vocab_size)
    title = f"TRL {trl.__version__}, vocabulary {len(tokenizer):,}, hidden size {args.hidden_size}, fp32, "
    title += f"{args.batch_size} x {args.seq_len} packed tokens a step"
    console.print(title, highlight=False)
    logs = {name: train(name, tokenizer, texts, args) for name in ("nll", "cce")}

    table = Table("", "first step", "last step", "first step", "last step", "largest difference", title="nll | cce")
    largest = {}
    for key, label in METRICS.items():
        nll, cce = ([entry[key] for entry in log] for log in logs.values())
        largest[key] = max(abs(a - b) for a, b in zip(nll, cce, strict=True))
        table.add_row(label, *(f"{v:.5f}" for v in (nll[0], nll[-1], cce[0], cce[-1])), f"{largest[key]:.1e}")
    console.print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(args.out / "trl.png", logs, title)
    console.print(f"plot: {args.out / 'trl.png'}", soft_wrap=True)
    text = f"largest difference of the loss curves: {largest['loss']:.1e} (allowed: {TOLERANCE:g})"
    console.print(text, highlight=False)
    # accuracy counts argmaxima: rounding may turn over a tie among thousands of tokens
    allowed = {"loss": TOLERANCE, "entropy": 10 * TOLERANCE, "mean_token_accuracy": 5e-3}
    if not all(largest[key] <= allowed[key] for key in METRICS):  # this way round, so that NaN fails too
        sys.exit("FAILED: nll and cce do not train the same model.")


if __name__ == "__main__":
    main()
