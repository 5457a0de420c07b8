"""The laboratory's story as blocks: the numbers behind the verdict, striking pairs, what was wrong, what to paste."""

from collections.abc import Iterator

import numpy as np

from distbench.laboratory.comparisons import BETTER_OF_TORCH, CHOSEN, NEAR_BEST, WORSE_SHARE, LargestGain
from distbench.laboratory.failures import BAD, Failure
from distbench.laboratory.predictions import APART
from distbench.laboratory.study import Study
from distbench.laboratory.study_verdict import regret_of, verdict_lines
from distbench.planning.choice import LEAVING_SHARE
from distbench.render.blocks import Block, Heading, Lines, Table, capped, shorten
from distbench.render.units import NOTHING, known, percent_text, ratio_text, size_text, time_text, whole_text
from distbench.spec.planner_names import BASELINE

MAX_FAILURES = 30
MAX_ERROR = 160
STATUS_ORDER = ("ok", *BAD, "unsupported", "skipped")


def opening(study: Study) -> list[Block]:
    """The verdict, for the top of a report."""
    return [Lines(verdict_lines(study))]


def story(study: Study) -> list[Block]:
    """The numbers behind the verdict, in the order of telling."""
    tables: list[Table | None] = [
        _means(study),
        _wins(study),
        _regrets(study),
        _paths(study),
        _predictions(study),
        _striking(study),
        _outcomes(study),
        _failures(study),
    ]
    heading = Heading(f"Redistribution laboratory: {study.machine}, torch {study.versions.torch}")
    return [heading, *(table for table in tables if table is not None)]


def _groups(study: Study) -> list[tuple[str, str]]:
    return [(mesh, size) for mesh, size, _ in study.planner_table.groups()]


def _means(study: Study) -> Table | None:
    """Geometric mean of each planner's time over greedy's, by mesh and size."""
    planners = [planner for planner in study.planner_table.planners if study.against(planner)]
    by_place = {(m.mesh, m.size, m.planner): m for m in study.planner_comparisons if m.baseline == BASELINE}
    rows = []
    for mesh, size in _groups(study):
        found = [by_place.get((mesh, size, planner)) for planner in planners]
        if any(found):
            pairs = max(matchup.num_pairs for matchup in found if matchup)
            cells = [ratio_text(*matchup.mean).replace(" ", "\n", 1) if matchup else NOTHING for matchup in found]
            rows.append((mesh, size, str(pairs), *cells))
    if not rows:
        return None
    notes = [
        "geometric mean over the pairs that communicate, [95 % CI over pairs]; below 1 is faster than greedy",
        "direct moves no pair with Partial: its mean is over the others",
    ]
    title = "Time over greedy's, by mesh and size of the whole tensor"
    breaks = frozenset(range(1, len(rows)))
    columns = ("<mesh", "<size", "pairs", *(planner.replace("+", "\n+") for planner in planners))
    return Table(title, columns, rows, notes[: 2 if "direct" in planners else 1], breaks)


def _wins(study: Study) -> Table | None:
    rows = []
    for planner in study.planner_table.planners:
        one, other = study.against(planner), study.against(planner, BETTER_OF_TORCH)
        if one is None and other is None:
            continue
        cells = [NOTHING] * 4 if one is None else [one.num_pairs, one.num_differing, one.num_faster, one.num_slower]
        more = [NOTHING] * 3 if other is None else [other.num_faster, other.num_slower, other.num_much_slower]
        rows.append((planner, *map(str, cells), *map(str, more)))
    if not rows:
        return None
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


def _regrets(study: Study) -> Table | None:
    rows = []
    for name in (*study.planner_table.planners, CHOSEN):
        regret = regret_of(study, name)
        if regret is None:
            continue
        planning = study.planner_table.numbers["planning_s"].get(name, np.zeros(0))
        cold = float(np.nanmedian(planning)) if np.isfinite(planning).any() else float("nan")
        sent = study.sent_over_bound.get(name, float("nan"))
        rows.append(
            (
                name,
                str(regret.num_pairs),
                f"{regret.mean:.2f}",
                f"{regret.worst:.2f}",
                percent_text(regret.share_near),
                f"{sent:.2f}" if known(sent) else NOTHING,
                time_text(cold),
            )
        )
    if not rows:
        return None
    columns = (
        "<planner", "pairs", "time over\nthe best", "at worst", f"within {percent_text(NEAR_BEST)}\nof the best",
        "sent over\nthe bound", "planning,\nempty caches",
    )  # fmt: skip
    notes = [
        "the best: the least time measured of the pair; the luckiest wins it, so even the best choice pays a little",
        f"{CHOSEN}: pair by pair what distbench plan says to use, nothing measured: the better of torch's two, "
        f"unless another is predicted more than {percent_text(LEAVING_SHARE)} faster",
        "bound: the bytes that must arrive at the rank that lacks most; over pairs without Partial (geometric mean)",
        *_left_out(study),
    ]
    return Table(f"What each choice costs over the best, pairs {study.focus_text}", columns, rows, notes)


def _left_out(study: Study) -> list[str]:
    """One sentence on pairs that nothing can be compared with; nothing when there are none."""
    planner_table = study.planner_table
    count = int((~planner_table.has(BASELINE)).sum()) if BASELINE in planner_table.planners else 0
    return [f"left out: {count} pairs that greedy did not move rightly in the same run"] if count else []


