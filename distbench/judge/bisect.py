"""`distbench ab --bisect`: the first slower commit of a history, by pairs of launches of the good commit and another
commit.

First the good and the bad commit are compared as by `distbench ab`. If the bad commit is slower, the case with the
clearest slowdown is followed. `statistics.noisy_bisection` chooses the commit of each further pair. The search ends
when the probability of one commit reaches the certainty and two pairs have measured this commit, or when the time is
over. `render` returns the result as text, Markdown, JSON, JUnit XML, or GitHub's annotations.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from distbench.judge import gate_text
from distbench.judge.ab import (
    WORKING_TREE,
    LaunchFailed,
    Pair,
    Settled,
    Side,
    Terms,
    Worktrees,
    git,
    is_over,
    launch_pair,
    run_pairs,
)
from distbench.judge.gate import CaseTable, CaseVerdict, MetricVerdict
from distbench.judge.paired_launches import groups_of
from distbench.show.blocks import Block, Heading, Lines, Table, markdown_of
from distbench.show.ci_formats import CiOutcome, annotation, badge, junit_xml
from distbench.show.terminal import text_of
from distbench.show.units import times_text
from distbench.spec.discovery import argument_of
from distbench.spec.errors import UserError
from distbench.spec.printable_text import clean, count_text
from distbench.statistics.intervals import Floats
from distbench.statistics.noisy_bisection import (
    Step,
    chances,
    level_interval,
    next_commit,
    separable_groups,
    smallest_range,
    threshold_of,
)
from distbench.statistics.verdicts import REGRESSION, Options

GOOD = "good"
CONFIRMING_PAIRS = 2  # of the commit that is named


@dataclass(frozen=True)
class Commit:
    """A commit of the history: full hash and subject."""

    sha: str
    subject: str

    @property
    def name(self) -> str:
        """The abbreviated hash."""
        return self.sha[:8]

    @property
    def text(self) -> str:
        """`1a2b3c4d 'Subject'`."""
        return f"{self.name} {clean(self.subject)!r}"


def commits_between(trees: Worktrees, good: str, bad: str) -> list[Commit]:
    """Return the commits from the good to the bad commit, on the line of first parents.

    Raises:
        UserError: a revision does not exist, or the good commit is not on the bad commit's line of first parents.
    """
    if WORKING_TREE in (good, bad):
        raise UserError("--bisect needs two commits, and . is the working tree; commit the changes, and give HEAD")
    first, last = trees.commit_of(good), trees.commit_of(bad)
    if first == last:
        raise UserError(f"{good} and {bad} are the same commit; give an older GOOD, or a newer BAD")
    listing = ["log", "--first-parent", "--reverse", "--format=%H %P%x09%s"]
    lines = git([*listing, f"{first}..{last}"], trees.root, "git log failed: ").split("\n")
    parents = [line.partition("\t")[0].split()[1:2] for line in lines]
    if parents[0] != [first]:
        base = git(["merge-base", first, last], trees.root)
        if base == last:
            raise UserError(f"{bad} is older than {good}; give the good commit first")
        instead = f"give their merge base {base[:8]} as GOOD" if base not in ("", first) else "give another GOOD"
        raise UserError(f"{good} is not on the line of first parents of {bad}; {instead}")
    subject = git(["log", "-1", "--format=%s", first], trees.root, "git log failed: ")
    return [Commit(first, subject), *(Commit(line.split()[0], line.partition("\t")[2]) for line in lines)]


class CommitLauncher:
    """Launch the good commit and another commit. Each commit's worktree is made for its first launch.

    Args:
        names: the user's names of the good and the bad commit.
        run_arguments: scenarios and options of `distbench run`.
        out: folder that contains a results folder per commit.
    """

    def __init__(
        self,
        trees: Worktrees,
        commits: Sequence[Commit],
        names: tuple[str, str],
        run_arguments: Sequence[str],
        out: Path,
        seed: int,
    ) -> None:
        self._trees, self._run_arguments, self._out, self._seed = trees, run_arguments, out, seed
        self._commits, self._sides = commits, dict[int, Side]()
        self._refs = {0: names[0], len(commits) - 1: names[1]}

    def launch(self, number: int, pair: int) -> Pair:
        """Launch the good commit and the commit with this number once, in random order. Raise as `launch_pair`."""
        sides = [self._side(0), self._side(number)]
        return launch_pair(pair, sides, self._run_arguments, self._out, self._seed)

    def _side(self, number: int) -> Side:
        if number not in self._sides:
            commit = self._commits[number]
            ref = self._refs.get(number, commit.subject)
            side = Side(commit.name if number else GOOD, ref, self._trees.here, sys.executable)
            self._sides[number] = self._trees.check_out(side, commit.sha)
        return self._sides[number]


@dataclass
class Search:
    """The state of a search after the comparison of the good and the bad commit.

    Args:
        commits: the good commit, and later commits; the last is the bad commit.
        settled: the comparison of the good and the bad commit.
        certainty: the probability of one commit at which the search ends.
        case: the followed case and its metric; None if the bad commit is not slower.
        step: the change of this case from the good to the bad commit.
        pairs: all pairs of launches.
        differences: commit's number to the differences of its pairs after `settled`, in logarithms.
        chances: the probability of each commit after the good one to be the first slower commit; the last entry is the
            probability that no commit is slower.
        skipped: commit's number to the reason why it could not be measured.
        reason: why the search ended before one commit was certain; "" if one commit is certain.
    """

    commits: Sequence[Commit]
    settled: Settled
    certainty: float
    case: tuple[CaseVerdict, MetricVerdict] | None = None
    step: Step | None = None
    pairs: list[Pair] = field(default_factory=list)
    differences: dict[int, list[float]] = field(default_factory=dict)
    chances: Floats = field(default_factory=lambda: np.empty(0))
    skipped: dict[int, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def spent_s(self) -> float:
        """The duration of all launches in seconds."""
        return sum(pair.total_s for pair in self.pairs)

    @property
    def is_measurable(self) -> list[bool]:
        """Whether each commit after the good commit was not skipped."""
        return [number not in self.skipped for number in range(1, len(self.commits))]

    def add(self, number: int, difference: float) -> None:
        """Add a pair's difference at a commit, and recompute the chances."""
        assert self.step is not None
        self.differences.setdefault(number, []).append(difference)
        self.chances = chances(len(self.commits) - 1, self.differences, self.step)

    @property
    def answer(self) -> tuple[int, int, float]:
        """The numbers of the first and last commit of the smallest range that contains the first slower commit with the
        certainty, and the probability of this range.
        """
        return smallest_range(separable_groups(self.chances, self.is_measurable), self.certainty)

    @property
    def is_certain(self) -> bool:
        """Whether one group of commits that pairs can separate has the certainty."""
        return any(chance >= self.certainty for _, _, chance in separable_groups(self.chances, self.is_measurable))

    @property
    def unconfirmed(self) -> int | None:
        """The number of the certain commit if one pair shows it, which a short disturbance may explain."""
        _, end, _ = self.answer
        return end if end < len(self.commits) - 1 and len(self.differences.get(end, ())) < CONFIRMING_PAIRS else None

    @property
    def is_refuted(self) -> bool:
        """Whether later pairs show that no commit is slower, although the first pairs showed a slower commit."""
        return bool(self.chances[-1] >= self.certainty)

    def slowdown(self, number: int) -> tuple[float, float, float]:
        """Return a slower commit's slowdown as a share, with its 95 % interval."""
        assert self.step is not None
        middle, low, high = map(math.expm1, level_interval(number, self.differences, self.step))
        return middle, low, high


