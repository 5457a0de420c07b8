"""Published steps next to their simulation, recorded once for equal steps, as text, picture and plain data.

Time is linear in micro-batches, so a row without published memory is recorded with few of them. Recordings are kept in
a folder, named by a digest of their inputs.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from distbench.search.sweep_child import Question, SweepChild
from distbench.show import plots as style
from distbench.show.blocks import Block, Heading, Lines, Notes, Table, TableColumns, table_of
from distbench.show.units import NOTHING, rate_text
from distbench.simulate.error_bars import (
    DifferenceErrors,
    Residual,
    ResidualFile,
    bar_rows,
    coverage,
    difference_errors,
    machine_of,
    memory_coverage,
    pairs_of,
)
from distbench.simulate.hardware_file import Figure, Hardware, load_hardware
from distbench.simulate.published import Published
from distbench.simulate.recording import Recording, load_recordings
from distbench.simulate.simulation import Simulation, fullest, slowest
from distbench.spec import Entry, find
from distbench.spec.errors import UserError
from distbench.spec.job import MESH, brief_mesh, parse_choices, variants_of
from distbench.spec.mesh import mesh_size
from distbench.spec.plan import LOSS
from distbench.spec.printable_text import count_text
from distbench.statistics.intervals import median

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

MICROBATCHES = (1, 2)  # that are recorded instead of more
LAYERS_IN_FLOAT8 = ("layers.*",)
MAX_LAYERS = 1000
APART = 0.05  # pairs whose published times differ by more must be in the right order
LENGTHS = ((2048, "up to 2k tokens"), (8192, "up to 8k tokens"), (math.inf, "over 8k tokens"))
CLASSES: Sequence[tuple[str, Callable[[Published], str]]] = (
    ("hardware", lambda row: machine_of(row.hardware)),
    ("plan", lambda row: row.plan),
    ("dtype", lambda row: row.dtype),
    ("mode", lambda row: row.mode),
    ("sequence", lambda row: next(text for most, text in LENGTHS if (row.sequence or 4096) <= most)),
    ("source", lambda row: row.source),
)


@dataclass(frozen=True)
class Compared:
    """A published row next to its simulation.

    Args:
        step_s: simulated; None without a simulation.
        reserved_bytes: simulated; None where nothing was published.
        why: the reason without a simulation.
    """

    row: Published
    step_s: float | None = None
    published_s: float | None = None
    reserved_bytes: float | None = None
    why: str = ""

    @property
    def log_error(self) -> float:
        """Logarithm of simulated over published step time; positive is too slow."""
        assert self.step_s is not None and self.published_s is not None
        return math.log(self.step_s / self.published_s)

    @property
    def memory_log_error(self) -> float | None:
        """Logarithm of simulated over published reserved memory."""
        if self.reserved_bytes is None or self.row.reserved_gib is None:
            return None
        return math.log(self.reserved_bytes / (1 << 30) / self.row.reserved_gib)


@dataclass(frozen=True)
class _Step:
    """A row's step: the scenario, its variant, and the numbers of micro-batches that are recorded instead."""

    row: Published
    entry: Entry
    variant: dict[str, Any]
    mesh: dict[str, int]

    @property
    def microbatches(self) -> int:
        """The step's own micro-batches."""
        value = self.variant.get("microbatches")
        return value if type(value) is int else 1

    @property
    def recorded(self) -> tuple[int, ...]:
        """Numbers of micro-batches to record."""
        has_batch = type(self.variant.get("batch")) is int
        is_long = self.microbatches > MICROBATCHES[-1] and has_batch and self.row.reserved_gib is None
        return MICROBATCHES if is_long else (self.microbatches,)

    def question(self, microbatches: int) -> Question:
        """Return the query for a number of micro-batches. Compilation is a rule of the replay."""
        changes: dict[str, Any] = {"compiled": False} if "compiled" in self.variant else {}
        if microbatches != self.microbatches:
            batch = self.variant["batch"] * microbatches // self.microbatches
            changes |= {"microbatches": microbatches, "batch": batch}
        return Question("record", [{**self.variant, **changes}], self.mesh)


