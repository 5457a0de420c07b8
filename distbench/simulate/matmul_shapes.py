"""Time of a matmul by its shape: tiles over the device's multiprocessors, in whole waves.

A kernel divides the output into tiles, and each multiprocessor computes one tile at a time. Multiprocessors idle in an
incomplete last wave, tiles at the border compute elements that do not exist, and each tile loads its first operands and
stores its output (NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization" and "Wave Quantization").
The library chooses the kernel: here the fastest tile, with the inner dim divided over several tiles if the output has
too few tiles.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from distbench.simulate.recording import Operator

# Height and width of tiles, those of NVIDIA's guide, the largest first. A smaller tile reads each operand more often;
# at HALF_INTENSITY multiplications per element that is read, reading takes as long as computing.
TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64))
HALF_INTENSITY = 12.0
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)  # of the inner dim
LEAST_INNER = 512  # of a split
ELEMENT_BYTES = {"float8": 1, "f32": 4, "f64": 8}


class Shape(NamedTuple):
    """Sizes of equal matmuls in one kernel, (rows, inner) times (inner, columns), and the bytes of an element."""

    num_matmuls: float
    rows: float
    inner: float
    columns: float
    element_bytes: int


def shape_of(operator: Operator) -> Shape | None:
    """Return a matmul's shape from the bytes of its tensors; None if it does not have two inputs and an output.

    The operations are twice num_matmuls x rows x inner x columns. Each tensor has the elements of three of these, so
    the fourth follows. Rows and columns may be swapped. Groups of different sizes have the mean size.
    """
    size = ELEMENT_BYTES.get(operator.dtype, 2)
    inputs = sorted(num_bytes / size for _, num_bytes in operator.reads)[-2:]  # a bias is smaller
    output = max((num_bytes / max(size, 2) for _, num_bytes in operator.writes), default=0.0)
    if len(inputs) < 2 or not min(*inputs, output, operator.flops):
        return None
    multiplications = operator.flops / 2
    rows, columns, inner = multiplications / inputs[1], multiplications / inputs[0], multiplications / output
    return Shape(max(output / (rows * columns), 1.0), rows, inner, columns, size)


@lru_cache(maxsize=4096)
def shape_factor(shape: Shape, num_units: int, fill_bytes: float) -> float:
    """Return a matmul's time divided by the time of as many operations in a large matmul.

    Args:
        num_units: multiprocessors of the device.
        fill_bytes: bytes along the inner dim that a tile could compute while it loads its first operands and stores its
            output.
    """
    num_matmuls, rows, inner, columns, element_bytes = shape
    fill = fill_bytes / element_bytes
    times = []
    for height, width in TILES:
        tiles = num_matmuls * ceil(rows / height) * ceil(columns / width)
        tile_s = num_units * height * width * _reading(height, width) / _reading(*TILES[0])
        for parts in SPLITS:
            if parts == 1 or inner / parts >= LEAST_INNER:
                times.append(ceil(tiles * parts / num_units) * tile_s * (inner / parts + fill))
    return min(times) / (num_matmuls * rows * inner * columns)


def _reading(height: int, width: int) -> float:
    return 1 + HALF_INTENSITY * (height + width) / (height * width)