def search(
    commits: Sequence[Commit],
    launch: Callable[[int, int], Pair],
    options: Options,
    terms: Terms,
    show: Callable[[str], None],
) -> Search:
    """Find the first slower commit.

    Args:
        commits: the good commit, and the commits from there to the bad commit.
        launch: launches the good commit and the commit with this number; the second argument is the pair's number.
        options: options of the gate; the search ends at a certainty of 1 - alpha.
        show: receives each line of progress.

    Raises:
        LaunchFailed: the good or the bad commit cannot be launched.
        UserError: as `launch`.
        KeyboardInterrupt: interrupted by the user; the last line of progress is the command that continues.
    """
    last = len(commits) - 1
    settled = run_pairs(lambda pair: launch(last, pair), options, terms, show)
    state = Search(commits, settled, 1 - options.alpha, pairs=[*settled.pairs])
    regressions = [
        (case, metric)
        for case in settled.gated.cases
        for metric in case.metrics
        if case.verdict == metric.verdict == REGRESSION
    ]
    if not regressions:
        show(f"no case of {commits[-1].name} is slower than {commits[0].name} with certainty, so no commit is searched")
        return state
    state.case = case, metric = max(regressions, key=lambda both: _clearness(both[1]))
    known = np.array([difference for pair in settled.pairs if (difference := _difference(pair, state)) is not None])
    state.step = Step(known, threshold_of(known, math.log1p(metric.tolerance)))
    state.chances = chances(last, {}, state.step)
    show(f"{commits[-1].name} is slower than {commits[0].name}; followed: {metric.metric} of {case.case_id}")
    try:
        _halve(state, launch, terms, show)
    except KeyboardInterrupt:
        first, end, _ = state.answer
        show(f"continue: distbench ab --bisect {commits[first - 1].name} {commits[end].name} -- ...")
        raise
    return state


