"""`python -m benchmarks.prose [PATH...]`: phrases in docs and in the program's strings that a plain sentence avoids.

It reads the prose of README.md, CONTRIBUTING.md and docs/*.md, and docstrings and strings of distbench/ and scenarios/.
Code blocks, inline code, URLs, and strings without a space are skipped: they are quoted output and identifiers. The
budget of each folder in prose_budget.json may only fall; its goal is 0.
"""

import argparse
import ast
import bisect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BUDGET = Path(__file__).with_name("prose_budget.json")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
SOURCES = ("distbench/**/*.py", "scenarios/*.py")
PACKAGE_PARTS = 3  # distbench, a package and a file: below that, a folder has the budget of its package

BLANK = r"(?:[^\S\n]+|[^\S\n]*\n[^\S\n]*)"  # between two words: at most one line break, since a paragraph ends with two
_COUNTED = (
    "step|rank|device|GPU|CPU|case|pass|launch|node|host|layer|token|iteration|sample|side|pair|row|line|run|link|scenario|"
    "variant|module|parameter|call|request|stage|head|expert|file|second|minute|day|plan|page|command|collective|mesh|process"
)
_UNIT = (
    "ms|s|us|µs|seconds?|minutes?|hours?|once|twice|GB|MB|GiB|MiB|KiB|bytes|tokens/s|tokens|samples/s|GB/s|%|"
    "collectives|launches|passes|samples|ranks|rows|lines|figures|parameters|steps"
)
_NUMBER = r"one|two|three|four|five|six|seven|eight|nine|ten|several|some|many|\d[\d.,]*"
_VERB = (
    "is|was|are|were|it|they|takes?|took|has|had|would|will|needs?|follows|comes|came|goes|cannot|can|may|must|does|did|"
    "fits|stays|remains|makes?|made|gives?|stands|differs?|depends|runs?|ran|begins|ends|changes?|changed|happens?|happened"
)
_LINKING = "is|was|as|of|in|for|with|where|when|if|after|before|from|to|by|and|or|on|at|that|than|only|has|into|without"

_NO_VERB = "".join(rf"(?<!\b{word}\s)" for word in ("to", "and", "that", "which", "it", "they", "can", "will", "must"))
_NO_VERB += r"(?<![.:;!?(]\s)(?<!^)(?<!\n)"


class Rule(NamedTuple):
    """A phrase to avoid.

    Attributes:
        name: W1 free relatives, W2 "per", W3 verbs of people, W4 "is none", W5 old words, W6 actors, W7 jargon.
        pattern: matches the phrase; a space in it matches BLANK.
        plain: the words to use instead.
    """

    name: str
    pattern: re.Pattern[str]
    plain: str


def _rule(name: str, pattern: str, plain: str) -> Rule:
    return Rule(name, re.compile(pattern.replace(" ", BLANK), re.IGNORECASE), plain)