def compared(rows: Sequence[Published], folder: Path, on_progress: Callable[[int, int], None]) -> list[Compared]:
    """Simulate rows, in their order.

    Args:
        folder: keeps the recordings.
        on_progress: called with the number of recordings and of those that exist.
    """
    results: dict[int, Compared] = {}
    steps: dict[int, _Step] = {}
    for place, row in enumerate(rows):
        try:
            if row.not_simulated:
                raise UserError(row.not_simulated)
            steps[place] = _step_of(row)
        except UserError as error:
            results[place] = Compared(row, why=str(error))
    files: dict[str, Path | str] = {}  # by question: the recording or the reason without one
    by_scenario: dict[tuple[Path, str], dict[str, Question]] = defaultdict(dict)
    for step in steps.values():
        for question in map(step.question, step.recorded):
            by_scenario[step.entry.file, step.entry.name].setdefault(_key(question), question)
    on_progress(sum(map(len, by_scenario.values())), 0)
    for (file, scenario), questions in by_scenario.items():
        with SweepChild(file, scenario, folder, resume=True) as child:
            for place, answer in child.ask([*questions.values()]):
                reason = answer.get("left_out")
                files[[*questions][place]] = str(reason) if reason else Path(answer["answers"][0])
                on_progress(0, 1)
    for place, step in steps.items():
        try:
            results[place] = _compared(step, files)
        except UserError as error:
            results[place] = Compared(step.row, why=str(error))
    return [results[place] for place in range(len(rows))]


def _key(question: Question) -> str:
    return repr((sorted(question.variants[0].items()), sorted(question.mesh.items())))


def _step_of(row: Published) -> _Step:
    entries = find(row.scenario)
    if len(entries) != 1:
        raise UserError(f"{row.scenario} has {len(entries)} scenarios; name one")
    (entry,) = entries
    mesh = {**dict.fromkeys(entry.mesh, 1), **row.sizes}
    texts = (*row.choice_texts, "plan.loss=chunked") if row.loss == "chunked" else row.choice_texts
    variants = variants_of(entry, parse_choices(texts, entry.params), False)
    if len(variants) != 1:
        raise UserError(
            f"choices {row.choices!r} select {len(variants)} variants of {row.scenario}; choose one variant"
        )
    return _Step(row, entry, {**variants[0], MESH: brief_mesh(mesh)}, mesh)


def _compared(step: _Step, files: Mapping[str, Path | str]) -> Compared:
    row, machine = step.row, _machine(step.row)
    seconds: dict[int, float] = {}
    for microbatches in step.recorded:
        file = files[_key(step.question(microbatches))]
        if isinstance(file, str):
            raise UserError(file)
        recordings = [_as_run(recording, row) for recording in load_recordings(file)]
        float8 = LAYERS_IN_FLOAT8 if row.dtype == "float8" else ()
        ranks = Simulation.all_of(recordings, machine, row.expandable_segments == "yes", float8)
        seconds[microbatches] = slowest(ranks).timed.step_s
    reserved = float(fullest(ranks).memory.reserved_bytes) if row.reserved_gib is not None else None
    head = ranks[0].recording.head
    tokens = (head.num_tokens or head.batch_size) * step.microbatches / microbatches
    return Compared(
        row, _on_line(seconds, step.microbatches), tokens / mesh_size(step.mesh) / row.tokens_per_s, reserved
    )


def _machine(row: Published) -> Hardware:
    hardware = load_hardware(row.hardware)
    own = {name: Figure(value, "published", row.source) for name, value in row.figures.items()}
    return dataclasses.replace(hardware, figures={**hardware.figures, **own})


def _as_run(recording: Recording, row: Published) -> Recording:
    """Return the recording with layers and loss compiled if the row's were."""
    names = tuple(f"layers.{number}" for number in range(MAX_LAYERS)) if row.mode == "compile" else ()
    names = (*names, LOSS) if row.loss == "compiled" else names
    return dataclasses.replace(recording, head=dataclasses.replace(recording.head, compiled=names))


def _on_line(seconds: Mapping[int, float], microbatches: int) -> float:
    """Return the time of a number of micro-batches, linear in recorded ones.

    >>> _on_line({1: 3.0, 2: 5.0}, 10)
    21.0
    """
    (first, first_s), (last, last_s) = min(seconds.items()), max(seconds.items())
    return first_s + (last_s - first_s) * (microbatches - first) / max(last - first, 1)


def residuals_of(results: Sequence[Compared], commit: str) -> ResidualFile:
    """Return the residuals of all simulated rows."""
    rows = [
        Residual(
            name=result.row.name,
            source=result.row.source,
            split=result.row.split,
            model=_model(result.row),
            hardware=machine_of(result.row.hardware),
            plan=result.row.plan,
            dtype=result.row.dtype,
            mode=result.row.mode,
            log_error=round(result.log_error, 5),
            memory_log_error=None if result.memory_log_error is None else round(result.memory_log_error, 5),
            stated_cause=result.row.stated_cause,
        )
        for result in results
        if result.step_s is not None
    ]
    return ResidualFile(commit, rows)


