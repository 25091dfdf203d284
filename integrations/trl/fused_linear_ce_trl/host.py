"""What differs between the TRL versions, and the names of TRL that this package hooks into.

TRL chooses its loss by name and patches the model's forward for it. Two generations of that patch exist:

    - 1.14   loss_type "chunked_nll": sft_trainer._patch_chunked_ce_lm_head(model, ...), before Trainer.__init__
    1.15 -   loss_type "nll": sft_trainer.add_fused_lm_head(model, ...), after Trainer.__init__

Everything is looked up when this package is imported: a TRL that has moved on fails here, not at the first step.
"""

import trl
from packaging.version import Version
from trl.trainer import sft_trainer

TESTED = "1.12 to 1.16"

_moved = ImportError(
    f"fused_linear_ce_trl was tested with TRL {TESTED} and needs trl>=1.12,<2; TRL {trl.__version__} is installed"
)
if not Version("1.12") <= Version(trl.__version__) < Version("2.dev0"):
    raise _moved

# Whether TRL's SFT loss is made from log-probabilities of a fused head, called with fused_lm_head=True.
FUSED_HEAD = hasattr(sft_trainer, "add_fused_lm_head")
# The function of sft_trainer that patches a model's forward, and the loss type under which TRL calls it.
PATCH = "add_fused_lm_head" if FUSED_HEAD else "_patch_chunked_ce_lm_head"
LOSS_TYPE = "nll" if FUSED_HEAD else "chunked_nll"

try:
    from trl.trainer.utils import maybe_gather_lm_head_ctx as gather_zero3
except ImportError as error:
    raise _moved from error
if not hasattr(sft_trainer, PATCH):
    raise _moved

__all__ = ["FUSED_HEAD", "LOSS_TYPE", "PATCH", "gather_zero3", "sft_trainer"]
