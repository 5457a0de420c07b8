"""The planner study as text and figures: verdict, findings, the line of code, and the error of predictions."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distbench.planning.redistribution_plans import LEAVING_SHARE
from distbench.report.planner_study import (
    APART,
    BAD,
    BETTER_OF_TORCH,
    CHOSEN,
    NEAR_BEST,
    WORSE_SHARE,
    Failure,
    LargestGain,
    Place,
    PlannerTable,
    Study,
    Tally,
    median_of,
    proof_lines,
)
from distbench.show import plots as style
from distbench.show import units
from distbench.show.blocks import Block, Code, Heading, Lines, Table, capped, shorten
from distbench.show.plots import Spot, hover
from distbench.spec.file_io import short_path
from distbench.spec.placements import BASELINE, NATIVE, OUR_VARIANTS
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import Floats, geometric_mean
from distbench.statistics.pass_comparison import MIN_PASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The verdict: what to use, what greedy wastes, what min_cost mispredicts; and the line of code.

# What torch can be made to plan with everywhere, operators and backward included.
EVERYWHERE = ("min_cost", "min_cost+native", "calibrated", "calibrated+native", "greedy+native")
# Predictions further off than this rank plans by luck.
ROUGH = 0.5
ROUGH_TEXT = "That is rough: this machine did not behave as when it was calibrated; calibrate again, without --quick."


def verdict_lines(study: Study) -> tuple[str, ...]:
    """What to use, what greedy wastes, what min_cost changes, errors of predictions, wrong results; all measured."""
    lines = [_use_line(study), _greedy_line(study), _min_cost_line(study), _prediction_line(study), _wrong_line(study)]
    if study.is_native:
        lines.insert(1, "Every all-to-all ran as such in these runs (+native), greedy's and min_cost's too.")
    return tuple(line for line in lines if line)


def best_everywhere(study: Study) -> tuple[str, Tally] | None:
    """The planner to set for everything: that with the least mean time, if its interval is under greedy's; or None."""
    candidates = [(planner, compared) for planner in EVERYWHERE if (compared := study.against(planner))]
    best = min(candidates, key=lambda candidate: candidate[1].mean[0], default=None)
    return best if best and best[1].mean[2] < 1 else None


def best_by_hand(study: Study) -> Tally | None:
    """direct, where it is faster than greedy and than the planner best everywhere on the pairs that it can move."""
    direct, everywhere = study.against("direct"), best_everywhere(study)
    if not direct or not direct.mean[2] < 1:
        return None
    if everywhere:
        direct_times, other_times = (study.table.times[study.table.at(name)] for name in ("direct", everywhere[0]))
        if not geometric_mean((direct_times / other_times)[study.compared]) < 1:
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
        advice = "direct for redistributions that you write yourself"
        parts.append(f"{advice}: {_times_greedy(by_hand)} on the {by_hand.num_pairs} pairs that it can move")
    if everywhere:
        planner, compared = everywhere
        parts.append(f"{planner} for everything: {_times_greedy(compared)} over {compared.num_pairs} pairs")
    elif study.tallies:
        parts.append(
            "greedy, torch's default, for the rest: no planner that can be set for everything is surely faster"
        )
    if not parts:
        return f"{on} greedy was not measured next to another planner, so none can be recommended."
    return f"{on}, use " + "; and ".join(parts) + f" (pairs {study.focus_text} that communicate)."


def _times_greedy(compared: Tally) -> str:
    return f"{units.ratio_text(*compared.mean)} of greedy's time"


def _greedy_line(study: Study) -> str:
    regret = study.regrets.get("greedy")
    if not regret:
        return ""
    sent = study.sent_over_bound.get("greedy", float("nan"))
    bytes_text = f", and sends {sent:.1f} times the bytes that must arrive" if units.known(sent) else ""
    return (
        f"greedy wastes {units.percent_text(1 - 1 / regret.mean)} of its time: it takes {regret.mean:.2f} times as "
        f"long as the best planner measured{bytes_text}; at worst {regret.worst:.1f} times."
    )


