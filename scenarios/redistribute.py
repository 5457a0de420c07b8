"""Every way to move a tensor between placements of a 2-D mesh, by torch's two planners."""

from distbench.spec import Redistributions, Scenario, placement_pairs, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"small": 64, "large": 512},
    tags=("redistribute",),
)
def redistribute(*, small: int = 64, large: int = 2048) -> Scenario:
    """Every ordered pair of R, S(0), S(1), and P(sum) as source, small and large; greedy against min_cost."""
    pairs = placement_pairs(mesh_ndim=2)
    return Scenario(redistributions=tuple(Redistributions(shape=(side, side), pairs=pairs) for side in (small, large)))
