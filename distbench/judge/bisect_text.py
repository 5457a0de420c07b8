"""The result of `distbench ab --bisect` as text, Markdown, JSON, JUnit XML, and GitHub's annotations."""

import json
import math
from collections.abc import Callable
from statistics import median

from distbench.judge import gate_text
from distbench.judge.bisect import Search, certainty_text
from distbench.show.blocks import Block, Heading, Lines, Table, markdown_of
from distbench.show.ci_formats import CiOutcome, annotation, badge, junit_xml
from distbench.show.terminal import text_of
from distbench.show.units import times_text
from distbench.spec.discovery import argument_of
from distbench.spec.printable_text import clean, count_text

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
        found = f"INCONCLUSIVE: {bad.name} was slower in the first {count_text(search.settled.num_pairs, 'pair')} only"
        return f"{found}. {cost}", f"Next: distbench ab {good.name} {bad.name} -- {scenario}   (measures both again)"
    share, low, high = search.slowdown(last)
    slower = times_text(1 + share, good.name, 1 + low, 1 + high, case.unit.words)
    of_case = f"{case.case_id}: {metric.metric} {slower}"
    certainty = f"certainty {certainty_text(chance)}, {cost}"
    if first == last:
        commit = search.commits[first]
        found = f"FAIL: first slower commit: {commit.text}. {of_case}, {certainty}"
        return found, f"Next: git show {commit.name}"
    names = f"{search.commits[first].name} to {search.commits[last].name}"
    why = search.reason or f"{count_text(len(search.skipped), 'commit')} could not be measured"
    found = f"FAIL: first slower commit: one of {last - first + 1}, {names}. {of_case}, {certainty}. {why.capitalize()}"
    before = search.commits[first - 1].name
    command = f"distbench ab --bisect {before} {search.commits[last].name} -- {scenario}   (continues)"
    return found, f"Next: git log {before}..{search.commits[last].name}" if not search.reason else f"Next: {command}"


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


def _level(search: Search, found: str, undecided: str) -> str:
    return undecided if search.is_refuted else found


FORMS: dict[str, Callable[[Search], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": annotations, "badge": badge_text},
}
