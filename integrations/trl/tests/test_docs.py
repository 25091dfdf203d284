"""docs/trl.md: its code runs, its names exist, its wording keeps the rules."""

import re
from pathlib import Path

import pytest

import fused_linear_ce_trl
from fused_linear_ce_trl import kernel, model

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
PROSE = " ".join(re.sub(r"```.*?```", "", PAGE, flags=re.S).split())


def test_the_imports_of_the_examples_work():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "docs/trl.md", "exec")
        exec("\n".join(line for line in block.splitlines() if line.startswith("from ")), {})


def test_the_names_of_the_page_exist():
    for name in ("enable", "disable", "patch_cce_lm_head", "cut_cross_entropy_loss", "load_kernel", "KERNEL_REVISION"):
        assert f"`{name}" in PROSE or f".{name}" in PROSE, name
        assert hasattr(fused_linear_ce_trl, name)
    assert kernel.KERNEL_ID in PAGE
    assert f"`{kernel.REVISION_VARIABLE}`" in PAGE and f"`{model.CHECK_VARIABLE}=0`" in PAGE


def test_r1c_r12_r15_what_the_page_has_to_say():
    first_section = PROSE[: PROSE.index("## Install")]
    assert "throughput, **not** memory" in first_section
    assert "downloads code from the Hub and runs it" in PROSE
    for word in ("HF_HUB_OFFLINE=1", "LOCAL_KERNELS", "trust_remote_code", "https://huggingface.co/papers/2411.09009"):
        assert word in PROSE


@pytest.mark.parametrize("caveat", ["Liger", "code from the Hub", "PEFT adapter on the LM head", "DataParallel",
                                    "label_smoothing_factor", "quantised", "logits are not", "On a CPU"])  # fmt: skip
def test_r13_caveats(caveat):
    assert caveat in PROSE


@pytest.mark.parametrize("path", ["docs/trl.md", "integrations/trl/README.md"])
def test_r14_wording(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|`[^`]*`|\(https?:[^)]*\)|^    .*$", "", text, flags=re.S | re.M)
    assert not re.search(r"\bhub\b", text), "the Hub has a capital letter"
    assert not re.search(r"fused[^.]*\bby a fused", text, flags=re.I)
    assert not re.search(r"TODO|FIXME|XXX|before merging", text)
