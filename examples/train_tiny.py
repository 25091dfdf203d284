"""Train a tiny language model twice, with two loss heads, and show that only time and memory change.

    make demo                                                           # this checkout's, through a local Hub
    python examples/train_tiny.py --revision SHA --trust-remote-code    # a published one

One copy of the model computes all logits and calls F.cross_entropy, the other gives its hidden states and the lm_head
weight to the kernel. Initial weights, batches and optimizer are the same, so in fp32 the two loss curves must agree to
1e-4, or the script fails. It works offline: the text is the help that ships with Python.
"""

import os

# Both are read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces itself
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # or threads spin, which is slow where other work shares the cores

import argparse
import copy
import functools
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data import topics
from statistics import fmean, median

import kernels
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

REPO_ID = "trl-lib/fused-linear-ce"
IGNORE = -100
FULL, FUSED = "full logits + F.cross_entropy", "fused-linear-ce"
TOLERANCE = 1e-4  # two correct fp32 implementations differ by rounding alone: a few 1e-6 here


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--batch-size", type=int, help="sequences a step (default: 4; on a GPU 32)")
    p.add_argument("--seq-len", type=int, default=256)
    p.add_argument("--vocab-size", type=int, default=8192, help="at most; the text supports about 9000")
    p.add_argument("--hidden-size", type=int, default=128)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", help="default: a GPU if there is one, else the CPU")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for the plot")
    p.add_argument("--revision", help="commit of the kernel to load from the Hub; not needed with LOCAL_KERNELS")
    p.add_argument("--trust-remote-code", action="store_true", help=f"allow the code of {REPO_ID} to run")
    args = p.parse_args()
    default = "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"
    args.device = torch.device(args.device or default)
    args.batch_size = args.batch_size or (4 if args.device.type == "cpu" else 32)
    return args


# ---- data


