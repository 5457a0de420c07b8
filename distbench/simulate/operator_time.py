"""How long an operator takes on a hardware file's device, which runs with others that are not equally fast."""

from functools import lru_cache
from statistics import NormalDist

from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.recording import ATTENTION, ATTENTION_BACKWARD, MATMUL, Operator

FLOAT8 = "float8"


def operator_s(operator: Operator, hardware: Hardware, fused: int | None = None, world_size: int = 1) -> float:
    """Seconds that an operator runs: its floating point operations, or its bytes, whichever take longer.

    Args:
        fused: bytes of the one kernel that it became with others, 0 where another one stands for it; None for its own.
        world_size: of the devices that wait for one another.
    """
    num_bytes = operator.num_bytes if fused is None else fused
    bytes_s = num_bytes / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
    if operator.kind == MATMUL:
        return max(operator.flops / _matmul_rate(operator, hardware) * slowest(hardware, world_size), bytes_s)
    if operator.kind in (ATTENTION, ATTENTION_BACKWARD):
        return operator.flops / _attention_rate(operator, hardware) * slowest(hardware, world_size)
    return bytes_s + hardware["operator_s"] if num_bytes else 0.0


def slowest(hardware: Hardware, world_size: int) -> float:
    """How much longer the slowest of so many devices computes than the mean one.

    All wait for it in every step, so a larger world is slower. Speeds are taken as normally distributed with the
    hardware file's spread, and the largest of n as Blom's approximation has it (Statistical Estimates, 1958).
    """
    return 1 + hardware["device_spread"] * _largest_of(world_size)


@lru_cache(maxsize=64)
def _largest_of(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _matmul_rate(operator: Operator, hardware: Hardware) -> float:
    if operator.dtype == FLOAT8:
        return hardware["matmul_fp8_flops"]
    return hardware["matmul_bf16_flops" if operator.dtype in ("bf16", "f16") else "matmul_f32_flops"]


def _attention_rate(operator: Operator, hardware: Hardware) -> float:
    """By shape: causal or not, forward or backward, and slower where sequences are short."""
    queries, keys, is_causal = operator.attention or (0, 0, 1)
    name = "attention_backward" if operator.kind == ATTENTION_BACKWARD else "attention"
    rate = hardware[f"{name}_flops" if is_causal else f"{name}_full_flops"]
    length = min(queries, keys)
    return rate * length / (length + hardware["attention_half_length"]) if length else rate
