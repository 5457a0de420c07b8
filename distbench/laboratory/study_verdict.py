"""The laboratory's verdict: what to use, what greedy wastes, what min_cost mispredicts; and the line of code."""

from pathlib import Path

from distbench.compare.intervals import geometric_mean
from distbench.compare.passes import MIN_PASSES
from distbench.laboratory.comparisons import CHOSEN, Tally
from distbench.laboratory.failures import BAD
from distbench.laboratory.predictions import APART
from distbench.laboratory.study import Study
from distbench.render.blocks import Block, Code, Heading, Lines
from distbench.render.units import known, percent_text, ratio_text
from distbench.spec.planner_names import BASELINE, NATIVE, OUR_VARIANTS

# What torch can be made to plan with everywhere, operators and backward included.
EVERYWHERE = ("min_cost", "min_cost+native", "calibrated", "calibrated+native", "greedy+native")
# Predictions further off than this rank plans by luck.
ROUGH = 0.5
ROUGH_TEXT = "That is rough: this machine did not behave as when it was calibrated; calibrate again, without --quick."


def verdict_lines(study: Study) -> tuple[str, ...]:
    """What an engineer has to know, in the order of telling; only what was measured."""
    lines = [_use_line(study), _greedy_line(study), _min_cost_line(study), _prediction_line(study), _wrong_line(study)]
    if study.is_native:
        lines.insert(1, "Every all-to-all ran as such in these runs (+native), greedy's and min_cost's too.")
    return tuple(line for line in lines if line)


def best_everywhere(study: Study) -> tuple[str, Tally] | None:
    """The planner to set for everything: the one with the least mean time, if it is surely under greedy's; or None."""
    found = [(planner, tally) for planner in EVERYWHERE if (tally := study.against(planner))]
    best = min(found, key=lambda one: one[1].mean[0], default=None)
    return best if best and best[1].mean[2] < 1 else None


def best_by_hand(study: Study) -> Tally | None:
    """direct, where on the pairs it can move it is surely faster than greedy, and than what is best everywhere."""
    direct, everywhere = study.against("direct"), best_everywhere(study)
    if not direct or not direct.mean[2] < 1:
        return None
    if everywhere:
        one, other = (study.table.times[study.table.at(name)] for name in ("direct", everywhere[0]))
        if not geometric_mean((one / other)[study.focus & study.table.communicates]) < 1:
            return None
    return direct


def _use_line(study: Study) -> str:
    meshes = ", ".join(dict.fromkeys(mesh for mesh, _, _ in study.table.groups())) or "unknown mesh"
    on = f"On {study.machine} ({study.versions.backend}, mesh {meshes})"
    everywhere, by_hand = best_everywhere(study), best_by_hand(study)
    if not study.table.planners:
        return f"{on} no redistribution came out right, so there is nothing to compare."
    parts = []
    if by_hand:
        what = "direct for redistributions that you write yourself"
        parts.append(f"{what}: {_times_greedy(by_hand)} on the {by_hand.num_pairs} pairs that it can move")
    if everywhere:
        planner, tally = everywhere
        parts.append(f"{planner} for everything: {_times_greedy(tally)} over {tally.num_pairs} pairs")
    elif study.tallies:
        parts.append(
            "greedy, torch's default, for the rest: no planner that can be set for everything is surely faster"
        )
    if not parts:
        return f"{on} greedy was not measured beside another planner, so none can be recommended."
    return f"{on}, use " + "; and ".join(parts) + f" (pairs {study.focus_text} that communicate)."


def _times_greedy(tally: Tally) -> str:
    return f"{ratio_text(*tally.mean)} of greedy's time"


def _greedy_line(study: Study) -> str:
    regret = study.regrets.get("greedy")
    if not regret:
        return ""
    sent = study.sent_over_bound.get("greedy", float("nan"))
    bytes_text = f", and sends {sent:.1f} times the bytes that must arrive" if known(sent) else ""
    return (
        f"greedy wastes {percent_text(1 - 1 / regret.mean)} of its time: it takes {regret.mean:.2f} times as long as "
        f"the best planner measured{bytes_text}; at worst {regret.worst:.1f} times."
    )


