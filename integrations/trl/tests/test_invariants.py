"""Fifty steps in fp32 look the same whatever computes the loss, with the bounds that TRL sets its own SFT invariants.

Everything is computed in the same run: a stored reference would have to be made anew for every torch. Two processes
are in test_distributed.py.
"""

from statistics import fmean

import pytest

from distributed_worker import invariant_run
from support import REFERENCE, differences


@pytest.fixture(scope="module")
def nll() -> list[dict]:
    return invariant_run(REFERENCE, world=1)


def test_o1_the_reference_trains(nll):
    assert len(nll) == 50 and nll[-1]["loss"] < nll[0]["loss"] - 0.2


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"gradient_checkpointing": False},
    ],
    ids=["cce", "cce bs1 x GA8", "cce without checkpointing"],
)
def test_o1_k7_cce_follows_nll(nll, changes):
    cce = invariant_run("cce", world=1, **changes)
    for key, largest, mean in (("loss", 1e-3, 1e-5), ("grad_norm", 1e-1, 1e-3)):
        apart = differences(cce, nll, key)
        assert max(map(abs, apart)) <= largest, key
        assert abs(fmean(apart)) <= mean, key
    if "gradient_accumulation_steps" in changes:
        return  # TRL logs the mean of the micro-batches' means, which is another number
    # Gradients rounded at every chunk would let the entropy drift.
    assert abs(fmean(differences(cce, nll, "entropy"))) < 1e-3
    assert abs(fmean(differences(cce, nll, "mean_token_accuracy"))) < 1e-3
