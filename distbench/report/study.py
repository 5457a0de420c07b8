"""The planner study: its findings as data, its verdict, and its story as blocks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distbench.planning.priced_plans import LEAVING_SHARE
from distbench.records.run_file import Run
from distbench.report import redistributions
from distbench.report.redistributions import (
    BAD,
    CHOSEN,
    Bools,
    Failure,
    LargestGain,
    PathDifference,
    Place,
    PlannerTable,
    Ratios,
    Regret,
    Tally,
    failures_of,
    laboratory_rows,
    median_of,
    planner_table_of,
)
from distbench.report.reproducer import Versions
from distbench.show import units
from distbench.show.blocks import Block, Code, Heading, Lines, Table, capped, shorten
from distbench.show.units import known, percent_text, ratio_text, size_text
from distbench.spec.file_io import short_path
from distbench.spec.placements import BASELINE, NATIVE, OUR_VARIANTS
from distbench.spec.safe_text import count_text
from distbench.statistics.intervals import Floats, Ints, geometric_mean
from distbench.statistics.pass_comparison import MIN_PASSES

if TYPE_CHECKING:
    import pandas as pd


# Predicted against measured: how far off, and whether plans are ranked right.

# Plans predicted further apart than this are expected to be ranked right.
APART = 0.35


class PredictionError(NamedTuple):
    """How far off predictions are."""

    num_pairs: int  # pairs with a prediction
    error: float  # median of |predicted / measured - 1|
    bias: float  # median of predicted / measured


class PredictionRanking(NamedTuple):
    """Of `num_plans` pairs of plans predicted more than APART apart, `num_right` were measured in that order.

    Two plans of one redistribution that run the same count once.
    """

    num_plans: int
    num_right: int


def prediction_errors(table: PlannerTable, focus: Bools) -> dict[tuple[str, str], PredictionError]:
    """By planner and size class over non-trivial pairs, and (size "") over those in focus; only what was predicted."""
    found = {}
    for planner, predicted, measured in zip(table.planners, *_predicted_and_measured(table), strict=True):
        over = predicted / measured
        for size in [*table.sizes(), ""]:
            pairs = np.isfinite(over) & ((table.pairs["size"] == size).to_numpy(bool) if size else focus)
            if pairs.any():
                error = float(np.median(np.abs(over[pairs] - 1)))
                found[planner, size] = PredictionError(int(pairs.sum()), error, float(np.median(over[pairs])))
    return found


def _predicted_and_measured(table: PlannerTable) -> tuple[Floats, Floats]:
    """Seconds, [planners, pairs]; nan where one of the two is missing or the pair is trivial."""
    predicted, measured = table.numbers["predicted_s"], table.times
    known = np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0) & table.communicates
    return np.where(known, predicted, np.nan), np.where(known, measured, np.nan)


def predicted_pairs(table: PlannerTable, planner: str) -> tuple[Ints, Floats, Floats]:
    """The non-trivial pairs on which a planner has both: their indexes, seconds predicted, seconds measured."""
    predicted, measured = (values[table.at(planner)] for values in _predicted_and_measured(table))
    pairs = np.flatnonzero(np.isfinite(predicted))
    return pairs, predicted[pairs], measured[pairs]


def ranking(table: PlannerTable, focus: Bools) -> PredictionRanking:
    """How plans predicted more than APART apart were measured, over the non-trivial pairs in focus."""
    num_plans = num_right = 0
    predicted, measured = _predicted_and_measured(table)
    for pair in np.flatnonzero(focus).tolist():
        plans: dict[str, tuple[float, float]] = {}
        for at in np.flatnonzero(np.isfinite(predicted[:, pair])).tolist():
            plans.setdefault(str(table.runs_as[at, pair]), (predicted[at, pair], measured[at, pair]))
        for one, other in combinations(plans.values(), 2):
            if max(one[0], other[0]) > (1 + APART) * min(one[0], other[0]):
                num_plans += 1
                num_right += int((one[0] < other[0]) == (one[1] < other[1]))
    return PredictionRanking(num_plans, num_right)


# The redistribution laboratory's findings as data: everything its tables, plots and page say of some runs.

MIN_PLANNERS = 3
MAX_STRIKING = 10
LARGE_BYTES = 1 << 20
MIN_FOCUS = 20


@dataclass(frozen=True)
class Study:
    """What a machine's runs of redistributions say together."""

    machine: str
    runs: Sequence[Run]  # oldest first
    versions: Versions  # torch and backend of the latest run
    profile: str | None  # the file as the latest run was given it
    is_native: bool  # every all-to-all ran as such; the planners' names then do without +native
    table: PlannerTable
    focus: Bools  # the pairs that the verdict is about: those of LARGE_BYTES and above, where there are enough
    focus_text: str
    ratios: dict[tuple[str, str], Ratios]  # planner and what it is held against to its ratios
    tallies: dict[Place, Tally]  # each planner against greedy and against torch's better one
    differences: dict[Place, PathDifference]
    regrets: dict[str, Regret]  # of each planner and CHOSEN that moved a pair in focus
    errors: dict[tuple[str, str], PredictionError]  # by planner and size class, "" for the pairs in focus
    ranking: PredictionRanking
    largest_gains: list[LargestGain]
    chosen_ratio: tuple[float, float, float]  # geometric mean, with its CI, of choosing by prediction over greedy
    sent_over_bound: dict[str, float]  # geometric mean of bytes sent over the receive lower bound
    outcomes: dict[str, Counter[str]]  # planner to its cases by status
    failures: list[Failure]

    def against(self, planner: str, baseline: str = BASELINE) -> Tally | None:
        """A planner against a baseline over the pairs in focus."""
        return self.tallies.get((planner, baseline, "", ""))


