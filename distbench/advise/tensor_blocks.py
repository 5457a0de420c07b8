"""A plan's layouts as text: the tensor divided into blocks, in each block the ranks that hold it."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from distbench.advise.drawing import Drawing, Scene
from distbench.planning import Box
from distbench.planning.direct_exchange import overlap
from distbench.render.screen import width_here
from distbench.render.terminal import wrap

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
