"""A comparison as machines read it: JSON, JUnit XML, GitHub annotations."""

import json
import math
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from distbench.gate.page import sentence
from distbench.gate.verdict import INCOMPARABLE, INCONCLUSIVE, INVALID, MISSING, NEW, REGRESSION, CaseVerdict, Gated

MAX_ANNOTATIONS = 10  # of each level that GitHub shows for one step
_ERRORS = (INVALID, MISSING, INCOMPARABLE)


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


def junit_text(gated: Gated) -> str:
    """JUnit XML: a regression is a failure; missing, invalid and incomparable are errors; inconclusive is skipped.

    The text stands in the message and in the body, since readers show one or the other.
    """
    root = ElementTree.Element("testsuites", name="distbench gate", tests=str(len(gated.cases)))
    suites: dict[str, list[CaseVerdict]] = {}
    for case in gated.cases:
        suites.setdefault(case.scenario, []).append(case)
    if not gated.cases:
        suites["distbench gate"] = []
    for scenario, cases in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": scenario, **_counts(cases)})
        for case in cases:
            _junit_case(ElementTree.SubElement(suite, "testcase", classname=scenario, name=_legal(case.case_id)), case)
    if gated.num_judged == 0:
        suite.set("errors", str(int(suite.get("errors", "0")) + 1))
        suite.set("tests", str(int(suite.get("tests", "0")) + 1))
        nothing = ElementTree.SubElement(suite, "testcase", classname="distbench gate", name="something was compared")
        _outcome(nothing, "error", "nothing was measured that could be compared")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


def _counts(cases: list[CaseVerdict]) -> dict[str, str]:
    tags = [_tag(case) for case in cases]
    named = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    return {"tests": str(len(cases)), **{name: str(tags.count(tag)) for name, tag in named.items()}}


def _tag(case: CaseVerdict) -> str | None:
    if case.verdict == REGRESSION:
        return "failure"
    if case.verdict in _ERRORS:
        return "error"
    return "skipped" if case.verdict in (INCONCLUSIVE, NEW) else None


def _junit_case(element: ElementTree.Element, case: CaseVerdict) -> None:
    tag = _tag(case)
    if tag:
        _outcome(element, tag, f"{case.verdict}: {sentence(case)}")
    else:
        ElementTree.SubElement(element, "system-out").text = _legal(f"{case.verdict}: {sentence(case)}")


def _outcome(element: ElementTree.Element, tag: str, message: str) -> None:
    ElementTree.SubElement(element, tag, message=_legal(message)).text = _legal(message)


def _legal(text: str) -> str:
    """Without the control characters that XML 1.0 forbids."""
    return "".join(char if char in "\t\n" or ord(char) >= 32 else " " for char in text)


def annotations(gated: Gated, strict: bool = False) -> str:
    """GitHub's workflow commands, one a line, the worst first; the last of a level says how many were left out."""
    levels: dict[str, list[CaseVerdict]] = {"error": [], "warning": []}
    for case in gated.cases:
        if case.verdict in (REGRESSION, *_ERRORS):
            levels["error"].append(case)
        elif case.verdict == INCONCLUSIVE:
            levels["error" if strict else "warning"].append(case)
    lines = [line for level, cases in levels.items() for line in _of_level(level, cases)]
    if gated.num_judged == 0:
        lines.insert(0, _command("error", "distbench gate", gated.headline(strict)))
    return "\n".join(lines)


def _of_level(level: str, cases: list[CaseVerdict]) -> list[str]:
    room = MAX_ANNOTATIONS if len(cases) <= MAX_ANNOTATIONS else MAX_ANNOTATIONS - 1
    lines = [_command(level, f"{case.verdict}: {case.scenario}", sentence(case)) for case in cases[:room]]
    if len(cases) > room:
        lines.append(_command(level, "distbench gate", f"{len(cases) - room} more; the job's summary has them all"))
    return lines


def _command(level: str, title: str, message: str) -> str:
    # A property ends at a comma or colon, a message at the line's end (GitHub's escapes of workflow commands).
    message = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    title = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={title}::{message}"
