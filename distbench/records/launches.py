"""The launches of a comparison, with mean and 10th percentile of each case.

Samples of one launch are not independent, because the launch's threads, memory and load are common. On a busy machine
40 samples had the weight of 2 to 10 independent samples. A launch therefore has one mean and one 10th percentile per
case, and statistics count launches.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from distbench.records.run_file import (
    Environment,
    Record,
    Run,
)
from distbench.spec.errors import UserError
from distbench.spec.job import CaseChoice, none_chosen

FAILED = ("wrong", "raised", "timeout", "aborted")
NOT_RUN = ("skipped", "unsupported")
FORWARD_ONLY = "inference"  # the mode of a case that is a forward pass only


@dataclass(frozen=True)
class Unit:
    """The unit of a case's numbers.

    Args:
        name: "s" for times; other names, also "", are only shown.
        is_reciprocal: whether a higher number is better. `Value` then has reciprocals, so that lower is better.
    """

    name: str = "s"
    is_reciprocal: bool = False

    @property
    def is_time(self) -> bool:
        """Whether the numbers are times of which a lower one is better."""
        return self == SECONDS

    @property
    def words(self) -> tuple[str, str]:
        """The words for a worse and a better number."""
        higher = ("lower", "higher") if self.is_reciprocal else ("higher", "lower")
        return ("slower", "faster") if self.is_time else higher

    def given(self, stored: float) -> float:
        """A number of `Value` as the user gave it."""
        return 1 / stored if self.is_reciprocal else stored

    def change(self, share: float) -> float:
        """A change of `Value`'s numbers, as a share, as a change of the user's numbers."""
        return 1 / (1 + share) - 1 if self.is_reciprocal else share


SECONDS = Unit()


class Value(NamedTuple):
    """One case in one launch.

    Args:
        status: as in a run file.
        mean_s: the samples' mean, in seconds or in the unit; nan without samples.
        p10_s: the samples' 10th percentile, in the same unit.
        error: one sentence, when status is not ok.
        is_latency: whether its times are of forward passes only, with a tail more important than the mean.
    """

    status: str
    num_samples: int
    mean_s: float
    p10_s: float
    error: str | None = None
    is_latency: bool = False
    unit: Unit = SECONDS


@dataclass(frozen=True)
class Launch:
    """One launch: one run file, or one launch of another tool.

    Args:
        run_id: unique id, by which a launch on both sides of a comparison is rejected.
        source: run file or baseline file.
        started_at: seconds since the epoch, or 0 if unknown. The same applies to `ended_at`.
        variants: the scenario's parameters as text. Launches with equal text should have equal cases.
        facts: fields of the header that must be equal on both sides, and fields that are only shown.
        foreign_load: CPU use by other processes during this launch, as a share of the CPUs, or None.
        complete: whether it finished.
        invocation_id: shared by the launches of one `distbench run`, or None.
        label: the user's own text for it, or "".
        pair: the name that it shares with its partner on the other side, or None.
        more: advice on more launches that can be judged, or "" where `distbench ab` does that.
    """

    run_id: str
    source: str
    scenario: str
    started_at: float
    ended_at: float
    variants: str
    facts: Record
    foreign_load: float | None
    complete: bool
    cases: dict[str, Value] = field(repr=False)
    invocation_id: str | None = None
    label: str = ""
    pair: str | None = None
    more: str = ""


def launch_of(run: Run) -> Launch:
    """One run file as a launch."""
    about = run.about
    cases: dict[str, Value] = {}
    for record in run.cases:
        value, case_id = value_of(record), record["case"]["id"]
        value = value._replace(is_latency=record["case"].get("params", {}).get("mode") == FORWARD_ONLY)
        # A case may have a second row, which the parent writes after a failed launch. The failure then counts.
        if case_id not in cases or cases[case_id].status == "ok":
            cases[case_id] = value
    return Launch(
        run_id=about.run_id or run.path.name,
        source=str(run.path),
        scenario=run.scenario,
        started_at=float(about.started_at),
        ended_at=float((run.footer or {}).get("finished_at") or 0.0),
        variants=json.dumps(about.variants, sort_keys=True),
        facts=about.facts,
        foreign_load=foreign_load(about.environment, run.footer or {}),
        complete=run.footer is not None and run.footer.get("status") == "complete",
        cases=cases,
        invocation_id=about.invocation_id,
        label=about.label or "",
    )


def value_of(record: Record) -> Value:
    """One case record as a value. Status ok without a valid sample counts as raised."""
    samples, status = record.get("samples_s") or [], record["status"]
    if status != "ok":
        return Value(status, len(samples), math.nan, math.nan, record.get("error"))
    mean_s = sum(samples) / len(samples) if samples else math.nan
    if not (math.isfinite(mean_s) and min(samples) > 0):
        return Value("raised", len(samples), math.nan, math.nan, "status ok without valid samples")
    return Value("ok", len(samples), mean_s, tenth_percentile(samples))


def tenth_percentile(samples: Sequence[float]) -> float:
    """The 10th percentile, interpolated between order statistics as in numpy.

    The minimum depends on the number of samples, and varied twice as much between launches on an idle machine.
    """
    return statistics.quantiles(samples, n=10, method="inclusive")[0] if len(samples) > 1 else samples[0]


def foreign_load(environment: Environment, footer: Record) -> float | None:
    """CPU use by other processes as a share of this host's CPUs, measured over the launch (the footer's `foreign_cpu`).

    Without `foreign_cpu`, the load average of the minute before the launch is used, divided by the number of CPUs. This
    load average includes the end of the previous launch, on both sides of an interleaved comparison.
    """
    foreign_cpu = footer.get("foreign_cpu")
    return environment.load_per_cpu if foreign_cpu is None else float(foreign_cpu)


def units_of(launches: Iterable[Launch]) -> dict[str, Unit]:
    """The unit of each case; UserError if launches have a case in two units."""
    units: dict[str, Unit] = {}
    for launch in launches:
        for case_id, value in launch.cases.items():
            unit = units.setdefault(case_id, value.unit)
            if unit is not value.unit and unit != value.unit:
                both = f"{unit.name or 'no unit'}, and in {value.unit.name or 'no unit'} in {launch.source}"
                raise UserError(f"case {case_id!r} is in {both}; write one unit per case")
    return units


def with_cases(sides: Sequence[Sequence[Launch]], expression: str) -> list[list[Launch]]:
    """The launches of each side with the cases that match an expression of -k. Raise UserError if no case matches."""
    if not expression:
        return [[*side] for side in sides]
    choice, launches = CaseChoice(expression), list(chain.from_iterable(sides))
    ids = sorted({case_id for launch in launches for case_id in launch.cases})
    if ids and not any(map(choice.matches, ids)):
        raise UserError(none_chosen(expression, len(ids), ids))
    return [
        [
            replace(launch, cases={name: value for name, value in launch.cases.items() if choice.matches(name)})
            for launch in side
        ]
        for side in sides
    ]