def _min_cost_line(study: Study) -> str:
    compared = study.against("min_cost")
    if not compared:
        return ""
    changed = study.differences.get(("min_cost", "greedy", "", ""))
    if not changed or not changed.num_differing:
        return "min_cost plans what greedy plans on every pair here."
    open_calls = compared.num_differing - compared.num_faster - compared.num_slower
    paid = (
        f"Measured beyond noise it paid on {compared.num_faster} and cost time on {compared.num_slower}, "
        f"{open_calls} are too close to call"
        if study.ratios["min_cost", BASELINE].enough.any()
        else f"Under {MIN_PASSES} passes it is unknown on which it did"
    )
    return (
        f"min_cost leaves greedy's path on {changed.num_differing} of {changed.num_pairs} pairs, because its constants "
        f"predict a gain. {paid}; over all pairs, min_cost takes {_times_greedy(compared)}."
    )


def _prediction_line(study: Study) -> str:
    overall = [error.error for (_, size), error in study.errors.items() if not size]
    if CHOSEN not in study.regrets or not overall:
        return ""
    rank, ranked = study.ranking, ""
    if rank.num_plans:
        apart, share = units.percent_text(APART), units.percent_text(rank.num_right / rank.num_plans)
        ranked = f", and of {rank.num_plans} plan pairs predicted over {apart} apart {share} are ranked right"
    errors = " to ".join(dict.fromkeys(f"{100 * end(overall):.0f}" for end in (min, max)))
    return (
        "Choosing each pair's planner by the profile's prediction alone takes "
        f"{units.ratio_text(*study.chosen_ratio)} of greedy's time; predictions are off by {errors} % (median, by "
        f"planner){ranked}." + (f" {ROUGH_TEXT}" if max(overall) > ROUGH else "")
    )


def _wrong_line(study: Study) -> str:
    ours = sum(study.outcomes[planner]["ok"] for planner in OUR_VARIANTS if planner in study.outcomes)
    bad = {planner: sum(counts[status] for status in BAD) for planner, counts in sorted(study.outcomes.items())}
    own_wrong, theirs = (
        ", ".join(f"{name} on {count}" for name, count in bad.items() if count and (name in OUR_VARIANTS) is is_ours)
        for is_ours in (True, False)
    )
    if not own_wrong and not theirs:
        return "Every value was checked and is correct." if study.outcomes else ""
    parts = [f"torch's planners gave wrong values or broke: {theirs} cases"] if theirs else []
    if own_wrong:
        parts.append(f"OURS TOO: {own_wrong} cases")
    elif ours:
        parts.append(f"distbench's own planners gave none wrong among the {ours} cases that they moved")
    return "; ".join(parts) + "."


def code_blocks(study: Study) -> list[Block]:
    """The lines of code for the verdict's choice."""
    everywhere, by_hand, calibrated = best_everywhere(study), best_by_hand(study), study.against("calibrated")
    profile = str(short_path(Path(study.profile or "profile.json")))
    native = NATIVE if study.is_native else ""
    advice: dict[str, str] = {}  # planner to its sentence
    if everywhere:
        why = f"{everywhere[0]}, for every redistribution, also those inside operators and in backward"
        advice[everywhere[0] + native] = f"{why}: {_times_greedy(everywhere[1])}."
    if by_hand:
        why = "direct, in the place of tensor.redistribute(...), where neither side has a Partial"
        advice["direct"] = f"{why}: {_times_greedy(by_hand)}."
    if not everywhere and calibrated:
        why = f"calibrated takes {_times_greedy(calibrated)} here: no sure gain. To try it all the same:"
        advice["calibrated" + native] = why
    blocks = [block for planner, text in advice.items() for block in (Lines((text,)), Code(code_for(planner, profile)))]
    nothing = Lines(("Nothing to change: greedy is what torch uses by itself.",))
    return [Heading("The line of code"), *(blocks or [nothing])]


