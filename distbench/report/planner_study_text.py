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
from distbench.statistics.verdicts import MIN_PASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The verdict: recommendation, waste of greedy, errors of min_cost, and the line of code.

# Planners that torch can use everywhere, including operators and backward.
EVERYWHERE = ("min_cost", "min_cost+native", "calibrated", "calibrated+native", "greedy+native")
# Predictions with larger errors do not rank plans reliably.
ROUGH = 0.5
ROUGH_TEXT = (
    "These errors are large, because the machine's speed has changed since the calibration. Calibrate again "
    "without --quick."
)


def verdict_lines(study: Study) -> tuple[str, ...]:
    """Lines on the recommended planner, greedy's waste, min_cost's changes, errors of predictions, and wrong
    results."""
    lines = [_use_line(study), _greedy_line(study), _min_cost_line(study), _prediction_line(study), _wrong_line(study)]
    if study.is_native:
        lines.insert(1, "All planners used native all-to-all in these runs (+native), including greedy and min_cost.")
    return tuple(line for line in lines if line)


def best_everywhere(study: Study) -> tuple[str, Tally] | None:
    """The planner for everything: the planner with the lowest mean time, if the interval is below greedy's time, else
    None."""
    candidates = [(planner, compared) for planner in EVERYWHERE if (compared := study.against(planner))]
    best = min(candidates, key=lambda candidate: candidate[1].mean[0], default=None)
    return best if best and best[1].mean[2] < 1 else None


def best_by_hand(study: Study) -> Tally | None:
    """The tally of direct, if direct is faster than greedy and the best planner for everything, on the pairs that
    direct can move; else None."""
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
        return f"{on} no redistribution has a correct result, so no planner can be recommended."
    parts = []
    if by_hand:
        advice = "direct for redistributions that you write yourself"
        parts.append(f"{advice}: {_times_greedy(by_hand)} on the {by_hand.num_pairs} pairs that it can move")
    if everywhere:
        planner, compared = everywhere
        parts.append(f"{planner} for everything: {_times_greedy(compared)} over {compared.num_pairs} pairs")
    elif study.tallies:
        parts.append("greedy, torch's default, for the rest, because no planner for everything is faster beyond noise")
    if not parts:
        return f"{on} greedy was not measured together with another planner, so no planner can be recommended."
    return f"{on}, use " + "; and ".join(parts) + f" (pairs {study.focus_text} that communicate)."


def _times_greedy(compared: Tally) -> str:
    return f"{units.ratio_text(*compared.mean)} of greedy's time"


def _greedy_line(study: Study) -> str:
    regret = study.regrets.get("greedy")
    if not regret:
        return ""
    sent = study.sent_over_bound.get("greedy", float("nan"))
    bytes_text = f", and sends {sent:.1f}x the bytes that must arrive" if units.known(sent) else ""
    return (
        f"greedy wastes {units.percent_text(1 - 1 / regret.mean)} of its time: greedy is {regret.mean:.2f}x slower "
        f"than the best measured planner (at worst {regret.worst:.1f}x){bytes_text}."
    )


def _min_cost_line(study: Study) -> str:
    compared = study.against("min_cost")
    if not compared:
        return ""
    changed = study.differences.get(("min_cost", "greedy", "", ""))
    if not changed or not changed.num_differing:
        return "min_cost plans the same path as greedy on every pair of this run."
    open_calls = compared.num_differing - compared.num_faster - compared.num_slower
    paid = (
        f"On these pairs min_cost is faster in {compared.num_faster}, slower in {compared.num_slower} and within "
        f"noise in {open_calls}"
        if study.ratios["min_cost", BASELINE].enough.any()
        else f"With fewer than {MIN_PASSES} passes, the real gain is unknown"
    )
    return (
        f"min_cost plans another path than greedy on {changed.num_differing} of {changed.num_pairs} pairs, because "
        f"min_cost's constants predict a gain. {paid}; over all pairs, min_cost takes {_times_greedy(compared)}."
    )


