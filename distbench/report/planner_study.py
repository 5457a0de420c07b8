"""The planner study: a machine's redistributions analysed, its verdict and its story as blocks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distbench.planning.redistribution_plans import LEAVING_SHARE, choose
from distbench.records.run_file import Run
from distbench.report.planner_table import (
    BETTER_OF_TORCH,
    WORSE_SHARE,
    Bools,
    PlannerTable,
    Ratios,
    Tally,
    laboratory_rows,
    median_of,
    planner_table_of,
    proof_lines,
    ratios,
    references_of,
    tally,
)
from distbench.report.reproducer import BAD, Failure, Versions, failures_of
from distbench.show import units
from distbench.show.blocks import Block, Code, Heading, Lines, Table, capped, shorten
from distbench.spec.file_io import short_path
from distbench.spec.placements import BASELINE, NATIVE, OUR_VARIANTS
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import Floats, Ints, geometric_mean, geometric_mean_with_ci
from distbench.statistics.pass_comparison import MIN_PASSES

if TYPE_CHECKING:
    import pandas as pd


# The study as data: everything that its tables, figures and page show.

CHOSEN = "choosing by prediction"
NEAR_BEST = 0.10
# Plans predicted further apart than this are expected to be ranked right.
APART = 0.35
MIN_PLANNERS = 3
MAX_STRIKING = 10
LARGE_BYTES = 1 << 20
MIN_FOCUS = 20
# Two planners that may plan different paths.
PATH_PLANNERS = (("min_cost", "greedy"), ("calibrated", "greedy"), ("calibrated", "min_cost"))
# Planner, what it is compared with, mesh ("2x4") and size class; the last two "" for the pairs in focus.
Place = tuple[str, str, str, str]


class PathDifference(NamedTuple):
    """How often two planners plan another path: `num_differing` of `num_pairs`."""

    num_pairs: int
    num_differing: int


class Regret(NamedTuple):
    """What a planner (or CHOSEN) takes over the best measured of each non-trivial pair that it moved."""

    num_pairs: int
    mean: float  # geometric mean of its time over the best's, at least 1
    worst: float  # the largest such ratio
    share_near: float  # of pairs on which it is within NEAR_BEST of the best
    num_best: int  # pairs on which it is the best


class LargestGain(NamedTuple):
    """A pair (its index) with a large gain of a planner over greedy: the ratio with its 95 % interval."""

    pair: int
    planner: str
    ratio: tuple[float, float, float]


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


@dataclass(frozen=True, eq=False)
class Study:
    """What a machine's runs of redistributions say together; each part is worked out when it is first read."""

    machine: str
    runs: Sequence[Run]  # oldest first
    rows: "pd.DataFrame"  # as `laboratory_rows` gives them, the planners as the study names them
    is_native: bool  # every all-to-all ran as such; the planners' names then do without +native

    @property
    def versions(self) -> Versions:
        """Torch and backend of the latest run."""
        environment = self.runs[-1].about.environment
        return Versions(environment.torch or "unknown", environment.backend or "gloo")

    @property
    def profile(self) -> str | None:
        """The profile as the latest run with one was given it."""
        return next((run.about.profile for run in reversed(self.runs) if run.about.profile), None)

    @cached_property
    def table(self) -> PlannerTable:
        """The redistributions that were right."""
        return planner_table_of(self.rows)

    @property
    def focus(self) -> Bools:
        """The pairs that the verdict is about: those of LARGE_BYTES and above, where there are enough."""
        return self._focus[0]

    @property
    def focus_text(self) -> str:
        """Which pairs are in focus."""
        return self._focus[1]

    @cached_property
    def _focus(self) -> tuple[Bools, str]:
        """Small tensors show latency alone, and suites that look for wrong values have many of them.

        Pairs without greedy's time in the same run are left out: times of different runs are not to be compared.
        """
        table = self.table
        is_there = BASELINE in table.planners
        eligible = table.measured[table.at(BASELINE)] if is_there else np.ones(len(table.pairs), dtype=bool)
        large = (table.pairs["payload_bytes"] >= LARGE_BYTES).to_numpy(bool) & eligible
        if (large & table.communicates).sum() >= MIN_FOCUS:
            return large, f"of {units.size_text(LARGE_BYTES)} and above"
        return eligible, "of all sizes"

    @cached_property
    def compared(self) -> Bools:
        """The pairs in focus that communicate."""
        return self.focus & self.table.communicates

    @cached_property
    def _groups(self) -> list[tuple[str, str, Bools]]:
        """(mesh, size class, which pairs) of each mesh and size, and ("", "") for the pairs in focus."""
        return [*self.table.groups(), ("", "", self.focus)]

    @cached_property
    def ratios(self) -> dict[tuple[str, str], Ratios]:
        """Every planner over greedy and over torch's better one, by their names; each two planners are one family."""
        table = self.table
        return {
            (planner, reference.name): ratios(table, planner, reference, np.ones(len(table.pairs), dtype=bool))
            for reference in references_of(table)
            for planner in table.planners
            if planner != reference.name
        }

    @cached_property
    def tallies(self) -> dict[Place, Tally]:
        """Every planner against greedy and torch's better one, over pairs that communicate."""
        tallies = {}
        for (planner, reference), compared in self.ratios.items():
            moved = self.table.communicates & np.isfinite(compared.ratio.center)
            for mesh, size, pairs in self._groups:
                if (pairs & moved).any():
                    tallies[planner, reference, mesh, size] = tally(compared, pairs & moved)
        return tallies

    def against(self, planner: str, baseline: str = BASELINE) -> Tally | None:
        """A planner against a baseline over the pairs in focus."""
        return self.tallies.get((planner, baseline, "", ""))

    @cached_property
    def differences(self) -> dict[Place, PathDifference]:
        """How often min_cost and calibrated leave greedy's path, and calibrated min_cost's."""
        table, path_differences = self.table, {}
        for planner, reference in PATH_PLANNERS:
            if planner not in table.planners or reference not in table.planners:
                continue
            one, two = table.at(planner), table.at(reference)
            both_measured = table.measured[one] & table.measured[two]
            differing = both_measured & (table.paths[one] != table.paths[two])
            for mesh, size, pairs in self._groups:
                if (both_measured & pairs).any():
                    counts = int((both_measured & pairs).sum()), int((differing & pairs).sum())
                    path_differences[planner, reference, mesh, size] = PathDifference(*counts)
        return path_differences

    @cached_property
    def regrets(self) -> dict[str, Regret]:
        """Every planner, and CHOSEN, against the best measured of each pair compared that it moved."""
        table = self.table
        if not table.planners:
            return {}
        best, regrets = np.nanmin(table.times, axis=0), {}
        for name, times in zip((*table.planners, CHOSEN), (*table.times, self._chosen_times), strict=True):
            over = (times / best)[self.compared & np.isfinite(times)]
            if over.size:
                near = float((over <= 1 + NEAR_BEST).mean())
                regrets[name] = Regret(over.size, geometric_mean(over), float(over.max()), near, int((over == 1).sum()))
        return regrets

    @cached_property
    def _chosen_times(self) -> Floats:
        """Each pair's time by the planner that `choose` takes by the predictions; nan where none has a prediction."""
        table, predicted = self.table, self.table.numbers["predicted_s"]
        is_known = np.isfinite(predicted) & table.measured
        chosen_times = np.full(len(table.pairs), np.nan)
        for pair in np.flatnonzero(is_known.any(axis=0)).tolist():
            rows = np.flatnonzero(is_known[:, pair]).tolist()
            plans = {table.planners[row]: float(predicted[row, pair]) for row in rows}
            chosen_times[pair] = table.times[table.at(choose(plans)), pair]
        return chosen_times

    @cached_property
    def chosen_ratio(self) -> tuple[float, float, float]:
        """Choosing by prediction over greedy: geometric mean and its CI over the pairs compared."""
        if BASELINE not in self.table.planners:
            return (np.nan, np.nan, np.nan)
        over = self._chosen_times / self.table.times[self.table.at(BASELINE)]
        return geometric_mean_with_ci(over[self.compared])

    @cached_property
    def largest_gains(self) -> list[LargestGain]:
        """The pairs in focus with the largest measured gain over greedy beyond noise, each by its fastest planner."""
        over_greedy = {planner: part for (planner, reference), part in self.ratios.items() if reference == BASELINE}
        if not over_greedy:
            return []
        planners, compared = list(over_greedy), list(over_greedy.values())
        gains = np.stack([np.where((part.side < 0) & self.compared, part.ratio.center, np.inf) for part in compared])
        best, least = gains.argmin(axis=0), gains.min(axis=0)
        pairs = [pair for pair in np.argsort(least, kind="stable").tolist() if np.isfinite(least[pair])]
        return [LargestGain(pair, planners[best[pair]], compared[best[pair]].at(pair)) for pair in pairs[:MAX_STRIKING]]

    @cached_property
    def _predicted_and_measured(self) -> tuple[Floats, Floats]:
        """Seconds, [planners, pairs]; nan where one of the two is missing or the pair is trivial."""
        predicted, measured = self.table.numbers["predicted_s"], self.table.times
        is_known = np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0) & self.table.communicates
        return np.where(is_known, predicted, np.nan), np.where(is_known, measured, np.nan)

    def predicted_pairs(self, planner: str) -> tuple[Ints, Floats, Floats]:
        """The non-trivial pairs on which a planner has both: their indexes, seconds predicted, seconds measured."""
        predicted, measured = (values[self.table.at(planner)] for values in self._predicted_and_measured)
        pairs = np.flatnonzero(np.isfinite(predicted))
        return pairs, predicted[pairs], measured[pairs]

    @cached_property
    def errors(self) -> dict[tuple[str, str], PredictionError]:
        """By planner and size class over non-trivial pairs, and (size "") over those in focus; what was predicted."""
        errors = {}
        for planner, predicted, measured in zip(self.table.planners, *self._predicted_and_measured, strict=True):
            over = predicted / measured
            for size in [*self.table.sizes(), ""]:
                of_size = (self.table.pairs["size"] == size).to_numpy(bool) if size else self.focus
                if (pairs := np.isfinite(over) & of_size).any():
                    error = float(np.median(np.abs(over[pairs] - 1)))
                    errors[planner, size] = PredictionError(int(pairs.sum()), error, float(np.median(over[pairs])))
        return errors

    @cached_property
    def ranking(self) -> PredictionRanking:
        """How plans predicted more than APART apart were measured, over the pairs compared."""
        num_plans = num_right = 0
        predicted, measured = self._predicted_and_measured
        for pair in np.flatnonzero(self.focus).tolist():
            plans: dict[str, tuple[float, float]] = {}
            for at in np.flatnonzero(np.isfinite(predicted[:, pair])).tolist():
                plans.setdefault(str(self.table.runs_as[at, pair]), (predicted[at, pair], measured[at, pair]))
            for plan, other_plan in combinations(plans.values(), 2):
                if max(plan[0], other_plan[0]) > (1 + APART) * min(plan[0], other_plan[0]):
                    num_plans += 1
                    num_right += int((plan[0] < other_plan[0]) == (plan[1] < other_plan[1]))
        return PredictionRanking(num_plans, num_right)

    @cached_property
    def sent_over_bound(self) -> dict[str, float]:
        """Of each planner the geometric mean of bytes sent over the receive lower bound."""
        bound, sent = self.table.pairs["bound_bytes"].to_numpy(float), self.table.numbers["wire_bytes_executed"]
        pairs = self.focus & (bound > 0)
        return {name: geometric_mean(sent[at, pairs] / bound[pairs]) for at, name in enumerate(self.table.planners)}

    @cached_property
    def outcomes(self) -> dict[str, Counter[str]]:
        """Each planner's cases by status."""
        once = self.rows[~self.rows["is_again"]]
        return {str(planner): Counter(part) for planner, part in once.groupby("planner", sort=False)["status"]}

    @cached_property
    def failures(self) -> list[Failure]:
        """What was wrong or broke, by cause."""
        return failures_of(self.rows)


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
    studies = []
    for machine, members in by_machine.items():
        rows = laboratory_rows(pd.concat([frame for _, frame in members]))
        is_native = BASELINE not in set(rows["planner"]) and f"{BASELINE}{NATIVE}" in set(rows["planner"])
        if is_native:
            rows["planner"] = rows["planner"].str.removesuffix(NATIVE)
        studies.append(Study(machine, [run for run, _ in members], rows, is_native))
    return studies


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
    candidates = [(planner, compared) for planner in EVERYWHERE if (compared := study.against(planner))]
    best = min(candidates, key=lambda candidate: candidate[1].mean[0], default=None)
    return best if best and best[1].mean[2] < 1 else None