def code_for(planner: str, profile: str) -> tuple[str, ...]:
    """Lines of Python that make a training loop use a planner, `+native` in its name included."""
    name, _, native = planner.partition("+")
    if name == "direct":
        return (
            "import distbench",
            'move = distbench.DirectRedistribution("S(0)R", "RS(0)", x.shape, mesh.mesh)  # once, with your placements',
            "local = move(x.to_local())  # as often as wanted",
        )
    imports = ["import distbench"] if native or name == "calibrated" else []
    contexts = ["distbench.native_all_to_all()"] if native else []
    if name == "calibrated" and native:
        contexts.append("distbench.calibrated_planning(profile)")
        imports.append(f'profile = distbench.load_profile("{profile}").natively()')
    elif name == "calibrated":
        contexts.append(f'distbench.calibrated_planning("{profile}")')
    elif name == "min_cost":
        imports.append("from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan")
        contexts.append("use_min_cost_redistribution_plan(True)")
    return (*imports, f"with {', '.join(contexts)}:", "    train()")


MAX_FAILURES = 30
MAX_ERROR = 160
MEAN_CI = "95 % CI"
STATUS_ORDER = ("ok", *BAD, "unsupported", "skipped")


def story(study: Study) -> list[Block]:
    """The numbers behind the verdict; empty tables are left out."""
    heading = Heading(f"Redistribution planner study: {study.machine}, torch {study.versions.torch}")
    parts = (_means, _wins, _regrets, _paths, _predictions, _largest_gains, _outcomes, _failures)
    return [heading, *(table for part in parts if (table := part(study)).rows)]


def _by_group(
    study: Study, values: Mapping[Place, Any], kinds: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, list[Any]]]:
    """Mesh, size, and the values of each two planners there, in the order of kinds; only where there are some."""
    for mesh, size, _ in study.table.groups():
        of_group = [values.get((*kind, mesh, size)) for kind in kinds]
        if any(of_group):
            yield mesh, size, of_group


def _means(study: Study) -> Table:
    planners = [planner for planner in study.table.planners if study.against(planner)]
    rows = []
    for mesh, size, tallies in _by_group(study, study.tallies, [(planner, BASELINE) for planner in planners]):
        means = [units.ratio_text(*tally.mean) if tally else units.NOTHING for tally in tallies]
        num_pairs = max(tally.num_pairs for tally in tallies if tally)
        rows.append((mesh, size, str(num_pairs), *(cell for mean in means for cell in mean.partition(" ")[::2])))
    notes = [
        "geometric mean over the pairs that communicate, [95 % CI over pairs]; below 1 is faster than greedy",
        "direct makes no Partial: its mean is over the pairs that it moved",
    ]
    title = "Time over greedy's, by mesh and size of the whole tensor"
    columns = ("<mesh", "<size", "pairs", *(name for planner in planners for name in (planner, f"<{MEAN_CI}")))
    return Table(title, columns, rows, notes[: 2 if "direct" in planners else 1], optional=(MEAN_CI, "pairs"))


def _wins(study: Study) -> Table:
    rows = []
    for planner in study.table.planners:
        tally, other = study.against(planner), study.against(planner, BETTER_OF_TORCH)
        cells = tally[:4] if tally else [units.NOTHING] * 4
        more = (other.num_faster, other.num_slower, other.num_much_slower) if other else [units.NOTHING] * 3
        if tally or other:
            rows.append((planner, *map(str, cells), *map(str, more)))
    columns = (
        "<planner", "pairs", "not as\ngreedy", "faster than\ngreedy", "slower than\ngreedy",
        "faster than\nbetter", "slower than\nbetter", f"{units.percent_text(WORSE_SHARE)}+\nslower",
    )  # fmt: skip
    notes = [
        "faster, slower: by passes, all pairs of two planners tested together",
        "better: the faster of torch's two, greedy and min_cost, as measured, pair by pair",
        *dict.fromkeys(line for family in study.ratios.values() for line in family.sentences if "nothing" in line),
        *proof_lines([family for (_, other), family in study.ratios.items() if other == BASELINE]),
    ]
    title = f"Wins and losses beyond noise, pairs {study.focus_text}"
    return Table(title, columns, rows, notes, optional=("not as greedy", columns[-1].replace("\n", " "), "pairs"))


