"""Matmuls by shape: tiles and waves worked by hand, and published matmuls."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.matmul_shapes import Shape, shape_factor, shape_of
from distbench.simulate.operator_costs import operator_s
from distbench.simulate.recording import Operator


def matmul(
    inputs: Sequence[int], output: int, multiplications: int, dtype: str = "bf16", element_bytes: int = 2
) -> Operator:
    """Tensors are given by their numbers of elements."""
    reads = [(block, elements * element_bytes) for block, elements in enumerate(inputs)]
    return Operator(
        0, "aten.mm", "matmul", 2 * multiplications, dtype, 0, reads, [(9, output * 2)], "forward", "layers.0"
    )


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        (matmul([64 * 32, 32 * 16], 64 * 16, 64 * 32 * 16), (1, 64, 32, 16, 2)),
        # A bias, which is smaller than both matrices, and a product of 8 pairs.
        (matmul([16, 64 * 32, 32 * 16], 64 * 16, 64 * 32 * 16), (1, 64, 32, 16, 2)),
        (matmul([8 * 64 * 32, 8 * 32 * 16], 8 * 64 * 16, 8 * 64 * 32 * 16), (8, 64, 32, 16, 2)),
        # Four experts of 16 tokens each, and the gradient of their weights.
        (matmul([64 * 32, 4 * 32 * 8], 64 * 8, 64 * 32 * 8), (4, 16, 32, 8, 2)),
        (matmul([64 * 32, 64 * 8], 4 * 32 * 8, 64 * 32 * 8), (4, 32, 16, 8, 2)),
        (matmul([64 * 32, 32 * 16], 64 * 16, 64 * 32 * 16, "float8", 1), (1, 64, 32, 16, 1)),
    ],
)
def test_a_matmuls_shape_follows_from_its_tensors(operator: Operator, shape: tuple[float, ...]) -> None:
    count, rows, inner, columns, size = shape
    result = shape_of(operator)
    assert result is not None and (result.num_matmuls, result.inner, result.element_bytes) == (count, inner, size)
    assert {result.rows, result.columns} == {rows, columns}


def test_a_matmul_of_one_tensor_has_no_shape() -> None:
    assert shape_of(matmul([64], 64, 64)) is None


@pytest.mark.parametrize(
    ("shape", "factor"),
    [
        # 100 tiles of 256 x 128 on 100 multiprocessors; filling takes a tenth of 1000 elements in 2 bytes.
        ((1, 2560, 1000, 1280, 2), 1.1),
        ((1, 2560, 1000, 1280, 1), 1.2),
        # 101 tiles would take two waves. 808 tiles of 64 x 64 take 9 waves, and read each operand more often.
        ((101, 256, 1000, 128, 2), 9 / 8 * (1 + 12 / 32) / (1 + 12 * 384 / 32768) * 100 / 101 * 1.1),
    ],
)
def test_tiles_are_computed_in_whole_waves(shape: tuple[float, ...], factor: float) -> None:
    assert shape_factor(Shape(*shape), 100, 200) == pytest.approx(factor, rel=0.001)  # type: ignore[arg-type]


def test_the_inner_dim_is_divided_where_the_output_has_few_tiles() -> None:
    weight_gradient = Shape(1, 768, 65536, 768, 2)  # 18 tiles of 256 x 128
    assert shape_factor(weight_gradient, 108, 0) < 1.1
    assert shape_factor(weight_gradient._replace(inner=500), 108, 0) > 1.5


def test_large_matmuls_reach_the_rate_of_the_file_and_small_ones_do_not() -> None:
    h100 = load_hardware("h100")

    def rate(size: int) -> float:
        operator = matmul([size * size] * 2, size * size, size**3)
        return operator.flops / operator_s(operator, h100)

    rates = [rate(size) / h100["matmul_bf16_flops"] for size in (512, 1024, 2048, 4096, 16384)]
    assert rates == sorted(rates) and rates[0] < 0.35 and rates[-1] > 0.95
    flat = replace(h100, figures={name: figure for name, figure in h100.figures.items() if name != "num_units"})
    small = matmul([512 * 512] * 2, 512 * 512, 512**3)
    assert small.flops / operator_s(small, flat) == pytest.approx(h100["matmul_bf16_flops"])
