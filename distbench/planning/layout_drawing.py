"""Layouts of each rank after each step of a plan: as data, as text, and as a picture."""

import colorsys
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.planning.direct_exchange import overlap, volume
from distbench.planning.placement_states import Box, State, box_of
from distbench.planning.recommendation import Advice, time_words
from distbench.planning.redistribution_plans import Plan, PlannedStep, Setting
from distbench.show.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, save_figure, styled
from distbench.show.terminal import width_here, wrap
from distbench.show.units import size_text
from distbench.spec.errors import UserError
from distbench.spec.mesh import format_mesh
from distbench.spec.placements import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_DRAWN_DIMS = 2


@dataclass(frozen=True)
class Scene:
    """One layout of a plan, and the step before it (None for the source)."""

    state: State
    step: PlannedStep | None
    boxes: tuple[Box, ...]  # of each rank, drawn tensor dims only
    parts: tuple[
        int | None, ...
    ]  # for each rank, the number of the sum of which it holds a part; None without a partial


@dataclass(frozen=True)
class Drawing:
    """A plan's layouts over at most two tensor dims."""

    plan: Plan
    dims: tuple[int, ...]  # the tensor dims drawn, the first one downwards; one for a 1-D tensor
    sizes: tuple[int, ...]  # their elements
    left_out: tuple[int, ...]  # tensor dims that are never sharded
    scenes: tuple[Scene, ...]  # the source, then the layout after each step

    @property
    def has_partials(self) -> bool:
        """Return whether ranks hold parts of sums in any layout."""
        return any(scene.state.partials for scene in self.scenes)

    @property
    def left_out_note(self) -> str:
        """Sentence on undrawn tensor dims, with a leading space; "" if all tensor dims are drawn."""
        names = ", ".join(map(str, self.left_out))
        return f" Not drawn: tensor dim {names}, replicated on every rank." if names else ""


def drawing_of(setting: Setting, plan: Plan, max_ranks: int) -> Drawing | str:
    """Return a plan's drawing, or the reason why the plan is not drawn, such as more than `max_ranks` ranks."""
    mesh_shape, shape = setting.problem.mesh_shape, setting.problem.shape
    cells = list(product(*(range(size) for size in mesh_shape)))
    if len(cells) > max_ranks:
        return f"Not drawn: {len(cells)} ranks, but at most {max_ranks} fit."
    sharded = {dim for state in plan.states for dim, order in enumerate(state.orders) if order}
    # Add unsharded tensor dims up to two, so that a plan over one tensor dim still looks like the tensor.
    unsharded = [dim for dim in range(setting.tensor_ndim) if dim not in sharded]
    dims = tuple(sorted([*sharded, *unsharded[: max(MAX_DRAWN_DIMS - len(sharded), 0)]]))
    if len(dims) > MAX_DRAWN_DIMS:
        return f"Not drawn: the path shards {len(dims)} tensor dims, but at most {MAX_DRAWN_DIMS} fit."
    scenes = []
    for state, step in zip(plan.states, (None, *plan.steps), strict=True):
        boxes = [box_of(state, shape, mesh_shape, cell) for cell in cells]
        scenes.append(Scene(state, step, tuple(tuple(box[dim] for dim in dims) for box in boxes), _parts(state, cells)))
    left_out = tuple(dim for dim in range(setting.tensor_ndim) if dim not in dims)
    return Drawing(plan, dims, tuple(shape[dim] for dim in dims), left_out, tuple(scenes))


def _parts(state: State, cells: list[tuple[int, ...]]) -> tuple[int | None, ...]:
    """Number the sums: ranks that differ only along partial mesh dims hold parts of one sum."""
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
    """Return the diagram with a heading, within the screen's width."""
    panels = [_panel(scene, drawing.sizes) for scene in drawing.scenes]
    arrows = [_text_arrow(step.text) for step in drawing.plan.steps]
    down = f"tensor dim {drawing.dims[0]} downwards, " if len(drawing.dims) > 1 else ""
    across = f"tensor dim {drawing.dims[-1]} across; each block shows its ranks"
    parts = ", a+b for ranks with parts of a sum" if drawing.has_partials else ""
    head = f"The path of {drawing.plan.planner}: {down}{across}{parts}.{drawing.left_out_note}"
    return "\n".join([*wrap(head, width_here()), "", *_side_by_side(panels, arrows)])


def _panel(scene: Scene, sizes: Sequence[int]) -> Lines:
    boxes = scene.boxes if len(sizes) > 1 else tuple(((0, 1), *box) for box in scene.boxes)
    edges = [sorted({edge for box in boxes for edge in box[dim] if box[dim][0] < box[dim][1]}) for dim in (0, 1)]
    rows, columns = (list(pairwise(positions)) for positions in edges)
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