def _regrets(study: Study) -> Table:
    planning = study.table.numbers["planning_cold_s"]
    cold = {planner: median_of(planning[at]) for at, planner in enumerate(study.table.planners)}
    rows = [
        (
            name,
            str(regret.num_pairs),
            f"{regret.mean:.2f}",
            f"{regret.worst:.2f}",
            units.percent_text(regret.share_near),
            units.decimal_text(study.sent_over_bound.get(name)),
            units.time_text(cold.get(name, float("nan"))),
        )
        for name, regret in study.regrets.items()
    ]
    near = f"within {units.percent_text(NEAR_BEST)}\nof the best"
    columns = (
        "<planner", "pairs", "time over\nthe best", "at worst", near,
        "sent over\nthe bound", "planning,\nempty caches",
    )  # fmt: skip
    notes = [
        "the best: the least time measured of the pair; the luckiest wins it, so even the best choice pays a little",
        f"{CHOSEN}: pair by pair the choice of distbench redistribute, without measuring: the better of "
        f"torch's two, unless another is predicted more than {units.percent_text(LEAVING_SHARE)} faster",
        "bound: the bytes that must arrive at the rank that lacks most; over pairs without Partial (geometric mean)",
    ]
    if BASELINE in cold and (left_out := int((~study.table.measured[study.table.at(BASELINE)]).sum())):
        notes.append(f"left out: {left_out} pairs that greedy did not move rightly in the same run")
    title = f"What each choice costs over the best, pairs {study.focus_text}"
    optional = ("planning, empty caches", "pairs", "sent over the bound", near.replace("\n", " "))
    return Table(title, columns, rows, notes, optional=optional)


def _paths(study: Study) -> Table:
    kinds = list(dict.fromkeys((planner, reference) for planner, reference, _, _ in study.differences))
    texts = {
        place: f"{units.percent_text(num_differing / num_pairs)} ({num_differing}/{num_pairs})"
        for place, (num_pairs, num_differing) in study.differences.items()
    }
    rows = [
        (mesh, size, *(text or units.NOTHING for text in of_group))
        for mesh, size, of_group in _by_group(study, texts, kinds)
    ]
    columns = ("<mesh", "<size", *(f"{planner}\nnot {reference}'s" for planner, reference in kinds))
    return Table("How often another path is planned", columns, rows)


def _predictions(study: Study) -> Table:
    predicted_sizes = {size for _, size in study.errors}
    sizes = [size for size in study.table.sizes() if size in predicted_sizes]
    rows = []
    for planner in dict.fromkeys(planner for planner, _ in study.errors):
        errors, overall = [study.errors.get((planner, size)) for size in sizes], study.errors.get((planner, ""))
        cells = [units.percent_text(error.error) if error else units.NOTHING for error in errors]
        rows.append((planner, *cells, units.decimal_text(overall.bias if overall else None)))
    rank, notes = study.ranking, ["error: median of |predicted / measured - 1|"]
    if rank.num_plans:
        share, apart = units.percent_text(rank.num_right / rank.num_plans), units.percent_text(APART)
        of_all = f"{rank.num_right} of {rank.num_plans} plan pairs ({share})"
        notes.append(f"{of_all} predicted over {apart} apart were measured in that order")
    columns = ("<planner", *(f"error,\n{size}" for size in sizes), "predicted\nover measured")
    return Table("Predicted by the profile against measured", columns, rows, notes)


def _largest_gains(study: Study) -> Table:
    rows = [row for gain in study.largest_gains for row in _gain_rows(study.table, gain)]
    columns = ("<planner", "<path", "median", "coll.", "sent", "over\nbound", "<over greedy")
    notes = ["coll. = collectives; sent = bytes that one rank sends as executed; bound as above, none for Partial"]
    subject = f"The {len(study.largest_gains)} most striking pairs {study.focus_text}"
    title = f"{subject}: largest gains over greedy beyond noise"
    breaks = frozenset(range(2, len(rows), 2))
    return Table(title, columns, rows, notes, breaks, ("coll.", "over bound", "sent"), together=True)


