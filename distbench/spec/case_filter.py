"""`run -k EXPR`: which cases run, as pytest's -k chooses tests: parts of an id, `and`, `or`, `not` and parentheses."""

import re
from collections.abc import Callable, Sequence

from distbench.spec.errors import UserError
from distbench.spec.printable_text import count_text

Matches = Callable[[str], bool]
# A part of an id in quotes may hold spaces and parentheses, as those of redistributions do.
TOKEN = re.compile(r"""\s*(?:(?P<mark>[()])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s()"']+))""")
MAX_NAMED, MAX_SHOWN = 3, 200
MAX_DEPTH = 50


class CaseChoice:
    """A parsed expression.

    Raises:
        UserError: it is none.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._depth = 0
        self._matches = self._any_of()
        if self._tokens:
            raise self._wrong(f"{self._tokens[0][1]!r} is not expected there")

    def matches(self, case_id: str) -> bool:
        """Whether a case is chosen; upper and lower case are the same."""
        return self._matches(case_id.lower())

    def _split(self) -> list[tuple[str, str]]:
        """(kind, text) of each token: "mark", "word" or "quoted"."""
        tokens, place, text = [], 0, self._text.strip()
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                raise self._wrong("a quote is not closed")
            kind = str(match.lastgroup)
            tokens.append((kind if kind in ("mark", "word") else "quoted", match[kind]))
            place = match.end()
        return tokens

    def _any_of(self) -> Matches:
        parts = [self._all_of()]
        while self._take("word", "or"):
            parts.append(self._all_of())
        return lambda case_id: any(part(case_id) for part in parts)

    def _all_of(self) -> Matches:
        parts = [self._one()]
        while self._take("word", "and"):
            parts.append(self._one())
        return lambda case_id: all(part(case_id) for part in parts)

    def _one(self) -> Matches:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"nested deeper than {MAX_DEPTH} levels")
        part = self._part()
        self._depth -= 1
        return part

    def _part(self) -> Matches:
        if self._take("word", "not"):
            denied = self._one()
            return lambda case_id: not denied(case_id)
        if self._take("mark", "("):
            inner = self._any_of()
            if not self._take("mark", ")"):
                raise self._wrong("a parenthesis is not closed")
            return inner
        if not self._tokens or self._tokens[0] in (("mark", ")"), ("word", "and"), ("word", "or")):
            raise self._wrong("a part of a case's id is missing")
        part = self._tokens.pop(0)[1].lower()
        return lambda case_id: part in case_id

    def _take(self, *token: str) -> bool:
        is_next = bool(self._tokens) and self._tokens[0] == token
        if is_next:
            self._tokens.pop(0)
        return is_next

    def _wrong(self, why: str) -> UserError:
        how = """write parts of ids with and, or, not and parentheses, such as -k "greedy and not f32" """
        return UserError(f"-k {_shown(self._text)}: {why}; {how.strip()}")


def _shown(text: str) -> str:
    """In quotes, and only its beginning where it is long."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def none_chosen(text: str, num_cases: int, ids: Sequence[str]) -> str:
    """One sentence for a choice that leaves nothing."""
    some, of = "; ".join(ids[:MAX_NAMED]), count_text(num_cases, "case")
    return f"-k {_shown(text)} chooses none of the {of}; there are e.g. {some}; `run --dry-run` lists all"