def _holders(scene: Scene, boxes: Sequence[Box], block: Box) -> str:
    """Return the ranks that hold a block: `0-3`, `0 2`, or `0+2 1+3` if each holds a part of a sum."""
    sums: dict[int, list[int]] = defaultdict(list)
    for rank, box in enumerate(boxes):
        if overlap(box, block) == block:
            part = scene.parts[rank]
            sums[-1 - rank if part is None else part].append(rank)
    firsts = [ranks[0] for ranks in sums.values()]
    if len(firsts) > 2 and firsts == [*range(firsts[0], firsts[-1] + 1)] and max(map(len, sums.values())) == 1:
        return f"{firsts[0]}-{firsts[-1]}"
    return " ".join("+".join(map(str, ranks)) for ranks in sums.values())


def _text_arrow(text: str) -> Lines:
    op, _, over = text.partition(" over ")
    width = max(len(op), len(over) + 5, 8)
    return _padded(["", op.center(width), "-" * (width - 1) + ">", f"over {over}".center(width) if over else ""])


def _side_by_side(panels: Sequence[Lines], arrows: Sequence[Lines]) -> Lines:
    """Join panels and arrows horizontally; an arrow that does not fit starts a line with its panel."""
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


MAX_PICTURE_RANKS = 64
SUFFIXES = (".png", ".svg")
ABOVE_POINTS = 3
# One family of colours per rank of the outermost mesh dim.
FAMILIES = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
PALEST, ONLY_BLOCK_PALER = 0.72, 0.4
MARGIN = 0.07
PANEL_INCHES, HEAD_INCHES, HEAD_GAP_INCHES = 3.3, 1.15, 0.5
FOOT_CHARACTERS_PER_INCH = 13


def check_picture(path: Path) -> None:
    """Raise UserError for suffixes other than .png and .svg, or a missing folder."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"picture {path} ends with {path.suffix or 'no suffix'!r}; give a .png or .svg file")
    if not path.parent.is_dir():
        raise UserError(f"folder {path.parent} of picture {path} does not exist; create the folder first")


def save_picture(setting: Setting, advice: Advice, path: Path) -> str:
    """Draw the recommended plan, and DTensor's default if its path differs; return a sentence on the picture.

    Raises UserError if the file cannot be written.
    """
    use, plans = advice.use, [advice.use]
    default = advice.plans.get(BASELINE, use)
    if default is not use and (default.states != use.states or use.planner == "direct"):
        plans.append(default)
    rows: list[Drawing] = []
    for plan in plans:
        drawing = drawing_of(setting, plan, MAX_PICTURE_RANKS)
        if isinstance(drawing, str):
            return f"Picture: {drawing[0].lower()}{drawing[1:]}"
        rows.append(drawing)
    try:
        _save(setting, rows, path)
    except OSError as error:
        raise UserError(f"picture {path} cannot be written ({error.strerror}); give another path") from error
    return f"Picture: {path}, {' and '.join(plan.planner for plan in plans)}, one panel per step."


def _save(setting: Setting, rows: Sequence[Drawing], path: Path) -> None:
    num_columns = max(len(drawing.scenes) for drawing in rows)
    grid_rows, grid_columns = _tile_grid(setting)
    panel_inches = PANEL_INCHES * min(max(grid_rows / grid_columns, 0.35), 1.6)
    height = len(rows) * (panel_inches + HEAD_INCHES) + 0.8
    with styled():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(num_columns * PANEL_INCHES * 1.1, 8.0), height))
        FigureCanvasAgg(figure)
        figure.subplots_adjust(
            left=0.02, right=0.98, top=1 - 0.85 / height, bottom=0.62 / height, wspace=0.16, hspace=0.85 / panel_inches
        )
        for number, drawing in enumerate(rows):
            _draw_row(figure, setting, drawing, (len(rows), num_columns, number * num_columns + 1))
        foot = "\n".join(wrap(_foot(setting, rows), int(figure.get_figwidth() * FOOT_CHARACTERS_PER_INCH)))
        figure.text(0.02, 0.1 / height, foot, fontsize=9, color="#404040", va="bottom")
        save_figure(figure, path)


def _foot(setting: Setting, rows: Sequence[Drawing]) -> str:
    *outer, inner = setting.mesh
    hatched = " Hatched areas are parts of a sum." if any(drawing.has_partials for drawing in rows) else ""
    return (
        f"{setting.tensor} on {format_mesh(setting.mesh)}. Each tile is a rank at its mesh position (rows: "
        f"{', '.join(outer) or 'one'}, columns: {inner}), and the tile's outline is the tensor. The filled part is "
        f"the rank's shard, in the colour of the rank that had this part in the source.{hatched}{rows[0].left_out_note}"
    )


def _tile_grid(setting: Setting) -> tuple[int, int]:
    """Return (rows, columns) of tiles: the innermost mesh dim goes across, all others go down."""
    *outer, inner = setting.problem.mesh_shape
    return math.prod(outer), inner


def _draw_row(figure: Any, setting: Setting, drawing: Drawing, grid: tuple[int, int, int]) -> None:
    """Draw one plan's panels; `grid` is (rows, columns, number of the first panel), as for `add_subplot`."""
    num_rows, num_columns, first = grid
    plan = drawing.plan
    colours = _colours(setting, drawing.scenes[0])
    for index, scene in enumerate(drawing.scenes):
        axes = figure.add_subplot(num_rows, num_columns, first + index)
        _draw_scene(axes, setting, drawing, scene, colours)
        _above(axes, str(scene.state), 0, "left", fontsize=12, fontweight="bold")
        if scene.step:
            _arrow(axes, scene.step)
    default = " (DTensor's default)" if plan.planner == BASELINE else ""
    head = (
        f"{plan.planner}{default}: {time_words(plan.seconds)} predicted, each rank sends {size_text(plan.sent_bytes)}"
    )
    if first == 1:
        head = f"Use {head}"
    top = figure.axes[-1].get_position().y1 + HEAD_GAP_INCHES / figure.get_size_inches()[1]
    figure.text(0.02, top, head, fontsize=13, fontweight="bold", va="bottom")


