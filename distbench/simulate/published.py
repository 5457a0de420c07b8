"""Published steps: rows of CSV files, each with a scenario that expresses it, a machine, the figures and their
source.

Lines `# FIELD: VALUE` before a file's header give fields of all its rows. A row's own value is appended to `left_open`,
and replaces any other field.
"""

import csv
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from distbench.simulate.hardware_file import FIGURES
from distbench.spec.errors import UserError, nearest
from distbench.spec.json_decoder import decode
from distbench.spec.mesh import parse_mesh

FOLDER = Path(__file__).parent / "accuracy"
SHIPPED = "published"  # the name of FOLDER as an argument
MAX_ROWS = 10_000
REQUIRED = ("name", "url", "split", "tokens_per_s", "dtype", "mode")
Positive = Annotated[float, Meta(gt=0, lt=1e12, description="a number above 0")]


class Published(Struct, frozen=True):
    """One published step.

    Args:
        source: the file's name, which identifies the source; error bars treat rows of a source as dependent.
        url: where the figures were read.
        split: "fitted" if figures of hardware files or rules were fitted to any row of this source.
        left_open: facts that the source does not state, and the assumptions.
        scenario, choices, mesh: the step, as for `simulate SCENARIO --set CHOICE --mesh MESH`.
        hardware: a hardware file.
        machine: figures that replace the hardware file's, as NAME=VALUE.
        dtype: of the matmuls of all layers.
        mode: whether the layers are compiled.
        loss: how the software computes the loss, as `ParallelPlan.loss`; empty if the source does not state it, then
            simulated as eager.
        tokens_per_s: per device.
        reserved_gib: largest max_reserved of all devices.
        not_simulated: the reason why no scenario expresses the row.
        stated_cause: a fact of the source for which the row's machine or step is not the simulated one; error bars do
            not use the row.
    """

    name: str
    source: str
    url: str
    split: Literal["fitted", "held-out"]
    tokens_per_s: Positive
    dtype: Literal["bf16", "float8"]
    mode: Literal["eager", "compile"]
    loss: Literal["", "eager", "compiled", "chunked"] = ""
    software: str = ""
    left_open: str = ""
    scenario: str = ""
    choices: str = ""
    mesh: str = ""
    hardware: str = ""
    machine: str = ""
    reserved_gib: Positive | None = None
    expandable_segments: Literal["yes", "no"] = "no"
    not_simulated: str = ""
    stated_cause: str = ""

    def __post_init__(self) -> None:
        """Check the texts with parts."""
        if not self.not_simulated:
            if missing := next((name for name in ("scenario", "mesh", "hardware") if not getattr(self, name)), None):
                raise ValueError(f"{missing} is missing; give {missing}, or the reason in not_simulated")
            self.sizes, self.choice_texts, self.figures  # noqa: B018 - raise their errors

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh dim to size."""
        return parse_mesh(self.mesh)

    @property
    def choice_texts(self) -> tuple[str, ...]:
        """Each NAME=VALUE of the choices."""
        return tuple(_assignment(text, "choices") for text in self.choices.split())

    @property
    def figures(self) -> dict[str, float]:
        """Map each figure that differs from the hardware file to the machine's value."""
        figures = dict(_assignment(text, "machine").split("=", 1) for text in self.machine.split())
        for name in figures:
            if name not in FIGURES:
                raise ValueError(f"machine: figure {name} is unknown ({nearest(name, FIGURES)})")
        return {name: decode(_number(value), FIGURES[name], f"machine.{name}") for name, value in figures.items()}

    @property
    def plan(self) -> str:
        """Kinds of parallelism, such as "FSDP x TP"."""
        return plan_kinds(self.sizes) if self.mesh else "other"

    @property
    def sequence(self) -> int | None:
        """Tokens per sample, if chosen."""
        return next((int(text.split("=")[1]) for text in self.choice_texts if text.startswith("sequence=")), None)


def plan_kinds(mesh: Mapping[str, int]) -> str:
    """Return the kinds of parallelism of a mesh, such as "FSDP x TP"; the class of a plan.

    >>> plan_kinds({"dp_replicate": 2, "dp_shard": 8, "tp": 4})
    'FSDP x TP'
    """
    kinds = {"dp_shard": "FSDP", "cp": "CP", "tp": "TP", "pp": "PP", "ep": "EP"}
    has = [kind for mesh_dim, kind in kinds.items() if mesh.get(mesh_dim, 1) > 1]
    return " x ".join(has) or ("FSDP" if mesh.get("dp_replicate", 1) > 1 else "one device")


def published_rows(path: Path | str, leave_out: Callable[[str], None] | None = None) -> list[Published]:
    """Read a CSV file, or all CSV files of a folder in alphabetical order.

    Args:
        leave_out: called with a sentence per invalid row, which is not returned; None raises the first one.

    Raises:
        UserError: no such file, no valid rows, an unknown or missing field, or an invalid value.
    """
    path = FOLDER if str(path) == SHIPPED else Path(path)
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    rows: list[Published] = []
    problems: list[UserError] = []
    for result in itertools.chain.from_iterable(map(_rows, files)):
        if isinstance(result, Published):
            rows.append(result)
        elif leave_out is None:
            raise result
        else:
            problems.append(result)
    if not rows:
        advice = f"give a CSV file of published steps, or {SHIPPED!r}"
        raise problems[0] if problems else UserError(f"--against {path} has no rows; {advice}")
    for problem in problems:
        assert leave_out is not None
        leave_out(f"left out: {problem}")
    return rows


def _rows(file: Path) -> Iterator[Published | UserError]:
    """Yield the rows, or the error of an invalid row."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--against {file} cannot be read ({why}); give a CSV file, or {SHIPPED!r}") from error
    head = {"source": file.stem}
    body = list(itertools.dropwhile(lambda line: line.startswith("#"), lines))
    for line in lines[: len(lines) - len(body)]:
        name, _, value = line.removeprefix("#").partition(":")
        head[name.strip()] = value.strip()
    reader = csv.DictReader(body)
    fields = Published.__struct_fields__
    for count, cells in enumerate(reader, start=1):
        where = f"--against {file}, row {count}"
        if count > MAX_ROWS:
            yield UserError(f"{where}: a file has at most {MAX_ROWS:,} rows; give further rows in another file")
            return
        if None in cells:
            yield UserError(f"{where} has more cells than the header; give one cell per field of the header")
            continue
        own = {name: cell for name, cell in cells.items() if cell}
        opens = "; ".join(filter(None, (head.get("left_open"), own.get("left_open"))))
        record: dict[str, object] = {**head, **own, "left_open": opens}
        try:
            for name in record:
                if name not in fields:
                    raise ValueError(f"field {name!r} is unknown ({nearest(str(name), fields)})")
            for name in REQUIRED:
                if name not in record:
                    raise ValueError(
                        f"{name} is missing; give {name} in the row, or for all rows in a line # {name}: VALUE"
                    )
            for name in ("tokens_per_s", "reserved_gib"):
                if name in record:
                    record[name] = _number(str(record[name]))
            yield decode(record, Published)
        except (ValueError, UserError) as error:
            yield UserError(f"{where}: {error}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _assignment(text: str, field: str) -> str:
    if "=" not in text.strip("="):
        raise ValueError(f"{field}: {text!r} is not NAME=VALUE")
    return text
