"""Redistributions between all placements of a 2-D mesh, by torch's two planners and distbench's."""

from distbench.spec import Redistributions, Scenario, placement_pairs, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"small": 64, "large": 512},
    tags=("redistribute",),
)
def redistribute(
    *, small: int = 64, large: int = 2048, planners: str = "", native_all_to_all: bool = False
) -> Scenario:
    """Every ordered pair of R, S(0), S(1), by each planner. Also P(sum) as source; small and large tensors.

    planners: names joined by "+", for example greedy+calibrated+direct; by default greedy and min_cost, and with
        --profile also calibrated and direct.
    native_all_to_all: on CPU, run DTensor's all-to-alls as all-to-alls instead of all-gathers.
    """
    pairs = placement_pairs(mesh_ndim=2)
    names = tuple(name for name in planners.split("+") if name)
    return Scenario(
        redistributions=tuple(
            Redistributions(shape=(side, side), pairs=pairs, planners=names, native_all_to_all=native_all_to_all)
            for side in (small, large)
        )
    )
