"""Every collective over every mesh dim: latency and bandwidth of this machine's links."""

from distbench.spec import Collectives, Scenario, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"max_bytes": 4194304, "step": 64, "dtypes": "f32"},
    tags=("collective",),
)
def collectives(
    *, min_bytes: int = 1024, max_bytes: int = 67108864, step: int = 4, dtypes: str = "f32+bf16"
) -> Scenario:
    """Five collectives over every mesh dim, 1 KiB to 64 MiB. They are all_gather, reduce_scatter, all_to_all,
    all_reduce and broadcast.
    """
    sizes = []
    size = min_bytes
    while size <= max_bytes:
        sizes.append(size)
        size *= step
    return Scenario(collectives=(Collectives(sizes_bytes=tuple(sizes), dtypes=tuple(dtypes.split("+"))),))