def residuals_text(residuals: ResidualFile) -> str:
    """Return the file's JSON text, one line per row."""
    lines = ",\n".join(msgspec.json.encode(row).decode() for row in residuals.rows)
    return f'{{"commit": {json.dumps(residuals.commit)}, "rows": [\n{lines}\n]}}\n'


PLAN_CHOICES = ("batch", "checkpoint", "microbatches", "reduce", "reshard", "compiled", "async_tp")


def _model(row: Published) -> str:
    sizes = [text for text in row.choice_texts if text.split("=")[0] not in PLAN_CHOICES]
    return " ".join([row.scenario, *sorted(sizes), row.machine]).strip()


def error_text(log_error: float) -> str:
    """Return a text such as `+3.1 %` of simulated over published."""
    return f"{100 * (math.exp(log_error) - 1):+.1f} %"


def blocks_of(results: Sequence[Compared]) -> list[Block]:
    """Return the comparison, with the summary of held-out rows at the end."""
    simulated = [result for result in results if result.step_s is not None]
    held_out = [result for result in simulated if result.row.split == "held-out"]
    fitted = [result for result in simulated if result.row.split == "fitted"]
    blocks: list[Block] = [Heading("published steps, simulated")]
    for title, rows in (("held-out", held_out), ("fitted", fitted)):
        if rows:
            blocks += [_rows(title, rows), _by_class(title, rows)]
    if stated := [result for result in simulated if result.row.stated_cause]:
        causes = (f"{result.row.name} ({result.row.source}): {result.row.stated_cause}" for result in stated)
        blocks.append(Notes(tuple(f"not used for error bars: {cause}" for cause in causes)))
    blocks += [*_without(results), Lines(tuple(summary(results)))]
    return blocks


def _rows(title: str, results: Sequence[Compared]) -> Table:
    columns: TableColumns = (
        ("<source", lambda result: result.row.source),
        ("<row", lambda result: result.row.name),
        ("<on", lambda result: result.row.hardware),
        ("published", lambda result: rate_text(result.row.tokens_per_s)),
        ("simulated", lambda result: rate_text(result.row.tokens_per_s * math.exp(-result.log_error))),
        ("step time", lambda result: error_text(result.log_error)),
        (
            "memory",
            lambda result: NOTHING if result.memory_log_error is None else error_text(result.memory_log_error),
        ),
    )
    notes = ["published and simulated are tokens/s/device; a step time above 0 % is simulated too slow"]
    return table_of(f"{title} rows", columns, results, notes if title == "held-out" else ())


def classes_of(results: Sequence[Compared]) -> list[tuple[str, str, list[Compared]]]:
    """Return (kind of class, class, its rows), as for the picture."""
    classes = []
    for kind, class_of in CLASSES:
        by_class: dict[str, list[Compared]] = defaultdict(list)
        for result in results:
            by_class[class_of(result.row)].append(result)
        classes += [(kind, name, rows) for name, rows in sorted(by_class.items())]
    return classes


def _by_class(title: str, results: Sequence[Compared]) -> Table:
    columns: TableColumns = (
        ("<class", lambda item: item[0]),
        ("<of", lambda item: item[1]),
        ("rows", lambda item: str(len(item[2]))),
        ("median error", lambda item: f"{100 * median_error(item[2]):.1f} %"),
        ("signed", lambda item: error_text(median([result.log_error for result in item[2]]))),
        ("worst", lambda item: error_text(worst_of(item[2]).log_error)),
    )
    return table_of(f"{title} rows by class", columns, classes_of(results))


def median_error(results: Sequence[Compared]) -> float:
    """Return the median absolute error of the step time, as a share."""
    return median([abs(math.exp(result.log_error) - 1) for result in results])


def worst_of(results: Sequence[Compared]) -> Compared:
    """Return the row with the largest error of the step time."""
    return max(results, key=lambda result: abs(result.log_error))


def _without(results: Sequence[Compared]) -> list[Block]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if result.step_s is None:
            by_reason[result.why].append(f"{result.row.name} ({result.row.source})")
    if not by_reason:
        return []
    notes = [
        f"not simulated: {why}: {names[0]}" + (f" and {count_text(len(names) - 1, 'further row')}" if names[1:] else "")
        for why, names in by_reason.items()
    ]
    return [Notes(tuple(notes))]


def orders_of(rows: Sequence[Residual], results: Sequence[Compared]) -> tuple[int, int]:
    """Return the numbers of pairs of one source and model over 5 % apart: in the right order, and all."""
    published = {(result.row.source, result.row.name): result.published_s for result in results}
    right = count = 0
    for row, other in pairs_of(rows):
        times = published[row.source, row.name], published[other.source, other.name]
        assert times[0] is not None and times[1] is not None
        apart = math.log(times[0] / times[1])
        if abs(apart) > math.log(1 + APART):
            count += 1
            right += apart * (apart + row.log_error - other.log_error) > 0
    return right, count