def _gain_rows(table: PlannerTable, gain: LargestGain) -> Iterator[tuple[str, ...]]:
    facts = table.pairs.iloc[gain.pair]
    for planner, last in ((BASELINE, _tensor_text(facts)), (gain.planner, units.ratio_text(*gain.ratio))):
        at = table.at(planner), gain.pair
        sent, bound = float(table.numbers["wire_bytes_executed"][at]), float(facts["bound_bytes"])
        yield (
            planner,
            table.paths[at] or f"{facts['source']}->{facts['target']}",
            units.time_text(float(table.times[at])),
            units.whole_text(float(table.numbers["num_collectives"][at])),
            units.size_text(sent),
            units.decimal_text(sent / bound if bound > 0 else None),
            last,
        )


def _tensor_text(facts: Any) -> str:
    return f"{facts['dtype']}[{facts['shape'].replace('x', ',')}] on {facts['mesh_shape']}"


def _outcomes(study: Study) -> Table:
    statuses = [status for status in STATUS_ORDER if any(counts[status] for counts in study.outcomes.values())]
    rows = [
        (name or "-", str(study.outcomes[name].total()), *(str(study.outcomes[name][status]) for status in statuses))
        for name in dict.fromkeys([*study.table.planners, *study.outcomes])
    ]
    notes = ["every result is compared with a shard that is cut from the full tensor without DTensor"]
    return Table("Values: every case of every suite", ("<planner", "cases", *statuses), rows, notes)


def _failures(study: Study) -> Table:
    rows = [_failure_row(failure) for failure in study.failures]
    columns = ("<status", "<planner", "cases", "<in common", "<smallest of them", "<ours on the same")
    title = f"Wrong or broken, by cause: {count_text(sum(failure.num_cases for failure in study.failures), 'case')}"
    notes = ["one stand-alone script each: distbench report --reproducers DIR"]
    breaks, optional = frozenset(range(1, len(rows))), ("ours on the same",)
    return capped(Table(title, columns, rows, notes, breaks, optional, "smallest of them"), MAX_FAILURES)


def _failure_row(failure: Failure) -> tuple[str, ...]:
    record = failure.example
    error = shorten(str(record["error"] or "-"), MAX_ERROR)
    # What our planners did on the same pairs.
    ours = [f"{name}: {units.counts_text(counts)}" for name, counts in failure.ours.items()]
    return (
        failure.status,
        failure.planner,
        str(failure.num_cases),
        f"{failure.suite}: {failure.pattern}" if failure.suite else failure.pattern,
        f"{record['source']} -> {record['target']}, {_tensor_text(record)}: {error}",
        "; ".join(ours) or "not run",
    )


# Figures: what each choice costs, ratios by size, predicted against measured.

COLORS = {
    "greedy": style.GREY,
    "greedy+native": style.BLACK,
    "min_cost": style.ORANGE,
    "min_cost+native": style.RED,
    "calibrated": style.SKY,
    "calibrated+native": style.BLUE,
    "direct": style.GREEN,
    CHOSEN: style.PURPLE,
}
MARKERS = {"min_cost": "s", "min_cost+native": "D", "calibrated": "o", "calibrated+native": "^", "direct": "v"}
TICKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10)
MAX_MESHES = 3
MAX_SCATTERS = 8
PER_ROW = 4


def laboratory_figures(study: Study) -> "Iterator[tuple[str, Figure]]":
    """(name, figure) of whatever there is something to draw of."""
    parts = {
        "cost-over-best": _cost_figure,
        "ratio-by-size": _ratio_figure,
        "predicted-against-measured": _prediction_figure,
    }
    yield from ((name, figure) for name, part in parts.items() if (figure := part(study)))


