"""Two processes on one machine (gloo, CPU): what each rank computes adds up to what one process computes.

A launch of two processes costs more than the cases in it, so each family is one launch, whose results several tests
read. A hang is the failure to expect: every launch has 120 seconds.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

import distributed_worker as worker
import fused_linear_ce_trl
import support
from fused_linear_ce_trl import host

pytestmark = pytest.mark.slow

LIMIT_S = 120


def launch(case: str, tmp_path_factory, kernel_build) -> dict:
    out = tmp_path_factory.mktemp(case) / "results.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(Path(worker.__file__)), case, str(out),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "LOCAL_KERNELS": f"{fused_linear_ce_trl.KERNEL_ID}={kernel_build}",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{case} still ran after {LIMIT_S} s:\n{output[-4000:]}")
    assert process.returncode == 0, output[-12000:]
    return json.loads(out.read_text())


# --- DDP -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ddp(tmp_path_factory, kernel_build) -> dict:
    return launch("ddp", tmp_path_factory, kernel_build)


@pytest.mark.parametrize("case", ["full", "tied", "lora", "local_average", "accumulation"])
def test_i8_t2_ddp_equals_trl(ddp, case):
    """A rank without a valid label keeps in step, with find_unused_parameters=False."""
    support.assert_same_curves(ddp[f"{case} cce"], ddp[f"{case} {host.LOSS_TYPE}"])


@pytest.mark.parametrize("case", ["full", "tied", "lora", "accumulation"])
def test_i10_ddp_equals_one_process(ddp, case):
    """average_tokens_across_devices is on by default: two ranks' loss is that of the whole batch."""
    setup = worker.ddp_cases()[case]
    alone = worker.train_case(setup, "cce", world=1)
    assert alone[-1]["num_tokens"] == sum(map(len, setup["data"]["input_ids"])), "TRL left rows out"
    support.assert_same_curves(ddp[f"{case} cce"], alone)


def test_i10_without_the_average_over_devices_each_rank_has_its_own_mean(ddp):
    """The rank with few tokens then weighs as much as the other, so the loss is another one."""
    case = worker.ddp_cases()["local_average"]
    alone = worker.train_case(case, "cce", world=1)
    assert abs(alone[0]["loss"] - ddp["local_average cce"][0]["loss"]) > 1e-3


def test_o1_ddp_2_follows_nll_on_one_process(ddp):
    """TRL's own numbers for its sft invariants: 50 steps in fp32."""
    nll = worker.invariant_run(host.LOSS_TYPE, world=1)
    assert len(nll) == 50 and nll[-1]["loss"] < nll[0]["loss"] - 0.2, "it does not train"
    for key, largest, mean in (("loss", 1e-3, 1e-5), ("grad_norm", 1e-1, 1e-3)):
        differences = [a[key] - b[key] for a, b in zip(ddp["invariant"], nll)]
        assert max(map(abs, differences)) <= largest
        assert abs(fmean(differences)) <= mean


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory, kernel_build) -> dict:
    return launch("fsdp", tmp_path_factory, kernel_build)


@pytest.mark.parametrize("case", worker.FSDP_CASES)
def test_i8_t2_fsdp2_gradients_equal_one_process(fsdp, case):
    """One rank has valid labels, the other none. The reference is in fp32 in every case."""
    result, tolerance = fsdp[case], worker.FSDP_CASES[case].tolerance
    whole, both_ranks = result["loss"]
    assert result["valid"] > 0 and abs(whole - both_ranks) < tolerance
    assert result["missing"] == []
    assert result["relative"] <= tolerance, result
    if tolerance <= 1e-6:
        assert result["difference"] <= 1e-6 * max(1, result["size"]), result


@pytest.mark.parametrize("case", worker.FSDP_CASES)
def test_i8_fsdp2_gathers_the_head_once_a_step(fsdp, case):
    """A head in the root's group is whole already while the model's forward runs."""
    own_group = worker.FSDP_CASES[case].own_group
    assert fsdp[case]["gathers"] == (fsdp[case]["head_tensors"] if own_group else 0)


def test_i8_a_replicated_head_beside_plain_hidden_states(tmp_path_factory, kernel_build):
    """https://github.com/huggingface/trl/issues/6064: mixed torch.Tensor and DTensor."""
    result = launch("replicated_head", tmp_path_factory, kernel_build)
    whole, both_ranks = result["loss"]
    assert abs(whole - both_ranks) < 1e-6
    assert result["relative"] <= 1e-6


# --- ZeRO-3 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zero3(tmp_path_factory, kernel_build) -> dict:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    return launch("zero3", tmp_path_factory, kernel_build)


@pytest.mark.parametrize("case", worker.ZERO3_CASES)
def test_i8_t1_zero3_steps_equal_one_process(zero3, case):
    assert zero3[case]["moved"] > 1e-3
    assert zero3[case]["difference"] <= 1e-6


@pytest.mark.parametrize("case", worker.ZERO3_CASES)
def test_t1_t2_zero3_ranks_start_the_same_collectives_in_both_passes(zero3, case):
    first, second = zero3[case]["collectives"]
    assert first == second
    for forward, backward in first:
        assert forward["head"] == backward["head"] == 1
        assert sum(forward.values()) > 1 and sum(backward.values()) > 1


# --- context and sequence parallelism --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shift_labels(tmp_path_factory, kernel_build) -> dict:
    return launch("shift_labels", tmp_path_factory, kernel_build)


@pytest.mark.parametrize("case", ["plain", "masked"])
def test_i9_shards_with_shift_labels_add_up(shift_labels, case):
    """labels are there as well, and ignored; the second rank's half may be fully masked."""
    result, masked = shift_labels[case], case == "masked"
    loss, parameters = 0.0, None
    model = support.make_model("llama")
    for shard in (0, 1):
        half, num_items = worker.shifted_half(shard, masked)
        logits = model(input_ids=half["input_ids"]).logits
        loss = loss + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), half["shift_labels"].flatten(), reduction="sum"
        ) / num_items  # fmt: skip
    loss.backward()
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert result["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert result["without_gradient"] == []
    (_, _), (valid, last_loss) = result["ranks"]
    assert (valid == 0 and last_loss == 0.0) == masked