def summary(results: Sequence[Compared]) -> list[str]:
    """Return sentences on held-out rows, error bars and pairs."""
    simulated = [result for result in results if result.step_s is not None]
    held_out = [result for result in simulated if result.row.split == "held-out"]
    left_out = len(results) - len(simulated)
    lines = []
    if held_out:
        usable = [result for result in held_out if not result.row.stated_cause]
        worst = worst_of(usable or held_out)
        sources = count_text(len({result.row.source for result in held_out}), "source")
        lines.append(
            f"Held-out: {count_text(len(held_out), 'row')} of {sources}, median error of the step time "
            f"{100 * median_error(held_out):.1f} %, worst {error_text(worst.log_error)} ({worst.row.name}, "
            f"{worst.row.source})"
            + (f"; worst with a stated cause {error_text(worst_of(held_out).log_error)}" if usable != held_out else "")
        )
        residuals = bar_rows(residuals_of(held_out, "").rows)
        inside, count = coverage(residuals)
        if count:
            lines.append(
                f"Error bars, each from all other sources: {inside} of {count_text(count, 'row')} within the 90 % bar "
                f"({100 * inside / count:.0f} %)"
            )
        in_memory, num_memory = memory_coverage(residuals)
        if num_memory:
            lines.append(f"Error bars of memory: {in_memory} of {count_text(num_memory, 'row')} within the bar")
        right, num_pairs = orders_of(residuals, held_out)
        if num_pairs:
            lines.append(
                f"Order: {right} of {count_text(num_pairs, 'pair')} of one source and model over 5 % apart in the "
                "right order"
            )
        if (errors := difference_errors(residuals)) is not None:
            lines.append(_difference_text(errors))
    if fitted := [result for result in simulated if result.row.split == "fitted"]:
        lines.append(
            f"Fitted: {count_text(len(fitted), 'row')}, median error {100 * median_error(fitted):.1f} %, worst "
            f"{error_text(worst_of(fitted).log_error)}"
        )
    if left_out:
        lines.append(f"Not simulated: {count_text(left_out, 'row')}; -v shows the reasons")
    return lines


def _difference_text(errors: DifferenceErrors) -> str:
    return (
        f"Ratio of two plans: error {100 * errors.same_kind:.1f} % with equal kinds of parallelism "
        f"({count_text(errors.num_pairs, 'pair')} of {count_text(errors.num_sources, 'source')}), "
        f"{100 * errors.other_kind:.1f} % otherwise"
    )


def record_of(results: Sequence[Compared]) -> dict[str, Any]:
    """Return the comparison as plain data."""
    rows = []
    for result in results:
        row = {name: getattr(result.row, name) for name in result.row.__struct_fields__}
        rows.append(
            {
                **row,
                "plan": result.row.plan,
                "simulated_step_s": result.step_s,
                "published_step_s": result.published_s,
                "simulated_reserved_bytes": result.reserved_bytes,
                "why_not": result.why,
            }
        )
    return {"rows": rows, "summary": summary(results)}


def residual_figure(results: Sequence[Compared]) -> "Picture":
    """Return the picture: error of the step time of each row, by class, held-out and fitted rows apart."""
    from matplotlib.figure import Figure as Picture

    simulated = [result for result in results if result.step_s is not None]
    classes = classes_of(simulated)
    figure = Picture(figsize=(7.2, 0.27 * len(classes) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    labels, kinds = [], [kind for kind, _, _ in classes]
    for place, (kind, name, rows) in enumerate(classes):
        labels.append(name if place and kinds[place - 1] == kind else f"{kind}: {name}")
        for split, color, offset in (("fitted", style.GREY, 0.16), ("held-out", style.BLUE, -0.16)):
            errors = [100 * (math.exp(row.log_error) - 1) for row in rows if row.row.split == split]
            axes.plot(errors, [place + offset] * len(errors), "o", color=color, markersize=3, alpha=0.6)
            if errors:
                axes.plot([median(errors)], [place + offset], "|", color=color, markersize=9, markeredgewidth=2)
        if place and kinds[place - 1] != kind:
            axes.axhline(place - 0.5, color=style.GREY, linewidth=0.5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("error of the simulated step time, % (below 0: too fast); bar: median")
    for split, color in (("held-out", style.BLUE), ("fitted", style.GREY)):
        if any(result.row.split == split for result in simulated):
            axes.plot([], [], "o", color=color, label=split)
    axes.legend(loc="best", fontsize=8)
    return figure
