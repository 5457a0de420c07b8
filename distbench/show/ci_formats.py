"""The two forms that CI systems read, whatever was found: JUnit XML, and GitHub's annotations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from distbench.spec.printable_text import clean, cut

TOOL = "distbench gate"
MAX_ANNOTATIONS = 10  # of each level that GitHub shows for one step


@dataclass(frozen=True)
class CiOutcome:
    """One test case of a JUnit report: what was tried, and what came of it."""

    suite: str
    name: str
    message: str
    tag: str | None = None  # "failure", "error" or "skipped"; None where all is well


def junit_xml(outcomes: Sequence[CiOutcome]) -> str:
    """JUnit XML, suites in the order of their first outcome.

    The text stands in the message and in the body, since readers show one or the other.
    """
    root = ElementTree.Element("testsuites", name=TOOL, tests=str(len(outcomes)))
    for name in dict.fromkeys(outcome.suite for outcome in outcomes):
        members = [outcome for outcome in outcomes if outcome.suite == name]
        suite = ElementTree.SubElement(root, "testsuite", {"name": _legal(name), **_counts(members)})
        for outcome in members:
            _add(ElementTree.SubElement(suite, "testcase", classname=_legal(name), name=_legal(outcome.name)), outcome)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


def _counts(outcomes: Sequence[CiOutcome]) -> dict[str, str]:
    tags = [outcome.tag for outcome in outcomes]
    counted_tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    return {"tests": str(len(tags)), **{name: str(tags.count(tag)) for name, tag in counted_tags.items()}}


def _add(element: ElementTree.Element, outcome: CiOutcome) -> None:
    message = _legal(outcome.message)
    if outcome.tag:
        ElementTree.SubElement(element, outcome.tag, message=message).text = message
    else:
        ElementTree.SubElement(element, "system-out").text = message


def _legal(text: str) -> str:
    """Without what XML 1.0 forbids or a terminal obeys, and not longer than anybody reads."""
    return "\n".join(map(clean, cut(text).split("\n")))


def annotations(levels: Mapping[str, Iterable[tuple[str, str]]]) -> list[str]:
    """GitHub's workflow commands, of "error" or "warning" to (title, message) of each.

    The last of a level says how many were left out.
    """
    return [line for level, messages in levels.items() for line in _of_level(level, list(messages))]


def _of_level(level: str, messages: Sequence[tuple[str, str]]) -> list[str]:
    room = MAX_ANNOTATIONS if len(messages) <= MAX_ANNOTATIONS else MAX_ANNOTATIONS - 1
    lines = [annotation(level, title, message) for title, message in messages[:room]]
    if len(messages) > room:
        lines.append(annotation(level, TOOL, f"{len(messages) - room} more; the job's summary has them all"))
    return lines


def annotation(level: str, title: str, message: str) -> str:
    """One workflow command."""
    # A property ends at a comma or colon, a message at the line's end (GitHub's escapes of workflow commands).
    message, title = (
        _legal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A") for text in (message, title)
    )
    return f"::{level} title={title.replace(':', '%3A').replace(',', '%2C')}::{message}"
