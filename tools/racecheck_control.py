"""A kernel of Triton's own synchronisation and nothing else, for tools.sanitize to see what racecheck says of it.

Its three partitions, as hopper.py's, rearrange registers through scratch memory that the compiler gives to each alone.
What one writes no other reads; only what Triton itself passes between them, the number of the partition that a warp is
to run, is shared.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rearrange(source, out, offset, rounds, warps: gl.constexpr):
    by_rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])
    by_columns: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, warps], [0, 1])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, by_rows))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, by_rows))
    at = rows[:, None] * 64 + columns[None, :]
    tile = gl.load(source + at)
    for _ in range(rounds):
        tile = gl.convert_layout(gl.convert_layout(tile, by_columns) + 1.0, by_rows)
    gl.store(out + offset + at, tile)


@gluon.jit
def control(source, out, rounds):
    gl.warp_specialize(
        [
            (rearrange, (source, out, 0, rounds, 4)),
            (rearrange, (source, out, 4096, rounds, 4)),
            (rearrange, (source, out, 8192, rounds, 1)),
        ],
        [4, 1],
        [232, 40],
    )


def main() -> None:
    source = torch.randn(4096, device="cuda")
    out = torch.full((3, 4096), float("nan"), device="cuda")
    control[(132,)](source, out, 3, num_warps=4)
    torch.testing.assert_close(out, (source + 3.0).expand(3, -1))


if __name__ == "__main__":
    main()
