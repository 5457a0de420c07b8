"""What does not divide evenly, as a sentence with the sizes that would do; and problems of many layers told once."""

import re
from collections import Counter
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
        where: the mesh dims with their size.
        number: what they do not divide.
        size: ranks along them.
    """

    name: str
    what: str
    where: str
    number: int
    size: int

    def __str__(self) -> str:
        why = f"{self.number} is not a multiple of {self.size}; {self.works}"
        return f"{self.what} over {self.where}: {why}"

    @property
    def works(self) -> str:
        """The sizes that divide it."""
        most = min(self.number, LARGEST_SIZE)
        return "sizes that work: " + ", ".join(str(size) for size in range(1, most + 1) if self.number % size == 0)

    @property
    def reason(self) -> str:
        """What other parameters may share with it."""
        return f"{self.where} does not divide {self.number} ({self.works})"


def undivided(what: str, number: int, mesh_dims: Sequence[str], context: RankContext, name: str = "") -> Undivided:
    """That the mesh dims do not shard a tensor dim (or batch) of `number` evenly, as a sentence that begins `what`."""
    _, size = context.index(tuple(mesh_dims))
    return Undivided(name, what, f"mesh dim {'x'.join(mesh_dims)!r} of size {size}", number, size)


def grouped(problems: Iterable[str | Undivided]) -> list[str]:
    """One sentence for all parameters that fail for one reason, and one for all layers that have one problem."""
    by_reason: dict[str, list[str | Undivided]] = {}
    for problem in problems:
        is_named = isinstance(problem, Undivided) and problem.name
        reason = problem.reason if is_named else _without_layers(str(problem))  # type: ignore[union-attr]
        by_reason.setdefault(reason, []).append(problem)
    return [_sentence(reason, alike) for reason, alike in by_reason.items()]


def _sentence(reason: str, alike: Sequence[str | Undivided]) -> str:
    if len(alike) == 1:
        return str(alike[0])
    names = [problem.name for problem in alike if isinstance(problem, Undivided)]
    if not any(names):
        return f"{reason}: {len(alike)} layers"
    listed = _listed(names)
    more = f"; {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return f"{reason}, as these need: {'; '.join(listed[:MAX_NAMED])}{more}"


def _listed(names: Sequence[str]) -> list[str]:
    """`layers.*.attention.{wq,wk}.weight: 8 layers`: layers counted, and modules beside each other on one line."""
    beside: dict[tuple[str, str, int], list[str]] = {}
    for name, count in Counter(map(folded, names)).items():
        module, _, parameter = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        beside.setdefault((parent, parameter, count), []).append(last)
    return [_brief(*key, lasts) for key, lasts in beside.items()]


def _brief(parent: str, parameter: str, count: int, lasts: Sequence[str]) -> str:
    module = lasts[0] if len(lasts) == 1 else f"{{{','.join(lasts)}}}"
    name = ".".join(filter(None, (parent, module, parameter)))
    return name if count == 1 else f"{name}: {count} layers"


def _without_layers(sentence: str) -> str:
    return _IN_LAYER.sub(lambda found: _folded_name(found[0]), sentence)


def _folded_name(text: str) -> str:
    """A number such as 0.5 is no name."""
    return folded(text) if re.search(r"[^\W\d]", text) else text