def _cost_figure(study: Study) -> "Figure | None":
    """How much longer than the best measured planner of each pair every choice takes."""
    if not study.regrets:
        return None
    regrets = dict(sorted(study.regrets.items(), key=lambda planner_regret: planner_regret[1].mean))
    most = max(regret.num_pairs for regret in regrets.values())
    figure, (axes,) = style.new_figure(1, 9, 1.5 + 0.42 * len(regrets))
    extra = [100 * (regret.mean - 1) for regret in regrets.values()]
    limit = max(style.reach(extra), 5)
    shown = [min(value, limit) for value in extra]
    axes.barh(range(len(regrets)), shown, color=[COLORS.get(planner, style.BLACK) for planner in regrets], height=0.66)
    for place, ((planner, regret), value, end) in enumerate(zip(regrets.items(), extra, shown, strict=True)):
        few = f"  (on {regret.num_pairs} of the {most} pairs)" if regret.num_pairs < most else ""
        style.name_end(axes, (end, place), f"+{value:.0f} %{few}", is_beyond=value > limit)
        near = f"within {units.percent_text(NEAR_BEST)} of it on {units.percent_text(regret.share_near)}"
        text = f"{planner}: {regret.mean:.2f} times the best's time, at worst {regret.worst:.2f} times"
        hover(axes, [Spot(0, place - 0.33, f"{text}\n{near} of {regret.num_pairs} pairs", end, 0.66)])
    style.name_bars(axes, list(regrets))
    axes.set_xlim(0, limit * 1.3)
    style.label_axis(axes.xaxis, lambda value: f"+{value:g} %" if value else "0 %")
    axes.set_xlabel(f"time over the best planner of each pair (geometric mean over {most} pairs)")
    style.title(figure, f"What each choice costs, pairs {study.focus_text}: shorter is better")
    return figure


def _ratio_figure(study: Study) -> "Figure | None":
    """Each planner's time over greedy's by size, one panel per mesh."""
    means = {place: tally.mean for place, tally in study.tallies.items() if place[1] == BASELINE}
    meshes = list(dict.fromkeys(mesh for _, _, mesh, _ in means if mesh))[:MAX_MESHES]
    if not meshes:
        return None
    width = 1.6 + max(2.6, 0.9 * max(len(_sizes(study, mesh)) for mesh in meshes)) * len(meshes) * 1.4
    figure, axes = style.new_figure(len(meshes), min(max(width, 8), 14), 4.4)
    bounds = [bound for (_, _, mesh, _), mean in means.items() if mesh for bound in mean if bound > 0]
    low, high = min(*bounds, 0.9) / 1.1, max(*bounds, 1.1) * 1.1
    axes[0].set_yscale("log")
    axes[0].set_ylim(low, high)
    for panel, mesh in zip(axes, meshes, strict=True):
        _ratio_panel(panel, mesh, study)
    axes[0].set_yticks([tick for tick in TICKS if low <= tick <= high])
    axes[0].set_yticks([], minor=True)
    style.label_axis(axes[0].yaxis, lambda value: f"{value:g}")
    axes[0].set_ylabel("time over greedy's")
    style.title(figure, "Time over greedy's by size of the tensor: below the line is faster than greedy")
    caption = "geometric mean over the pairs that communicate; bars: its 95 % CI over pairs"
    style.caption(figure, caption + ("; direct: the pairs that it moved" if "direct" in study.table.planners else ""))
    return figure


def _sizes(study: Study, mesh: str) -> list[str]:
    """The size classes of a mesh on which some planner is compared with greedy."""
    sizes = {size for _, baseline, on, size in study.tallies if (baseline, on) == (BASELINE, mesh)}
    return [size for on, size, _ in study.table.groups() if on == mesh and size in sizes]