def _arrow(axes: "Axes", step: PlannedStep) -> None:
    """Draw the step before this panel as text above it, and an arrow from the previous panel."""
    cost = f"{size_text(step.sent_bytes)} sent, {time_words(step.seconds)}" if step.is_collective else "nothing sent"
    _above(axes, f"{step.text}\n{cost}", 1, "right", fontsize=9, color=RED)
    style = {"arrowstyle": "-|>", "color": RED, "linewidth": 2.5, "mutation_scale": 18}
    ends: dict[str, Any] = {"xy": (-0.015, 0.5), "xytext": (-0.145, 0.5), "xycoords": "axes fraction"}
    axes.annotate("", **ends, arrowprops=style, annotation_clip=False)


def _above(axes: "Axes", text: str, x: float, side: Any, **style: Any) -> None:
    """Write text above the panel, at the same distance in every size of picture."""
    style |= {"xycoords": "axes fraction", "textcoords": "offset points", "ha": side, "va": "bottom"}
    axes.annotate(text, xy=(x, 1), xytext=(0, ABOVE_POINTS), **style)


def _draw_scene(axes: "Axes", setting: Setting, drawing: Drawing, scene: Scene, colours: Mapping[Box, Any]) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    num_rows, num_columns = _tile_grid(setting)
    axes.set_xlim(-0.06, num_columns + 0.06)
    axes.set_ylim(num_rows + 0.06, -0.06)
    axes.axis("off")
    for rank, box in enumerate(scene.boxes):
        row, column = divmod(rank, num_columns)
        hatch = "////" if scene.parts[rank] is not None else None
        for block, colour in colours.items():
            piece = overlap(box, block)
            if volume(piece):
                corner, width, height = _inside_tile(piece, drawing.sizes, row, column)
                filled = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4, "hatch": hatch}
                axes.add_patch(Rectangle(corner, width, height, **filled))
        corner, width, height = _inside_tile(tuple((0, size) for size in drawing.sizes), drawing.sizes, row, column)
        axes.add_patch(Rectangle(corner, width, height, facecolor="none", edgecolor=GREY, linewidth=1.0))
        centre = corner[0] + width / 2, corner[1] + height / 2
        size = 12 if num_columns <= 4 else 9
        label = axes.text(*centre, str(rank), ha="center", va="center", fontsize=size, fontweight="bold", color="black")
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _inside_tile(box: Box, sizes: Sequence[int], row: int, column: int) -> tuple[tuple[float, float], float, float]:
    """Return (corner, width, height) of a part of the tensor inside its rank's tile."""
    inside = 1 - 2 * MARGIN
    (top, bottom), (left, right) = box if len(box) > 1 else ((0, 1), box[0])
    height, width = sizes if len(sizes) > 1 else (1, sizes[0])
    corner = column + MARGIN + inside * left / width, row + MARGIN + inside * top / height
    return corner, inside * (right - left) / width, inside * (bottom - top) / height


def _colours(setting: Setting, source: Scene) -> dict[Box, Any]:
    """Return a colour for each block of the source: a family by its first holder's outermost mesh index, then paler."""
    firsts: dict[Box, int] = {}
    for rank, box in enumerate(source.boxes):
        if volume(box):
            firsts.setdefault(box, rank)
    if len(firsts) == 1:
        return dict.fromkeys(firsts, _paler(BLUE, ONLY_BLOCK_PALER))
    inner = math.prod(setting.problem.mesh_shape[1:])
    families: dict[int, list[Box]] = {}
    for box, rank in firsts.items():
        families.setdefault(rank // inner, []).append(box)
    return {
        box: _paler(colour, PALEST * index / len(members))
        for colour, members in zip(itertools.cycle(FAMILIES), families.values(), strict=False)
        for index, box in enumerate(members)
    }


def _paler(colour: str, share: float) -> tuple[float, float, float]:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    hue, lightness, saturation = colorsys.rgb_to_hls(*channels)
    return colorsys.hls_to_rgb(hue, lightness + (0.93 - lightness) * share, saturation)
