"""What a call will run, decided from shapes, dtypes, the gradients asked for and `workspace` alone.

Nothing here reads the device's free memory or looks at values: the same call always runs the same way. Everything
below this module is told what to do. Units: 1 G = 2 * N * V * H floating-point operations, one GEMM over all tokens.

The ways to run ("E" is a chunk's exponentials, see backends/base.py; ignored rows cost nothing in any of them):

    none       1 G      forward only: statistics, nothing of size N x V kept
    forward    3 G      scalar losses: a chunk's dX and dW are made while its E is at hand; backward scales them
    backward   3-4 G    E is kept until backward for as many rows as the workspace holds, the other rows' logits are
                        recomputed there: per-token losses; and on accelerators scalar ones of which it holds all
                        rows, whose dW then is one GEMM, without an fp32 accumulator that backward has to scale
    backward, slabs 4 G little workspace: backward goes slab by slab of classes and needs no (V, H) accumulator
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

import torch

from . import backends, validation
from .backends.base import UPCAST_BYTES, accumulation_dtype

MIB = 1 << 20
# What lives at once when `workspace` is None. On an accelerator the E of 4096 rows, or of more where that is not yet
# 1 GiB: the GEMMs run at full speed, and the fp32 accumulator of dW is read and written few times. On a CPU 384 rows
# of a 32k vocabulary, the most with which 4096 tokens of width 512 stay below a quarter of their logits
# (tests/test_memory.py), gradients included.
DEFAULT_CHUNK = {"cpu": 64 * MIB}
DEFAULT_ROWS_ACCELERATOR = 4096
DEFAULT_CHUNK_ACCELERATOR = (1024 * MIB, 2560 * MIB)  # at least, at most
# A batch of more than LONG_CHUNKS such chunks runs in as many larger ones, each of LONG_ROWS and LONG_CHUNK bytes at
# most: a chunk costs some 0.3 ms for that accumulator and for small kernels.
LONG_CHUNKS, LONG_ROWS, LONG_CHUNK = 8, 8192, 2816 * MIB
# Per-token losses keep E until backward, where the rows that were not kept cost a fourth GEMM: by default of four such
# chunks, which are all rows of most batches.
DEFAULT_KEPT_CHUNKS, DEFAULT_KEPT_ACCELERATOR = 4, 6144 * MIB  # at most
ROW_MULTIPLE = 128  # chunks are whole tiles of the GEMMs
WAVE_ROWS = 2048  # and large ones a multiple of this: with 3328 rows dX takes as long as with 4096, for want of tiles
GEMM_ROWS = 4096  # of one GEMM of dX, if WAVE_ROWS remain: of a width of 4096 one of 8192 takes 3 % longer than two
MIN_ROWS = 16  # the fewest rows that a chunk is cut to
# Each chunk reads and writes dW's accumulator, which takes an accelerator as long as half-precision GEMMs of some 200
# rows. With chunks of fewer rows than these, slabs of classes are faster, although they recompute the logits. An
# accumulator of up to CACHED bytes stays in the second-level cache and costs little.
LEAST_ROWS_ACCELERATOR = 640  # also of statistics alone, beside a copy of the weight
CACHED = 64 * MIB
TOKEN_BYTES = 192  # a token's targets, statistics and coefficients
SLAB_ROWS = 4096  # rows of a chunk in the slab plan, where they fit
SLAB_MULTIPLE = 64  # classes, of whose E no byte is padding (backends.padded_vocab)
# Tiles of ROW_MULTIPLE x SLAB_TILE logits that an accelerator (of 132 multiprocessors) works on at once, a wave. Slabs
# of whole waves waste nothing: one and a fifth would take the time of two. What is left is taken if NEARLY a wave.
SLAB_TILE, SLAB_WAVE, NEARLY = 256, 128, 0.75
# A dW of fewer elements always goes through an fp32 accumulator: its GEMM may be split along the tokens, and torch
# lets the library add the parts in half precision (torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction).
LEAST_UNSPLIT = 1 << 23


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Plan:
    """The decision, and what it costs. print() it."""

    n_tokens: int
    vocab: int
    hidden_size: int
    backend: str  # "eager" | "triton"
    gradients: str  # "none" | "forward" | "backward"
    chunk_rows: int  # rows whose E (or dlogits) live at once, beside the kept ones
    kept_rows: int  # rows whose E lives until backward
    slab: int  # classes per slab of the recomputing backward; vocab = no slabs
    copies_weight: bool  # whether a pass holds a whole copy of the weight in the GEMMs' dtype
    flop_g: float  # forward and backward, in G
    workspace_bytes: int  # at most, beyond the outputs
    statistics_rows: int  # rows of which the forward makes statistics at once and keeps nothing else

    def __str__(self) -> str:
        recomputed = self.n_tokens - self.kept_rows
        rows = f"{self.kept_rows} rows from kept exponentials and {recomputed} recomputed, {self.chunk_rows} rows x "
        how = {
            "none": f"forward only, {self.chunk_rows} rows at a time",
            "forward": f"gradients in the forward, {self.chunk_rows} rows at a time; backward only scales them",
            "backward": "gradients in the backward, "
            + (f"{rows}{self.slab} classes at a time" if recomputed else "from the kept exponentials of all rows"),
        }[self.gradients]
        one = 2e-12 * self.n_tokens * self.vocab * self.hidden_size
        return (
            f"{self.n_tokens} tokens x {self.vocab} classes x {self.hidden_size} ({self.backend} backend): {how}; "
            f"{self.flop_g:.2f} G of {one:.3f} TFLOP, {self.workspace_bytes / MIB:.0f} MiB beyond the outputs"
        )


class Call:
    """The sizes of one call, in bytes, from which everything is decided."""

    def __init__(
        self,
        vocab: int,
        hidden_size: int,
        dtype: torch.dtype,
        hidden_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        device: Union[torch.device, str],
        needs: Needs,
        row_scaled: bool,
        workspace: Optional[int],
    ):
        acc = accumulation_dtype(dtype)
        self.needs, self.row_scaled, self.workspace = needs, row_scaled, workspace
        self.vocab, self.hidden_size = vocab, hidden_size
        self.backend = backends.choose(device, dtype == torch.float64)
        exps = backends.exps_dtype(self.backend, dtype)
        self.exp = exps.itemsize
        self.x_row = 2 * hidden_size * acc.itemsize  # a chunk's copies of x, one in the accumulation dtype
        # A row of statistics alone, and one with its E. The Triton backend keeps E in registers where it is not
        # stored, but leaves up to five partial sums for each tile of classes, of at least 128 (fp32: 64).
        e_row = backends.padded_vocab(self.backend, vocab) * self.exp
        operand = backends.operand_dtype(self.backend, dtype)
        x_copy = hidden_size * operand.itemsize
        gathered = hidden_size * hidden_dtype.itemsize if hidden_dtype != operand else 0
        if self.backend == "triton":
            partials = vocab // (3 if dtype.itemsize == 4 else 6)
            # Beside E the chunk's x, and either its partial sums, or x scaled, or its dX (in the accumulation dtype,
            # and rounded; of a large chunk less than all of it lives at once). By slabs of classes x is scaled where
            # it is, unless E has another dtype.
            self.row = e_row + x_copy + max(partials, hidden_size * acc.itemsize + x_copy, gathered)
            self.slab_row = x_copy + max(gathered, x_copy if operand != exps else 0)
            self.statistics_row = partials + self.x_row
        else:
            self.row = e_row + 2 * x_copy + hidden_size * acc.itemsize
            self.slab_row = self.x_row
            self.statistics_row = e_row + self.x_row
        device_type = device if isinstance(device, str) else device.type
        least, most = DEFAULT_CHUNK_ACCELERATOR
        by_rows = min(max(DEFAULT_ROWS_ACCELERATOR * self.row, least), most)
        self.default_chunk = DEFAULT_CHUNK.get(device_type, by_rows)
        kept = min(DEFAULT_KEPT_CHUNKS * by_rows, DEFAULT_KEPT_ACCELERATOR)
        self.default_kept = DEFAULT_CHUNK.get(device_type, kept)
        self.saved_weight = vocab * hidden_size * acc.itemsize if needs.weight else 0
        self.saved_hidden_row = hidden_size * acc.itemsize if needs.hidden else 0
        # Whether a chunk's way through the accumulator of dW is one through an accelerator's memory.
        self.costly_chunks = device_type not in DEFAULT_CHUNK and self.saved_weight > CACHED
        self.least_rows = LEAST_ROWS_ACCELERATOR if self.costly_chunks and dtype.itemsize < 4 else MIN_ROWS
        # With outputs in the accumulation dtype the output is its own accumulator.
        self.acc_weight = self.saved_weight if weight_dtype != acc else 0
        self.acc_hidden_row = self.saved_hidden_row if hidden_dtype != acc else 0
        # Whether a GEMM can leave dW in its own dtype.
        rounds_weight = weight_dtype in (acc, exps)
        self.unsplit_weight = (
            self.backend == "triton" and needs.weight and rounds_weight and vocab * hidden_size >= LEAST_UNSPLIT
        )
        # Copies of the weight: the Triton backend's GEMMs want the dtype of x (and bf16 beside fp16's E); the torch
        # backend rounds and upcasts a slab of classes at a time.
        copies = upcast = 0
        if self.backend == "triton":
            copies += dtype.itemsize if weight_dtype != dtype else 0
            copies += self.exp if dtype == torch.float16 and any(needs) else 0
        elif dtype != acc or weight_dtype != acc:
            upcast = min(UPCAST_BYTES, vocab * hidden_size * acc.itemsize) * 3 // 2  # with its half-precision copy
        self.copy_class = copies * hidden_size
        self.copy_weight = copies * hidden_size * vocab
        self.upcast = upcast
        self.weights = self.copy_weight + upcast

    def forward_chunk(self, n_tokens: int) -> int:
        """Bytes of a chunk of a forward that makes the gradients, by default."""
        rows = -(-n_tokens // (LONG_CHUNKS * WAVE_ROWS)) * WAVE_ROWS
        if not self.costly_chunks or rows <= DEFAULT_ROWS_ACCELERATOR:
            return self.default_chunk
        return max(self.default_chunk, min(min(rows, LONG_ROWS) * self.row, LONG_CHUNK))

    def slab_bytes(self, n_tokens: int, rows: int, classes: int) -> int:
        """What the backward by slabs of classes holds: dX accumulates over the slabs, dW of a slab over the chunks."""
        class_bytes = self.copy_class + (self.acc_weight // self.vocab) + rows * self.exp
        token_bytes = n_tokens * (self.acc_hidden_row + TOKEN_BYTES)
        return token_bytes + self.upcast + rows * self.slab_row + classes * class_bytes

    def slabs(self, n_tokens: int) -> tuple[int, int]:
        """(rows of a chunk, classes of a slab) that the workspace allows; 0 classes if it is too small for any.

        Of the rows half as many and so on, until there are half as many classes as rows: nearly square GEMMs do the
        most with the bytes. Of the classes whole waves of tiles, in multiples of SLAB_MULTIPLE, and half of the
        vocabulary at the most. A CPU wants its SLAB_ROWS classes."""
        rows = max(1, min(n_tokens, SLAB_ROWS))
        while True:
            held = self.slab_bytes(n_tokens, rows, 0)
            slab = (self.workspace - held) // (self.slab_bytes(n_tokens, rows, 1) - held)
            if slab >= min(self.vocab, rows // 2 if self.backend == "triton" else SLAB_ROWS) or rows <= MIN_ROWS:
                break
            rows = max(rows // 2, MIN_ROWS)
        if slab >= self.vocab:  # one slab of all would run as chunks of rows, which hold more
            return rows, -(-self.vocab // 2) if self.vocab > 1 else 0
        wave = SLAB_TILE * max(1, SLAB_WAVE // -(-rows // ROW_MULTIPLE))
        if self.backend == "triton" and slab > wave and slab % wave < wave * NEARLY:
            slab -= slab % wave
        if slab > SLAB_MULTIPLE:
            slab = slab // SLAB_MULTIPLE * SLAB_MULTIPLE
        return rows, max(0, slab)

    def least_chunk(self, n_tokens: int) -> int:
        """Bytes of the smallest chunk beside which a dW of all classes is accumulated. MIN_ROWS where slabs would need
        more bytes than that accumulator."""
        slabs_need_less = self.slab_bytes(n_tokens, MIN_ROWS, 1) <= self.accumulator_bytes(n_tokens)
        rows = self.least_rows if slabs_need_less else MIN_ROWS
        return max(MIN_ROWS, min(rows, n_tokens)) * self.row

    def accumulator_bytes(self, n_tokens: int) -> int:
        """What a backward over the whole vocabulary holds beside E."""
        return self.acc_weight + self.weights + n_tokens * TOKEN_BYTES

    def kept_budget(self, n_tokens: int) -> int:
        """Bytes for the E that a backward keeps, and for the chunk that it recomputes beside it."""
        return self.default_kept if self.workspace is None else self.workspace - self.accumulator_bytes(n_tokens)

    def saved_bytes(self, n_tokens: int) -> int:
        """What a forward that makes the gradients holds beside E: the gradients, until the backward."""
        return self.saved_weight + n_tokens * (self.saved_hidden_row + TOKEN_BYTES) + self.weights

    def gemm_rounds(self, rows: int) -> bool:
        """Whether one GEMM over these rows can leave dW in its own dtype; of an E below 2^31 elements, which is what
        libraries are commonly tried with."""
        return self.unsplit_weight and rows * self.vocab < 1 << 31

    def in_one_gemm(self, n_tokens: int) -> bool:
        """Whether E of all tokens fits, so that dW is one GEMM: by default in what the accumulator would take as well,
        which this way does without."""
        if not self.row_scaled:
            return False
        by_default = self.default_chunk + self.saved_weight
        budget = by_default if self.workspace is None else self.kept_budget(n_tokens)
        return 0 < n_tokens * self.row <= budget and self.gemm_rounds(n_tokens)

    def gradients_in_forward(self, n_tokens: int, constant: bool = False) -> bool:
        """Whether a scalar loss makes its gradients in the forward. constant: dlogits have a constant term (label
        smoothing), which needs the accumulator in any case.

        While torch.compile traces, this depends on N only with an explicit workspace: a graph is not to be specialised
        on it.
        """
        if not self.row_scaled:
            return False
        if self.workspace is None and torch.compiler.is_compiling():
            return True
        if self.in_one_gemm(n_tokens) and not constant:
            return False
        if self.workspace is None:
            return True
        return self.workspace - self.saved_bytes(n_tokens) >= self.least_chunk(n_tokens)

    def whole_bytes(self, n_tokens: int) -> int:
        """The least workspace for an accumulator of the whole dW: some rows kept and some recomputed, or all kept, or
        none where none can be."""
        chunks = (2 if self.row_scaled else 1) * self.least_chunk(n_tokens)
        if self.row_scaled and n_tokens >= MIN_ROWS:
            chunks = min(chunks, n_tokens * self.row)
        return self.accumulator_bytes(n_tokens) + chunks

    def whole_vocabulary(self, n_tokens: int) -> bool:
        """Whether a backward can hold the accumulator of the whole dW beside what it keeps and recomputes."""
        enough = self.workspace is None or self.workspace >= self.whole_bytes(n_tokens)
        return enough or self.in_one_gemm(n_tokens)

    def kept_rows(self, n_tokens: int) -> int:
        """Rows whose E is kept for a backward with per-token upstream gradients."""
        if not self.row_scaled or not any(self.needs) or not self.whole_vocabulary(n_tokens):
            return 0
        if self.in_one_gemm(n_tokens):
            return n_tokens
        budget = self.kept_budget(n_tokens)
        if n_tokens * self.row <= budget:
            return n_tokens
        return max(0, (budget - self.recompute_chunk(budget, n_tokens)) // self.row)

    def recompute_chunk(self, budget: int, n_tokens: int) -> int:
        """Bytes of the budget set aside for the chunk of rows that are recomputed beside the kept ones."""
        return max(min(budget // 4, self.default_chunk), self.least_chunk(n_tokens))


def _whole_tiles(rows: int, n_tokens: int) -> int:
    """Equal chunks of at most `rows` rows, rounded to whole tiles where there are several; large ones to WAVE_ROWS."""
    if rows >= n_tokens or rows < ROW_MULTIPLE:
        return max(1, min(rows, n_tokens))
    multiple = WAVE_ROWS if rows >= WAVE_ROWS else ROW_MULTIPLE
    chunks = -(-n_tokens // (rows // multiple * multiple))
    return -(-n_tokens // (chunks * multiple)) * multiple


def decide(call: Call, n_tokens: int, in_forward: bool, constant: bool = True) -> Plan:
    """The plan of a call. in_forward: its gradients, if any are wanted, are made in the forward. constant: dlogits may
    have a constant term (label smoothing), so that bytes are counted for the accumulator that it needs."""

    def result(gradients, chunk_rows, kept_rows, slab, copies, flop_g, held, statistics_rows=None) -> Plan:
        copies = copies and call.copy_weight > 0
        return Plan(
            n_tokens, call.vocab, call.hidden_size, call.backend, gradients, chunk_rows, kept_rows, slab, copies,
            flop_g, held, chunk_rows if statistics_rows is None else statistics_rows,
        )  # fmt: skip

    def rows_in(budget: int, tokens: int = n_tokens, row: int = call.row, least: int = MIN_ROWS) -> int:
        return _whole_tiles(max(budget // row, least), tokens)

    gemms = 1.0 + call.needs.hidden + call.needs.weight
    if not any(call.needs):
        row = call.statistics_row
        for_tokens = n_tokens * TOKEN_BYTES
        # No copy of the weight that would leave room for fewer rows than these: each chunk reads it.
        least = min(LEAST_ROWS_ACCELERATOR, max(MIN_ROWS, n_tokens)) * row
        copies = call.workspace is None or call.workspace - for_tokens - call.weights >= least
        held = for_tokens + (call.weights if copies else call.upcast)
        budget = call.default_chunk if call.workspace is None else min(call.workspace - held, call.default_chunk)
        rows = rows_in(budget, row=row, least=MIN_ROWS if call.workspace is None else 1)
        held += min(rows, n_tokens) * row
        if call.workspace is not None and held > call.workspace:
            raise validation.workspace_too_small(call.workspace, held)
        return result("none", rows, 0, call.vocab, copies, 1.0, held)

    if in_forward:
        held = call.saved_bytes(n_tokens)
        rows = rows_in(call.forward_chunk(n_tokens) if call.workspace is None else call.workspace - held)
        return result("forward", rows, 0, call.vocab, True, gemms, held + rows * call.row)

    if call.whole_vocabulary(n_tokens):
        held = call.accumulator_bytes(n_tokens)
        unused = call.acc_weight if call.in_one_gemm(n_tokens) and not constant else 0
        budget = call.kept_budget(n_tokens)
        kept = call.kept_rows(n_tokens)
        rest = n_tokens - kept
        if rest:
            rows = rows_in(call.recompute_chunk(budget, n_tokens) if kept else min(budget, call.default_chunk), rest)
        else:  # chunks of what is there already
            rows = max(1, min(n_tokens, max(rows_in(call.default_chunk), ROW_MULTIPLE * 8)))
        recomputed = rest / n_tokens if n_tokens else 0.0
        held += kept * call.row + (rows * call.row if rest else 0) - unused
        return result("backward", rows, kept, call.vocab, True, gemms + recomputed, held)

    rows, slab = call.slabs(n_tokens)
    for_statistics = call.upcast + n_tokens * TOKEN_BYTES
    least_statistics = for_statistics + call.statistics_row
    if slab < 1 or call.workspace < least_statistics:
        least = max(call.slab_bytes(n_tokens, min(rows, MIN_ROWS), 1), least_statistics)
        whole = call.whole_bytes(n_tokens)
        raise validation.workspace_too_small(call.workspace, whole if call.vocab == 1 else min(whole, least))
    statistics = min(call.workspace - for_statistics, SLAB_ROWS * call.statistics_row)
    statistics_rows = rows_in(statistics, row=call.statistics_row, least=1)
    held = max(call.slab_bytes(n_tokens, rows, slab), for_statistics + statistics_rows * call.statistics_row)
    return result("backward", rows, 0, slab, False, gemms + 1, held, statistics_rows)


# A training loop asks for the same sizes again and again, several times a call; an answer takes the host up to 10 us.
known_call = functools.lru_cache(maxsize=256)(Call)
known_plan = functools.lru_cache(maxsize=256)(decide)


def plan(
    n_tokens: int,
    vocab: int,
    hidden_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device_type: str = "cuda",
    hidden_dtype: Optional[torch.dtype] = None,
    weight_dtype: Optional[torch.dtype] = None,
    needs: tuple = (True, True, False),
    upstream: str = "scalar",
    row_scaled: bool = True,
    workspace: Optional[int] = None,
    label_smoothing: bool = False,
) -> Plan:
    """What a call of these sizes would run. Only computes; print the result to read it.

    A call that torch.compile traces makes the gradients of a scalar loss in the forward, however few the tokens.

    Args:
        n_tokens, vocab, hidden_size: N, V, H of the call; N counts all tokens (ignored ones then cost nothing).
        dtype: what the GEMMs compute in: the tensors' dtype, or autocast's under autocast.
        device_type: "cpu", "cuda" (also for ROCm) or "xpu".
        hidden_dtype, weight_dtype: dtypes of the tensors themselves; default `dtype`.
        needs: which gradients of (hidden, weight, bias) are wanted.
        upstream: "scalar" for reduction "mean" and "sum", "token" for "none" and for log-probabilities.
        row_scaled: False where the logits' gradient is not E times a factor per row: an entropy gradient, or label
            smoothing together with a softcap.
        workspace: bytes that the call may allocate beyond its outputs; None for the default.
        label_smoothing: whether the loss has any: its gradient's constant term needs an accumulator.

    Returns:
        Plan.

    Raises:
        TypeError, ValueError: which argument is wrong, and its value.
        ValueError: workspace is smaller than the smallest plan, which the message names.
    """
    sizes = {"n_tokens": n_tokens, "vocab": vocab, "hidden_size": hidden_size}
    dtypes = {"dtype": dtype, "hidden_dtype": hidden_dtype or dtype, "weight_dtype": weight_dtype or dtype}
    validation.check_plan(sizes, dtypes, device_type, needs, upstream, row_scaled, label_smoothing)
    validation.check_workspace(workspace)
    call = Call(
        vocab, hidden_size, dtype, hidden_dtype or dtype, weight_dtype or dtype, device_type, Needs(*needs),
        row_scaled, workspace,
    )  # fmt: skip
    in_forward = upstream == "scalar" and call.gradients_in_forward(n_tokens, constant=label_smoothing)
    return decide(call, n_tokens, in_forward, constant=label_smoothing)