RULES = (
    _rule(
        "W1",
        rf"\bwhat (?:{_VERB})\b(?![^.;:!?]*\?)",
        "a noun and a verb, such as 'slowdowns of 19 % or more are detected'",
    ),
    _rule("W1", r"\bwhich of the two\b", "name both"),
    _rule("W1", r"\bwould have been found\b", "would be detected"),
    _rule("W2", rf"\b(?:{_UNIT}) an? (?:{_COUNTED})\b", "per"),
    # Also verbs: "to time a step", "which times a case".
    _rule("W2", rf"{_NO_VERB}\b(?:time|times|memory|load|calls) an? (?:{_COUNTED})\b", "per"),
    _rule("W2", rf"\b(?:{_NUMBER}) (?!(?:{_LINKING})\b)[\w-]+ an? (?:{_COUNTED})\b", "per"),
    _rule("W3", r"\b(?:says?|said|saying|tells?|told|telling)\b", "prints, reports, shows, states, returns"),
    _rule("W3", r"\b(?:asks?|asked|asking|knows|knew)\b", "requires, requests, detects, has"),
    _rule(
        "W3",
        r"\b(?:that|which|it|message|error|line|row|table|and) names (?:the|an?|it|its|each|every|both)\b",
        "shows",
    ),
    _rule("W4", r"(?<!there\s)\b(?:is|are|was|were|be) (?-i:none)\b", "is not a valid X, no X, missing"),
    _rule(
        "W4",
        r"(?<!there\s)(?<!here\s)\b(?:is|are) no (?!longer|more|less|better|worse|later|earlier|larger|smaller)[a-z-]+",
        "is not a ..., is not a valid ...",
    ),
    _rule("W5", r"\b(?:stands?|stood)\b(?!-)", "is, remains, means"),
    _rule("W3", r"\b(?:no longer|nothing) answers?\b", "responds"),
    _rule("W5", r"\banew\b", "again"),
    _rule("W5", r"\b(?:in vain|for ever|cannot be had)\b", "without success, forever, not available"),
    _rule("W5", r"\bbeside\b", "next to, in addition to"),
    _rule("W5", r"\b(?:held|holds?|holding) (?:[\w`']+ ){0,3}against\b", "compared with, validated against"),
    _rule("W5", r"\b(?:holds? for|tests? (?:\w+ )?holds?|bench holds?)\b", "is valid for, checks"),
    _rule("W5", r"\bmend(?:s|ed|ing)?\b", "fix"),
    _rule("W5", r"\b(?:go|goes|went|going) on\b", "continue"),
    _rule("W5", r"\bat hand\b", "available"),
    _rule("W5", r"\b(?:its|their) like\b", "comparable"),
    _rule("W5", r"\bshall\b", "will, must"),
    _rule("W5", r"\blent\b", "borrowed, given"),
    _rule("W5", r"\bforetold\b", "predicted"),
    _rule("W6", r"\b(?:nobody|somebody|whoever|whomever|whosoever|no one)\b", "name the actor; not validated"),
    _rule("W6", r"\bof \w+ nothing is\b", "X is not validated"),
    _rule("W7", r"\brooms?\b", "package, space"),
    _rule("W7", r"\bwalls?\b(?!(?: |-)(?:time|clock))", "layer rule, limit"),
    _rule("W7", r"\bknobs?\b", "option"),
    _rule("W7", r"\blaborator(?:y|ies)\b(?!:)", "planner study"),
    _rule("W7", r"\bpromis(?:e|es|ed|ing)\b", "guarantee"),
    _rule("W7", r"\bproofs?\b", "control"),
    _rule("W7", r"\bstor(?:y|ies)\b", "report"),
    _rule("W7", r"\b(?:(?:take|takes|took|taking|by) turns|whose turn)\b", "alternate, in a random order"),
    _rule("W7", r"\btight(?:er|est|ly)?\b", "narrow, small"),
)
# Phrases that a rule matches by mistake, and quotations: a pattern each.
ALLOWED = re.compile(r"no one-|knob=|^not told$|\(tight\)", re.IGNORECASE)


class Finding(NamedTuple):
    """One phrase: file, line (from 1), rule, the phrase as written, and the plain form."""

    path: str
    line: int
    rule: str
    phrase: str
    plain: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: {self.rule} "{self.phrase}"; write: {self.plain}'