def _paths(study: Study) -> Table | None:
    kinds = list(dict.fromkeys((d.planner, d.other) for d in study.differences))
    by_place = {(d.mesh, d.size, d.planner, d.other): d for d in study.differences}
    rows = []
    for mesh, size in _groups(study):
        found = [by_place.get((mesh, size, *kind)) for kind in kinds]
        if any(found):
            cells = [
                f"{percent_text(d.num_differing / d.num_pairs)} ({d.num_differing}/{d.num_pairs})" if d else NOTHING
                for d in found
            ]
            rows.append((mesh, size, *cells))
    if not rows:
        return None
    columns = ("<mesh", "<size", *(f"{planner}\nnot {other}'s" for planner, other in kinds))
    return Table("How often another path is planned", columns, rows)


def _predictions(study: Study) -> Table | None:
    known_sizes = {error.size for error in study.errors}
    sizes = [size for size in study.planner_table.sizes() if size in known_sizes]
    by_place = {(error.planner, error.size): error for error in study.errors}
    rows = []
    for planner in dict.fromkeys(error.planner for error in study.errors):
        cells = [
            percent_text(by_place[planner, size].error) if (planner, size) in by_place else NOTHING for size in sizes
        ]
        whole = by_place.get((planner, ""))
        rows.append((planner, *cells, f"{whole.bias:.2f}" if whole else NOTHING))
    if not rows:
        return None
    rank = study.ranking
    notes = ["error: median of |predicted / measured - 1|"]
    if rank.num_plans:
        share = percent_text(rank.num_right / rank.num_plans)
        notes.append(
            f"{rank.num_right} of {rank.num_plans} plan pairs ({share}) predicted over {percent_text(APART)} apart "
            "were measured in that order"
        )
    columns = ("<planner", *(f"error,\n{size}" for size in sizes), "predicted\nover measured")
    return Table("Predicted by the profile against measured", columns, rows, notes)


def _striking(study: Study) -> Table | None:
    rows = [row for pair in study.largest_gains for row in _striking_rows(study, pair)]
    if not rows:
        return None
    columns = ("<planner", "<path", "median", "coll.", "sent", "over\nbound", "<over greedy")
    notes = ["coll. = collectives; sent = bytes that one rank sends as executed; bound as above, none for Partial"]
    title = (
        f"The {len(study.largest_gains)} most striking pairs {study.focus_text}: largest gains over greedy beyond noise"
    )
    return Table(title, columns, rows, notes, frozenset(range(2, len(rows), 2)))


def _striking_rows(study: Study, pair: LargestGain) -> Iterator[tuple[str, ...]]:
    planner_table, index = study.planner_table, pair.row
    facts = planner_table.pairs.iloc[index]
    where = f"{facts['dtype']}[{facts['shape'].replace('x', ',')}] on {facts['mesh_shape']}"
    ratio = ratio_text(*pair.ratio)
    for planner, last in ((BASELINE, where), (pair.planner, ratio)):
        sent, bound = float(planner_table.numbers["sent_bytes"][planner][index]), float(facts["bound_bytes"])
        yield (
            planner,
            str(planner_table.paths[planner][index]) or f"{facts['source']}->{facts['target']}",
            time_text(float(planner_table.times[planner].center[index])),
            whole_text(float(planner_table.numbers["num_collectives"][planner][index])),
            size_text(sent),
            f"{sent / bound:.2f}" if known(bound) and bound > 0 else NOTHING,
            last,
        )


def _outcomes(study: Study) -> Table:
    seen = [status for status in STATUS_ORDER if any(counts.get(status) for counts in study.outcomes.values())]
    order = [
        *study.planner_table.planners,
        *(name for name in study.outcomes if name not in study.planner_table.planners),
    ]
    rows = [
        (name or "-", str(sum(study.outcomes[name].values())), *(str(study.outcomes[name].get(s, 0)) for s in seen))
        for name in order
    ]
    notes = ["every result is compared with a shard that is cut from the full tensor without DTensor"]
    return Table("Values: every case of every suite", ("<planner", "cases", *seen), rows, notes)


def _failures(study: Study) -> Table | None:
    if not study.failures:
        return None
    rows = [_failure_row(failure) for failure in study.failures[:MAX_FAILURES]]
    columns = ("<status", "<planner", "cases", "<what they share", "<smallest of them", "<ours on the same")
    title = f"Wrong or broken, by cause: {sum(failure.num_cases for failure in study.failures)} cases"
    notes = ["one stand-alone script each: distbench report --reproducers DIR"]
    table = Table(title, columns, rows, notes, frozenset(range(1, len(rows))))
    return capped(table, len(study.failures), MAX_FAILURES)


def _failure_row(failure: Failure) -> tuple[str, ...]:
    record = failure.example
    pair = f"{record['source']} -> {record['target']}"
    error = shorten(str(record["error"] or "-"), MAX_ERROR)
    shape = f"{record['dtype']}[{record['shape'].replace('x', ',')}] on {record['mesh_shape']}"
    suite = f"{failure.suite}: " if failure.suite else ""
    return (
        failure.status,
        failure.planner.replace("+", "\n+"),
        str(failure.num_cases),
        suite + failure.pattern,
        f"{pair}\n{shape}\n{error}",
        ours_text(failure.ours),
    )


def ours_text(ours: dict[str, dict[str, int]]) -> str:
    """`calibrated: 3 ok` a line; what our planners did on the pairs of a failure."""
    lines = [f"{name}: " + ", ".join(f"{n} {status}" for status, n in counts.items()) for name, counts in ours.items()]
    return "\n".join(lines) or "not run"