def _ratio_panel(axes: "Axes", mesh: str, study: Study) -> None:
    sizes = _sizes(study, mesh)
    by_planner: dict[str, list[tuple[int, tuple[float, float, float]]]] = {}
    for planner in study.table.planners:
        for place, size in enumerate(sizes):
            if tally := study.tallies.get((planner, BASELINE, mesh, size)):
                by_planner.setdefault(planner, []).append((place, tally.mean))
    axes.axhline(1, color=style.GREY, linewidth=1.4, zorder=1)
    for number, (planner, points) in enumerate(by_planner.items()):
        shift = (number - (len(by_planner) - 1) / 2) * 0.09
        means = np.array([mean for _, mean in points])
        below, above = means[:, 0] - means[:, 1], means[:, 2] - means[:, 0]
        axes.errorbar(
            [place + shift for place, _ in points], means[:, 0], yerr=np.nan_to_num([below, above]),
            color=COLORS.get(planner, style.BLACK), marker=MARKERS.get(planner, "o"), markersize=6, linewidth=1.4,
            capsize=2,
        )  # fmt: skip
        for place, mean in points:
            text = f"{planner} over {BASELINE}, {sizes[place]} on {mesh}\n{units.ratio_text(*mean)}"
            hover(axes, [Spot(place + shift, mean[0], text)])
    axes.set_xticks(range(len(sizes)), [size.replace(" to ", " to\n") for size in sizes])
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.grid(visible=True, axis="y")
    axes.set_title(f"mesh {mesh}", fontweight="normal")
    ends = {BASELINE: 1.0} | {planner: points[-1][1][0] for planner, points in by_planner.items()}
    style.label_ends(axes, ends, COLORS)


def _prediction_figure(study: Study) -> "Figure | None":
    """Measured against predicted, one dot per plan, one panel per planner."""
    predictions = {planner: study.predicted_pairs(planner) for planner in study.table.planners}
    planners = [planner for planner, (pairs, _, _) in predictions.items() if pairs.size][:MAX_SCATTERS]
    if not planners:
        return None
    figure, axes = style.panels(len(planners), PER_ROW, (3.1, 3.5), (0.8, 0.8))
    times = np.concatenate([part for planner in planners for part in predictions[planner][1:]])
    low, high = float(times.min()) / 1.5, float(times.max()) * 1.5
    for panel, planner in zip(axes, planners, strict=True):
        pairs, predicted, measured = predictions[planner]
        _scatter(panel, planner, predicted, measured, low, high)
        places = zip(pairs.tolist(), predicted.tolist(), measured.tolist(), strict=True)
        hover(panel, [Spot(x, y, _prediction_text(study.table, planner, pair, x, y)) for pair, x, y in places])
        panel.set_xlabel("predicted")
    for panel in axes[::PER_ROW]:
        panel.set_ylabel("measured")
    style.caption(figure, "grey band: within 20 %; pairs of all sizes that communicate")
    style.title(figure, "Predicted against measured, one dot per pair: on the line the prediction is right")
    return figure


def _prediction_text(table: PlannerTable, planner: str, pair: int, predicted_s: float, measured_s: float) -> str:
    facts, path = table.pairs.iloc[pair], table.paths[table.at(planner), pair]
    times = (f"predicted {units.brief_time_text(predicted_s)}", f"measured {units.brief_time_text(measured_s)}")
    lines = (f"{planner}, {_tensor_text(facts)}", f"{facts['source']} -> {facts['target']}", path, *times)
    return "\n".join(filter(None, lines))


def _scatter(axes: "Axes", planner: str, predicted: Floats, measured: Floats, low: float, high: float) -> None:
    line = np.array([low, high])
    axes.fill_between(line, line / 1.2, line * 1.2, color=style.LIGHT, alpha=0.6, linewidth=0, zorder=0)
    axes.plot(line, line, color=style.GREY, linewidth=1.2, zorder=1)
    axes.scatter(predicted, measured, s=13, color=COLORS.get(planner, style.BLACK), alpha=0.55, linewidth=0, zorder=2)
    style.square_time_axes(axes, low, high, max_ticks=4)
    axes.set_box_aspect(1)
    error = float(np.median(np.abs(predicted / measured - 1)))
    axes.set_title(f"{planner}: off by {units.percent_text(error)}", fontweight="normal")
    look: Any = {"xycoords": "axes fraction", "fontsize": 8, "color": style.NOTE}
    axes.annotate("slower than\npredicted", (0.05, 0.95), va="top", **look)
    axes.annotate("faster than\npredicted", (0.95, 0.05), ha="right", **look)
