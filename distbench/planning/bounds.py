"""A lower bound of what is left to pay, for A*: the cheapest path when most of a state is forgotten.

Forgotten are which tensor dims are sharded, in which order, and whether the target's own mesh dims shard already
(here they always do, as do those that a zero-fill may take out of a shard at any time, here for nothing). Every real
path maps to such an abstract one that costs no more (a pattern database, Culberson and Schaeffer 1998), so the bound is
admissible and consistent. Bytes are unpadded shares in it: a padded one depends on the tensor dim that is forgotten,
and could be larger than what the cheapest path really moves.
"""

from distbench.costmodel.lines import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from distbench.planning.pricing import Pricing


class Bounds(dict[int, int]):
    """Least packed price from a state with these pending bits (see `Graph`) to one that the target's bits shard."""

    def __init__(self, pricing: Pricing, target: int) -> None:
        super().__init__()
        graph = pricing.graph
        self.mesh_ndim, self.share_label = graph.mesh_ndim, pricing.share_label
        self.zero_filled = sum(1 << mesh_dim for mesh_dim in graph.zero_filled)
        self.target = target | self.zero_filled
        self.others = ((1 << graph.mesh_ndim) - 1) & ~self.target
        self.leaving_ops = (ALL_GATHER, ALL_TO_ALL) if graph.tensor_ndim > 1 else (ALL_GATHER,)
        self._gathers = {0: 0}

    def __missing__(self, bits: int) -> int:
        gathered = bits & self.others
        found = self._gather(gathered)
        if rest := (bits ^ gathered) & ~self.zero_filled:
            found += self._leave(rest, self.target | gathered)
        # Sharding once more makes all else smaller, and must be gathered again.
        unsharded = self.others & ~gathered
        while unsharded:
            bit = unsharded & -unsharded
            unsharded ^= bit
            other = self[bits | bit]
            if other < found:
                found = other
        self[bits] = found
        return found

    def _gather(self, sharding: int) -> int:
        """All-gathers of these mesh dims, in the best order, while the target's own mesh dims shard."""
        known = self._gathers.get(sharding)
        if known is not None:
            return known
        options = []
        for mesh_dim in range(self.mesh_ndim):
            if sharding >> mesh_dim & 1:
                label = self.share_label(ALL_GATHER, mesh_dim, self.target | sharding)
                options.append(label + self._gather(sharding ^ 1 << mesh_dim))
        self._gathers[sharding] = found = min(options)
        return found

    def _leave(self, bits: int, sharded: int) -> int:
        """Each of these mesh dims leaves its tensor dim, or its partial, while all of `sharded` shard."""
        total = 0
        for mesh_dim in range(self.mesh_ndim):
            if bits >> mesh_dim & 1:
                total += min([self.share_label(op, mesh_dim, sharded) for op in self.leaving_ops])
            elif bits >> mesh_dim + self.mesh_ndim & 1:
                mask = sharded & ~(1 << mesh_dim)
                reduced = self.share_label(ALL_REDUCE, mesh_dim, mask)
                total += min(reduced, self.share_label(REDUCE_SCATTER, mesh_dim, mask))
        return total
