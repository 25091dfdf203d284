"""TRL's SFT script, with loss_type "cce":

    accelerate launch -m fused_linear_ce_trl.sft --loss_type cce --trust_remote_code \\
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --output_dir out

The arguments are those of `trl sft`, on the command line or in a YAML file named by --config. loss_type "cce"
DOWNLOADS AND RUNS CODE from the Hub, at a pinned commit; --trust_remote_code allows it.

`trl sft` itself cannot be taught: it starts trl/scripts/sft.py in processes of their own.
"""

import gc
import runpy

import torch.distributed as dist

from . import enable

if __name__ == "__main__":
    enable()
    runpy.run_module("trl.scripts.sft", run_name="__main__")
    # TRL's script leaves the process group to the interpreter's exit. There a thread of gloo that has just finished a
    # collective may still be about to drop a tensor that Python owns, for which it aborts the process, and a training
    # that is done is reported as failed. What holds the group goes first, so that destroying it ends its threads.
    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
