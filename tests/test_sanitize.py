"""How tools.sanitize reads racecheck's output. The tool itself runs on a GPU."""

import pytest

from tools import sanitize

SOURCE = """@gluon.jit
def kernel(
    x,
):
    gl.warp_specialize(
    block.store(values)
    _specialize(
    if add:
"""


def report(*lines):
    first, *others = (f"access at kernel+0x{16 * line:x} in kernels.py:{line}" for line in lines)
    return f"========= Error: Race reported between Read {first}\n" + "".join(
        f"=========     and Write {other} [239 hazards]\n" for other in others
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(SOURCE)
    monkeypatch.setattr(sanitize, "ROOT", tmp_path)
    monkeypatch.setattr(sanitize, "SOURCES", (".",))


@pytest.mark.parametrize(
    "lines, own",
    [
        ((2, 2, 5), True),  # the partition's number: read and written where the kernel begins, written at its end
        ((2, 5), True),
        ((2, 2, 7), True),  # hopper.py's way to the same
        ((2, 2, 8), False),
        ((2, 6), False),
        ((6, 6), False),
        ((6, 2, 5), False),
        ((2, 2, 6), False),
        ((2, 40), False),  # a line that is not there
        ((2,), False),  # a report that could not be read
    ],
)
def test_only_accesses_of_tritons_own_are_laid_to_triton(folder, lines, own):
    others, handshakes = sanitize.races("========= COMPUTE-SANITIZER\n" + report(2, 5) + report(*lines))
    assert (len(others), len(handshakes)) == ((0, 2) if own else (1, 1))


def test_another_file_is_not_triton(folder):
    text = report(2, 5).replace("kernels.py", "elsewhere.py")
    assert [len(found) for found in sanitize.races(text)] == [1, 0]


def test_no_report(folder):
    assert sanitize.races("========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards\n") == ([], [])
