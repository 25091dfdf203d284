"""TRL's SFT script, with loss_type "cce":

    accelerate launch -m fused_linear_ce_trl.sft --loss_type cce --trust_remote_code \\
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --output_dir out

The arguments are those of `trl sft`, on the command line or in a YAML file named by --config. loss_type "cce"
DOWNLOADS AND RUNS CODE from the Hub, at a pinned commit; --trust_remote_code allows it.

`trl sft` itself cannot be taught: it starts trl/scripts/sft.py in processes of their own.
"""

import runpy

from . import enable

if __name__ == "__main__":
    enable()
    runpy.run_module("trl.scripts.sft", run_name="__main__")
