"""One stored baseline as a person reads it."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, stdev

from distbench.render.blocks import Heading, Lines, Table
from distbench.render.terminal import text_of
from distbench.render.units import NOTHING, time_text
from distbench.runs.baselines import load_record, read_baseline
from distbench.runs.header import MUST_AGREE
from distbench.runs.launches import Value
from distbench.spec.printable import count_text

PROVENANCE = ("git_commit", "torch", "nccl", "python")


def baseline_page(path: Path) -> str:
    """Provenance, and a row a case: its mean and 10th percentile over launches, and how far launches lie apart."""
    record, launches = load_record(path), read_baseline(path)
    facts = record["facts"]
    facts_text = [f"{name} {facts[name]}" for name in (*PROVENANCE, *MUST_AGREE) if facts.get(name) is not None]
    lines = (f"{count_text(len(launches), 'launch', 'launches')}, saved at {record['saved_at']}", ", ".join(facts_text))
    ids = dict.fromkeys(case_id for launch in launches for case_id in launch.cases)
    rows = [_row(case_id, [one.cases[case_id] for one in launches if case_id in one.cases]) for case_id in ids]
    columns = ("<case", "launches", "mean", "p10")
    notes = [
        "mean, p10 (10th percentile): geometric mean over launches, and its logarithm's standard deviation between them"
    ]
    title = f"{count_text(len(rows), 'case')}:"
    return text_of(
        [
            Heading(f"baseline {record['scenario']}", 1),
            Lines(lines),
            Table(title, columns, rows, notes, optional=("launches",)),
        ]
    )


def _row(case_id: str, values: Sequence[Value]) -> tuple[str, ...]:
    good = [value for value in values if value.status == "ok"]
    if not good:
        return case_id, "0", values[0].status, NOTHING
    mean, p10 = _over_launches([value.mean_s for value in good]), _over_launches([value.p10_s for value in good])
    return case_id, str(len(good)), mean, p10


def _over_launches(times: Sequence[float]) -> str:
    """`1.00 ms, 1.9 %`: geometric mean, and the standard deviation of the logarithms."""
    spread = f"{100 * stdev(map(math.log, times)):.1f} %" if len(times) > 1 else NOTHING
    return f"{time_text(geometric_mean(times))}, {spread}"
