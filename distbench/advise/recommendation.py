"""One sentence on which planner to use and why."""

from distbench.advise.plans import Advice, Plan
from distbench.advise.question import Setting
from distbench.planning.choice import LEAVING_SHARE
from distbench.render.units import percent_text, size_text, time_text
from distbench.spec.planner_names import BASELINE

# What to write in training code. Braces: the profile's file, or the layouts of the pair.
HOW = {
    "greedy": "DTensor's default, nothing to change",
    "min_cost": "with torch.distributed.tensor._redistribute.use_min_cost_redistribution_plan()",
    "calibrated": 'with distbench.calibrated_planning("{profile}")',
    "direct": 'move = distbench.DirectRedistribution("{source}", "{target}", x.shape, mesh.mesh), then '
    "move(x.to_local()) in place of redistribute",
}


def verdict(setting: Setting, advice: Advice) -> str:
    """Which planner to use and why, and how far to trust that."""
    use, default = advice.use, advice.plans.get(BASELINE)
    if advice.source == advice.target:
        return "Nothing to do: source and target are the same."
    if not use.num_collectives and not use.seconds:
        reason = "every step is local, so no rank sends anything"
    elif default is None:
        reason = f"predicted {time_words(use.seconds)}, the least of those that could be planned"
    elif use is default:
        reason = f"none of ours is predicted more than {percent_text(LEAVING_SHARE)} faster, nor min_cost at all"
    else:
        reason = _against(use, default)
    return f"Use {use.planner}: {reason}{_doubt(setting, use, default)}. How: {how(setting, advice)}."


def how(setting: Setting, advice: Advice) -> str:
    """What to write in training code to have the recommended plan."""
    profile = setting.profile_path or "profile.json"
    return HOW[advice.use.planner].format(profile=profile, source=advice.source, target=advice.target)


def _against(use: Plan, default: Plan) -> str:
    share = f"predicted {time_words(use.seconds)}, {use.seconds / default.seconds:.2f} of {BASELINE}'s time"
    if use.sent_bytes == default.sent_bytes:
        return f"{share}, for the same bytes sent by a rank"
    return f"{share}; a rank sends {size_text(use.sent_bytes)}, not {size_text(default.sent_bytes)}"


def _doubt(setting: Setting, use: Plan, default: Plan | None) -> str:
    if default is None or use is default:
        return ""
    if setting.profile is None:
        return " (by torch's constants; --profile decides for your machine)"
    error = max(use.error or 0.0, default.error or 0.0)
    if 1 - use.seconds / default.seconds < error:
        return f" (less apart than the prediction's error of {percent_text(error)}: measure both)"
    return ""


def time_words(seconds: float) -> str:
    """A time inside a sentence: `1.20 s`, `0 us`."""
    return " ".join(time_text(seconds).split()) if seconds else "0 us"