def _halve(state: Search, launch: Callable[[int, int], Pair], terms: Terms, show: Callable[[str], None]) -> None:
    """Measure pairs until one commit, or no slower commit, is certain, or the time is over."""
    while not state.is_refuted:
        unconfirmed = state.unconfirmed if state.is_certain else None
        if state.is_certain and unconfirmed is None:
            return
        if is_over(state.pairs, terms.budget_s):
            state.reason = f"another pair would take longer than --max-time {terms.budget_s:g}"
            return
        number = unconfirmed or next_commit(state.chances, state.is_measurable)
        commit = state.commits[number]
        try:
            pair = launch(number, len(state.pairs) + 1)
        except LaunchFailed as failure:
            if failure.side.name == GOOD or number == len(state.commits) - 1:
                raise
            state.skipped[number] = failure.why
            show(f"{commit.name} skipped: {failure.why}")
            continue
        state.pairs.append(pair)
        difference = _difference(pair, state)
        if difference is None:
            state.skipped[number] = "the case was not measured, or is not comparable"
            show(f"{commit.name} skipped: {state.skipped[number]}")
            continue
        state.add(number, difference)
        show(f"pair {len(state.pairs)}: {pair.text}: {100 * math.expm1(difference):+.1f} %. {range_text(state)}")


def range_text(state: Search) -> str:
    """`First slower: one of 16 commits, 1a2b3c4d to 5e6f7a8b (certainty 97 %)`."""
    first, end, chance = state.answer
    names = state.commits[first].name if first == end else f"{state.commits[first].name} to {state.commits[end].name}"
    count = f"one of {end - first + 1} commits, " if first != end else ""
    return f"First slower: {count}{names} (certainty {certainty_text(chance)})"


def certainty_text(chance: float) -> str:
    """A chance in whole percent, rounded down, and at most 99 %."""
    return f"{min(math.floor(100 * chance), 99)} %"


def _clearness(metric: MetricVerdict) -> float:
    """A slowdown relative to the lower half of its interval."""
    change, low = math.log1p(metric.change), math.log1p(metric.low or 0.0)
    return change / max(change - low, 1e-12)


def _difference(pair: Pair, state: Search) -> float | None:
    """The followed case's difference of logarithms; None if a side lacks the case or is not comparable."""
    assert state.case is not None
    case, metric = state.case
    for group in groups_of(pair.baseline, pair.candidate, state.settled.gated.options.allowed):
        if group.conflicts or not (group.baseline and group.candidate) or not case.scenario.startswith(group.label):
            continue
        sides = [CaseTable.of(side) for side in (group.baseline, group.candidate)]
        if all(side.num_ok(case.case_id) for side in sides):
            before, after = (side.logarithms([case.case_id], metric.metric).item() for side in sides)
            return float(after - before)
    return None


TOOL = "distbench ab --bisect"


def exit_code(search: Search, strict: bool) -> int:
    """Return 1 if a slower commit, or a range that contains it, was found. Otherwise return the code of the first
    comparison or of an undecided comparison.
    """
    if search.step is None:
        return search.settled.gated.exit_code(strict)
    return 3 * strict if search.is_refuted else 1


def render(form: str, search: Search, strict: bool) -> str:
    """Return the result in a format of `--format`. If no commit was searched, return the result of the first
    comparison.
    """
    if search.step is None:
        return gate_text.FORMS[form](search.settled.gated, strict)
    return FORMS[form](search)


