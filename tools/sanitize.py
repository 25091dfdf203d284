"""Run every Triton kernel on small shapes under compute-sanitizer: memcheck (addresses) and racecheck (shared memory).

    make build && python -m tools.sanitize        # on a machine with an NVIDIA GPU and compute-sanitizer

torch's caching allocator is switched off, so that an access beyond a tensor is one beyond an allocation.

racecheck does not follow the barriers with which Triton tells a kernel's warps what to run (warp_specialize): it
reports the number of a warp's partition, read where the kernel begins and written where its partitions begin and end.
A report is laid to that, and counted, if all its lines are in HANDSHAKE, and if racecheck says the same of
racecheck_control.py, whose partitions share nothing else. Any other report is an error.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("build/torch-cuda/backends/triton", "tools")
# How the lines begin that stand for Triton's own accesses: where a kernel and its partitions begin.
HANDSHAKE = ("def ", "_specialize(", "gl.warp_specialize(")
ACCESS = re.compile(r"(?:Race reported between|and) (?:Read|Write) access at .* in (\S+):(\d+)")


def exercise() -> None:
    """Each kernel once or twice: aligned operands (bulk copies) and odd ones (pointers), every option somewhere."""
    import torch

    from benchmarks.peers import load_kernel

    kernel, _ = load_kernel(None)

    def tensors(rows, vocab, hidden_size, dtype):
        hidden = torch.randn(rows, hidden_size, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(vocab, hidden_size, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.randn(vocab, device="cuda", dtype=dtype, requires_grad=True)
        targets = torch.randint(vocab, (rows,), device="cuda")
        targets[::5] = -100
        return hidden, weight, targets, bias

    loss, log_probs = kernel.fused_linear_cross_entropy, kernel.fused_linear_log_probs
    for rows, vocab, hidden_size, dtype in (
        (150, 1000, 128, torch.bfloat16),
        (67, 301, 50, torch.bfloat16),
        (35, 77, 24, torch.float32),
    ):
        hidden, weight, targets, bias = tensors(rows, vocab, hidden_size, dtype)
        loss(hidden, weight, targets, return_metrics=True)[0].backward()
        class_weight = torch.rand(vocab, device="cuda")
        options = {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weight": class_weight}
        loss(hidden, weight, targets, bias, logit_scale=0.7, softcap=9.0, **options).backward()
        loss(hidden, weight, targets, bias, reduction="none").sum().backward()
        loss(hidden * 40, weight, targets).backward()  # rows whose exponentials overflow are repaired
        outputs = ("log_probs", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1")
        out = log_probs(hidden, weight, targets, outputs=outputs)
        (out.log_probs + out.entropy + out.lse).sum().backward()
        with torch.no_grad():
            loss(hidden, weight, targets, return_metrics=True)
    # Several chunks, so that dW accumulates; enough tokens that the first rows start before they are counted.
    hidden, weight, targets, _ = tensors(2100, 700, 136, torch.bfloat16)
    loss(hidden, weight, targets, workspace=(2100 + 700) * 136 * 4 + 600 * (3 * 700 + 8 * 136)).backward()
    torch.cuda.synchronize()


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--exercise", action="store_true", help="only run the kernels")
    args = parser.parse_args(argv)
    if args.exercise:
        exercise()
        return 0
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    exercised = [sys.executable, "-m", "tools.sanitize", "--exercise"]
    # Once without: it compiles the kernels into Triton's cache, which under the sanitizer takes minutes.
    subprocess.run(exercised, env=environment, check=True)
    tools = args.tools.split(",")

    def check(tool: str) -> subprocess.CompletedProcess:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *exercised]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    worst = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for tool, result in zip(tools, pool.map(check, tools)):
            code, verdict = result.returncode, "clean"
            if tool == "racecheck" and code:
                control = [sanitizer, "--tool", tool, sys.executable, "-m", "tools.racecheck_control"]
                said = subprocess.run(control, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
                others, handshakes = races(result.stdout)
                if handshakes and not others and races(said)[1] and not races(said)[0]:
                    code, verdict = 0, f"clean, but for {len(handshakes)} reports that racecheck_control has as well"
                else:
                    print(said)
            print(result.stdout, f"{tool}: {f'exit code {code}, see above' if code else verdict}", flush=True)
            worst = max(worst, code)
    return worst


def races(output: str) -> tuple[list[str], list[str]]:
    """racecheck's reports, of anything else and of accesses of Triton's own only, see above."""
    others, handshakes = [], []
    for report in re.split(r"(?m)^=+ (?=\w+: Race reported)", output)[1:]:
        lines = [_source_line(file, int(number)) for file, number in ACCESS.findall(report)]
        own = len(lines) > 1 and all(line.startswith(HANDSHAKE) for line in lines)
        (handshakes if own else others).append(report)
    return others, handshakes


def _source_line(file: str, number: int) -> str:
    for folder in SOURCES:
        path = ROOT / folder / Path(file).name
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return lines[number - 1].strip() if number <= len(lines) else ""
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
