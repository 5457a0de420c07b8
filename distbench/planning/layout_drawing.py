"""What each rank holds after each step of a plan, as data to draw and as text."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from distbench.planning.direct_exchange import overlap
from distbench.planning.placement_states import Box, State, box_of
from distbench.planning.plan_request import Setting
from distbench.planning.redistribution_plans import Plan, PlannedStep
from distbench.show.terminal import width_here, wrap

# What there is to draw of a plan: which part of the tensor each rank holds after each step. Data only.

MAX_DRAWN_DIMS = 2


@dataclass(frozen=True)
class Scene:
    """One layout of a plan, and the step that led there (None for the source).

    Args:
        boxes: what each rank holds, drawn tensor dims only.
        parts: for each rank, the number of the sum it holds a part of; None without a partial.
    """

    state: State
    step: PlannedStep | None
    boxes: tuple[Box, ...]
    parts: tuple[int | None, ...]


@dataclass(frozen=True)
class Drawing:
    """A plan's layouts over at most two tensor dims.

    Args:
        dims: the tensor dims drawn, first downwards; one for a 1-D tensor. `sizes`: their elements.
        left_out: tensor dims that are never sharded, and that are not drawn.
        scenes: the source, then the layout after each step.
    """

    plan: Plan
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    left_out: tuple[int, ...]
    scenes: tuple[Scene, ...]

    @property
    def has_partials(self) -> bool:
        """Whether ranks hold parts of sums anywhere on the way."""
        return any(scene.state.partials for scene in self.scenes)

    @property
    def left_out_note(self) -> str:
        """A sentence on the tensor dims left out, a space before it; empty for none."""
        names = ", ".join(map(str, self.left_out))
        return f" Not drawn: tensor dim {names}, whole on every rank." if names else ""


def drawing_of(setting: Setting, plan: Plan, max_ranks: int) -> Drawing | str:
    """What to draw of a plan, or a sentence that says why it is not drawn: `max_ranks` ranks fit."""
    mesh_shape, shape = setting.problem.mesh_shape, setting.problem.shape
    cells = list(product(*(range(size) for size in mesh_shape)))
    if len(cells) > max_ranks:
        return f"Not drawn: {len(cells)} ranks, of which at most {max_ranks} fit."
    dims = _dims(plan, setting.tensor_ndim)
    if len(dims) > MAX_DRAWN_DIMS:
        return f"Not drawn: the path cuts {len(dims)} tensor dims, of which at most {MAX_DRAWN_DIMS} fit on paper."
    scenes = []
    for state, step in zip(plan.states, (None, *plan.steps), strict=True):
        boxes = [box_of(state, shape, mesh_shape, cell) for cell in cells]
        scenes.append(Scene(state, step, tuple(tuple(box[dim] for dim in dims) for box in boxes), _parts(state, cells)))
    left_out = tuple(dim for dim in range(setting.tensor_ndim) if dim not in dims)
    return Drawing(plan, dims, tuple(shape[dim] for dim in dims), left_out, tuple(scenes))


def _dims(plan: Plan, tensor_ndim: int) -> tuple[int, ...]:
    sharded = {dim for state in plan.states for dim, order in enumerate(state.orders) if order}
    # Whole tensor dims fill up to two, so that a plan over one tensor dim still looks like the tensor.
    unsharded = [dim for dim in range(tensor_ndim) if dim not in sharded]
    return tuple(sorted([*sharded, *unsharded[: max(MAX_DRAWN_DIMS - len(sharded), 0)]]))


def _parts(state: State, cells: list[tuple[int, ...]]) -> tuple[int | None, ...]:
    """Ranks that differ along partial mesh dims alone hold parts of one sum."""
    partial = {mesh_dim for mesh_dim, _ in state.partials}
    if not partial:
        return (None,) * len(cells)
    numbers: dict[tuple[int, ...], int] = {}
    keys = [tuple(index for mesh_dim, index in enumerate(cell) if mesh_dim not in partial) for cell in cells]
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


MAX_TEXT_RANKS = 16
GAP = "  "
Lines = list[str]


def diagram_of(drawing: Drawing) -> str:
    """The diagram, within the screen's width, below which plan it is of."""
    panels = [_panel(scene, drawing.sizes) for scene in drawing.scenes]
    arrows = [_arrow(step.text) for step in drawing.plan.steps]
    head = wrap(f"The path of {drawing.plan.planner}: {_legend(drawing)}", width_here())
    return "\n".join([*head, "", *_side_by_side(panels, arrows)])


def _legend(drawing: Drawing) -> str:
    down = f"tensor dim {drawing.dims[0]} downwards, " if len(drawing.dims) > 1 else ""
    parts = ", a+b those that hold parts of a sum" if drawing.has_partials else ""
    across = f"tensor dim {drawing.dims[-1]} across; in a block the ranks that hold it"
    return f"{down}{across}{parts}.{drawing.left_out_note}"


def _panel(scene: Scene, sizes: Sequence[int]) -> Lines:
    boxes = scene.boxes if len(sizes) > 1 else tuple(((0, 1), *box) for box in scene.boxes)
    rows, columns = (_intervals(boxes, dim) for dim in (0, 1))
    texts = [[_holders(scene, boxes, (row, column)) for column in columns] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(*texts, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [rule]
    for row in texts:
        cells = (text.center(width) for text, width in zip(row, widths, strict=True))
        lines += ["| " + " | ".join(cells) + " |", rule]
    return _padded([str(scene.state), *lines])


def _padded(lines: Lines) -> Lines:
    width = max(map(len, lines))
    return [line.ljust(width) for line in lines]


def _intervals(boxes: Sequence[Box], dim: int) -> list[tuple[int, int]]:
    edges = sorted({edge for box in boxes for edge in box[dim] if box[dim][0] < box[dim][1]})
    return list(pairwise(edges))


def _holders(scene: Scene, boxes: Sequence[Box], block: Box) -> str:
    """The ranks that hold a block: `0-3`, `0 2`, or `0+2 1+3` where each holds a part of a sum."""
    sums: dict[int, list[int]] = defaultdict(list)
    for rank, box in enumerate(boxes):
        if overlap(box, block) == block:
            part = scene.parts[rank]
            sums[-1 - rank if part is None else part].append(rank)
    firsts = [ranks[0] for ranks in sums.values()]
    if len(firsts) > 2 and firsts == [*range(firsts[0], firsts[-1] + 1)] and max(map(len, sums.values())) == 1:
        return f"{firsts[0]}-{firsts[-1]}"
    return " ".join("+".join(map(str, ranks)) for ranks in sums.values())


def _arrow(text: str) -> Lines:
    op, _, over = text.partition(" over ")
    width = max(len(op), len(over) + 5, 8)
    return _padded(["", op.center(width), "-" * (width - 1) + ">", f"over {over}".center(width) if over else ""])


def _side_by_side(panels: Sequence[Lines], arrows: Sequence[Lines]) -> Lines:
    """Panels and arrows next to each other; an arrow goes to the next line with its panel where there is no room."""
    rows: list[list[Lines]] = [[panels[0]]]
    for arrow, panel in zip(arrows, panels[1:], strict=True):
        width = sum(len(part[0]) + len(GAP) for part in (*rows[-1], arrow, panel)) - len(GAP)
        if width > width_here():
            rows.append([])
        rows[-1] += [arrow, panel]
    lines: Lines = []
    for row in rows:
        height = max(map(len, row))
        filled = [_padded(part + [""] * (height - len(part))) for part in row]
        lines += ["", *(GAP.join(pieces).rstrip()[: width_here()] for pieces in zip(*filled, strict=True))]
    return lines[1:]
