"""Redistributions by every planner, and the laboratory's suites that are right on an unharmed torch."""

from distbench.spec import Laboratory, Redistributions, Scenario, placement_pairs, scenario

SUITES = ("pairs", "partials", "shard_orders", "backward")


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"native_all_to_all": (False, True)}, tags=("test",))
def moves(*, native_all_to_all: bool = False) -> Scenario:
    """Every eighth pair of one small tensor, and a few pairs of each suite."""
    sweep = Redistributions(
        shape=(32, 32),
        pairs=placement_pairs(mesh_ndim=2)[::8],
        planners=("greedy", "min_cost", "calibrated", "direct"),
        native_all_to_all=native_all_to_all,
    )
    labs = tuple(Laboratory(suite, (16384,), 3, native_all_to_all=native_all_to_all) for suite in SUITES)
    return Scenario(redistributions=(sweep,), laboratories=labs)