def is_laboratory(frame: "pd.DataFrame") -> bool:
    """Whether a run's frame is one that a study is made of: it names suites, or has more planners than torch's two."""
    rows = frame[frame["kind"] == "redistribute"]
    return bool(rows["suite"].notna().any()) or rows["planner"].nunique() >= MIN_PLANNERS


def studies_of(runs: Sequence[Run], frames: Sequence["pd.DataFrame"]) -> list[Study]:
    """One study a machine, of those runs that are a laboratory's, in order of their first runs."""
    import pandas as pd

    by_machine: dict[str, list[tuple[Run, pd.DataFrame]]] = {}
    for run, frame in zip(runs, frames, strict=True):
        if is_laboratory(frame):
            by_machine.setdefault(run.about.environment.machine or "unknown machine", []).append((run, frame))
    return [
        study_of(machine, [run for run, _ in found], pd.concat([frame for _, frame in found]))
        for machine, found in by_machine.items()
    ]


def study_of(machine: str, runs: Sequence[Run], frame: "pd.DataFrame") -> Study:
    """The study of one machine's runs, oldest first, and the frame of their cases."""
    rows = laboratory_rows(frame)
    is_native = BASELINE not in set(rows["planner"]) and f"{BASELINE}{NATIVE}" in set(rows["planner"])
    if is_native:
        rows["planner"] = rows["planner"].str.removesuffix(NATIVE)
    table = planner_table_of(rows)
    focus, focus_text = _focus(table)
    all_ratios, environment = redistributions.ratios_of(table), runs[-1].about.environment
    once = rows[~rows["is_again"]]
    return Study(
        machine=machine,
        runs=runs,
        versions=Versions(environment.torch or "unknown", environment.backend or "gloo"),
        profile=next((run.about.profile for run in reversed(runs) if run.about.profile), None),
        is_native=is_native,
        table=table,
        focus=focus,
        focus_text=focus_text,
        ratios=all_ratios,
        tallies=redistributions.tallies(table, focus, all_ratios),
        differences=redistributions.differences(table, focus),
        regrets=redistributions.regrets(table, focus),
        errors=prediction_errors(table, focus),
        ranking=ranking(table, focus),
        largest_gains=redistributions.largest_gains(table, focus, all_ratios, MAX_STRIKING),
        chosen_ratio=redistributions.ratio_when_chosen(table, focus),
        sent_over_bound=_sent_over_bound(table, focus),
        outcomes={str(planner): Counter(found) for planner, found in once.groupby("planner", sort=False)["status"]},
        failures=failures_of(rows),
    )


