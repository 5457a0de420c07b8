"""Detection of slow ranks, hosts and links."""

from distbench.spec import Links, Scenario, scenario


@scenario(mesh={"dp_shard": 2, "tp": 2}, tags=("links",))
def links(*, size_bytes: int = 0, matmul_size: int = 0, burst_s: float = 0.25, max_rounds: int = 0) -> Scenario:
    """Finds slow ranks, hosts and links. It measures every pair of ranks, each mesh dim's groups, and each rank's own
    speed.
    """
    sizes = Links(size_bytes=size_bytes, matmul_size=matmul_size, burst_s=burst_s, max_rounds=max_rounds)
    return Scenario(links=(sizes,))
