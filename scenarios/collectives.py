"""Every collective over every mesh dim: latency and bandwidth of this machine's links; ways of one collective."""

from distbench.spec import Collectives, Scenario, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"max_bytes": 4194304, "step": 64, "dtypes": "f32"},
    tags=("collective",),
)
def collectives(
    *,
    min_bytes: int = 1024,
    max_bytes: int = 67108864,
    step: int = 4,
    dtypes: str = "f32+bf16",
    op: str = "all_gather+reduce_scatter+all_to_all+all_reduce+broadcast",
) -> Scenario:
    """Five collectives over every mesh dim, 1 KiB to 64 MiB. Others: --set op=all_to_all_v+scatter+gather+send_recv."""
    sizes = sizes_between(min_bytes, max_bytes, step)
    return Scenario(
        collectives=(Collectives(tuple(op.split("+")), sizes_bytes=sizes, dtypes=tuple(dtypes.split("+"))),)
    )


@scenario(
    mesh={"tp": 4},
    quick={"max_bytes": 262144, "step": 16},
    tags=("collective", "further"),
)
def collective_ways(
    *,
    op: str = "all_reduce",
    ways: str = "plain+rs_ag+all_to_all",
    min_bytes: int = 1024,
    max_bytes: int = 4194304,
    step: int = 4,
    dtype: str = "f32",
) -> Scenario:
    """Ways of one collective, compared at every size. Shows the crossing, and checks every way."""
    sizes = sizes_between(min_bytes, max_bytes, step)
    return Scenario(
        collectives=(Collectives(ops=(op,), sizes_bytes=sizes, dtypes=(dtype,), ways=tuple(ways.split("+"))),)
    )


def sizes_between(min_bytes: int, max_bytes: int, step: int) -> tuple[int, ...]:
    """Sizes from `min_bytes` to `max_bytes`, each `step` times the previous."""
    sizes = []
    size = min_bytes
    while size <= max_bytes:
        sizes.append(size)
        size *= step
    return tuple(sizes)
