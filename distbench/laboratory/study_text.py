"""The laboratory's story as blocks: the numbers behind the verdict, striking pairs, what was wrong, what to paste."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from distbench.laboratory.comparisons import BETTER_OF_TORCH, CHOSEN, NEAR_BEST, WORSE_SHARE, LargestGain
from distbench.laboratory.failures import BAD, Failure
from distbench.laboratory.planner_table import PlannerTable, median_of
from distbench.laboratory.predictions import APART
from distbench.laboratory.study import Study
from distbench.laboratory.study_verdict import verdict_lines
from distbench.planning.choice import LEAVING_SHARE
from distbench.render.blocks import Block, Heading, Lines, Table, capped, shorten
from distbench.render.units import NOTHING, decimal_text, percent_text, ratio_text, size_text, time_text, whole_text
from distbench.spec.planner_names import BASELINE

MAX_FAILURES = 30
MAX_ERROR = 160
STATUS_ORDER = ("ok", *BAD, "unsupported", "skipped")


def opening(study: Study) -> list[Lines]:
    """The verdict, for the top of a report."""
    return [Lines(verdict_lines(study))]


def story(study: Study) -> list[Block]:
    """The numbers behind the verdict, in the order of telling; a table with nothing in it is left out."""
    heading = Heading(f"Redistribution laboratory: {study.machine}, torch {study.versions.torch}")
    parts = (_means, _wins, _regrets, _paths, _predictions, _largest_gains, _outcomes, _failures)
    return [heading, *(table for part in parts if (table := part(study)).rows)]


def _groups(study: Study) -> list[tuple[str, str]]:
    return [(mesh, size) for mesh, size, _ in study.table.groups()]


def _means(study: Study) -> Table:
    """Geometric mean of each planner's time over greedy's, by mesh and size."""
    planners = [planner for planner in study.table.planners if study.against(planner)]
    rows = []
    for mesh, size in _groups(study):
        found = [study.tallies.get((planner, BASELINE, mesh, size)) for planner in planners]
        if any(found):
            pairs = max(tally.num_pairs for tally in found if tally)
            cells = [ratio_text(*tally.mean).replace(" ", "\n", 1) if tally else NOTHING for tally in found]
            rows.append((mesh, size, str(pairs), *cells))
    notes = [
        "geometric mean over the pairs that communicate, [95 % CI over pairs]; below 1 is faster than greedy",
        "direct moves no pair with Partial: its mean is over the others",
    ]
    title = "Time over greedy's, by mesh and size of the whole tensor"
    columns = ("<mesh", "<size", "pairs", *(planner.replace("+", "\n+") for planner in planners))
    return Table(title, columns, rows, notes[: 2 if "direct" in planners else 1], frozenset(range(1, len(rows))))


def _wins(study: Study) -> Table:
    rows = []
    for planner in study.table.planners:
        one, other = study.against(planner), study.against(planner, BETTER_OF_TORCH)
        if one is None and other is None:
            continue
        cells = [NOTHING] * 4 if one is None else one[:4]
        more = [NOTHING] * 3 if other is None else [other.num_faster, other.num_slower, other.num_much_slower]
        rows.append((planner, *map(str, cells), *map(str, more)))
    columns = (
        "<planner", "pairs", "not as\ngreedy", "faster than\ngreedy", "slower than\ngreedy",
        "faster than\nbetter", "slower than\nbetter", f"{percent_text(WORSE_SHARE)}+\nslower",
    )  # fmt: skip
    widest = float(np.max(study.widening, initial=1.0))
    notes = [
        "faster, slower: the whole 95 % interval of the pair's ratio lies on that side of one",
        "better: the faster of torch's two, greedy and min_cost, as measured, pair by pair",
    ]
    if widest > 1:
        notes.append(
            f"intervals are widened up to {widest:.1f} times, so that they hold where two planners run the same thing"
        )
    return Table(f"Wins and losses beyond noise, pairs {study.focus_text}", columns, rows, notes)


def _regrets(study: Study) -> Table:
    planning = study.table.numbers["planning_cold_s"]
    cold = {planner: median_of(planning[at]) for at, planner in enumerate(study.table.planners)}
    rows = [
        (
            name,
            str(regret.num_pairs),
            f"{regret.mean:.2f}",
            f"{regret.worst:.2f}",
            percent_text(regret.share_near),
            decimal_text(study.sent_over_bound.get(name)),
            time_text(cold.get(name, float("nan"))),
        )
        for name, regret in study.regrets.items()
    ]
    columns = (
        "<planner", "pairs", "time over\nthe best", "at worst", f"within {percent_text(NEAR_BEST)}\nof the best",
        "sent over\nthe bound", "planning,\nempty caches",
    )  # fmt: skip
    notes = [
        "the best: the least time measured of the pair; the luckiest wins it, so even the best choice pays a little",
        f"{CHOSEN}: pair by pair what distbench plan says to use, nothing measured: the better of torch's two, "
        f"unless another is predicted more than {percent_text(LEAVING_SHARE)} faster",
        "bound: the bytes that must arrive at the rank that lacks most; over pairs without Partial (geometric mean)",
    ]
    if BASELINE in cold and (left_out := int((~study.table.measured[study.table.at(BASELINE)]).sum())):
        notes.append(f"left out: {left_out} pairs that greedy did not move rightly in the same run")
    return Table(f"What each choice costs over the best, pairs {study.focus_text}", columns, rows, notes)


def _paths(study: Study) -> Table:
    kinds = list(dict.fromkeys((planner, other) for planner, other, _, _ in study.differences))
    rows = []
    for mesh, size in _groups(study):
        found = [study.differences.get((*kind, mesh, size)) for kind in kinds]
        if any(found):
            cells = [
                f"{percent_text(d.num_differing / d.num_pairs)} ({d.num_differing}/{d.num_pairs})" if d else NOTHING
                for d in found
            ]
            rows.append((mesh, size, *cells))
    columns = ("<mesh", "<size", *(f"{planner}\nnot {other}'s" for planner, other in kinds))
    return Table("How often another path is planned", columns, rows)


def _predictions(study: Study) -> Table:
    sizes = [size for size in study.table.sizes() if any(size == known for _, known in study.errors)]
    rows = []
    for planner in dict.fromkeys(planner for planner, _ in study.errors):
        found = [study.errors.get((planner, size)) for size in sizes]
        whole = study.errors.get((planner, ""))
        cells = [percent_text(error.error) if error else NOTHING for error in found]
        rows.append((planner, *cells, decimal_text(whole.bias if whole else None)))
    rank, notes = study.ranking, ["error: median of |predicted / measured - 1|"]
    if rank.num_plans:
        share = percent_text(rank.num_right / rank.num_plans)
        notes.append(
            f"{rank.num_right} of {rank.num_plans} plan pairs ({share}) predicted over {percent_text(APART)} apart "
            "were measured in that order"
        )
    columns = ("<planner", *(f"error,\n{size}" for size in sizes), "predicted\nover measured")
    return Table("Predicted by the profile against measured", columns, rows, notes)


def _largest_gains(study: Study) -> Table:
    rows = [row for gain in study.largest_gains for row in _gain_rows(study.table, gain)]
    columns = ("<planner", "<path", "median", "coll.", "sent", "over\nbound", "<over greedy")
    notes = ["coll. = collectives; sent = bytes that one rank sends as executed; bound as above, none for Partial"]
    title = (
        f"The {len(study.largest_gains)} most striking pairs {study.focus_text}: largest gains over greedy beyond noise"
    )
    return Table(title, columns, rows, notes, frozenset(range(2, len(rows), 2)))


def _gain_rows(table: PlannerTable, gain: LargestGain) -> Iterator[tuple[str, ...]]:
    facts = table.pairs.iloc[gain.pair]
    for planner, last in ((BASELINE, _tensor_text(facts)), (gain.planner, ratio_text(*gain.ratio))):
        at = table.at(planner), gain.pair
        sent, bound = float(table.numbers["wire_bytes_executed"][at]), float(facts["bound_bytes"])
        yield (
            planner,
            table.paths[at] or f"{facts['source']}->{facts['target']}",
            time_text(float(table.times.center[at])),
            whole_text(float(table.numbers["num_collectives"][at])),
            size_text(sent),
            decimal_text(sent / bound if bound > 0 else None),
            last,
        )


def _tensor_text(facts: Any) -> str:
    """`f32[512,512] on 2x2`."""
    return f"{facts['dtype']}[{facts['shape'].replace('x', ',')}] on {facts['mesh_shape']}"


def _outcomes(study: Study) -> Table:
    seen = [status for status in STATUS_ORDER if any(counts[status] for counts in study.outcomes.values())]
    order = dict.fromkeys([*study.table.planners, *study.outcomes])
    rows = [
        (name or "-", str(study.outcomes[name].total()), *(str(study.outcomes[name][status]) for status in seen))
        for name in order
    ]
    notes = ["every result is compared with a shard that is cut from the full tensor without DTensor"]
    return Table("Values: every case of every suite", ("<planner", "cases", *seen), rows, notes)


def _failures(study: Study) -> Table:
    rows = [_failure_row(failure) for failure in study.failures]
    columns = ("<status", "<planner", "cases", "<what they share", "<smallest of them", "<ours on the same")
    title = f"Wrong or broken, by cause: {sum(failure.num_cases for failure in study.failures)} cases"
    notes = ["one stand-alone script each: distbench report --reproducers DIR"]
    table = Table(title, columns, rows, notes, frozenset(range(1, len(rows))))
    return capped(table, MAX_FAILURES)


def _failure_row(failure: Failure) -> tuple[str, ...]:
    record = failure.example
    pair = f"{record['source']} -> {record['target']}"
    error = shorten(str(record["error"] or "-"), MAX_ERROR)
    suite = f"{failure.suite}: " if failure.suite else ""
    return (
        failure.status,
        failure.planner.replace("+", "\n+"),
        str(failure.num_cases),
        suite + failure.pattern,
        f"{pair}\n{_tensor_text(record)}\n{error}",
        _ours_text(failure.ours),
    )


def _ours_text(ours: dict[str, dict[str, int]]) -> str:
    """`calibrated: 3 ok` a line; what our planners did on the pairs of a failure."""
    lines = [f"{name}: " + ", ".join(f"{n} {status}" for status, n in counts.items()) for name, counts in ours.items()]
    return "\n".join(lines) or "not run"
