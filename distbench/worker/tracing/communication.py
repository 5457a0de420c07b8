"""One collective of a step, as path tables, signatures and timelines have it."""

from dataclasses import dataclass

UNKNOWN_GROUP = "?"
# Owners that are no modules.
LOSS, OPTIMIZER = "(loss)", "(optimizer)"
# With find_unused_parameters, which parameters any rank has a gradient for: DDP's only all-reduce of i32.
USED_PARAMETERS = "DDP used parameters"


@dataclass(frozen=True)
class Communication:
    """One collective of a step.

    Args:
        phase: "forward", "backward" or "optimizer"; "call" where there is no step.
        source: "fsdp", "ddp", "pp", "cp", "ep", "tp", "redistribute" (DTensor over others), "autograd", or "model".
        kind: as in CollectiveCall, and so are op and dtype.
        mesh_dim: name of the mesh dim, several joined by "x"; "?" for a group that is none.
        payload_bytes: nccl-tests' S.
        owner: the module's name, empty for the root; LOSS or OPTIMIZER.
        owner_known: whether an owner was found at all.
        redistribution: `"S(0)R->RR"`, empty where it was none.
        explicit: whether that redistribution was asked for; an operator's own is implicit. None where it was none.
        group: global ranks of the group, sorted, joined by commas; of a message who sends, then who receives it.
    """

    phase: str
    source: str
    kind: str
    op: str
    mesh_dim: str
    group_size: int
    dtype: str
    payload_bytes: int
    owner: str
    owner_known: bool
    redistribution: str
    explicit: bool | None
    group: str
