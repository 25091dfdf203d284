"""Every kernel is compiled for GPUs that this machine need not have: registers, shared memory and instructions.

Triton's interpreter says nothing about whether a kernel compiles. The compiler works without a GPU, but not in a
process in which the kernels were defined for the interpreter, so each target has a process of its own: this file, as
a script.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# Bytes of shared memory that a block can have. Pointer-based kernels also run on consumer chips, which have 99 KiB.
SHARED = {"sm_80": 99, "sm_90": 227, "sm_100": 227, "gfx942": 64}
SHARED_BY_POINTER = 99

POINTERS = {
    "*i64": ("targets", "index", "classes"),
    "*i32": ("count",),
    "*i8": ("out_top1",),
    "*fp32": (
        "class_weight", "scale", "factor", "source", "scratch", "partials", "row_target", "row_scale",
        "out_max", "out_log_sum", "out_target", "out_scale", "out_entropy", "out_sum_log_probs", "out_squares",
        "row_max", "row_log_sum", "row_log_prob", "row_entropy", "row_a", "row_b", "row_r", "row_d",
    ),
}  # fmt: skip
NUMBERS = {
    "fp32": ("logit_scale", "softcap", "nudge"),
    "i32": (
        "R", "V", "H", "M", "N", "K", "row_tiles", "column_tiles", "class_tiles", "width_tiles", "plane",
        "ignore_index", "accumulate", "width", "repair",
    ),
}
TYPES = {name: kind for table in (POINTERS, NUMBERS) for kind, names in table.items() for name in names}

ALL = dict(SCALED=True, HAS_BIAS=True, HAS_SOFTCAP=True, HAS_CLASS_WEIGHT=True)
FORWARD = dict(
    SCALED=False, HAS_BIAS=False, HAS_SOFTCAP=False, HAS_CLASS_WEIGHT=False, ENTROPY=True, SQUARES=False,
    SHIFTED=False, REPAIR=False,
)  # fmt: skip
EVERYTHING = dict(ALL, SQUARES=True, SHIFTED=True)
DLOGITS = dict(
    SCALED=False, HAS_BIAS=False, HAS_SOFTCAP=False, HAS_CLASS_WEIGHT=False, HAS_B=False, HAS_D=False,
)  # fmt: skip


def variants(target: str, tuning) -> list:
    """(name, kernel, its constants, its operands' types, Tiles or None): each flag on and off, not each product."""
    found = []

    def add(name, kernel, constants, types, tiles=None):
        found.append((f"{kernel} {name}", kernel, constants, types, tiles))

    def gemm(name, kernel, constants, tiles, dtype, precision="ieee", **types):
        operands = {"x": dtype, "w": dtype, "bias": dtype, "exps": "bf16" if dtype != "fp32" else "fp32", **types}
        operands["out"] = operands["exps"]
        constants = dict(constants, DESCRIPTORS=tiles.loads == "descriptors", PRECISION=precision, COMPUTE=dtype)
        add(f"{name} {dtype}{' tf32' * (precision == 'tf32')}", kernel, constants, operands, tiles)

    able = {"pointers", "descriptors"} if target in ("sm_90", "sm_100") else {"pointers"}
    tables = [(kind, t) for kind, t in tuning.HEURISTICS.items() if t.loads in able]
    for kind, tiles in tables:
        full = "fp32" if kind == "float32" else "bf16"
        for store in (True, False):
            how = f"{kind}, {'stored' if store else 'not stored'}"
            base = dict(FORWARD, STORE=store)
            gemm(how, "forward_kernel", base, tiles, full)
            gemm(f"{how}, every option", "forward_kernel", dict(base, **EVERYTHING), tiles, full)
            gemm(f"{how}, no entropy", "forward_kernel", dict(base, ENTROPY=False), tiles, full)
        base = dict(FORWARD, STORE=True)
        gemm(f"{kind}, repair", "forward_kernel", dict(base, REPAIR=True), tiles, full)
        for flag in ("SCALED", "HAS_BIAS", "HAS_SOFTCAP", "SQUARES", "SHIFTED"):
            gemm(f"{kind}, {flag}", "forward_kernel", dict(base, **{flag: True}), tiles, full)
        gemm(kind, "dlogits_kernel", DLOGITS, tiles, full)
        gemm(f"{kind}, entropy", "dlogits_kernel", dict(DLOGITS, HAS_B=True), tiles, full)
        everything = dict(DLOGITS, **ALL, HAS_B=True, HAS_D=True)
        gemm(f"{kind}, every option", "dlogits_kernel", everything, tiles, full)
        if full == "fp32":
            gemm(kind, "forward_kernel", base, tiles, "fp32", "tf32")
            gemm(kind, "dlogits_kernel", DLOGITS, tiles, "fp32", "tf32")
            continue
        gemm(f"{kind}, every option", "forward_kernel", dict(base, **EVERYTHING), tiles, "fp16")
        gemm(f"{kind}, not stored", "forward_kernel", dict(FORWARD, STORE=False), tiles, "fp16")
        gemm(f"{kind}, every option", "dlogits_kernel", everything, tiles, "fp16")
        if tiles.loads == "pointers":
            mixed = {"w": "fp32", "bias": "fp32"}
            gemm(f"{kind}, fp32 weight", "forward_kernel", dict(base, HAS_BIAS=True), tiles, "bf16", **mixed)
            gemm(f"{kind}, 64-bit strides", "forward_kernel", base, tiles, "bf16", stride="i64")
    gemm("repair beside the pipeline", "forward_kernel", dict(FORWARD, STORE=True, REPAIR=True), tuning.REPAIR, "bf16")
    if target == "sm_90":
        hopper(add)
    add("", "select_kernel", dict(BLOCK=4096), {})
    for dtype in ("bf16", "fp16", "fp32"):
        constants = dict(ROWS=2, DEPTH=512, COMPUTE=dtype)
        for flags in (dict(SCALED=False, HAS_BIAS=False, HAS_SOFTCAP=False), {k: ALL[k] for k in list(ALL)[:3]}):
            types = {"x": dtype, "w": dtype, "bias": dtype}
            name = f"{dtype} {'every option' if flags['SCALED'] else ''}"
            add(name, "reference_kernel", dict(constants, **flags), types)
    for store in (False, True):
        for asked in (False, True):
            constants = dict(
                ROWS=32, TILES=128, COLUMNS=256, STORE=store, ENTROPY=asked, SQUARES=asked,
                SHIFTED=asked, TOP1=asked, COMPUTE="fp32" if asked else "bf16",
            )  # fmt: skip
            add(f"store={store} asked={asked}", "combine_kernel", constants, {})
    for accumulate in (False, True):
        constants = dict(ROWS=128, COLUMNS=128, DEPTH=32, GROUP=8, ACCUMULATE=accumulate)
        add(f"accumulate={accumulate}", "matmul_kernel", constants, {"a": "bf16", "b": "bf16", "out": "fp32"})
    for dtype in ("bf16", "fp32"):
        for flag in (False, True):
            constants = dict(ROWS=4, COLUMNS=1024, HAS_SOFTCAP=flag, SCALE_X=flag, PRECISE=dtype == "fp32")
            add(f"{dtype} {flag}", "finish_kernel", constants, {"e": dtype, "x": dtype, "scaled": dtype})
        add(dtype, "column_sum_kernel", dict(ROWS=32, COLUMNS=128), {"e": dtype, "out": "fp32"})
    for source, out in (("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "bf16")):
        for in_place in (False, True)[: 1 + (source == out)]:
            constants = dict(BLOCK=2048, IN_PLACE=in_place)
            add(f"{source} {out} {in_place}", "scale_kernel", constants, {"source": source, "out": out})
    return found


def hopper(add) -> None:
    """The pipelined kernels: names that end in "bare" are what a trainer runs."""
    options = dict(SCALED=False, HAS_BIAS=False, HAS_SOFTCAP=False, HAS_CLASS_WEIGHT=False, GROUP=16)
    forward = dict(options, STORE=True, ENTROPY=True, SQUARES=False, SHIFTED=False)
    dlogits = dict(options, HAS_B=False, HAS_D=False)

    def logits(name, kernel, constants, types):
        add(name, kernel, dict(constants, PARTITIONS=1 if constants["HAS_SOFTCAP"] else 2), types)

    for dtype in ("bf16", "fp16"):
        types = {"x": dtype, "w": dtype, "bias": dtype, "exps": "bf16", "out": "bf16"}
        for store in (True, False):
            base = dict(forward, STORE=store, GROUP=16 if store else 32)
            logits(f"hopper {dtype} store={store} bare", "hopper.forward_kernel", base, types)
            logits(f"hopper {dtype} store={store} all", "hopper.forward_kernel", dict(base, **EVERYTHING), types)
        for flag in ("SCALED", "HAS_BIAS", "HAS_SOFTCAP", "SQUARES", "SHIFTED"):
            logits(f"hopper {dtype} {flag}", "hopper.forward_kernel", dict(forward, **{flag: True}), types)
        logits(f"hopper {dtype}", "hopper.dlogits_kernel", dlogits, types)
        logits(f"hopper {dtype} entropy", "hopper.dlogits_kernel", dict(dlogits, HAS_B=True), types)
        everything = dict(dlogits, **ALL, HAS_B=True, HAS_D=True)
        logits(f"hopper {dtype} all", "hopper.dlogits_kernel", everything, types)
    for classes, width in ((128, 256), (256, 128)):
        types = {"e": "bf16", "x": "bf16", "out": "fp32", "bias": "fp32"}
        for bias in (False, True):
            constants = dict(CLASSES=classes, WIDTH=width, HAS_BIAS=bias)
            name = f"hopper {classes}x{width} {'bias' if bias else 'bare'}"
            add(name, "hopper.weight_kernel", constants, types)


def load(variant: Path):
    """The built package, as the interpreter never sees it."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(
        name, variant / "__init__.py", submodule_search_locations=[str(variant)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.backends.triton")


def compile_variant(target, function, constants, types, tiles):
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    dtypes = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    constants = dict(constants)
    options = {"num_warps": 4}
    if tiles is not None:
        shape = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "GROUP": tiles.group}
        constants.update(shape)
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if "COMPUTE" in constants:
        constants["COMPUTE"] = dtypes[constants["COMPUTE"]]
    blocks = {"x": ("ROWS", "DEPTH"), "w": ("COLUMNS", "DEPTH")}
    blocks["exps"] = blocks["out"] = ("ROWS", "COLUMNS")
    signature, attributes = {}, {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            assert name in constants, f"{name} of {function.__name__} is not covered"
            signature[name] = "constexpr"
            continue
        written = constants.get("DESCRIPTORS") and name in blocks and (name != "exps" or constants["STORE"])
        if written:
            rows, columns = (constants[block] for block in blocks[name])
            signature[name] = f"tensordesc<{types[name]}[{rows}, {columns}]>"
            continue
        if name.startswith("stride_"):
            signature[name] = types.get("stride", "i32")
        elif name in types:
            signature[name] = "*" + types[name]
        else:
            signature[name] = TYPES[name]
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def compile_pipelined(target, function, constants, types):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    dtypes = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
    if "CLASSES" in constants:
        classes, width = constants["CLASSES"], constants["WIDTH"]
        blocks = {"e": (64, classes // 2), "x": (64, width), "out": (classes // 2, width // 8)}
    else:
        rows = 128 // constants["PARTITIONS"]
        blocks = {"x": (rows, 64), "w": (256, 64), "exps": (rows, 64), "out": (rows, 64)}
    signature, attributes, values = {}, {}, {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif name in blocks:
            layout = gl.NVMMASharedLayout.get_default_for(list(blocks[name]), dtypes[types[name]])
            signature[name] = f"tensordesc<{types[name]}[{blocks[name][0]}, {blocks[name][1]}],{layout!r}>"
        else:
            signature[name] = "*" + types[name] if name in types else TYPES[name]
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    warps = 8 // constants.get("PARTITIONS", 2)
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": warps})


def stack_bytes(binary: bytes):
    """Local memory of a thread, which these kernels only use for want of registers, in the binary that would run; None
    where Triton comes without the tool that tells."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return sum(map(int, re.findall(r"STACK:(\d+)", usage.stdout)))


def main(variant: str, target: str) -> None:
    """Compiles everything; one line of JSON for each variant."""
    backend = load(Path(variant))
    for name, kernel, constants, types, tiles in variants(target, backend.tuning):
        pipelined = kernel.startswith("hopper.")
        bulk = pipelined or bool(tiles and tiles.loads == "descriptors")
        report = {"name": name, "descriptors": bulk}
        try:
            if pipelined:
                module = importlib.import_module(f"{backend.__name__}.hopper")
                compiled = compile_pipelined(target, getattr(module, kernel.partition(".")[2]), constants, types)
            else:
                function = getattr(backend.fwd, kernel, None) or getattr(backend.bwd, kernel)
                compiled = compile_variant(target, function, constants, types, tiles)
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"[-1500:]
            print(json.dumps(report), flush=True)
            continue
        ptx = compiled.asm.get("ptx", "")
        binary = compiled.asm.get("cubin") or compiled.asm.get("hsaco") or b""
        report.update(shared=compiled.metadata.shared, binary=len(binary), wgmma="wgmma.mma_async" in ptx)
        report["stack"] = stack_bytes(binary) if target == "sm_90" and report["descriptors"] else None
        print(json.dumps(report), flush=True)


@functools.cache
def reports(variant: str, target: str) -> list:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, variant, target]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
class TestTargets:
    @pytest.fixture
    def compiled(self, build_dir, target) -> list:
        pytest.importorskip("triton")
        return reports(str(next(build_dir.glob("torch-*"))), target)

    def test_every_variant_compiles(self, compiled):
        assert len(compiled) > 40
        failed = [f"{r['name']}: {r['error']}" for r in compiled if "error" in r]
        assert not failed, "\n".join(failed)
        assert all(r["binary"] > 0 for r in compiled)

    def test_shared_memory_suffices(self, compiled, target):
        for report in compiled:
            limit = SHARED[target] if report["descriptors"] else min(SHARED[target], SHARED_BY_POINTER)
            assert report.get("shared", 0) <= limit * 1024, report

    def test_hopper_gets_its_own_matrix_instruction_and_spills_no_tile(self, compiled, target):
        """An eighth of a consumer's tile is 64 bytes a thread: what does not fit may be a few numbers, no more."""
        if target != "sm_90":
            pytest.skip("of Hopper only")
        assert all(r["wgmma"] for r in compiled if r["descriptors"])
        bare = [r for r in compiled if r["name"].endswith("bare")]
        assert len(bare) == 6
        for report in bare:
            assert report["stack"] is None or report["stack"] < 64, report


if __name__ == "__main__":
    main(*sys.argv[1:])
