"""A comparison in each form of `gate --format`, those that machines read made here: JSON, JUnit, annotations."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from distbench.compare.verdicts import BROKEN, INCONCLUSIVE, NEW, REGRESSION
from distbench.gate.comparison_text import markdown, sentence, text
from distbench.gate.outcome import Gated
from distbench.render.ci import TOOL, CiOutcome, annotation, junit_xml
from distbench.render.ci import annotations as annotation_lines

JUNIT_TAGS = {REGRESSION: "failure", **dict.fromkeys(BROKEN, "error"), **dict.fromkeys((INCONCLUSIVE, NEW), "skipped")}


def json_text(gated: Gated, strict: bool = False) -> str:
    """Everything that was found, as JSON; times in seconds, changes as shares."""
    record = {
        "exit_code": gated.exit_code(strict),
        "headline": gated.headline(strict),
        "counts": gated.counts,
        **{name: value for name, value in asdict(gated).items() if name != "cases"},
        "cases": [{**asdict(case), "suspected": case.suspected} for case in gated.cases],
    }
    return json.dumps(_finite(record), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    """The same without nan and infinity, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def junit_text(gated: Gated, _: bool = False) -> str:
    """JUnit XML: a regression is a failure; missing, invalid and incomparable are errors; inconclusive is skipped."""
    outcomes = [
        CiOutcome(case.scenario, case.case_id, f"{case.verdict}: {sentence(case)}", JUNIT_TAGS.get(case.verdict))
        for case in gated.cases
    ]
    if gated.num_judged == 0:
        outcomes.append(CiOutcome(TOOL, "something was compared", gated.why_nothing, "error"))
    elif gated.is_open:
        outcomes.append(CiOutcome(TOOL, "the comparison is decided", gated.headline(), "skipped"))
    return junit_xml(outcomes)


def annotations(gated: Gated, strict: bool = False) -> str:
    """GitHub's workflow commands, one a line, the worst first; the last of a level says how many were left out."""
    levels: dict[str, list[tuple[str, str]]] = {"error": [], "warning": []}
    level_of = {**dict.fromkeys((REGRESSION, *BROKEN), "error"), INCONCLUSIVE: "error" if strict else "warning"}
    if gated.is_open:
        levels[level_of[INCONCLUSIVE]].append((TOOL, gated.headline(strict)))
    for case in gated.cases:
        if level := level_of.get(case.verdict):
            levels[level].append((f"{case.verdict}: {case.scenario}", sentence(case)))
    lines = annotation_lines(levels)
    if gated.num_judged == 0:
        lines.insert(0, annotation("error", TOOL, gated.headline(strict)))
    return "\n".join(lines)


# As `--format` names them; the exact gate has the same in signature/difference_text.py.
FORMS: dict[str, Callable[[Gated, bool], str]] = {
    **{"table": text, "markdown": markdown},
    **{"json": json_text, "junit": junit_text, "github": annotations},
}
