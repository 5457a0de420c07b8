"""What there is to draw of a plan: which part of the tensor each rank holds after each step. Data only."""

from dataclasses import dataclass
from itertools import product

from distbench.advise.plans import Plan, PlannedStep
from distbench.advise.question import Setting
from distbench.planning import Box, State, box_of

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
    whole = [dim for dim in range(tensor_ndim) if dim not in sharded]
    return tuple(sorted([*sharded, *whole[: max(MAX_DRAWN_DIMS - len(sharded), 0)]]))


def _parts(state: State, cells: list[tuple[int, ...]]) -> tuple[int | None, ...]:
    """Ranks that differ along partial mesh dims alone hold parts of one sum."""
    partial = {mesh_dim for mesh_dim, _ in state.partials}
    if not partial:
        return (None,) * len(cells)
    numbers: dict[tuple[int, ...], int] = {}
    keys = [tuple(index for mesh_dim, index in enumerate(cell) if mesh_dim not in partial) for cell in cells]
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)
