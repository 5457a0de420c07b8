"""How a tensor lies on the mesh before and after a redistribution. Plain data, no torch."""

from dataclasses import dataclass

from distbench.planning import State, state_of
from distbench.spec.layouts import Placement, format_placements, parse_placements


@dataclass(frozen=True)
class Layout:
    """One side of a redistribution; it has no state where no order of shards gives its strided shards."""

    placements: tuple[Placement, ...]
    state: State | None

    @classmethod
    def of(cls, text: str, tensor_ndim: int) -> "Layout":
        """The layout that a text in the notation of `spec.layouts` names; strided shards have no state."""
        placements = parse_placements(text)
        is_strided = any(placement.split_factor for placement in placements)
        return cls(placements, None if is_strided else state_of(placements, tensor_ndim))

    def __str__(self) -> str:
        return format_placements(self.placements)

    @property
    def has_partial(self) -> bool:
        """Whether a mesh dim still waits for its reduction."""
        return any(placement.reduce_op for placement in self.placements)

    @property
    def is_strided(self) -> bool:
        """Whether a mesh dim has a strided shard."""
        return any(placement.split_factor for placement in self.placements)

    @property
    def has_own_order(self) -> bool:
        """Whether some tensor dim is not sharded from left to right."""
        return self.state is not None and any(tuple(sorted(order)) != order for order in self.state.orders)


@dataclass(frozen=True)
class Pair:
    """One redistribution of one tensor; the shape is the full one's."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: str, target: str, shape: tuple[int, ...]) -> "Pair":
        """The pair of two layouts as text."""
        return cls(Layout.of(source, len(shape)), Layout.of(target, len(shape)), shape)

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"
