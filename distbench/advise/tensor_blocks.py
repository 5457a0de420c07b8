"""A plan's layouts as text: the tensor cut into blocks, in each block the ranks that hold it."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from distbench.advise.drawing import Drawing, Scene
from distbench.planning import Box
from distbench.render.blocks import MAX_WIDTH, wrap

MAX_TEXT_RANKS = 16
GAP = "  "
Lines = list[str]


def diagram_of(drawing: Drawing, title: str) -> str:
    """The diagram, lines of at most 100 characters.

    Args:
        drawing: what to draw.
        title: which plan it is.
    """
    parts = []
    for scene in drawing.scenes:
        if scene.arrow:
            parts.append(_arrow(scene.arrow))
        parts.append(_panel(scene, drawing.sizes))
    return "\n".join([*wrap(f"{title} {_legend(drawing)}", MAX_WIDTH), "", *_side_by_side(parts)])


def _legend(drawing: Drawing) -> str:
    down = f"tensor dim {drawing.dims[0]} downwards" if len(drawing.dims) > 1 else ""
    across = f"tensor dim {drawing.dims[-1]} across"
    text = f"{down}, {across}" if down else across
    text += "; in a block the ranks that hold it"
    text += ", a+b those that hold parts of a sum." if any(scene.state.partials for scene in drawing.scenes) else "."
    if drawing.left_out:
        names = ", ".join(map(str, drawing.left_out))
        text += f" Not drawn: tensor dim {names}, whole on every rank."
    return text


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
    width = max(len(scene.layout), len(rule))
    return [line.ljust(width) for line in (scene.layout, *lines)]


def _intervals(boxes: Sequence[Box], dim: int) -> list[tuple[int, int]]:
    edges = sorted({edge for box in boxes for edge in box[dim] if box[dim][0] < box[dim][1]})
    return list(pairwise(edges))


def _holders(scene: Scene, boxes: Sequence[Box], block: Box) -> str:
    sums: dict[int, list[int]] = defaultdict(list)
    for rank, box in enumerate(boxes):
        if all(low <= start and stop <= high for (low, high), (start, stop) in zip(box, block, strict=True)):
            part = scene.parts[rank]
            sums[-1 - rank if part is None else part].append(rank)
    if all(len(ranks) == 1 for ranks in sums.values()):
        return _ranks([ranks[0] for ranks in sums.values()])
    return " ".join("+".join(map(str, ranks)) for ranks in sums.values())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))


def _arrow(text: str) -> Lines:
    op, _, over = text.partition(" over ")
    width = max(len(op), len(over) + 5, 8)
    lines = ["", op.center(width), "-" * (width - 1) + ">", f"over {over}".center(width) if over else ""]
    return [line.ljust(width) for line in lines]


def _side_by_side(parts: Sequence[Lines]) -> Lines:
    """Panels and arrows next to each other; an arrow goes to the next line with its panel where there is no room."""
    rows: list[list[Lines]] = [[parts[0]]]
    for arrow, panel in zip(parts[1::2], parts[2::2], strict=True):
        width = sum(len(part[0]) + len(GAP) for part in (*rows[-1], arrow, panel)) - len(GAP)
        if width > MAX_WIDTH:
            rows.append([])
        rows[-1] += [arrow, panel]
    lines: Lines = []
    for row in rows:
        height = max(map(len, row))
        filled = [part + [" " * len(part[0])] * (height - len(part)) for part in row]
        lines += ["", *(GAP.join(pieces).rstrip()[:MAX_WIDTH] for pieces in zip(*filled, strict=True))]
    return lines[1:]
