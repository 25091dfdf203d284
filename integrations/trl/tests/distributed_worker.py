"""What one of the processes of a distributed test does: `torchrun --nproc_per_node 2 distributed_worker.py CASE OUT`.

CASE is the name of a function below; what it returns on rank 0 is written to OUT as JSON. Models and data are those of
support.py, so that the test itself can train the same in one process. gloo, on the CPU.
"""

import contextlib
import copy
import json
import os
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from datasets import Dataset

import conftest  # noqa: F401  the environment of the tests
import fused_linear_ce_trl
import support
from fused_linear_ce_trl import host
from fused_linear_ce_trl import loss as loss_module

IGNORE = -100
STEPS = 3


def rank() -> int:
    return int(os.environ["RANK"])


# --- the batches, also for the test's own process --------------------------------------------------------------------


def half_masked_rows(steps: int = STEPS) -> Dataset:
    """4 rows a step, of which the last two, a second rank's share, have no valid label in every other step.

    TRL drops rows without any label, so they keep that of their first token, which nothing predicts.
    """
    rows = support.texts(4 * steps)
    labels = [list(row) for row in rows]
    for i, row in enumerate(labels):
        if i % 4 >= 2 and i // 4 % 2 == 0:
            row[1:] = [IGNORE] * (len(row) - 1)
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def uneven_rows(steps: int = STEPS) -> Dataset:
    """4 rows a step; the last two have few valid labels, but some."""
    rows = support.texts(4 * steps)
    labels = [row if i % 4 < 2 else [IGNORE] * (len(row) - 3) + row[-3:] for i, row in enumerate(rows)]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)


