"""SFTConfig(loss_type="cce") for TRL: the cross-entropy of the Hub kernel trl-lib/fused-linear-ce.

    from trl import SFTConfig
    from fused_linear_ce_trl import SFTTrainer

    SFTTrainer(model, args=SFTConfig(loss_type="cce", trust_remote_code=True), train_dataset=dataset).train()

`loss_type="cce"` downloads code from the Hub, at a pinned commit, and runs it; that is what trust_remote_code allows.
"""

from .kernel import KERNEL_ID, KERNEL_REVISION, load_kernel
from .loss import cut_cross_entropy_loss
from .model import check_logit_transform, patch_cce_lm_head
from .trainer import SFTTrainer, disable, enable

__all__ = [
    "SFTTrainer",
    "enable",
    "disable",
    "patch_cce_lm_head",
    "check_logit_transform",
    "cut_cross_entropy_loss",
    "load_kernel",
    "KERNEL_ID",
    "KERNEL_REVISION",
]