def _focus(table: PlannerTable) -> tuple[Bools, str]:
    """Small tensors show latency alone, and suites that look for wrong values have many of them.

    Pairs without greedy's time in the same run are left out: times of different runs are not to be compared.
    """
    is_there = BASELINE in table.planners
    eligible = table.measured[table.at(BASELINE)] if is_there else np.ones(len(table.pairs), dtype=bool)
    large = (table.pairs["payload_bytes"] >= LARGE_BYTES).to_numpy(bool) & eligible
    if (large & table.communicates).sum() >= MIN_FOCUS:
        return large, f"of {size_text(LARGE_BYTES)} and above"
    return eligible, "of all sizes"


def _sent_over_bound(table: PlannerTable, focus: Bools) -> dict[str, float]:
    bound = table.pairs["bound_bytes"].to_numpy(float)
    pairs, sent = focus & (bound > 0), table.numbers["wire_bytes_executed"]
    return {name: geometric_mean(sent[at, pairs] / bound[pairs]) for at, name in enumerate(table.planners)}


# The laboratory's verdict: what to use, what greedy wastes, what min_cost mispredicts; and the line of code.

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
    profile = str(short_path(Path(study.profile or "profile.json")))
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


MAX_FAILURES = 30
MAX_ERROR = 160
MEAN_CI = "95 % CI"
STATUS_ORDER = ("ok", *BAD, "unsupported", "skipped")


def opening(study: Study) -> Lines:
    """The verdict, for the top of a report."""
    return Lines(verdict_lines(study))


def story(study: Study) -> list[Block]:
    """The numbers behind the verdict, in the order of telling; a table with nothing in it is left out."""
    heading = Heading(f"Redistribution laboratory: {study.machine}, torch {study.versions.torch}")
    parts = (_means, _wins, _regrets, _paths, _predictions, _largest_gains, _outcomes, _failures)
    return [heading, *(table for part in parts if (table := part(study)).rows)]


def _by_group(
    study: Study, known: Mapping[redistributions.Place, Any], kinds: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, list[Any]]]:
    """Mesh, size, and what is known there of each two planners, in the order of kinds; only where something is."""
    for mesh, size, _ in study.table.groups():
        found = [known.get((*kind, mesh, size)) for kind in kinds]
        if any(found):
            yield mesh, size, found


def _means(study: Study) -> Table:
    planners = [planner for planner in study.table.planners if study.against(planner)]
    rows = []
    for mesh, size, found in _by_group(study, study.tallies, [(planner, BASELINE) for planner in planners]):
        pairs = max(tally.num_pairs for tally in found if tally)
        cells = [_mean_cells(tally) for tally in found]
        rows.append((mesh, size, str(pairs), *(cell for pair in cells for cell in pair)))
    notes = [
        "geometric mean over the pairs that communicate, [95 % CI over pairs]; below 1 is faster than greedy",
        "direct makes no Partial: its mean is over the pairs that it moved",
    ]
    title = "Time over greedy's, by mesh and size of the whole tensor"
    columns = ("<mesh", "<size", "pairs", *(name for planner in planners for name in (planner, f"<{MEAN_CI}")))
    return Table(title, columns, rows, notes[: 2 if "direct" in planners else 1], optional=(MEAN_CI, "pairs"))


def _mean_cells(tally: redistributions.Tally | None) -> tuple[str, str]:
    """A mean ratio and its interval."""
    mean, _, interval = (units.ratio_text(*tally.mean) if tally else units.NOTHING).partition(" ")
    return mean, interval


