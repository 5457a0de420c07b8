"""Bus bandwidth and bytes on the wire of a collective, as nccl-tests define them."""


def busbw_factor(op: str, group_size: int) -> float:
    """The factor from algbw = S/t to busbw. Source: nccl-tests' PERFORMANCE.md, and its code for other ops.

    Args:
        op: a name of a collective (`spec.scenario.Collectives.ops`), else ValueError.
        group_size: number of ranks in the group.
    """
    n = group_size
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "scatter", "gather"):
        return (n - 1) / n
    if op in ("broadcast", "send_recv"):
        return 1.0
    raise ValueError(f"{op!r} has no busbw factor")


def wire_bytes(kind: str, payload_bytes: int, group_size: int) -> int | None:
    """Bytes that one rank must send by the algorithm of nccl-tests, or None for a `kind` that nccl-tests does not
    have."""
    if kind in ("send", "recv"):
        return payload_bytes if kind == "send" else 0
    try:
        return round(payload_bytes * busbw_factor(kind, group_size))
    except ValueError:
        return None
