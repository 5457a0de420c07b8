"""Scripts for upstream issues, one per cause of wrong or broken redistributions, with the smallest case in pure
torch."""

import math
import re
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from distbench.records.dataframe import Row
from distbench.report.planner_study import Failure, Versions, numel_of, placements_of, sizes_in
from distbench.show.blocks import shorten
from distbench.spec.devices import device_of
from distbench.spec.file_io import write_whole, writing
from distbench.spec.placements import NATIVE, TORCH_PLANNERS, Placement
from distbench.spec.printable_text import clean

TEMPLATE = "reproducer_script.jinja"
MAX_NUMEL = 1_000_000
DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
# Reduce op of a Partial target to the all-reduce op that combines the parts. For an average, each part is the whole.
REDUCTIONS = {"sum": "SUM", "max": "MAX", "min": "MIN", "avg": "MAX"}
HAPPENED = {"wrong": "gives wrong values", "raised": "raises", "aborted": "kills a rank", "timeout": "hangs"}


class NotWritten(Exception):
    """A failure cannot be reproduced in pure torch, with the reason as message."""


class Cut(NamedTuple):
    """The cut of a tensor by one mesh dim."""

    mesh_dim: int
    tensor_dim: int
    num_pieces: int  # above 1 for a strided shard


class ScriptLayout(NamedTuple):
    """A layout in the form of the script."""

    placements: list[str]  # Python expressions, one per mesh dim
    reduce_ops: set[str]
    cuts: list[Cut]  # in order of execution
    order: dict[int, tuple[int, ...]]  # tensor dim to the mesh dims that shard the tensor dim
    is_ordered: bool  # whether the order differs from left to right


