"""What does not divide evenly, as a sentence with the sizes that would do; and problems of many layers told once."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distbench.spec.parallel import folded
from distbench.worker.rank.rank_context import RankContext

# Of the sizes that a sentence names.
LARGEST_SIZE = 64
MAX_NAMED = 12
# A module's or parameter's name with the number of a layer in it.
_IN_LAYER = re.compile(r"(?<![\w.])(?:\w+\.)*\d+(?:\.\w+)*(?![\w.])")


@dataclass(frozen=True)
class Undivided:
    """Mesh dims do not shard a tensor dim, or a batch, evenly: a sentence in two halves.

    Args:
        name: the parameter's, or empty.
        what: the half that names it, such as "parameter w of shape [3, 4] cannot be sharded on tensor dim 0".
        why: the half that other parameters may have as well.
    """

    name: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} {self.why}"


def undivided(what: str, number: int, mesh_dims: Sequence[str], context: RankContext, name: str = "") -> Undivided:
    """That the mesh dims do not shard a tensor dim (or batch) of `number` evenly, as a sentence that begins `what`."""
    _, size = context.index(tuple(mesh_dims))
    where = f"mesh dim {'x'.join(mesh_dims)!r} of size {size}"
    sizes = ", ".join(str(size) for size in range(1, min(number, LARGEST_SIZE) + 1) if number % size == 0)
    return Undivided(name, what, f"over {where}: {number} is not a multiple of {size}; sizes that work: {sizes}")


def grouped(problems: Iterable[str | Undivided]) -> list[str]:
    """One sentence for all parameters that fail for one reason, and one for all layers that have one problem."""
    by_reason: dict[str, list[str | Undivided]] = {}
    for problem in problems:
        is_named = isinstance(problem, Undivided) and problem.name
        reason = problem.why if is_named else _without_layers(str(problem))  # type: ignore[union-attr]
        by_reason.setdefault(reason, []).append(problem)
    return [_sentence(reason, alike) for reason, alike in by_reason.items()]


def _sentence(reason: str, alike: Sequence[str | Undivided]) -> str:
    if len(alike) == 1:
        return str(alike[0])
    names = [problem.name for problem in alike if isinstance(problem, Undivided)]
    if not any(names):
        return f"{reason}: {len(alike)} layers"
    counts: dict[str, int] = {}
    for name in names:
        counts[folded(name)] = counts.get(folded(name), 0) + 1
    listed = [name if count == 1 else f"{name}: {count} layers" for name, count in counts.items()]
    more = f"; {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return f"{len(names)} parameters cannot be sharded {reason}; they are {'; '.join(listed[:MAX_NAMED])}{more}"


def _without_layers(sentence: str) -> str:
    return _IN_LAYER.sub(lambda found: _folded_name(found[0]), sentence)


def _folded_name(text: str) -> str:
    """A number such as 0.5 is no name."""
    return folded(text) if re.search(r"[^\W\d]", text) else text