def findings_of_text(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(offset, rule, phrase, plain form) of each match; overlapping matches of one rule group count once."""
    allowed = [match.span() for match in ALLOWED.finditer(text)]
    taken: list[tuple[int, int]] = []
    for rule in RULES:
        for match in rule.pattern.finditer(text):
            begin, end = match.span()
            if any(begin < stop and start < end for start, stop in [*allowed, *taken]):
                continue
            taken.append((begin, end))
            phrase = " ".join(match[0].split())
            plain = re.sub(r" an? (\w+)$", r" per \1", phrase) if rule.name == "W2" else rule.plain
            yield begin, rule.name, phrase, plain


def prose_of_page(markdown: str) -> str:
    """The page with code, URLs and HTML comments blanked; offsets and line breaks stay.

    A zero byte replaces each blanked character and separates the cells of a table.
    """

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", "\x00", match[0])

    code = r"^( *)(```|~~~).*?^\1\2", r"`[^`]+`", r"^:::[^\n]*(?:\n    [^\n]*)*"  # the last: mkdocstrings
    for pattern in (code[0], r"<!--.*?-->", *code[1:], r"\]\([^)\s]*\)", r"https?://\S+"):
        markdown = re.sub(pattern, blank, markdown, flags=re.DOTALL | re.MULTILINE)
    return markdown.replace("|", "\x00")


def strings_of_source(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings and strings with a space in them; values of an f-string are {}."""
    parts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(id(part) for part in ast.walk(node) if isinstance(part, ast.Constant))
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, re.sub(r"`[^`\n]+`|https?://\S+", lambda match: "\x00" * len(match[0]), text)


def findings_in(path: Path) -> list[Finding]:
    """All findings of one file, by line."""
    name, content = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    texts = strings_of_source(content) if path.suffix == ".py" else [(1, prose_of_page(content))]
    findings = []
    for first_line, text in texts:
        breaks = [match.start() for match in re.finditer("\n", text)]
        for offset, *words in findings_of_text(text):
            findings.append(Finding(name, first_line + bisect.bisect_left(breaks, offset), *words))
    return sorted(findings)


def files() -> list[Path]:
    """Every file that the linter reads."""
    return sorted(path for pattern in (*PAGES, *SOURCES) for path in ROOT.glob(pattern))


def folder_of(name: str) -> str:
    """The key of a file's budget: its package, its folder, or its own name at the top."""
    parts = Path(name).parts
    return "/".join(parts[: min(len(parts) - 1, PACKAGE_PARTS - 1)]) or name


def over_budget(findings: Iterable[Finding], budget: dict[str, int]) -> dict[str, int]:
    """Folder to its count, where that exceeds its budget; a folder without a budget has 0."""
    counts = Counter(folder_of(finding.path) for finding in findings)
    return {folder: count for folder, count in sorted(counts.items()) if count > budget.get(folder, 0)}


def lowered(findings: Iterable[Finding], budget: dict[str, int]) -> dict[str, int]:
    """The budget, lowered to what is there; folders without findings are left out."""
    counts = Counter(folder_of(finding.path) for finding in findings)
    return {folder: min(counts[folder], limit) for folder, limit in sorted(budget.items()) if counts[folder]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where every folder keeps its budget, and, with PATHs, where these have no finding."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prose", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="list every finding of these files and folders")
    parser.add_argument("--update", action="store_true", help="lower the budget to the findings that are left")
    options = parser.parse_args(arguments)
    findings = [finding for path in files() for finding in findings_in(path)]
    if options.paths:
        chosen = [path.resolve() for path in options.paths]
        findings = [each for each in findings if any((ROOT / each.path).is_relative_to(path) for path in chosen)]
        print("\n".join(map(str, findings)) or "prose: no findings")
        return 1 if findings else 0
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    above = over_budget(findings, budget)
    for finding in findings:
        if folder_of(finding.path) in above:
            print(finding)
    for folder, count in above.items():
        print(f"prose: FAIL: {folder} has {count} findings, at most {budget.get(folder, 0)} are allowed")
    if options.update:
        BUDGET.write_text(json.dumps(lowered(findings, budget), indent=4) + "\n", encoding="utf-8")
    by_rule = ", ".join(f"{rule} {count}" for rule, count in sorted(Counter(each.rule for each in findings).items()))
    print(f"prose: {len(findings)} findings, goal 0 ({by_rule or 'none left'})")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