def tokenize(vocab_size):
    """Byte-level BPE on Python's own help: a large vocabulary for so small a model, so that the logits dominate."""
    texts = list(topics.topics.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The text is short: with min_frequency=1 it merges until whole words are left.
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<eos>"]}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=1, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    eos = tokenizer.token_to_id("<eos>")
    docs = [torch.tensor([*encoding.ids, eos]) for encoding in tokenizer.encode_batch(texts)]
    return docs, tokenizer.get_vocab_size(), eos


def make_batches(docs, eos, args):
    """(inputs, targets) of every step: random windows of random documents.

    As in fine-tuning, not every position has a target: the first eighth of a row is its prompt, and a document that
    ends early leaves padding. The kernel never projects these rows to the vocabulary.
    """
    length, prompt = args.seq_len, args.seq_len // 8
    docs = [doc for doc in docs if len(doc) > length // 2]
    if not docs:
        sys.exit(f"--seq-len {length}: no document is half as long.")
    sizes = torch.tensor([float(len(doc)) for doc in docs])
    rng = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(args.steps):
        inputs = torch.full((args.batch_size, length), eos)
        targets = torch.full((args.batch_size, length), IGNORE)
        for row, i in enumerate(torch.multinomial(sizes, args.batch_size, replacement=True, generator=rng).tolist()):
            start = torch.randint(len(docs[i]) - length // 2, (), generator=rng).item()
            window = docs[i][start : start + length + 1]
            n = len(window) - 1
            inputs[row, :n] = window[:-1]
            targets[row, prompt:n] = window[1 + prompt :]  # shifted already: the token after inputs[row, t]
        batches.append((inputs.to(args.device), targets.to(args.device)))
    return batches


# ---- the two loss heads: (hidden, weight, targets) -> (loss, metrics)


def full_logits_head(hidden, weight, targets):
    """What the kernel replaces, with the metrics that it returns."""
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    logits = F.linear(hidden, weight)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE)
    valid, correct, entropy = targets != IGNORE, 0, 0
    with torch.no_grad():  # the metrics in chunks, so that the peak is the loss's own
        for z, y, keep in zip(logits.split(256), targets.split(256), valid.split(256)):
            log_p = z.log_softmax(-1)
            correct += (z.argmax(-1) == y).sum()
            entropy -= ((log_p.exp() * log_p).sum(-1) * keep).sum()
    return loss, {"num_correct_tokens": correct, "entropy_sum": entropy, "num_valid_tokens": valid.sum()}


def fused_head(args):
    # LOCAL_KERNELS maps the repository to a folder, past the Hub and its question of trust. Without it a commit has to
    # be named: version=1 alone follows a branch, and what runs could change overnight.
    if args.revision is None and "LOCAL_KERNELS" not in os.environ:
        sys.exit("Which kernel? Run `make demo`, or pass --revision SHA --trust-remote-code.")
    which = {"revision": args.revision} if args.revision else {"version": 1}
    trusted = [REPO_ID] if args.trust_remote_code else False
    kernel = kernels.get_kernel(REPO_ID, trust_remote_code=trusted, **which)
    return functools.partial(kernel.fused_linear_cross_entropy, return_metrics=True)


# ---- training


def build_model(vocab_size, args):
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden_size // 4,
        tie_word_embeddings=True,  # the head's weight gradient is added to the embedding's
        initializer_range=0.05,  # 0.02 is for wider models: here it trains slowly, and blows rounding differences up
    )
    return Qwen3ForCausalLM(config).to(args.device)


def train_step(model, optimizer, head, inputs, targets):
    start = time.perf_counter()
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # the backbone only, no lm_head
    loss, metrics = head(hidden, model.lm_head.weight, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss = loss.item()  # waits for the device
    seconds, valid = time.perf_counter() - start, metrics["num_valid_tokens"].item()
    accuracy, entropy = metrics["num_correct_tokens"].item() / valid, metrics["entropy_sum"].item() / valid
    return {"loss": loss, "accuracy": accuracy, "entropy": entropy, "seconds": seconds}


def train(model, heads, batches, args, progress):
    """One copy of the model per head, step by step side by side: whatever else the machine does slows both down."""
    twins = {name: copy.deepcopy(model) for name in heads}
    optimizers = {n: torch.optim.AdamW(t.parameters(), betas=(0.9, 0.99), weight_decay=0.0) for n, t in twins.items()}
    history = {name: [] for name in heads}
    task = progress.add_task("training both", total=args.steps, loss="")
    for step, (inputs, targets) in enumerate(batches):
        warmup = min(1.0, 10 * (step + 1) / args.steps)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
        for name, head in heads.items():
            optimizers[name].param_groups[0]["lr"] = 3e-3 * warmup * cosine
            history[name].append(train_step(twins[name], optimizers[name], head, inputs, targets))
        progress.update(task, advance=1, loss="loss " + " | ".join(f"{h[-1]['loss']:.4f}" for h in history.values()))
    return history, twins[FULL]


# ---- time and memory of the loss alone


def peak_bytes(call, device):
    """Most bytes alive at once during call() beyond those alive before it: without the inputs, with the gradients.

    The allocator of a GPU keeps that number. On the CPU the profiler provides it: it records the size of every
    allocation and release of torch's allocator, inside custom operators too; the peak is that of their running sum.
    """
    if device.type != "cpu":
        gpu = torch.get_device_module(device)
        gpu.reset_peak_memory_stats()
        before = gpu.memory_allocated()
        call()
        return gpu.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    return max(itertools.accumulate(e["Bytes"] for e in sorted(events, key=lambda e: e["Ev Idx"])))


def measure(model, heads, inputs, targets):
    """Forward and backward of each loss head on its own: {name: (seconds, peak bytes)}."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state.detach().requires_grad_()
    weight = model.lm_head.weight.detach().requires_grad_()

    def call(head):
        loss, _ = head(hidden, weight, targets)
        torch.autograd.grad(loss, (hidden, weight))
        torch.get_device_module(inputs.device).synchronize()

    seconds = {name: [] for name in heads}
    for _ in range(20):
        for name, head in heads.items():
            start = time.perf_counter()
            call(head)
            seconds[name].append(time.perf_counter() - start)
    peaks = {name: peak_bytes(functools.partial(call, head), inputs.device) for name, head in heads.items()}
    return {name: (min(seconds[name]), peaks[name]) for name in heads}  # other work on the machine only ever adds time


# ---- report


def print_table(console, history, loss_only):
    table = Table("", title="same seed, same batches")
    for name in (FULL, FUSED, "ratio"):
        table.add_column(name, justify="right")
    columns = []
    for name in (FULL, FUSED):
        means = [fmean(h[key] for h in history[name][-10:]) for key in ("loss", "accuracy", "entropy")]
        step, (seconds, peak) = median(h["seconds"] for h in history[name]), loss_only[name]
        columns.append((*means, step * 1e3, seconds * 1e3, peak / 2**20))
    labels = "loss", "token accuracy", "entropy, nats", "step, ms", "loss fwd + bwd, ms", "loss peak memory, MiB"
    for i, (label, full, fused) in enumerate(zip(labels, *columns)):
        form = "{:.2%}" if label == "token accuracy" else "{:.5f}" if i < 3 else "{:.1f}"
        table.add_row(label, form.format(full), form.format(fused), f"{full / fused:.2f} x" if i >= 3 else "")
    console.print(table)
    console.print("loss, accuracy, entropy: mean of the last 10 steps; step: median; memory: beyond the inputs")


def plot(path, curves, differences, title):
    full, fused, grey = "#7DB3E8", "#C2410C", "#6B7280"
    steps = range(1, len(differences) + 1)
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    top.plot(steps, curves[FULL], color=full, linewidth=6, solid_capstyle="round", label=FULL)
    top.plot(steps, curves[FUSED], color=fused, linewidth=1.4, label=FUSED)
    top.set_title(title, loc="left", fontsize=10, color=grey)
    top.set(ylabel="training loss, nats per token")
    top.legend(frameon=False)
    zero = 1e-8  # where equal losses, which have no logarithm, are drawn
    bottom.semilogy(steps, differences.clamp(min=zero), ".", color=grey, markersize=4, clip_on=False)
    bottom.axhline(TOLERANCE, color=fused, linestyle="--", linewidth=1)
    bottom.text(1, TOLERANCE * 1.5, f"allowed: {TOLERANCE:g}", color=fused)
    bottom.set(ylim=(zero, TOLERANCE * 20), ylabel="difference, nats", xlabel="step")
    bottom.set_yticks([zero, 1e-6, 1e-4], labels=["0", "1e-6", "1e-4"])
    for axes in (top, bottom):
        axes.grid(axis="y", color="#E5E7EB")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main():
    args = parse_args()
    console = Console(width=None if sys.stdout.isatty() else 119)  # rich takes a pipe to be 80 columns wide
    heads = {FULL: full_logits_head, FUSED: fused_head(args)}
    docs, vocab_size, eos = tokenize(args.vocab_size)
    batches = make_batches(docs, eos, args)
    initial = build_model(vocab_size, args)
    valid = fmean((targets != IGNORE).float().mean().item() for _, targets in batches)
    title = f"vocabulary {vocab_size:,}, hidden size {args.hidden_size}, fp32, {args.device.type}, "
    title += f"{args.batch_size * args.seq_len:,} tokens a step, {valid:.0%} with a target"
    sizes = f"text: {sum(map(len, docs)):,} tokens; model: {initial.num_parameters() / 1e6:.1f} M parameters"
    console.print(title, sizes, sep="\n", highlight=False)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        history, model = train(initial, heads, batches, args, progress)
    print_table(console, history, measure(model, heads, *batches[-1]))

    curves = {name: [h["loss"] for h in history[name]] for name in heads}
    differences = (torch.tensor(curves[FULL]) - torch.tensor(curves[FUSED])).abs()
    largest = differences.max().item()
    args.out.mkdir(parents=True, exist_ok=True)
    plot(args.out / "loss.png", curves, differences, title)
    console.print(f"plot: {args.out / 'loss.png'}", soft_wrap=True)
    console.print(f"largest difference of the loss curves: {largest:.1e} (allowed: {TOLERANCE:g})", highlight=False)
    if not largest <= TOLERANCE:  # this way round, so that NaN fails too
        sys.exit("FAILED: the two loss heads do not train the same model.")


if __name__ == "__main__":
    main()
