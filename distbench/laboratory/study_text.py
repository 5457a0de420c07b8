"""The laboratory's story as blocks: the numbers behind the verdict, striking pairs, what was wrong, what to paste."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distbench.laboratory import comparisons
from distbench.laboratory.failures import BAD, Failure
from distbench.laboratory.planner_table import PlannerTable, median_of
from distbench.laboratory.predictions import APART
from distbench.laboratory.study import Study
from distbench.laboratory.study_verdict import verdict_lines
from distbench.planning.choice import LEAVING_SHARE
from distbench.render import units
from distbench.render.blocks import Block, Heading, Lines, Table, capped, shorten
from distbench.spec.planner_names import BASELINE
from distbench.spec.printable import count_text

MAX_FAILURES = 30
MAX_ERROR = 160
MEAN_CI = "95 % CI"
STATUS_ORDER = ("ok", *BAD, "unsupported", "skipped")


def opening(study: Study) -> Lines:
    """The verdict, for the top of a report."""
    return Lines(verdict_lines(study))


def story(study: Study) -> list[Block]:
    """The numbers behind the verdict, in the order of telling; a table with nothing in it is left out."""
    heading = Heading(f"Redistribution laboratory: {study.machine}, torch {study.versions.torch}")
    parts = (_means, _wins, _regrets, _paths, _predictions, _largest_gains, _outcomes, _failures)
    return [heading, *(table for part in parts if (table := part(study)).rows)]


def _by_group(
    study: Study, known: Mapping[comparisons.Place, Any], kinds: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, list[Any]]]:
    """Mesh, size, and what is known there of each two planners, in the order of kinds; only where something is."""
    for mesh, size, _ in study.table.groups():
        found = [known.get((*kind, mesh, size)) for kind in kinds]
        if any(found):
            yield mesh, size, found


def _means(study: Study) -> Table:
    planners = [planner for planner in study.table.planners if study.against(planner)]
    rows = []
    for mesh, size, found in _by_group(study, study.tallies, [(planner, BASELINE) for planner in planners]):
        pairs = max(tally.num_pairs for tally in found if tally)
        cells = [_mean_cells(tally) for tally in found]
        rows.append((mesh, size, str(pairs), *(cell for pair in cells for cell in pair)))
    notes = [
        "geometric mean over the pairs that communicate, [95 % CI over pairs]; below 1 is faster than greedy",
        "direct makes no Partial: its mean is over the pairs that it moved",
    ]
    title = "Time over greedy's, by mesh and size of the whole tensor"
    columns = ("<mesh", "<size", "pairs", *(name for planner in planners for name in (planner, f"<{MEAN_CI}")))
    return Table(title, columns, rows, notes[: 2 if "direct" in planners else 1], optional=(MEAN_CI, "pairs"))


def _mean_cells(tally: comparisons.Tally | None) -> tuple[str, str]:
    """A mean ratio and its interval."""
    mean, _, interval = (units.ratio_text(*tally.mean) if tally else units.NOTHING).partition(" ")
    return mean, interval


def _wins(study: Study) -> Table:
    rows = []
    for planner in study.table.planners:
        one, other = study.against(planner), study.against(planner, comparisons.BETTER_OF_TORCH)
        if one is None and other is None:
            continue
        cells = [units.NOTHING] * 4 if one is None else one[:4]
        more = [units.NOTHING] * 3 if other is None else [other.num_faster, other.num_slower, other.num_much_slower]
        rows.append((planner, *map(str, cells), *map(str, more)))
    columns = (
        "<planner", "pairs", "not as\ngreedy", "faster than\ngreedy", "slower than\ngreedy",
        "faster than\nbetter", "slower than\nbetter", f"{units.percent_text(comparisons.WORSE_SHARE)}+\nslower",
    )  # fmt: skip
    notes = [
        "faster, slower: by passes, all pairs of two planners tested together",
        "better: the faster of torch's two, greedy and min_cost, as measured, pair by pair",
        *dict.fromkeys(line for found in study.ratios.values() for line in found.told if "nothing" in line),
        *comparisons.proof_lines([found for (_, other), found in study.ratios.items() if other == BASELINE]),
    ]
    title = f"Wins and losses beyond noise, pairs {study.focus_text}"
    return Table(title, columns, rows, notes, optional=("not as greedy", columns[-1].replace("\n", " "), "pairs"))


def _regrets(study: Study) -> Table:
    planning = study.table.numbers["planning_cold_s"]
    cold = {planner: median_of(planning[at]) for at, planner in enumerate(study.table.planners)}
    rows = [
        (
            name,
            str(regret.num_pairs),
            f"{regret.mean:.2f}",
            f"{regret.worst:.2f}",
            units.percent_text(regret.share_near),
            units.decimal_text(study.sent_over_bound.get(name)),
            units.time_text(cold.get(name, float("nan"))),
        )
        for name, regret in study.regrets.items()
    ]
    near = f"within {units.percent_text(comparisons.NEAR_BEST)}\nof the best"
    columns = (
        "<planner", "pairs", "time over\nthe best", "at worst", near,
        "sent over\nthe bound", "planning,\nempty caches",
    )  # fmt: skip
    notes = [
        "the best: the least time measured of the pair; the luckiest wins it, so even the best choice pays a little",
        f"{comparisons.CHOSEN}: pair by pair what distbench plan says to use, nothing measured: the better of torch's "
        f"two, unless another is predicted more than {units.percent_text(LEAVING_SHARE)} faster",
        "bound: the bytes that must arrive at the rank that lacks most; over pairs without Partial (geometric mean)",
    ]
    if BASELINE in cold and (left_out := int((~study.table.measured[study.table.at(BASELINE)]).sum())):
        notes.append(f"left out: {left_out} pairs that greedy did not move rightly in the same run")
    title = f"What each choice costs over the best, pairs {study.focus_text}"
    optional = ("planning, empty caches", "pairs", "sent over the bound", near.replace("\n", " "))
    return Table(title, columns, rows, notes, optional=optional)


def _paths(study: Study) -> Table:
    def text(found: comparisons.PathDifference) -> str:
        return f"{units.percent_text(found.num_differing / found.num_pairs)} ({found.num_differing}/{found.num_pairs})"

    kinds = list(dict.fromkeys((planner, other) for planner, other, _, _ in study.differences))
    rows = [
        (mesh, size, *(text(one) if one else units.NOTHING for one in found))
        for mesh, size, found in _by_group(study, study.differences, kinds)
    ]
    columns = ("<mesh", "<size", *(f"{planner}\nnot {other}'s" for planner, other in kinds))
    return Table("How often another path is planned", columns, rows)


def _predictions(study: Study) -> Table:
    sizes = [size for size in study.table.sizes() if any(size == known for _, known in study.errors)]
    rows = []
    for planner in dict.fromkeys(planner for planner, _ in study.errors):
        found = [study.errors.get((planner, size)) for size in sizes]
        whole = study.errors.get((planner, ""))
        cells = [units.percent_text(error.error) if error else units.NOTHING for error in found]
        rows.append((planner, *cells, units.decimal_text(whole.bias if whole else None)))
    rank, notes = study.ranking, ["error: median of |predicted / measured - 1|"]
    if rank.num_plans:
        share, apart = units.percent_text(rank.num_right / rank.num_plans), units.percent_text(APART)
        of_all = f"{rank.num_right} of {rank.num_plans} plan pairs ({share})"
        notes.append(f"{of_all} predicted over {apart} apart were measured in that order")
    columns = ("<planner", *(f"error,\n{size}" for size in sizes), "predicted\nover measured")
    return Table("Predicted by the profile against measured", columns, rows, notes)


def _largest_gains(study: Study) -> Table:
    rows = [row for gain in study.largest_gains for row in _gain_rows(study.table, gain)]
    columns = ("<planner", "<path", "median", "coll.", "sent", "over\nbound", "<over greedy")
    notes = ["coll. = collectives; sent = bytes that one rank sends as executed; bound as above, none for Partial"]
    what = f"The {len(study.largest_gains)} most striking pairs {study.focus_text}"
    title = f"{what}: largest gains over greedy beyond noise"
    breaks = frozenset(range(2, len(rows), 2))
    return Table(title, columns, rows, notes, breaks, ("coll.", "over bound", "sent"), together=True)


def _gain_rows(table: PlannerTable, gain: comparisons.LargestGain) -> Iterator[tuple[str, ...]]:
    facts = table.pairs.iloc[gain.pair]
    for planner, last in ((BASELINE, _tensor_text(facts)), (gain.planner, units.ratio_text(*gain.ratio))):
        at = table.at(planner), gain.pair
        sent, bound = float(table.numbers["wire_bytes_executed"][at]), float(facts["bound_bytes"])
        yield (
            planner,
            table.paths[at] or f"{facts['source']}->{facts['target']}",
            units.time_text(float(table.times[at])),
            units.whole_text(float(table.numbers["num_collectives"][at])),
            units.size_text(sent),
            units.decimal_text(sent / bound if bound > 0 else None),
            last,
        )


def _tensor_text(facts: Any) -> str:
    """`f32[512,512] on 2x2`."""
    return f"{facts['dtype']}[{facts['shape'].replace('x', ',')}] on {facts['mesh_shape']}"


def _outcomes(study: Study) -> Table:
    seen = [status for status in STATUS_ORDER if any(counts[status] for counts in study.outcomes.values())]
    rows = [
        (name or "-", str(study.outcomes[name].total()), *(str(study.outcomes[name][status]) for status in seen))
        for name in dict.fromkeys([*study.table.planners, *study.outcomes])
    ]
    notes = ["every result is compared with a shard that is cut from the full tensor without DTensor"]
    return Table("Values: every case of every suite", ("<planner", "cases", *seen), rows, notes)


def _failures(study: Study) -> Table:
    rows = [_failure_row(failure) for failure in study.failures]
    columns = ("<status", "<planner", "cases", "<what they share", "<smallest of them", "<ours on the same")
    title = f"Wrong or broken, by cause: {count_text(sum(failure.num_cases for failure in study.failures), 'case')}"
    notes = ["one stand-alone script each: distbench report --reproducers DIR"]
    found = Table(
        title, columns, rows, notes, frozenset(range(1, len(rows))), ("ours on the same",), "smallest of them"
    )
    return capped(found, MAX_FAILURES)


def _failure_row(failure: Failure) -> tuple[str, ...]:
    record = failure.example
    error = shorten(str(record["error"] or "-"), MAX_ERROR)
    # What our planners did on the same pairs.
    ours = [f"{name}: {units.counts_text(counts)}" for name, counts in failure.ours.items()]
    return (
        failure.status,
        failure.planner,
        str(failure.num_cases),
        f"{failure.suite}: {failure.pattern}" if failure.suite else failure.pattern,
        f"{record['source']} -> {record['target']}, {_tensor_text(record)}: {error}",
        "; ".join(ours) or "not run",
    )
