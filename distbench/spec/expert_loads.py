"""Loads of experts, with one meaning in measurements and in `--assume`, and the traffic between ranks that follows.

A load is the share of all choices that each expert gets. Choices have exactly these shares, rounded to whole rows, so
that two runs, and a run and its simulation, route equally many rows to each rank.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from distbench.spec.errors import UserError
from distbench.spec.file_io import opened, parse_json

UNIFORM = "uniform"
# W0 to W7 separate the causes of imbalance: https://github.com/NVIDIA/Megatron-LM/pull/7488 (its README).
WORKLOADS = {
    "W0": "balanced",
    "W1": "a hot set of experts",
    "W2": "a hot set of experts on one rank",
    "W3": "a hot set of experts, spread over ranks",
    "W4": "ranks with different numbers of tokens",
    "W5": "experts without tokens",
    "W6": "a hot set that moves every 3 steps",
    "W7": "3 balanced steps, then a burst",
}
LOADS = (UNIFORM, "zipf", *WORKLOADS)
RAGGED, ROTATING, BURST = "W4", "W6", "W7"
# Loads whose ranks or steps differ, which one step with equal batches per rank cannot have.
VARYING = (RAGGED, ROTATING, BURST)
HOT_SHARE, BURST_SHARE = 0.75, 0.5  # shares of the tokens that choose hot experts only
MOVES_AFTER, BURST_STEPS = 3, 4
# Loads of one step with equal batches per rank.
STEADY = tuple(load for load in LOADS if load not in VARYING)


def advice_of(loads: Sequence[str]) -> str:
    """Return the advice for a load that is not valid, in a clause."""
    return f"use {', '.join(loads)}, or a JSON file with one count per expert"


class Load(NamedTuple):
    """Shares of choices per expert, for each exchange of a period: steps of a workload, or modules of a recording."""

    steps: list[list[float]]
    modules: tuple[str, ...] = ()


def weights_of(load: str, num_experts: int, top_k: int, step: int = 0) -> list[float]:
    """Return each expert's weight under a name of LOADS in one step; weights are proportional to shares.

    The hot set has a quarter of the experts (at least top_k), from expert 0 on. No expert has more than one choice per
    token. W1 and W2 are equal, as in their source: the mesh decides how many ranks have the hot experts.
    """
    if load == "zipf":
        return _capped([1 / place for place in range(1, num_experts + 1)], top_k)
    num_hot = max(top_k, num_experts // 4)
    moved = step // MOVES_AFTER * num_hot
    hot_experts: dict[str, Sequence[int]] = {
        **dict.fromkeys(("W1", "W2", BURST), range(num_hot)),
        "W3": [place * num_experts // num_hot for place in range(num_hot)],
        "W5": range(num_experts // 2, num_experts),
        ROTATING: [(moved + place) % num_experts for place in range(num_hot)],
    }
    shares = {"W5": 1.0, BURST: BURST_SHARE if step % BURST_STEPS == BURST_STEPS - 1 else 0.0}
    if load not in hot_experts:
        return [1.0] * num_experts
    return _hot(set(hot_experts[load]), shares.get(load, HOT_SHARE), num_experts, top_k)


def _hot(hot: set[int], share: float, num_experts: int, top_k: int) -> list[float]:
    """Weights if a share of the tokens chooses hot experts only, as far as there are top_k, and others any expert."""
    inside = min(top_k, len(hot)) / len(hot)
    outside = (top_k - min(top_k, len(hot))) / max(num_experts - len(hot), 1)
    even = (1 - share) * top_k / num_experts
    return [share * (inside if expert in hot else outside) + even for expert in range(num_experts)]


def _capped(weights: list[float], top_k: int) -> list[float]:
    """Weights with no share above one choice per token; the excess goes to other experts in proportion."""
    shares = [weight / sum(weights) for weight in weights]
    full: set[int] = set()
    while over := {place for place, share in enumerate(shares) if share > 1 / top_k + 1e-12} - full:
        full |= over
        rest = sum(weight for place, weight in enumerate(weights) if place not in full)
        left = 1 - len(full) / top_k
        shares = [1 / top_k if place in full else left * weight / rest for place, weight in enumerate(weights)]
    return shares


def num_steps(load: str, num_experts: int, top_k: int) -> int:
    """Return the number of steps after which a load of LOADS repeats."""
    if load == ROTATING:
        return MOVES_AFTER * num_experts // math.gcd(num_experts, max(top_k, num_experts // 4))
    return BURST_STEPS if load == BURST else 1


def load_of(load: str, num_experts: int, top_k: int, names: Sequence[str] = LOADS) -> Load:
    """Return the load with a name of LOADS, or of a recorded routing file (see `recorded_loads`).

    Args:
        names: the names of loads that the caller accepts.

    Raises:
        UserError: the name is unknown; the file is not valid, or of a model with another number of experts or a smaller
            top_k.
    """
    if not 1 <= top_k <= num_experts:
        raise UserError(f"top_k={top_k} of {num_experts} experts is not valid; give a number from 1 to {num_experts}")
    if load in names:
        steps = range(num_steps(load, num_experts, top_k))
        return Load([weights_of(load, num_experts, top_k, step) for step in steps])
    path = Path(load)
    if not path.suffix and not path.exists():
        raise UserError(f"load {load!r} is unknown; {advice_of(names)}")
    content = recorded_loads(path, "load")
    by_module = content if isinstance(content, dict) else {"": content}
    for module, counts in by_module.items():
        of = f", {module}" if module else ""
        if len(counts) != num_experts:
            raise UserError(
                f"load file {load}{of}: it has counts of {len(counts)} experts, but the model has {num_experts}; "
                "record this model, or set num_experts"
            )
        # A float of a measured share is not exact.
        if max(counts) * top_k > sum(counts) * (1 + 1e-9):
            raise UserError(
                f"load file {load}{of}: expert {counts.index(max(counts))} has {max(counts) / sum(counts):.1%} of the "
                f"choices, but at most {1 / top_k:.1%} are possible, because the {top_k} choices of a token differ; "
                "record this model, or set top_k"
            )
    return Load([*by_module.values()], tuple(filter(None, by_module)))


def load_of_module(load: str, num_experts: int, top_k: int, module: str) -> list[float]:
    """Return the weights of one module of a model whose steps and ranks have equal loads.

    Raises:
        UserError: as `load_of`; also for a load of VARYING, and a file without the module.
    """
    if load in VARYING:
        cause = "ranks have different numbers of tokens" if load == RAGGED else "the load differs between steps"
        raise UserError(f"load {load} is for exchanges only, because {cause}; use scenario expert_exchange")
    steps, modules = load_of(load, num_experts, top_k, STEADY)
    if modules and module not in modules:
        raise UserError(f"load file {load} has no module {module!r}, only {', '.join(modules)}")
    return steps[modules.index(module) if modules else 0]


def recorded_loads(path: Path, what: str) -> Any:
    """Read a recorded routing: a JSON list with a count per expert, or an object of module names to such lists.

    Args:
        what: the file's kind, for messages.

    Raises:
        UserError: the file cannot be read, or is not such a recording.
    """
    with opened(path, f"{what} file") as file:
        try:
            content: Any = parse_json(file.read())
        except ValueError as error:
            raise UserError(f"{what} file {path}: {error}; give a JSON list of counts, one per choice") from error
    is_by_name = isinstance(content, dict)
    if is_by_name and not content:
        raise UserError(f"{what} file {path}: this object has no module; give a list of counts per module name")
    for name, counts in content.items() if is_by_name else [("", content)]:
        is_list = isinstance(counts, list) and bool(counts)
        if not is_list or any(type(count) not in (int, float) or count < 0 for count in counts) or not sum(counts):
            raise UserError(
                f"{what} file {path}{f', {name}' if name else ''}: this is not a list of counts; give one number >= 0 "
                "per choice, such as [120, 80, 95, 105]"
            )
    if is_by_name:
        return {name: [float(count) for count in counts] for name, counts in content.items()}
    return [float(count) for count in content]


def choice_ends(weights: Sequence[float], num_choices: int) -> list[int]:
    """Return the number of choices up to and with each expert; shares are rounded, and the last end is `num_choices`.

    Choices are laid out in this order over `[top_k, rows]`, so that a row's choices differ unless an expert's share is
    above one choice per row.
    """
    ends = [*accumulate(weights)]
    return [round(end / ends[-1] * num_choices) for end in ends]


def _parts(weights: Sequence[float], num_choices: int) -> list[int]:
    return [end - start for start, end in pairwise([0, *choice_ends(weights, num_choices)])]


MATRIX_FIELDS = ("matrix", "sent", "received")
Matrix = tuple[tuple[int, ...], ...]  # rows that each rank sends to each rank: [sender][receiver]


def traffic_of(load: str, num_ranks: int, num_experts: int, top_k: int, num_tokens: int) -> list[Matrix]:
    """Return the traffic of a load in each exchange of its period, if each rank owns equally many experts in order.

    Args:
        num_tokens: tokens per rank; under W4, rank r of n has a share proportional to r + 1 of the same total.

    Raises:
        UserError: as `load_of`; also if experts cannot be split over the ranks.
    """
    if num_experts % num_ranks:
        raise UserError(
            f"{num_experts} experts cannot be split over {num_ranks} ranks; set num_experts to a multiple of "
            f"{num_ranks}"
        )
    if num_tokens < 1:
        raise UserError(f"num_tokens={num_tokens} is not valid; give a number of tokens per rank, 1 or more")
    own = num_experts // num_ranks
    sources = [rank + 1.0 if load == RAGGED else 1.0 for rank in range(num_ranks)]
    rows = [tokens * top_k for tokens in _parts(sources, num_ranks * num_tokens)]
    matrices = []
    for weights in load_of(load, num_experts, top_k).steps:
        by_expert = [_parts(weights, num_rows) for num_rows in rows]
        matrices.append(tuple(tuple(sum(row[at : at + own]) for at in range(0, len(row), own)) for row in by_expert))
    return matrices


def _as_list(values: Any) -> Any:
    """Return an array or a tensor as nested lists, and other values unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values