def _wins(study: Study) -> Table:
    rows = []
    for planner in study.table.planners:
        one, other = study.against(planner), study.against(planner, redistributions.BETTER_OF_TORCH)
        if one is None and other is None:
            continue
        cells = [units.NOTHING] * 4 if one is None else one[:4]
        more = [units.NOTHING] * 3 if other is None else [other.num_faster, other.num_slower, other.num_much_slower]
        rows.append((planner, *map(str, cells), *map(str, more)))
    columns = (
        "<planner", "pairs", "not as\ngreedy", "faster than\ngreedy", "slower than\ngreedy",
        "faster than\nbetter", "slower than\nbetter", f"{units.percent_text(redistributions.WORSE_SHARE)}+\nslower",
    )  # fmt: skip
    notes = [
        "faster, slower: by passes, all pairs of two planners tested together",
        "better: the faster of torch's two, greedy and min_cost, as measured, pair by pair",
        *dict.fromkeys(line for found in study.ratios.values() for line in found.told if "nothing" in line),
        *redistributions.proof_lines([found for (_, other), found in study.ratios.items() if other == BASELINE]),
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
    near = f"within {units.percent_text(redistributions.NEAR_BEST)}\nof the best"
    columns = (
        "<planner", "pairs", "time over\nthe best", "at worst", near,
        "sent over\nthe bound", "planning,\nempty caches",
    )  # fmt: skip
    notes = [
        "the best: the least time measured of the pair; the luckiest wins it, so even the best choice pays a little",
        f"{redistributions.CHOSEN}: pair by pair what distbench plan says to use, nothing measured: the better of "
        f"torch's two, unless another is predicted more than {units.percent_text(LEAVING_SHARE)} faster",
        "bound: the bytes that must arrive at the rank that lacks most; over pairs without Partial (geometric mean)",
    ]
    if BASELINE in cold and (left_out := int((~study.table.measured[study.table.at(BASELINE)]).sum())):
        notes.append(f"left out: {left_out} pairs that greedy did not move rightly in the same run")
    title = f"What each choice costs over the best, pairs {study.focus_text}"
    optional = ("planning, empty caches", "pairs", "sent over the bound", near.replace("\n", " "))
    return Table(title, columns, rows, notes, optional=optional)


def _paths(study: Study) -> Table:
    def text(found: redistributions.PathDifference) -> str:
        return f"{units.percent_text(found.num_differing / found.num_pairs)} ({found.num_differing}/{found.num_pairs})"

    kinds = list(dict.fromkeys((planner, other) for planner, other, _, _ in study.differences))
    rows = [
        (mesh, size, *(text(one) if one else units.NOTHING for one in found))
        for mesh, size, found in _by_group(study, study.differences, kinds)
    ]
    columns = ("<mesh", "<size", *(f"{planner}\nnot {other}'s" for planner, other in kinds))
    return Table("How often another path is planned", columns, rows)


def _predictions(study: Study) -> Table:
    sizes = [size for size in study.table.sizes() if any(size == known for _, known in study.errors)]
    rows = []
    for planner in dict.fromkeys(planner for planner, _ in study.errors):
        found = [study.errors.get((planner, size)) for size in sizes]
        whole = study.errors.get((planner, ""))
        cells = [units.percent_text(error.error) if error else units.NOTHING for error in found]
        rows.append((planner, *cells, units.decimal_text(whole.bias if whole else None)))
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
    what = f"The {len(study.largest_gains)} most striking pairs {study.focus_text}"
    title = f"{what}: largest gains over greedy beyond noise"
    breaks = frozenset(range(2, len(rows), 2))
    return Table(title, columns, rows, notes, breaks, ("coll.", "over bound", "sent"), together=True)


def _gain_rows(table: PlannerTable, gain: redistributions.LargestGain) -> Iterator[tuple[str, ...]]:
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
    """`f32[512,512] on 2x2`."""
    return f"{facts['dtype']}[{facts['shape'].replace('x', ',')}] on {facts['mesh_shape']}"


def _outcomes(study: Study) -> Table:
    seen = [status for status in STATUS_ORDER if any(counts[status] for counts in study.outcomes.values())]
    rows = [
        (name or "-", str(study.outcomes[name].total()), *(str(study.outcomes[name][status]) for status in seen))
        for name in dict.fromkeys([*study.table.planners, *study.outcomes])
    ]
    notes = ["every result is compared with a shard that is cut from the full tensor without DTensor"]
    return Table("Values: every case of every suite", ("<planner", "cases", *seen), rows, notes)


def _failures(study: Study) -> Table:
    rows = [_failure_row(failure) for failure in study.failures]
    columns = ("<status", "<planner", "cases", "<what they share", "<smallest of them", "<ours on the same")
    title = f"Wrong or broken, by cause: {count_text(sum(failure.num_cases for failure in study.failures), 'case')}"
    notes = ["one stand-alone script each: distbench report --reproducers DIR"]
    found = Table(
        title, columns, rows, notes, frozenset(range(1, len(rows))), ("ours on the same",), "smallest of them"
    )
    return capped(found, MAX_FAILURES)


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
