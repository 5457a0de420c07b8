"""A launch as comparisons see it: of each case its mean and its 10th percentile.

Samples of one launch share its threads, memory and neighbours: on a contended machine 40 of them were worth 2 to 10
independent ones. So a launch gives one mean and one 10th percentile per case, and later statistics count launches.
"""

import json
import math
import statistics
from collections.abc import Sequence
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
FORWARD_ONLY = "inference"  # the mode of a case that is a forward pass alone


class Value(NamedTuple):
    """One case in one launch.

    Args:
        status: as a run file's.
        mean_s: the samples' mean, seconds; nan where there are none.
        p10_s: their 10th percentile, seconds; nan likewise.
        error: one sentence, when status is not ok.
        is_latency: whether its times are of forward passes alone, whose tail matters more than their mean.
    """

    status: str
    num_samples: int
    mean_s: float
    p10_s: float
    error: str | None = None
    is_latency: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch of ranks: one run file.

    Args:
        run_id: unique; a launch may be on one side only.
        source: its file.
        started_at: seconds since the epoch, or 0 where unknown; likewise `ended_at`.
        variants: the scenario's parameters as text: launches with the same text should hold the same cases.
        facts: as a header's: fields that must agree, and fields that are only shown.
        foreign_load: how busy others kept the CPUs around this launch, as a share of them, or None.
        complete: whether it ran to its end.
        invocation_id: shared by the launches of one `distbench run`, or None.
        label: the user's own text for it, or "".
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


def launch_of(run: Run) -> Launch:
    """One run file as a launch."""
    about = run.about
    cases: dict[str, Value] = {}
    for record in run.cases:
        value, case_id = value_of(record), record["case"]["id"]
        value = value._replace(is_latency=record["case"].get("params", {}).get("mode") == FORWARD_ONLY)
        # A case recorded twice, the second time by the parent when the launch broke: the failure is what counts.
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
    """One case record as a value; one that is ok without a usable sample counts as raised."""
    samples, status = record.get("samples_s") or [], record["status"]
    if status != "ok":
        return Value(status, len(samples), math.nan, math.nan, record.get("error"))
    mean_s = sum(samples) / len(samples) if samples else math.nan
    if not (math.isfinite(mean_s) and min(samples) > 0):
        return Value("raised", len(samples), math.nan, math.nan, "ok, but without samples that are times")
    return Value("ok", len(samples), mean_s, tenth_percentile(samples))


def tenth_percentile(samples: Sequence[float]) -> float:
    """The 10th percentile, interpolated between order statistics as numpy does.

    The minimum falls with the number of samples, and varied twice as much between launches of a quiet machine.
    """
    return statistics.quantiles(samples, n=10, method="inclusive")[0] if len(samples) > 1 else samples[0]


def foreign_load(environment: Environment, footer: Record) -> float | None:
    """How busy others kept this host's CPUs, as a share of them: the footer's `foreign_cpu`, measured over the launch.

    Without that it is the load average of the minute before the launch, over the CPUs. It contains the rest of an
    earlier launch of our own, which both sides of an interleaved comparison share.
    """
    foreign_cpu = footer.get("foreign_cpu")
    return environment.load_per_cpu if foreign_cpu is None else float(foreign_cpu)


def with_cases(sides: Sequence[Sequence[Launch]], expression: str) -> list[list[Launch]]:
    """The launches of each side with the cases that an expression of -k chooses; UserError where it chooses none."""
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