def best_by_hand(study: Study) -> Tally | None:
    """direct, where on the pairs it can move it is surely faster than greedy, and than what is best everywhere."""
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
        f"say that pays. {paid}; over all, min_cost takes {_times_greedy(compared)}."
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
    line = (
        "Choosing each pair's planner by the profile's prediction alone takes "
        f"{units.ratio_text(*study.chosen_ratio)} of greedy's time; predictions are off by {errors} % (median, by "
        f"planner){ranked}."
    )
    if max(overall) > ROUGH:
        line += f" {ROUGH_TEXT}"
    return line


def _wrong_line(study: Study) -> str:
    ours = sum(study.outcomes[planner]["ok"] for planner in OUR_VARIANTS if planner in study.outcomes)
    bad = {planner: sum(counts[status] for status in BAD) for planner, counts in sorted(study.outcomes.items())}
    own_wrong, theirs = (
        ", ".join(f"{name} on {count}" for name, count in bad.items() if count and (name in OUR_VARIANTS) is is_ours)
        for is_ours in (True, False)
    )
    if not own_wrong and not theirs:
        return "Every value was checked, and right." if study.outcomes else ""
    parts = [f"torch's planners gave wrong values or broke: {theirs} cases"] if theirs else []
    if own_wrong:
        parts.append(f"OURS TOO: {own_wrong} cases")
    elif ours:
        parts.append(f"distbench's own planners gave none wrong among the {ours} cases that they moved")
    return "; ".join(parts) + "."