def answer(search: Search) -> tuple[str, str]:
    """The finding, with its severity first, and the next command."""
    assert search.case is not None
    good, bad = search.commits[0], search.commits[-1]
    cost = f"{2 * len(search.pairs)} launches, {search.spent_s / 60:.0f} min"
    case, metric = search.case
    scenario = argument_of(case.scenario)
    first, last, chance = search.answer
    if search.is_refuted:
        summary = (
            f"INCONCLUSIVE: {bad.name} was slower in the first {count_text(search.settled.num_pairs, 'pair')} only"
        )
        return f"{summary}. {cost}", f"Next: distbench ab {good.name} {bad.name} -- {scenario}   (measures both again)"
    share, low, high = search.slowdown(last)
    slower = times_text(1 + share, good.name, 1 + low, 1 + high, case.unit.words)
    of_case = f"{case.case_id}: {metric.metric} {slower}"
    certainty = f"certainty {certainty_text(chance)}, {cost}"
    if first == last:
        commit = search.commits[first]
        summary = f"FAIL: first slower commit: {commit.text}. {of_case}, {certainty}"
        return summary, f"Next: git show {commit.name}"
    names = f"{search.commits[first].name} to {search.commits[last].name}"
    why = search.reason or f"{count_text(len(search.skipped), 'commit')} could not be measured"
    summary = (
        f"FAIL: first slower commit: one of {last - first + 1}, {names}. {of_case}, {certainty}. {why.capitalize()}"
    )
    before = search.commits[first - 1].name
    command = f"distbench ab --bisect {before} {search.commits[last].name} -- {scenario}   (continues)"
    return summary, f"Next: git log {before}..{search.commits[last].name}" if not search.reason else f"Next: {command}"


def text(search: Search) -> str:
    """The search as text, with the answer at the end."""
    return text_of([*_blocks(search), Lines(answer(search))])


def markdown(search: Search) -> str:
    """The search as GitHub Markdown, with the answer first."""
    finding, command = answer(search)
    return markdown_of([Heading(f"bisect: {finding}", 1), Lines((command,)), *_blocks(search)[1:]])


def _blocks(search: Search) -> list[Block]:
    assert search.case is not None
    commits = search.commits
    title = f"bisect: {count_text(len(commits) - 1, 'commit')} after {commits[0].name}, up to {commits[-1].name}"
    case, metric = search.case
    rows = [
        (
            commits[number].name,
            str(len(pairs)),
            f"{100 * math.expm1(median(pairs)):+.1f} %",
            f"{100 * search.chances[number - 1]:.1f} %",
            clean(commits[number].subject),
        )
        for number, pairs in sorted(search.differences.items())
    ]
    columns = ("<commit", "pairs", "change", "first slower", "<subject")
    table = Table(f"{case.case_id}, {metric.metric}, compared with {commits[0].name}:", columns, rows, prose="subject")
    skipped = [f"skipped: {commits[number].name}: {reason}" for number, reason in sorted(search.skipped.items())]
    num_pairs = search.settled.num_pairs
    rest = len({of.case_id for of in search.settled.gated.cases if of.verdict == case.verdict}) - 1
    notes = [f"first {count_text(num_pairs, 'pair')}: {commits[-1].name} is slower than {commits[0].name}", *skipped]
    if rest:
        notes.append(f"{count_text(rest, 'other case')} also slower; give -k CASE after -- to follow another")
    return [Heading(title, 1), table, Lines(tuple(notes))]


def json_text(search: Search) -> str:
    """The search as JSON: changes as shares, differences of pairs as logarithms, times in seconds."""
    assert search.case is not None
    first, last, chance = search.answer
    share, low, high = search.slowdown(last)
    record = {
        "answer": answer(search)[0],
        "commits": [commit.sha for commit in search.commits],
        "first_slower": [] if search.is_refuted else [commit.sha for commit in search.commits[first : last + 1]],
        "certainty": chance,
        "case": search.case[0].case_id,
        "metric": search.case[1].metric,
        "change": share,
        "change_low": low,
        "change_high": high,
        "num_launches": 2 * len(search.pairs),
        "seconds": search.spent_s,
        "reason": search.reason,
        "chances": search.chances.tolist(),
        "pairs": {search.commits[number].sha: pairs for number, pairs in search.differences.items()},
        "skipped": {search.commits[number].sha: reason for number, reason in search.skipped.items()},
    }
    return json.dumps(record, indent=1, allow_nan=False)


def junit_text(search: Search) -> str:
    """JUnit XML with one test: that no commit is slower."""
    return junit_xml([CiOutcome(TOOL, "no slower commit", answer(search)[0], _level(search, "failure", "skipped"))])


def annotations(search: Search) -> str:
    """GitHub's workflow command with the answer."""
    return annotation(_level(search, "error", "warning"), TOOL, answer(search)[0])


def badge_text(search: Search) -> str:
    """The JSON of a badge with the answer."""
    return badge(TOOL, answer(search)[0])


def _level(search: Search, decided: str, undecided: str) -> str:
    return undecided if search.is_refuted else decided


FORMS: dict[str, Callable[[Search], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": annotations, "badge": badge_text},
}
