"""The headline of a report: correct cases, variants compared with their baseline, and the largest communication."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distbench.judge.links_text import judged
from distbench.records.run_file import SIMULATED, STATUSES, Run
from distbench.report.section_protocol import Compared, Figures, ReportedRun
from distbench.report.trace_tables import largest_communication
from distbench.show import plots as style
from distbench.show.plots import Spot, hover
from distbench.show.units import counts_text, known, times_text
from distbench.spec.printable_text import count_text
from distbench.statistics.pass_comparison import TOO_FEW
from distbench.statistics.verdicts import FASTER, SLOWER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Status of cases that cannot run here, for which `distbench run` still exits with 0.
SKIPPED = ("skipped",)
NOT_OK = tuple(status for status in STATUSES if status not in ("ok", *SKIPPED))
PASS, FAIL, INCONCLUSIVE, UNKNOWN = "PASS", "FAIL", "INCONCLUSIVE", "UNKNOWN"
UNDECIDED = "undecided"
OF_LINKS = ("PASS: ", "FAIL: ", "UNKNOWN: ")


def status_of(run: Run) -> str:
    """The status of a run, such as `complete` or `failed`, or `interrupted` for a run without a footer."""
    return str((run.footer or {}).get("status") or "interrupted")


@dataclass(frozen=True)
class Outcome:
    """The outcome of all runs of a report.

    Args:
        num_by_status: number of cases per status.
        not_complete: statuses of the runs that are not complete.
        compared: (scenario, variant) of every variant with a comparison.
        largest: the sentence on the largest communication, empty without a trace.
        links: sentences on slow or unknown ranks and links, or the whole verdict if the report has a single run.
        is_slow: whether a rank or link is slow.
        is_unknown: whether slow ranks and links could not be detected.
        is_simulated: whether all cases are simulated.
    """

    num_scenarios: int
    num_by_status: Counter[str]
    not_complete: Sequence[str]
    compared: Sequence[tuple[str, Compared]]
    largest: str
    links: Sequence[str]
    is_slow: bool
    is_unknown: bool
    is_simulated: bool

    @property
    def num_correct(self) -> int:
        """The number of cases with correct results."""
        return self.num_by_status["ok"]

    @property
    def num_not_ok(self) -> int:
        """The number of cases that are wrong or did not finish."""
        return sum(self.num_by_status[status] for status in NOT_OK)

    @property
    def num_by_verdict(self) -> Counter[str]:
        """The number of slower, faster and undecided variants."""
        return Counter(side_of(variant) for _, variant in self.compared)

    @property
    def severity(self) -> str:
        """PASS, FAIL, INCONCLUSIVE or UNKNOWN."""
        if self.num_not_ok or self.is_slow or {*self.not_complete} - {"interrupted"}:
            return FAIL
        if self.is_unknown or not self.num_by_status.total():
            return UNKNOWN
        return INCONCLUSIVE if self.not_complete else PASS

    def lines(self) -> tuple[str, ...]:
        """The headline."""
        counts = counts_text({status: self.num_by_status[status] for status in STATUSES}) or "no case finished"
        if self.num_correct == self.num_by_status.total() > 0:
            counts = "simulated, nothing was measured" if self.is_simulated else "all correct"
        if self.not_complete:
            counts += f"; {count_text(len(self.not_complete), 'run')} not complete"
        cases = count_text(self.num_by_status.total(), "case")
        first, *links = self.links or ("",)
        links_text = first.partition(": ")[2] if first.startswith(OF_LINKS) else first
        lines = [
            text for text in (f"{cases} in {count_text(self.num_scenarios, 'scenario')}: {counts}", links_text) if text
        ]
        if links_text and not self.num_not_ok:
            lines.reverse()  # links are the subject of a run of links
        lines = [f"{self.severity}: {lines[0]}", *lines[1:], *links]
        if self.compared:
            sides = self.num_by_verdict
            num_too_few = sum(variant.verdict == TOO_FEW for _, variant in self.compared)
            number = "" if num_too_few == sides[UNDECIDED] else f"{num_too_few} with "
            few = f" ({number}{TOO_FEW})" if num_too_few else ""
            texts = [f"{sides[side]} {side}" for side in (SLOWER, FASTER, UNDECIDED)]
            variants = count_text(len(self.compared), "variant")
            lines.append(f"{variants} compared with the baseline: {', '.join(texts)}{few}")
        return (*lines, *([self.largest] if self.largest else []))


def outcome_of(reported: Sequence[ReportedRun], compared: Sequence[tuple[str, Compared]]) -> Outcome:
    """The outcome of all runs. `compared` are (scenario, variant)."""
    runs = [part.run for part in reported]
    largest = [communication for part in reported if (communication := largest_communication(part))]
    verdicts = [verdict for run in runs if (verdict := judged(run))]
    slow_or_unknown = [verdict.lines[0] for verdict in verdicts if verdict.is_slow or not verdict.is_conclusive]
    cases = [case for run in runs for case in run.cases]
    return Outcome(
        num_scenarios=len({run.scenario for run in runs}),
        num_by_status=Counter(case["status"] for case in cases),
        not_complete=[status_of(run) for run in runs if status_of(run) != "complete"],
        compared=compared,
        largest=max(largest, default=(0.0, ""))[1],
        links=verdicts[0].lines if verdicts and len(runs) == 1 else slow_or_unknown,
        is_slow=any(verdict.is_slow for verdict in verdicts),
        is_unknown=any(not verdict.is_conclusive for verdict in verdicts),
        is_simulated=all(case.get(SIMULATED) for case in cases),
    )


def side_of(variant: Compared) -> str:
    """`slower`, `faster`, or `undecided` (within noise, or too few passes)."""
    return variant.verdict if variant.verdict in (SLOWER, FASTER) else UNDECIDED


# All variants with a verdict in one plot, with ratio of times and interval, sorted.

MAX_ROWS = 40
LEAST_REACH = math.log(1.25)
LOOKS: dict[str, dict[str, Any]] = {
    SLOWER: {"color": style.RED, "marker": "s"},
    FASTER: {"color": style.BLUE, "marker": "D"},
    UNDECIDED: {"color": style.GREY, "marker": "o"},
}
TICKS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
ROW_HEIGHT, MAX_LABEL, TICK_GAP = 0.3, 64, 0.17


def forest_figures(compared: Sequence[tuple[str, Compared]]) -> Figures:
    """A figure of all variants with a comparison, or no figure without such variants."""
    rows = [(scenario, variant) for scenario, variant in compared if known(variant.ratio) and variant.ratio > 0]
    if not rows:
        return
    # If there are more than MAX_ROWS variants, show variants with a verdict first, then by distance from the baseline.
    rows.sort(key=lambda row: (side_of(row[1]) == UNDECIDED, -abs(math.log(row[1].ratio))))
    shown = sorted(rows[:MAX_ROWS], key=lambda row: -row[1].ratio)
    ends = [[abs(math.log(end)) for end in variant[2:5] if known(end) and end > 0] for _, variant in shown]
    distances = [*map(max, ends)]
    reach = max(style.reach(distances) * 1.15, LEAST_REACH)
    figure, (axes,) = style.new_figure(1, 9.5, 1.7 + ROW_HEIGHT * len(shown))
    for at, (_, variant) in enumerate(shown):
        _draw_row(axes, at, variant, reach)
    several = len({scenario for scenario, _ in shown}) > 1
    names = [f"{scenario}: {variant.name}" if several else variant.name for scenario, variant in shown]
    style.name_bars(axes, [name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 3]}..." for name in names])
    axes.axvline(0, color=style.BLACK, linewidth=1)
    ticks = [0.0]
    for tick in TICKS:
        if ticks[-1] + TICK_GAP * reach <= math.log(tick) <= reach:
            ticks.append(math.log(tick))
    places = [*(-tick for tick in reversed(ticks[1:])), *ticks]
    axes.set_xticks(places, [f"{math.exp(abs(place)):.3g}x" for place in places])
    axes.set_xlim(-reach, reach)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("faster   <   time compared with the baseline (log scale)   >   slower")
    sides = Counter(side_of(variant) for _, variant in rows)
    for side, look in LOOKS.items():
        if sides[side]:
            axes.scatter([], [], label=f"{side} ({sides[side]})", s=34, **look)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2, handletextpad=0.3)
    style.title(figure, f"Variants compared with their baseline: {count_text(len(rows), 'variant')}")
    left_out = (
        f"; {len(rows) - len(shown)} variants nearer to the baseline are only in the tables" if rows[MAX_ROWS:] else ""
    )
    style.caption(figure, f"bars: 95 % CI for all variants of a table together, arrow: beyond the axis{left_out}")
    yield "variants", figure


def _draw_row(axes: "Axes", at: int, variant: Compared, reach: float) -> None:
    side = side_of(variant)
    look, center = LOOKS[side], math.log(variant.ratio)
    is_far = abs(center) > reach
    place = min(max(center, -reach), reach)
    if known(variant.low) and known(variant.high) and variant.low > 0:
        ends = [min(max(math.log(end), -reach), reach) for end in (variant.low, variant.high)]
        axes.plot(ends, [at, at], color=look["color"], linewidth=2, solid_capstyle="butt")
    marker = (">" if center > 0 else "<") if is_far else look["marker"]
    axes.scatter([place], [at], s=46 if is_far else 34, color=look["color"], marker=marker, zorder=3, clip_on=False)
    text = times_text(variant.ratio, variant.baseline, variant.low, variant.high)
    axes.annotate(
        f"{math.exp(abs(center)):.3g}x" if side == UNDECIDED else text.partition(" than ")[0],
        (1, at), xycoords=("axes fraction", "data"), xytext=(8, 0),
        textcoords="offset points", va="center", fontsize=8.5, annotation_clip=False,
        color=style.NOTE if side == UNDECIDED else style.BLACK,
    )  # fmt: skip
    hover(axes, [Spot(place, at, f"{variant.name}\n{text}\n{variant.verdict}")])
