"""`python -m benchmarks.prose [PATH...]`: phrases in docs, strings and comments that a plain sentence avoids.

It reads the prose of README.md, CONTRIBUTING.md and docs/*.md, and docstrings, strings and comments of distbench/ and
scenarios/. Code blocks, inline code, URLs, and strings without a space are skipped: they are quoted output and
identifiers. No finding is allowed.
"""

import argparse
import ast
import bisect
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
SOURCES = ("distbench/**/*.py", "scenarios/*.py")

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
        name: W1 free relatives, W2 "per", W3 verbs of people, W4 "is none", W5 old words, W6 actors, W7 jargon,
            W8 fragments and pronouns far from their noun.
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
    _rule("W7", r"\b(?:(?:take|takes|took|taking|by) turns|whose turn|in turn)\b", "alternate, in a random order"),
    _rule("W7", r"\btight(?:er|est|ly)?\b", "narrow, small"),
    _rule("W8", r"(?:,|\() ?since\b(?! (?:then|the epoch|version|torch 2|v?\d))", "because"),
    _rule("W8", r"\b(?:do|does|did|doing) so\b|\bso (?:does|do|did|may|can)\b", "repeat the verb"),
    _rule("W8", r"\bthe ones? (?:that|which|of|whose|with|from)\b", "repeat the noun"),
    _rule("W8", r"\bstay(?:s|ed|ing)?\b", "remain, is not changed"),
    _rule("W8", r"\btried by hand\b", "a sentence with a subject"),
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


def comments_of_source(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments; comments on consecutive lines are one text with their line breaks."""
    first, lines, is_alone = 0, list[str](), False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            was_alone, is_alone = is_alone, not token.line[: token.start[1]].strip()
            if lines and not (was_alone and is_alone and token.start[0] == first + len(lines)):
                yield first, "\n".join(lines)
                lines = []
            first = first if lines else token.start[0]
            lines.append(re.sub(r"`[^`\n]+`|https?://\S+", lambda match: "\x00" * len(match[0]), token.string[1:]))
    if lines:
        yield first, "\n".join(lines)


def findings_in(path: Path) -> list[Finding]:
    """All findings of one file, by line."""
    name, content = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    texts: list[tuple[int, str]] = [(1, prose_of_page(content))]
    if path.suffix == ".py":
        texts = [*strings_of_source(content), *comments_of_source(content)]
    findings = []
    for first_line, text in texts:
        breaks = [match.start() for match in re.finditer("\n", text)]
        for offset, *words in findings_of_text(text):
            findings.append(Finding(name, first_line + bisect.bisect_left(breaks, offset), *words))
    return sorted(findings)


def files() -> list[Path]:
    """Every file that the linter reads."""
    return sorted(path for pattern in (*PAGES, *SOURCES) for path in ROOT.glob(pattern))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings of all files, or of PATHs, and return 0 if there are none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prose", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="check only these files and folders")
    chosen = [path.resolve() for path in parser.parse_args(arguments).paths]
    findings = [finding for path in files() for finding in findings_in(path)]
    if chosen:
        findings = [each for each in findings if any((ROOT / each.path).is_relative_to(path) for path in chosen)]
    for finding in findings:
        print(finding)
    by_rule = ", ".join(f"{rule} {count}" for rule, count in sorted(Counter(each.rule for each in findings).items()))
    print(f"prose: {len(findings)} findings{f' ({by_rule})' * bool(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