def write_reproducers(failures: Sequence[Failure], versions: Versions, folder: Path) -> list[str]:
    """Write one script per failure. Return sentences on the files, then on failures that pure torch cannot
    reproduce."""
    written, left_out = [], []
    with writing(f"--reproducers {folder}", "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for number, failure in enumerate(failures, start=1):
            words = f"{failure.status}-{failure.planner}-{failure.suite or 'pairs'}-{failure.pattern}"
            name = f"{number:02d}-" + re.sub(r"[^A-Za-z0-9_]+", "-", words).strip("-")[:80] + ".py"
            try:
                text = script_of(failure, versions, name)
            except NotWritten as reason:
                left_out.append(f"no reproducer for {failure.example['id']} ({failure.status}): {reason}")
                continue
            write_whole(folder / name, text)
            written.append(f"reproducer written: {folder / name}")
    return [*written, *left_out]


def script_of(failure: Failure, versions: Versions, file_name: str) -> str:
    """The script for the smallest case of a failure. Raise NotWritten if pure torch cannot reproduce the failure."""
    from jinja2 import Environment, StrictUndefined

    record = failure.example
    planner = failure.planner.partition("+")[0]
    if planner not in TORCH_PLANNERS:
        raise NotWritten(f"{planner} is a planner of distbench; run the case again with distbench")
    mesh_shape, shape = sizes_in(record["mesh_shape"]), sizes_in(record["shape"])
    if not mesh_shape or not shape or record["dtype"] not in DTYPES:
        raise NotWritten("the case has no mesh, shape or known dtype")
    if numel_of(record) > MAX_NUMEL:
        raise NotWritten(f"the smallest tensor has {numel_of(record)} elements")
    pair = f"{record['source']} -> {record['target']}"
    source, target = (layout_of(str(record[name]), mesh_shape) for name in ("source", "target"))
    if not source.reduce_ops | target.reduce_ops <= REDUCTIONS.keys():
        raise NotWritten(f"{pair} has a reduce op that the script does not support")
    sides = list(zip(source.placements, target.placements, strict=True))
    names = {text.partition("(")[0] for side in sides for text in side}
    becomes_partial = any(new.startswith("Partial") and new != old for old, new in sides)
    flattened = tuple(record["flattened"].split("x")) if record["flattened"] else ()
    where = f"of a {record['shape']} {record['dtype']} tensor on a {record['mesh_shape']} mesh"
    title = f"DTensor redistribute {pair} {where} {HAPPENED[failure.status]} ({failure.planner} planner)."
    error = shorten(str(record["error"] or "-"), 300)
    happened = f"{failure.status}: {error} (one of {failure.num_cases} such cases: {failure.pattern})"
    template = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return template.from_string(resources.files("distbench.report").joinpath(TEMPLATE).read_text("utf-8")).render(
        title=_docstring(title),
        happened=_docstring(happened, "    ", "Happened: "),
        torch=_docstring(versions.torch),
        backend=versions.backend,
        device=device_of(versions.backend),
        num_ranks=math.prod(mesh_shape),
        file_name=file_name,
        mesh_shape=mesh_shape,
        mesh_dim_names=_mesh_dim_names(record, len(mesh_shape), flattened),
        flattened=flattened,
        shape=shape,
        dtype=DTYPES[record["dtype"]],
        names=", ".join(sorted(names & {"Partial", "Replicate", "Shard"})) or "Replicate",
        source=", ".join(source.placements),
        target=", ".join(target.placements),
        source_ops=source.reduce_ops,
        target_ops=target.reduce_ops,
        source_cuts=[tuple(cut) for cut in source.cuts],
        target_cuts=[tuple(cut) for cut in target.cuts],
        source_order=source.order,
        target_order=target.order,
        reduction=REDUCTIONS[next(iter(target.reduce_ops), "sum")],
        min_cost=planner == "min_cost",
        native=failure.planner.endswith(NATIVE),
        strided="_StridedShard" in names,
        internals=source.is_ordered or target.is_ordered or becomes_partial,
        backward=record["direction"] == "backward",
    )


def _docstring(text: str, indent: str = "", before: str = "") -> str:
    """Text wrapped at 110 columns, and escaped for a docstring, because a rank may send any text."""
    lines = textwrap.wrap(before + clean(text), 110, subsequent_indent=indent)
    return "\n".join(lines).removeprefix(before).replace("\\", "/").replace('"""', "'''").removesuffix('"')


def _mesh_dim_names(record: Row, ndim: int, flattened: tuple[str, ...]) -> tuple[str, ...]:
    text = record["mesh"] if isinstance(record["mesh"], str) else ""
    names = tuple(part.partition("=")[0] for part in text.split(",")) if text else ()
    if len(names) == ndim:
        return names
    if len(flattened) == ndim:
        return flattened
    if flattened:
        raise NotWritten(f"the case flattens {'x'.join(flattened)} of a mesh without names")
    return tuple(f"d{index}" for index in range(ndim))


def layout_of(text: str, mesh_shape: Sequence[int]) -> ScriptLayout:
    """A layout in the form of the script, from text such as `S(0)[1]S(0)[0]`. Raise NotWritten for other text."""
    placements = placements_of(text.strip())
    if not placements or len(placements) != len(mesh_shape):
        raise NotWritten(f"the layout {text} is not valid")
    turns = sorted(
        (mesh_dim if shard.turn is None else shard.turn, Cut(mesh_dim, shard.tensor_dim, shard.split_factor or 1))
        for mesh_dim, shard in enumerate(placements)
        if shard.tensor_dim is not None
    )
    order: dict[int, tuple[int, ...]] = {}
    for _, cut in turns:
        order[cut.tensor_dim] = (*order.get(cut.tensor_dim, ()), cut.mesh_dim)
    return ScriptLayout(
        placements=list(map(_expression, placements)),
        reduce_ops={placement.reduce_op for placement in placements if placement.reduce_op},
        cuts=[cut for _, cut in turns],
        order=dict(sorted(order.items())),
        is_ordered=any(placement.turn is not None for placement in placements),
    )


def _expression(placement: Placement) -> str:
    if placement.reduce_op is not None:
        return f'Partial("{placement.reduce_op}")'
    if placement.split_factor is not None:
        return f"_StridedShard({placement.tensor_dim}, split_factor={placement.split_factor})"
    return "Replicate()" if placement.tensor_dim is None else f"Shard({placement.tensor_dim})"