def _named_fields(given: Any) -> tuple[str, dict[str, Any]]:
    """Return a matrix's name in messages, and its fields of MATRIX_FIELDS. Raise UserError for other fields."""
    name = "matrix"
    if isinstance(given, str):
        name = f"matrix file {given}"
        with opened(Path(given), "matrix file") as file:
            try:
                given = parse_json(file.read())
            except ValueError as error:
                raise UserError(f"{name}: {error}; give a JSON list of rows, such as [[0, 3], [3, 0]]") from error
    if not isinstance(given, Mapping):
        return name, {"matrix": _as_list(given)}
    if unknown := given.keys() - set(MATRIX_FIELDS):
        raise UserError(f"{name} has an unknown field {min(map(repr, unknown))}; use {', '.join(MATRIX_FIELDS)}")
    if "matrix" not in given:
        raise UserError(f"{name} has no field 'matrix'; add it with a list of rows, such as [[0, 3], [3, 0]]")
    return name, {field: _as_list(given[field]) for field in MATRIX_FIELDS if field in given}


def matrix_of(given: Any, num_ranks: int) -> Matrix:
    """Return a traffic matrix: rows that each rank sends to each rank.

    Args:
        given: nested sequences, an array or a tensor, or the path of a JSON file with a list of rows, or with an
            object: "matrix", and optional "sent" and "received", the total rows of each rank.

    Raises:
        UserError: the file has no matrix or an unknown field; the matrix is not square, is of another number of ranks,
            has an entry that is not a whole number of 0 or more, moves no row, or has other totals than stated.
    """
    name, totals = _named_fields(given)
    given = totals.pop("matrix")
    size = f"{num_ranks} rows of {num_ranks} numbers, one per rank of the group"
    if not isinstance(given, list | tuple) or not all(isinstance(row, list | tuple) for row in given):
        raise UserError(f"{name} is not a list of rows; give {size}")
    lengths = sorted({len(row) for row in given})
    if lengths != [len(given)]:
        columns = " or ".join(map(str, lengths)) or "no"
        raise UserError(f"{name} is not square: it has {len(given)} rows of {columns} numbers; give {size}")
    if len(given) != num_ranks:
        raise UserError(f"{name} has {len(given)} ranks, but the group has {num_ranks}; give {size}")
    for sender, row in enumerate(given):
        for receiver, entry in enumerate(row):
            if type(entry) is not int or entry < 0:
                place = f"entry [{sender}][{receiver}] is {entry!r}"
                raise UserError(f"{name}: {place}; give the number of rows that the rank sends, a whole number from 0")
    if not any(map(any, given)):
        raise UserError(f"{name} moves no row; give at least one entry above 0")
    for total, stated in totals.items():
        sums = [sum(row) for row in (given if total == "sent" else zip(*given, strict=True))]
        if stated != sums:
            raise UserError(f"{name} does not add up: {total!r} is {stated}, but the entries give {sums}; correct one")
    return tuple(tuple(row) for row in given)
