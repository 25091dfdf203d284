"""The README's Python blocks run as they stand, one after the other."""

import ast
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_usage_example_runs(build_dir, monkeypatch, capsys):
    pytest.importorskip("kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"trl-lib/fused-linear-ce={build_dir}")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    scope: dict = {}
    exec(blocks[0], scope)
    loss, accuracy = map(float, capsys.readouterr().out.split())
    # random hidden states and nn.Linear's initialisation: logits of standard deviation 1/sqrt(3)
    assert 6.9 < loss < 7.3
    assert 0.0 <= accuracy < 0.05
    assert scope["hidden"].grad[:, 32:].abs().sum() > 0
    assert scope["hidden"].grad[:, :32].abs().sum() == 0
    scope["hidden"].grad = None
    exec(blocks[1], scope)
    assert scope["hidden"].grad.isfinite().all()


def test_option_table_names_every_option():
    source = (README.parent / "torch-ext" / "fused_linear_ce" / "api.py").read_text()
    function = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "fused_linear_cross_entropy")
    names = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
    text = README.read_text()
    assert len(names) == 15
    assert [name for name in names if f"`{name}`" not in text] == []
