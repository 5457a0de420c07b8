"""Four pairs whose bytes and prices are easily worked out by hand, by every planner."""

from distbench.spec import Redistributions, Scenario, scenario

PAIRS = (
    (("S(0)", "S(0)"), ("S(1)", "S(1)")),
    (("R", "R"), ("S(0)", "R")),
    (("P(sum)", "R"), ("R", "R")),
    (("R", "S(0)"), ("R", "S(1)")),
)


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"native_all_to_all": (False, True)}, tags=("test",))
def pairs(*, planners: str = "", native_all_to_all: bool = False) -> Scenario:
    """Four pairs of one small tensor."""
    names = tuple(name for name in planners.split("+") if name)
    sweep = Redistributions(shape=(32, 32), pairs=PAIRS, planners=names, native_all_to_all=native_all_to_all)
    return Scenario(redistributions=(sweep,))