def options(world: int, **changes) -> dict:
    """Of support.config: the same 4 rows a step, in the same order, for any number of processes."""
    return dict(per_device_train_batch_size=4 // world, train_sampling_strategy="sequential", **changes)


def ddp_cases() -> dict[str, dict]:
    """name -> (model kind, dataset, PEFT or not, configuration)"""
    return {
        "full": dict(kind="phi", data=half_masked_rows(), peft=False, config={}),  # has a bias
        "tied": dict(kind="gemma2", data=half_masked_rows(), peft=False, config={}),
        # the gradient is large: at the usual rate three steps blow rounding up
        "lora": dict(kind="llama", data=half_masked_rows(), peft=True, config=dict(learning_rate=0.005)),
        "local_average": dict(
            kind="llama", data=uneven_rows(), peft=False, config=dict(average_tokens_across_devices=False)
        ),
        "accumulation": dict(
            kind="llama", data=half_masked_rows(2 * STEPS), peft=False, config=dict(gradient_accumulation_steps=2)
        ),
    }


def train_case(case: dict, loss_type: str, world: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as out:
        config = support.config(
            out, loss_type, **options(world, ddp_find_unused_parameters=False, **case["config"])
        )  # fmt: skip
        peft = dict(peft_config=lora()) if case["peft"] else {}
        torch.manual_seed(1)  # the adapters' initial weights
        return support.train(support.make_model(case["kind"]), config, train_dataset=case["data"], **peft)


def invariant_run(loss_type: str, world: int, **changes) -> list[dict]:
    """50 steps in fp32, 8 rows a step."""
    with tempfile.TemporaryDirectory() as out:
        config = support.config(
            out, loss_type, max_steps=50, optim="adamw_torch", learning_rate=1e-3, max_grad_norm=1.0,
            **{**options(world), "per_device_train_batch_size": 8 // world, **changes},
        )  # fmt: skip
        return support.train(support.make_model("qwen3"), config)


# --- the cases -------------------------------------------------------------------------------------------------------


def ddp() -> dict:
    """Every DDP case with cce and with TRL's own loss, then the invariant run."""
    logs = {
        f"{name} {loss_type}": train_case(case, loss_type, world=2)
        for name, case in ddp_cases().items()
        for loss_type in ("cce", host.LOSS_TYPE)
    }
    logs["invariant"] = invariant_run("cce", world=2)
    return logs


def sharded_batch(shard: int | None = None) -> dict[str, torch.Tensor]:
    """4 rows of 12 tokens, the last two without a valid label; shard 0 or 1 is a rank's half, None the whole."""
    ids = torch.tensor([row[:12] for row in support.texts(4, min_tokens=12)])
    labels = ids.clone()
    labels[0, :5] = IGNORE
    labels[2:] = IGNORE
    rows = slice(None) if shard is None else slice(2 * shard, 2 * shard + 2)
    return {"input_ids": ids[rows], "labels": labels[rows], "num_items_in_batch": (labels[:, 1:] != IGNORE).sum()}


class FsdpCase(NamedTuple):
    kind: str
    lora: bool = False
    own_group: bool = False  # of the head, which leaves it a DTensor
    policy: bool = False  # MixedPrecisionPolicy: fp32 parameters, computed with in bf16
    fp32_head: bool = False  # on a bf16 model, as TRL's cast_lm_head_to_fp32 leaves it

    @property
    def tolerance(self) -> float:
        """Of the loss, and relative of all gradients together."""
        return 2e-2 if self.policy or self.fp32_head else 1e-6


FSDP_CASES = {
    "llama": FsdpCase("llama"),
    "own_group": FsdpCase("llama", own_group=True),
    "bias_own_group": FsdpCase("phi", own_group=True),
    "tied": FsdpCase("gemma2"),
    "lora_own_group": FsdpCase("llama", lora=True, own_group=True),
    "policy": FsdpCase("llama", policy=True),
    "policy_own_group": FsdpCase("llama", own_group=True, policy=True),
    "fp32_head_own_group": FsdpCase("llama", own_group=True, fp32_head=True),
}


def build(kind: str, with_lora: bool):
    """(the model, the causal LM in it whose forward is patched)"""
    model = support.make_model(kind)
    if with_lora:
        from peft import get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, lora())
    base = model.get_base_model() if with_lora else model
    fused_linear_ce_trl.patch_cce_lm_head(base)
    return model, base


def gradients(model) -> dict[str, torch.Tensor]:
    full = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            full[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    return full


def of_both_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def relative_error(got, expected) -> float:
    """Frobenius, of all tensors together."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected)]
    norms = (torch.nn.utils.get_total_norm(tensors) for tensors in ([a - b for a, b in pairs], [b for _, b in pairs]))
    difference, size = (norm.item() for norm in norms)
    return difference / size


def replicated_head() -> dict:
    """A head that is a DTensor, whole on both ranks, under a plain model: tensor parallelism of other modules."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (2,))
    reference, _ = build("llama", False)
    loss = reference(**sharded_batch()).loss
    loss.backward()
    model, _ = build("llama", False)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(DTensor.from_local(head.weight.detach(), mesh, [Replicate()]))
    output = model(**sharded_batch(rank()))
    (2 * output.loss).backward()
    expected = reference.get_output_embeddings().weight.grad
    return {
        "loss": [loss.item(), of_both_ranks(output.loss)],
        "relative": relative_error([head.weight.grad.full_tensor()], [expected]),
    }


def fsdp() -> dict:
    """Gradients of two sharded ranks, one of them without a valid label, against those of the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name, case in FSDP_CASES.items():
        reference, _ = build(case.kind, case.lora)
        loss = reference(**sharded_batch()).loss
        loss.backward()
        expected = gradients(reference)

        model, base = build(case.kind, case.lora)
        if case.fp32_head:
            model.to(torch.bfloat16)
            base.get_output_embeddings().float()
        how = {"mesh": mesh}
        if case.policy:
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if case.own_group:
            fully_shard(base.get_output_embeddings(), **how)
        for layer in base.base_model.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        with mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=DTensor.full_tensor) as full_tensor:
            output = model(**sharded_batch(rank()))
            # FSDP averages over the ranks, num_items_in_batch counts the tokens of both
            (2 * output.loss).backward()
        got = gradients(model)
        results[name] = {
            "loss": [loss.item(), of_both_ranks(output.loss)],
            "missing": sorted(expected.keys() ^ got.keys()),
            "difference": max((expected[k] - got[k]).abs().max().item() for k in expected),
            "size": max(g.abs().max().item() for g in expected.values()),
            "relative": relative_error([got[k] for k in expected], expected.values()),
            "head_tensors": 1 + (getattr(base.get_output_embeddings(), "bias", None) is not None),
            "gathers": full_tensor.call_count,
            "valid": int(output.num_valid_tokens),
        }
    return results


ZERO3_CASES = {
    # name: (model kind, valid labels of the second rank's two rows)
    "llama": ("llama", 0),
    "uneven": ("llama", 1),
    "tied": ("gemma2", 0),
    "bias": ("phi", 0),
}


def zero3_batch(valid: int, shard: int | None = None) -> dict[str, torch.Tensor]:
    batch = {k: v.clone() for k, v in sharded_batch().items()}
    batch["labels"][2:, 12 - valid :] = batch["input_ids"][2:, 12 - valid :]
    batch["num_items_in_batch"] = (batch["labels"][:, 1:] != IGNORE).sum()
    if shard is not None:
        batch = {k: v[2 * shard : 2 * shard + 2] if v.dim() else v for k, v in batch.items()}
    return batch


def zero3() -> dict:
    """Parameters after a step of SGD under ZeRO-3 against one process, and the collectives of each rank and pass."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    # or the first use compiles a C++ extension for it, which takes minutes; gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60))
    results = {}
    for name, (kind, valid) in ZERO3_CASES.items():
        reference, _ = build(kind, False)
        start = {n: p.detach().clone() for n, p in reference.named_parameters()}
        reference(**zero3_batch(valid)).loss.backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        expected = {n: p.detach() for n, p in reference.named_parameters()}

        model = support.make_model(kind)
        keep = HfDeepSpeedConfig(settings)  # while it lives, transformers and TRL see that ZeRO-3 is on
        engine, *_ = deepspeed.initialize(
            model=model, config=copy.deepcopy(settings), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        fused_linear_ce_trl.patch_cce_lm_head(model)
        head = model.get_output_embeddings()
        assert head.weight.ds_tensor.numel() * 2 == head.weight.ds_numel, "the head is not partitioned"
        counts, difference = [], None
        for _ in range(2):  # the first step also records the order of the modules
            with counted_collectives() as forward:
                loss = engine(**zero3_batch(valid, rank())).loss
            with counted_collectives() as backward:
                engine.backward(2 * loss)  # averaged over the ranks
            engine.step()
            counts.append([dict(forward), dict(backward)])
            if difference is None:
                with deepspeed.zero.GatheredParameters(list(model.parameters())):
                    difference = max((p - expected[n]).abs().max().item() for n, p in model.named_parameters())
        moved = max((expected[n] - p).abs().max().item() for n, p in start.items())
        everyone = [None, None]
        dist.all_gather_object(everyone, counts)
        results[name] = {"difference": difference, "moved": moved, "collectives": everyone}
        del keep, engine
    return results


@contextlib.contextmanager
def counted_collectives():
    """Counts every collective that DeepSpeed starts, by name, and under "head" the gathers that the loss asks for."""
    from deepspeed.comm import comm

    counts: Counter = Counter()

    def counted(owner, name: str, key: str):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counts[key] += 1
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as stack:
        stack.enter_context(counted(loss_module, "gather_zero3", "head"))
        for name in COLLECTIVES:
            stack.enter_context(counted(comm.cdb, name, name))
        yield counts


COLLECTIVES = ("all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_reduce", "broadcast")


def shift_labels() -> dict:
    """Each rank holds half of a sequence and labels that were shifted before it was cut, as under context parallelism.

    The backbone is local here (no attention over the cut), so that the halves add up to the whole.
    """
    results = {}
    for masked in (False, True):
        model = support.make_model("llama")
        fused_linear_ce_trl.patch_cce_lm_head(model)
        ddp_model = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        half, num_items = shifted_half(rank(), masked)
        output = ddp_model(**half, num_items_in_batch=num_items)
        (2 * output.loss).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        everyone = [None, None]
        dist.all_gather_object(everyone, [int(output.num_valid_tokens), output.loss.item()])
        results["masked" if masked else "plain"] = {
            "loss": of_both_ranks(output.loss), "grad_norm": norm.item(), "ranks": everyone,
            "without_gradient": [n for n, p in model.named_parameters() if p.grad is None],
        }  # fmt: skip
    return results


def shifted_half(shard: int, masked: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(inputs of one rank, valid labels of both): with `masked` the second rank has none."""
    whole = sharded_batch()
    shifted = torch.nn.functional.pad(whole["labels"][:2, 1:], (0, 1), value=IGNORE)
    if masked:
        shifted[:, 6:] = IGNORE
    columns = slice(6 * shard, 6 * shard + 6)
    # "labels" as well, unshifted, as transformers' context parallelism leaves them: shift_labels win
    half = {
        "input_ids": whole["input_ids"][:2, columns],
        "labels": whole["labels"][:2, columns],
        "shift_labels": shifted[:, columns],
    }
    return half, (shifted != IGNORE).sum()


if __name__ == "__main__":
    if "PYTEST_XDIST_WORKER" not in os.environ:
        torch.set_num_threads(1)
    case, out = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = globals()[case]()
    if rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Leave without tearing the interpreter down: a library's thread that still runs then aborts the process, once in
    # some dozens of runs ("terminate called without an active exception"), and nothing of that is under test.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