def code_blocks(study: Study) -> list[Block]:
    """The lines of code for what the verdict says to use."""
    everywhere, by_hand, calibrated = best_everywhere(study), best_by_hand(study), study.against("calibrated")
    profile = str(short_path(Path(study.profile or "profile.json")))
    native = NATIVE if study.is_native else ""
    advice: list[tuple[str, str]] = []
    if everywhere:
        why = f"{everywhere[0]}, for every redistribution, also those inside operators and in backward"
        advice.append((f"{why}: {_times_greedy(everywhere[1])}.", everywhere[0] + native))
    if by_hand:
        why = "direct, in the place of tensor.redistribute(...), where neither side has a Partial"
        advice.append((f"{why}: {_times_greedy(by_hand)}.", "direct"))
    if not everywhere and calibrated:
        text = f"calibrated takes {_times_greedy(calibrated)} here: no sure gain. To try it all the same:"
        advice.append((text, "calibrated" + native))
    blocks: list[Block] = [Heading("The line of code")]
    for text, planner in advice:
        blocks += [Lines((text,)), Code(code_for(planner, profile))]
    return blocks if advice else [*blocks, Lines(("Nothing to change: greedy is what torch uses by itself.",))]


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


def story(study: Study) -> list[Block]:
    """The numbers behind the verdict, in the order of telling; a table with nothing in it is left out."""
    heading = Heading(f"Redistribution laboratory: {study.machine}, torch {study.versions.torch}")
    parts = (_means, _wins, _regrets, _paths, _predictions, _largest_gains, _outcomes, _failures)
    return [heading, *(table for part in parts if (table := part(study)).rows)]


