"""Formats for CI systems: JUnit XML, GitHub's annotations, and a badge."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from distbench.spec.printable_text import clean, cut

TOOL = "distbench gate"
BADGE_COLORS = {"PASS": "brightgreen", "FAIL": "red", "INCONCLUSIVE": "yellow", "UNKNOWN": "lightgrey"}
MAX_ANNOTATIONS = 10  # of each level that GitHub shows for one step


@dataclass(frozen=True)
class CiOutcome:
    """One test case of a JUnit report."""

    suite: str
    name: str
    message: str
    tag: str | None = None  # "failure", "error" or "skipped", or None for a pass


def junit_xml(outcomes: Sequence[CiOutcome]) -> str:
    """JUnit XML with suites in order of their first outcome. Message and body are equal, because readers show only one
    of the two."""
    root = ElementTree.Element("testsuites", name=TOOL, tests=str(len(outcomes)))
    for name in dict.fromkeys(outcome.suite for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.suite == name]
        tags = [outcome.tag for outcome in members]
        counts = {f"{tag}s": str(tags.count(tag)) for tag in ("failure", "error")}
        counts |= {"skipped": str(tags.count("skipped"))}
        suite = ElementTree.SubElement(root, "testsuite", {"name": _legal(name), "tests": str(len(tags)), **counts})
        for outcome in members:
            case = ElementTree.SubElement(suite, "testcase", classname=_legal(name), name=_legal(outcome.name))
            message = _legal(outcome.message)
            if outcome.tag:
                ElementTree.SubElement(case, outcome.tag, message=message).text = message
            else:
                ElementTree.SubElement(case, "system-out").text = message
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


def _legal(text: str) -> str:
    """The text, shortened, without control characters and characters that XML 1.0 forbids."""
    return "\n".join(map(clean, cut(text).split("\n")))


def annotations(levels: Mapping[str, Iterable[tuple[str, str]]]) -> list[str]:
    """GitHub's workflow commands for (title, message) by level, which is "error" or "warning".

    The last command of a level has the number of other messages.
    """
    lines = []
    for level, titles_and_messages in levels.items():
        messages = list(titles_and_messages)
        most = MAX_ANNOTATIONS if len(messages) <= MAX_ANNOTATIONS else MAX_ANNOTATIONS - 1
        lines += [annotation(level, title, message) for title, message in messages[:most]]
        if len(messages) > most:
            lines.append(annotation(level, TOOL, f"{len(messages) - most} more messages are in the job's summary"))
    return lines


def annotation(level: str, title: str, message: str) -> str:
    """One workflow command."""
    # A property ends at a comma or colon, and a message at the line's end, so these characters are escaped.
    message, title = (
        _legal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A") for text in (message, title)
    )
    return f"::{level} title={title.replace(':', '%3A').replace(',', '%2C')}::{message}"


def badge(label: str, answer: str) -> str:
    """The JSON of a shields.io endpoint badge (shields.io/badges/endpoint-badge).

    Args:
        answer: "SEVERITY: finding. More sentences"; the badge shows severity and finding.
    """
    message = _legal(answer.partition(". ")[0])
    color = BADGE_COLORS[answer.partition(":")[0]]
    return json.dumps({"schemaVersion": 1, "label": label, "message": message, "color": color})
