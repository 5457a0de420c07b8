"""The planners of redistributions by name, as scenarios, run files and reports have them."""

TORCH_PLANNERS = ("greedy", "min_cost")
# The cheapest path under a profile, and one exchange without a path.
OUR_PLANNERS = ("calibrated", "direct")
# What needs least of the user goes first: that is also the order in which equally good ones are preferred.
PLANNERS = (*TORCH_PLANNERS, *OUR_PLANNERS)
# DTensor's default, which the others are compared with.
BASELINE = "greedy"
# A planner whose all-to-alls ran as such on CPU, and not as all-gathers, has this behind its name; direct uses none.
NATIVE = "+native"
VARIANTS = tuple(name + how for name in PLANNERS for how in ("", NATIVE) if name + how != f"direct{NATIVE}")
OUR_VARIANTS = tuple(name for name in VARIANTS if name.removesuffix(NATIVE) in OUR_PLANNERS)