def _by_group(
    study: Study, values: Mapping[Place, Any], kinds: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, list[Any]]]:
    """Mesh, size, and the values there of each two planners, in the order of kinds; only where there are some."""
    for mesh, size, _ in study.table.groups():
        of_group = [values.get((*kind, mesh, size)) for kind in kinds]
        if any(of_group):
            yield mesh, size, of_group


def _means(study: Study) -> Table:
    planners = [planner for planner in study.table.planners if study.against(planner)]
    rows = []
    for mesh, size, tallies in _by_group(study, study.tallies, [(planner, BASELINE) for planner in planners]):
        cells = [
            (units.ratio_text(*planner_tally.mean) if planner_tally else units.NOTHING).partition(" ")[::2]
            for planner_tally in tallies
        ]
        num_pairs = max(planner_tally.num_pairs for planner_tally in tallies if planner_tally)
        rows.append((mesh, size, str(num_pairs), *(cell for mean_and_ci in cells for cell in mean_and_ci)))
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
        if tally is None and other is None:
            continue
        cells = [units.NOTHING] * 4 if tally is None else tally[:4]
        more = [units.NOTHING] * 3 if other is None else [other.num_faster, other.num_slower, other.num_much_slower]
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
        f"{CHOSEN}: pair by pair what distbench plan says to use, nothing measured: the better of "
        f"torch's two, unless another is predicted more than {units.percent_text(LEAVING_SHARE)} faster",
        "bound: the bytes that must arrive at the rank that lacks most; over pairs without Partial (geometric mean)",
    ]
    if BASELINE in cold and (left_out := int((~study.table.measured[study.table.at(BASELINE)]).sum())):
        notes.append(f"left out: {left_out} pairs that greedy did not move rightly in the same run")
    title = f"What each choice costs over the best, pairs {study.focus_text}"
    optional = ("planning, empty caches", "pairs", "sent over the bound", near.replace("\n", " "))
    return Table(title, columns, rows, notes, optional=optional)


def _paths(study: Study) -> Table:
    def text(difference: PathDifference) -> str:
        share = units.percent_text(difference.num_differing / difference.num_pairs)
        return f"{share} ({difference.num_differing}/{difference.num_pairs})"

    kinds = list(dict.fromkeys((planner, reference) for planner, reference, _, _ in study.differences))
    rows = [
        (mesh, size, *(text(difference) if difference else units.NOTHING for difference in differences))
        for mesh, size, differences in _by_group(study, study.differences, kinds)
    ]
    columns = ("<mesh", "<size", *(f"{planner}\nnot {reference}'s" for planner, reference in kinds))
    return Table("How often another path is planned", columns, rows)


def _predictions(study: Study) -> Table:
    predicted_sizes = {size for _, size in study.errors}
    sizes = [size for size in study.table.sizes() if size in predicted_sizes]
    rows = []
    for planner in dict.fromkeys(planner for planner, _ in study.errors):
        errors = [study.errors.get((planner, size)) for size in sizes]
        overall = study.errors.get((planner, ""))
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
    """`f32[512,512] on 2x2`."""
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
    columns = ("<status", "<planner", "cases", "<what they share", "<smallest of them", "<ours on the same")
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
