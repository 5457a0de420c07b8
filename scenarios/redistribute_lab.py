"""The planner study: speed and correctness of each planner on every kind of redistribution that DTensor supports."""

from distbench.spec import Laboratory, Scenario, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    axes={"suite": ("pairs", "partials", "shard_orders", "uneven", "flattened", "backward", "strided")},
    quick={"max_pairs": 6, "large_bytes": 1048576},
    tags=("redistribute", "laboratory", "profile"),
)
def redistribute_lab(
    *,
    suite: str = "pairs",
    small_bytes: int = 262144,
    large_bytes: int = 8388608,
    max_pairs: int = 30,
    planners: str = "",
    native_all_to_all: bool = False,
) -> Scenario:
    """The planner study: uneven shards, shard orders and more. Pairs, partials, shard orders, uneven and empty shards,
    flattened meshes, backward and strided shards.

    max_pairs: pairs of a suite at each size, a sample by symmetry; 0 for all.
    planners: names joined by "+", for example greedy+direct; by default all that support the pair. calibrated needs a
        profile: --profile, or the current folder's profile.json from `distbench calibrate`.
    native_all_to_all: on CPU, run DTensor's all-to-alls as all-to-alls instead of all-gathers.
    """
    lab = Laboratory(
        suite=suite,
        sizes_bytes=(small_bytes, large_bytes),
        max_pairs=max_pairs,
        planners=tuple(name for name in planners.split("+") if name),
        native_all_to_all=native_all_to_all,
    )
    return Scenario(laboratories=(lab,))