def _min_cost_line(study: Study) -> str:
    found = study.against("min_cost")
    if not found:
        return ""
    changed = study.differences.get(("min_cost", "greedy", "", ""))
    if not changed or not changed.num_differing:
        return "min_cost plans what greedy plans on every pair here."
    open_calls = found.num_differing - found.num_faster - found.num_slower
    paid = (
        f"Measured beyond noise it paid on {found.num_faster} and cost time on {found.num_slower}, {open_calls} are "
        "too close to call"
        if study.ratios["min_cost", BASELINE].enough.any()
        else f"Under {MIN_PASSES} passes nobody can say on which it did"
    )
    return (
        f"min_cost leaves greedy's path on {changed.num_differing} of {changed.num_pairs} pairs, because its constants "
        f"say that pays. {paid}; over all, min_cost takes {_times_greedy(found)}."
    )


def _prediction_line(study: Study) -> str:
    overall = [error.error for (_, size), error in study.errors.items() if not size]
    if CHOSEN not in study.regrets or not overall:
        return ""
    rank, ranked = study.ranking, ""
    if rank.num_plans:
        apart, share = percent_text(APART), percent_text(rank.num_right / rank.num_plans)
        ranked = f", and of {rank.num_plans} plan pairs predicted over {apart} apart {share} are ranked right"
    errors = " to ".join(dict.fromkeys(f"{100 * end(overall):.0f}" for end in (min, max)))
    line = (
        f"Choosing each pair's planner by the profile's prediction alone takes {ratio_text(*study.chosen_ratio)} of "
        f"greedy's time; predictions are off by {errors} % (median, by planner){ranked}."
    )
    if max(overall) > ROUGH:
        line += f" {ROUGH_TEXT}"
    return line


def _wrong_line(study: Study) -> str:
    ours = sum(study.outcomes[planner]["ok"] for planner in OUR_VARIANTS if planner in study.outcomes)
    bad = {planner: sum(counts[status] for status in BAD) for planner, counts in sorted(study.outcomes.items())}
    own, theirs = (
        ", ".join(f"{name} on {count}" for name, count in bad.items() if count and (name in OUR_VARIANTS) is is_ours)
        for is_ours in (True, False)
    )
    if not own and not theirs:
        return "Every value was checked, and right." if study.outcomes else ""
    parts = [f"torch's planners gave wrong values or broke: {theirs} cases"] if theirs else []
    if own:
        parts.append(f"OURS TOO: {own} cases")
    elif ours:
        parts.append(f"distbench's own planners gave none wrong among the {ours} cases that they moved")
    return "; ".join(parts) + "."


def code_blocks(study: Study) -> list[Block]:
    """The lines of code for what the verdict says to use."""
    everywhere, by_hand, calibrated = best_everywhere(study), best_by_hand(study), study.against("calibrated")
    profile = study.profile or "profile.json"
    if Path(profile).is_relative_to(Path.cwd()):
        profile = str(Path(profile).relative_to(Path.cwd()))
    native = NATIVE if study.is_native else ""
    found: list[tuple[str, str]] = []
    if everywhere:
        why = f"{everywhere[0]}, for every redistribution, also those inside operators and in backward"
        found.append((f"{why}: {_times_greedy(everywhere[1])}.", everywhere[0] + native))
    if by_hand:
        why = "direct, in the place of tensor.redistribute(...), where neither side has a Partial"
        found.append((f"{why}: {_times_greedy(by_hand)}.", "direct"))
    if not everywhere and calibrated:
        text = f"calibrated takes {_times_greedy(calibrated)} here: no sure gain. To try it all the same:"
        found.append((text, "calibrated" + native))
    blocks: list[Block] = [Heading("The line of code")]
    for text, planner in found:
        blocks += [Lines((text,)), Code(code_for(planner, profile))]
    return blocks if found else [*blocks, Lines(("Nothing to change: greedy is what torch uses by itself.",))]


def code_for(planner: str, profile: str) -> tuple[str, ...]:
    """Lines of Python that make a training loop use a planner, `+native` in its name included."""
    name, _, native = planner.partition("+")
    if name == "direct":
        return (
            "import distbench",
            'move = distbench.DirectRedistribution("S(0)R", "RS(0)", x.shape, mesh.mesh)  # once, with your placements',
            "local = move(x.to_local())  # as often as wanted",
        )
    imports, contexts = [], []
    if native:
        contexts.append("distbench.native_all_to_all()")
    if native or name == "calibrated":
        imports.append("import distbench")
    if name == "calibrated":
        contexts.append(f'distbench.calibrated_planning("{profile}")')
        if native:
            contexts[-1] = "distbench.calibrated_planning(profile)"
            imports.append(f'profile = distbench.load_profile("{profile}").natively()')
    elif name == "min_cost":
        imports.append("from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan")
        contexts.append("use_min_cost_redistribution_plan(True)")
    return (*imports, f"with {', '.join(contexts)}:", "    train()")
