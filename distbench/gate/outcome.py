"""What a gate says of one case, of the whole comparison, and the exit code that follows."""

from collections import Counter
from dataclasses import dataclass, field

from distbench.compare.options import Options
from distbench.compare.verdicts import BROKEN, IMPROVEMENT, INCONCLUSIVE, JUDGED, PASS, REGRESSION, VERDICTS
from distbench.spec.printable import count_text


@dataclass(frozen=True)
class MetricVerdict:
    """One metric of one case; None is what too few launches cannot give.

    Args:
        verdict: "regression", "inconclusive", "improvement" or "pass".
        baseline_s: geometric mean over launches, seconds; likewise `candidate_s`.
        change: candidate over baseline, minus one; between `low` and `high`.
        p: of "no slower", adjusted over the whole family.
        tolerance: the change that is still no regression, the floor in seconds included.
        detectable: the smallest true slowdown that would have been found four times in five.
        num_launches: pairs, or launches of the smaller side.
        num_more: further pairs, or launches a side, to settle an inconclusive one; None also where out of reach.
        suspected: "regression" or "improvement" that was seen but cannot be held against the candidate, or None.
    """

    metric: str
    verdict: str
    baseline_s: float
    candidate_s: float
    change: float
    low: float | None
    high: float | None
    p: float | None
    tolerance: float
    detectable: float | None
    num_launches: int
    num_more: int | None = None
    suspected: str | None = None


@dataclass(frozen=True)
class CaseVerdict:
    """One case.

    Args:
        scenario: the scenario, and what tells the group of launches apart where it has several.
        verdict: one of VERDICTS.
        paired: whether launches were compared in pairs.
        metrics: one a metric, the one that decided first; empty where nothing was compared.
    """

    scenario: str
    case_id: str
    verdict: str
    reason: str
    paired: bool = False
    metrics: tuple[MetricVerdict, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def suspected(self) -> str | None:
        """What was seen but cannot be held against the candidate, the worst of all metrics."""
        seen = {metric.suspected for metric in self.metrics}
        return REGRESSION if REGRESSION in seen else IMPROVEMENT if IMPROVEMENT in seen else None

    @property
    def excess(self) -> float:
        """By how much a metric was measured slower than its tolerance, as a share; the largest of all metrics."""
        return max((metric.change - metric.tolerance for metric in self.metrics), default=0.0)

    @property
    def change(self) -> float:
        """The deciding metric's change; 0 where nothing was compared."""
        return self.metrics[0].change if self.metrics else 0.0


@dataclass(frozen=True)
class Gated:
    """One comparison.

    Args:
        cases: the worst first.
        num_baseline: launches; likewise `num_candidate`.
        num_tests: tests in the family.
        num_not_run: cases that neither side ran (skipped or unsupported).
        num_too_few: cases with too few launches for a verdict.
        designs: one sentence a scenario: how its launches were compared.
        stamps: fields that differ and were allowed to.
        shown: other fields that differ.
        warnings: sentences about files and launches.
    """

    cases: list[CaseVerdict]
    options: Options
    num_baseline: int
    num_candidate: int
    num_tests: int = 0
    num_not_run: int = 0
    num_too_few: int = 0
    designs: list[str] = field(default_factory=list)
    stamps: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Cases by verdict, the worst first; only verdicts that occur."""
        counted = Counter(case.verdict for case in self.cases)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def num_judged(self) -> int:
        """Cases that had what a verdict needs, whatever it was."""
        return sum(case.verdict in JUDGED for case in self.cases) - self.num_too_few

    def exit_code(self, strict: bool = False) -> int:
        """0 pass, 1 regression, 3 inconclusive under `strict`, 4 incomparable, missing, invalid or nothing judged."""
        counts = self.counts
        if counts.get(REGRESSION):
            return 1
        if self.num_judged == 0 or any(counts.get(verdict) for verdict in BROKEN):
            return 4
        return 3 if strict and counts.get(INCONCLUSIVE) else 0

    @property
    def look_slower(self) -> list[CaseVerdict]:
        """Undecided cases that were measured slower than the tolerance, the slowest first."""
        slower = [case for case in self.cases if case.verdict == INCONCLUSIVE and case.excess > 0]
        return sorted(slower, key=lambda case: -case.excess)

    @property
    def is_open(self) -> bool:
        """Whether nothing failed and this is no pass either: no case is decided, or an undecided one looks slower."""
        if self.exit_code(strict=True) != 3:
            return False
        return bool(self.look_slower) or not any(self.counts.get(one) for one in (PASS, IMPROVEMENT))

    @property
    def why_nothing(self) -> str:
        """Why no case could be judged; "" where one was."""
        if self.num_judged:
            return ""
        compared = [case for case in self.cases if case.metrics]
        return compared[0].reason if compared else "nothing was measured that could be compared"

    def headline(self, strict: bool = False) -> str:
        """The outcome in one line: `PASS (27 of 30 cases decided): 3 inconclusive, 27 pass`."""
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items()) or "no case"
        word = {0: "PASS", 1: "FAIL", 3: "INCONCLUSIVE", 4: "NO VERDICT"}[self.exit_code(strict)]
        if word == "PASS" and self.is_open:
            word = "INCONCLUSIVE"
        if word in ("PASS", "INCONCLUSIVE") and (num_open := self.counts.get(INCONCLUSIVE, 0)):
            compared = sum(case.verdict in JUDGED for case in self.cases)
            word += f" ({compared - num_open} of {count_text(compared, 'case')} decided)"
        if word == "NO VERDICT" and not self.num_judged:
            counted += f"; {self.why_nothing}"
        if word.startswith("INCONCLUSIVE") and (slower := self.look_slower):
            change = max(metric.change for metric in slower[0].metrics)
            counted += f"; {len(slower)} measured slower than the tolerance, the worst {100 * change:+.1f} %: "
            counted += slower[0].case_id
        return f"{word}: {counted}"
