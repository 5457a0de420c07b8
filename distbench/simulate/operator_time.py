"""How long an operator takes on a hardware file's device; and which of them torch.compile would make one kernel."""

from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.recording import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MATMUL,
    Allocated,
    EventRecorded,
    EventWaited,
    Freed,
    HostWaited,
    Operator,
)

# What may lie between two operators of one kernel.
_BETWEEN = (Allocated, Freed, EventRecorded, EventWaited, HostWaited)
DEFAULT_STREAM = 0


def operator_s(operator: Operator, hardware: Hardware, fused: int | None = None) -> float:
    """Seconds that an operator runs: its floating point operations, or its bytes, whichever take longer.

    Args:
        fused: bytes of the one kernel that it became with others, 0 where another one stands for it; None for its own.
    """
    num_bytes = operator.num_bytes if fused is None else fused
    bytes_s = num_bytes / (hardware["memory_bytes_per_s"] * hardware["memory_share"])
    if operator.kind == MATMUL:
        rate = hardware["matmul_bf16_flops" if operator.dtype in ("bf16", "f16") else "matmul_f32_flops"]
        return max(operator.flops / rate, bytes_s)
    if operator.kind == ATTENTION:
        return operator.flops / hardware["attention_flops"]
    if operator.kind == ATTENTION_BACKWARD:
        return operator.flops / hardware["attention_backward_flops"]
    return bytes_s + hardware["operator_s"] if num_bytes else 0.0
