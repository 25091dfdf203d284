"""ACCEPTANCE.md names tests that exist; and the rules for the sources that no linter knows."""

import re
from pathlib import Path

import pytest
import tomllib

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]
SHIPPED = [*PACKAGE.glob("*.*"), *(PACKAGE / "fused_linear_ce_trl").glob("*.py"), ROOT / "docs" / "trl.md"]


def test_every_test_of_the_table_exists():
    text = (PACKAGE / "ACCEPTANCE.md").read_text(encoding="utf-8")
    files = [*(PACKAGE / "tests").glob("test_*.py"), *(ROOT / "tests").rglob("test_*.py")]
    defined = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    named = set(re.findall(r"`(test_\w+(?:\.py)?)`", text))
    assert len(named) > 100
    assert named - defined - {path.name for path in files} == set()


def test_every_line_has_an_answer():
    text = (PACKAGE / "ACCEPTANCE.md").read_text(encoding="utf-8")
    answered = set()
    for cell in re.findall(r"^\| ([A-Z]\d.*?) \|", text, re.MULTILINE):
        for letter, first, last in re.findall(r"([KFRNOTI])(\d+)(?: to [KFRNOTI](\d+))?", cell):
            answered |= {f"{letter}{n}" for n in range(int(first), int(last or first) + 1)}
    lines = dict(K=21, F=15, R=15, N=3, O=1, T=4, I=20)
    assert answered == {f"{letter}{n}" for letter, count in lines.items() for n in range(1, count + 1)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_n2_nothing_is_left_for_later(path):
    text = path.read_text(encoding="utf-8").lower()
    assert not re.search(r"\b(todo|fixme|xxx|before merging)\b", text)


def test_n1_lines_have_at_most_119_characters():
    """The linter sees to it; nobody has switched it off."""
    settings = tomllib.loads((ROOT / "ruff.toml").read_text(encoding="utf-8"))
    assert settings["line-length"] == 119 and "E" in settings["lint"]["select"]
    ignored = [settings["lint"]["ignore"], *settings["lint"]["per-file-ignores"].values()]
    assert not {"E", "E5", "E50", "E501"} & {rule for rules in ignored for rule in rules}