def _prediction_line(study: Study) -> str:
    overall = [error.error for (_, size), error in study.errors.items() if not size]
    if CHOSEN not in study.regrets or not overall:
        return ""
    rank, ranked = study.ranking, ""
    if rank.num_plans:
        apart, share = units.percent_text(APART), units.percent_text(rank.num_right / rank.num_plans)
        ranked = f", and rank {share} of {rank.num_plans} plan pairs correctly (predictions over {apart} apart)"
    errors = " to ".join(dict.fromkeys(f"{100 * end(overall):.0f}" for end in (min, max)))
    return (
        "A choice of each pair's planner only by the profile's prediction takes "
        f"{units.ratio_text(*study.chosen_ratio)} of greedy's time. Predictions have errors of {errors} % (median "
        f"per planner){ranked}." + (f" {ROUGH_TEXT}" if max(overall) > ROUGH else "")
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
    parts = [f"torch's planners gave wrong values or failed: {theirs} cases"] if theirs else []
    if own_wrong:
        parts.append(f"distbench's planners gave wrong values or failed: {own_wrong} cases")
    elif ours:
        parts.append(f"all {ours} results of distbench's planners are correct")
    return "; ".join(parts) + "."


def code_blocks(study: Study) -> list[Block]:
    """The lines of code for the recommended planners."""
    everywhere, by_hand, calibrated = best_everywhere(study), best_by_hand(study), study.against("calibrated")
    profile = str(short_path(Path(study.profile or "profile.json")))
    native = NATIVE if study.is_native else ""
    advice: dict[str, str] = {}  # planner to its sentence
    if everywhere:
        why = f"{everywhere[0]}, for every redistribution, including redistributions in operators and in backward"
        advice[everywhere[0] + native] = f"{why}: {_times_greedy(everywhere[1])}."
    if by_hand:
        why = "direct, instead of tensor.redistribute(...), if no placement is Partial"
        advice["direct"] = f"{why}: {_times_greedy(by_hand)}."
    if not everywhere and calibrated:
        why = f"calibrated takes {_times_greedy(calibrated)}, which is not a gain beyond noise. To try calibrated:"
        advice["calibrated" + native] = why
    blocks = [block for planner, text in advice.items() for block in (Lines((text,)), Code(code_for(planner, profile)))]
    nothing = Lines(("No change is needed, because greedy is torch's default.",))
    return [Heading("The line of code"), *(blocks or [nothing])]


def code_for(planner: str, profile: str) -> tuple[str, ...]:
    """Lines of Python for a training loop with a planner. The name may end with `+native`."""
    name, _, native = planner.partition("+")
    if name == "direct":
        return (
            "from distbench import redistribute",
            f'plan = redistribute.plan("S(0)R", "RS(0)", x.shape, mesh, "{profile}")  # once, with your placements',
            "local = redistribute.execute(x.to_local(), plan)  # any number of times",
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


def planner_tables(study: Study) -> list[Block]:
    """The tables with the numbers of the verdict, without empty tables."""
    heading = Heading(f"Redistribution planner study: {study.machine}, torch {study.versions.torch}")
    parts = (_means, _wins, _regrets, _paths, _predictions, _largest_gains, _outcomes, _failures)
    return [heading, *(table for part in parts if (table := part(study)).rows)]


def _by_group(
    study: Study, values: Mapping[Place, Any], kinds: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield mesh, size, and the values of each two planners in the order of `kinds`, if any value exists."""
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
        "direct cannot produce Partial placements; the mean of direct is over the pairs that direct moved",
    ]
    title = "Time relative to greedy, by mesh and size of the whole tensor"
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
        "faster, slower: tested over passes, with all pairs of two planners together",
        "better: the faster of greedy and min_cost in each pair, as measured",
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
        "the best: the shortest measured time of a pair; noise shortens this time, so a perfect choice is also above 1",
        f"{CHOSEN}: the choice of distbench redistribute per pair, the better of torch's two planners, unless another "
        f"planner is predicted more than {units.percent_text(LEAVING_SHARE)} faster",
        "bound: bytes that must arrive at the rank with the most missing data (geometric mean over pairs without "
        "Partial)",
    ]
    if BASELINE in cold and (left_out := int((~study.table.measured[study.table.at(BASELINE)]).sum())):
        notes.append(f"left out: {left_out} pairs without a correct result of greedy in the same run")
    title = f"Cost of each choice over the best, pairs {study.focus_text}"
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
    return Table("Share of pairs with another path", columns, rows)


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
        notes.append(f"{of_all} that are predicted over {apart} apart are ranked correctly")
    columns = ("<planner", *(f"error,\n{size}" for size in sizes), "predicted\nover measured")
    return Table("Predicted by the profile, compared with measured", columns, rows, notes)


def _largest_gains(study: Study) -> Table:
    rows = [row for gain in study.largest_gains for row in _gain_rows(study.table, gain)]
    columns = ("<planner", "<path", "median", "coll.", "sent", "over\nbound", "<over greedy")
    notes = ["coll.: collectives; sent: bytes that one rank sends; bound: as in the table above, unknown for Partial"]
    subject = f"The {len(study.largest_gains)} pairs {study.focus_text}"
    title = f"{subject} with the largest gains over greedy beyond noise"
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
    notes = ["every result is compared with a shard of the full tensor, computed without DTensor"]
    return Table("Values: every case of every suite", ("<planner", "cases", *statuses), rows, notes)


def _failures(study: Study) -> Table:
    rows = [_failure_row(failure) for failure in study.failures]
    columns = ("<status", "<planner", "cases", "<in common", "<smallest of them", "<distbench on the same")
    title = f"Wrong or broken, by cause: {count_text(sum(failure.num_cases for failure in study.failures), 'case')}"
    notes = ["a stand-alone script per cause: distbench report --reproducers DIR"]
    breaks, optional = frozenset(range(1, len(rows))), ("distbench on the same",)
    return capped(Table(title, columns, rows, notes, breaks, optional, "smallest of them"), MAX_FAILURES)


def _failure_row(failure: Failure) -> tuple[str, ...]:
    record = failure.example
    error = shorten(str(record["error"] or "-"), MAX_ERROR)
    # Results of distbench's planners on the same pairs.
    ours = [f"{name}: {units.counts_text(counts)}" for name, counts in failure.ours.items()]
    return (
        failure.status,
        failure.planner,
        str(failure.num_cases),
        f"{failure.suite}: {failure.pattern}" if failure.suite else failure.pattern,
        f"{record['source']} -> {record['target']}, {_tensor_text(record)}: {error}",
        "; ".join(ours) or "not run",
    )


# Figures: cost of each choice, ratios by size, predicted and measured times.

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
    """(name, figure) of each figure with data."""
    parts = {
        "cost-over-best": _cost_figure,
        "ratio-by-size": _ratio_figure,
        "predicted-against-measured": _prediction_figure,
    }
    yield from ((name, figure) for name, part in parts.items() if (figure := part(study)))


def _cost_figure(study: Study) -> "Figure | None":
    """Extra time of every choice over the best measured planner of each pair."""
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
        near = f"within {units.percent_text(NEAR_BEST)} of the best on {units.percent_text(regret.share_near)}"
        text = f"{planner}: {regret.mean:.2f}x slower than the best, at worst {regret.worst:.2f}x"
        hover(axes, [Spot(0, place - 0.33, f"{text}\n{near} of {regret.num_pairs} pairs", end, 0.66)])
    style.name_bars(axes, list(regrets))
    axes.set_xlim(0, limit * 1.3)
    style.label_axis(axes.xaxis, lambda value: f"+{value:g} %" if value else "0 %")
    axes.set_xlabel(f"time over the best planner of each pair (geometric mean over {most} pairs)")
    style.title(figure, f"Cost of each choice, pairs {study.focus_text} (shorter is better)")
    return figure


def _ratio_figure(study: Study) -> "Figure | None":
    """Each planner's time relative to greedy by size, one panel per mesh."""
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
    axes[0].set_ylabel("time relative to greedy")
    style.title(figure, "Time relative to greedy by size of the tensor (below the line: faster than greedy)")
    caption = "geometric mean over the pairs that communicate, with 95 % CI over pairs as bars"
    style.caption(
        figure, caption + ("; direct: only pairs that direct moved" if "direct" in study.table.planners else "")
    )
    return figure


def _sizes(study: Study, mesh: str) -> list[str]:
    """The size classes of a mesh with a comparison of a planner with greedy."""
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
    """Measured and predicted time, one dot per plan, one panel per planner."""
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
    style.title(figure, "Predicted and measured time, one dot per pair (on the line: exact prediction)")
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
    axes.set_title(f"{planner}: error {units.percent_text(error)}", fontweight="normal")
    look: Any = {"xycoords": "axes fraction", "fontsize": 8, "color": style.NOTE}
    axes.annotate("slower than\npredicted", (0.05, 0.95), va="top", **look)
    axes.annotate("faster than\npredicted", (0.95, 0.05), ha="right", **look)
