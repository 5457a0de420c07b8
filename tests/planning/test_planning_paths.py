"""The planner as plain data: states, bytes, the tie-break and the memory cap, against relaxing every step."""

import itertools
import random
from collections import deque

import pytest
from processes import Children

from benchmarks.random_states import random_state
from distbench.planning.cheapest_path import (
    NoPath,
    Pricing,
    Problem,
    cheapest_route,
    least_peak_route,
    least_received_bytes,
    priced_steps,
)
from distbench.planning.cost_profile import TorchCost
from distbench.planning.placement_states import Move, NotHandled, State, box_of, legal_steps, parse_state


class TableCost:
    """Any monotone model: base and slope drawn for each op and mesh dim, in whole microseconds so that ties occur."""

    pads = True

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        ops = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "zero_fill", "partition")
        self.terms = {(op, mesh_dim): (rng.randrange(3), rng.randrange(2)) for op in ops for mesh_dim in range(3)}

    def seconds(self, op: str, mesh_dim: int, payload_bytes: float, num_copies: int) -> float:
        base, slope = self.terms.get((op, mesh_dim), (0, 0))
        return (base + slope * payload_bytes * (1 + num_copies)) * 1e-6


def sizes_of(problem: Problem, state: State) -> list[int]:
    """The largest local size along each tensor dim, by taking the first chunk again and again."""
    sizes = list(problem.shape)
    for tensor_dim, order in enumerate(state.orders):
        for mesh_dim in order:
            sizes[tensor_dim] = -(-sizes[tensor_dim] // problem.mesh_shape[mesh_dim])
    return sizes


def bytes_of(problem: Problem, sizes: list[int]) -> int:
    total = problem.itemsize
    for size in sizes:
        total *= size
    return total


Key = tuple[int, int, int, int]


def step_key(problem: Problem, model: TableCost, state: State, following: State, move: Move) -> Key:
    """(microseconds, bytes sent, collectives, bytes held) of one step."""
    before, after, group = sizes_of(problem, state), sizes_of(problem, following), problem.mesh_shape[move.mesh_dim]
    payload = bytes_of(problem, before) * (group if move.op == "all_gather" else 1)
    if move.op == "zero_fill":
        payload = bytes_of(problem, after)
    if move.op in ("all_to_all", "reduce_scatter"):
        padded = list(before)
        padded[move.target_dim] = after[move.target_dim] * group
        payload = bytes_of(problem, padded)
    base, slope = model.terms.get((move.op, move.mesh_dim), (0, 0))
    speaks = move.op not in ("cut", "partition", "zero_fill") and group > 1
    sent = payload * (group - 1) // group * (2 if move.op == "all_reduce" else 1) if speaks else 0
    # torch fills zeros, and adds the shard to a copy of them.
    held = bytes_of(problem, before) + bytes_of(problem, after) * (2 if move.op == "zero_fill" else 1)
    return base + slope * payload * (1 + move.num_copies), sent, int(speaks), held


def least_key(
    problem: Problem,
    model: TableCost,
    source: State,
    target: State,
    cap: int | None = None,
    ops: tuple[str, ...] = (),
    filled: tuple[int, ...] = (),
) -> Key | None:
    """The least of (time, bytes, collectives, peak) over all paths: relax every step until nothing changes."""
    least: dict[State, Key] = {source: (0, 0, 0, 0)}
    # The oldest first: the newest first relaxes many steps again and again.
    changed = deque([source])
    while changed:
        state = changed.popleft()
        time, sent, collectives, peak = least[state]
        for following, move in legal_steps(state, ops, filled):
            step = step_key(problem, model, state, following, move)
            key = (time + step[0], sent + step[1], collectives + step[2], max(peak, step[3]))
            if (cap is None or step[3] <= cap) and (following not in least or key < least[following]):
                least[following] = key
                changed.append(following)
    return least.get(target)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.long
def test_the_path_is_the_least_of_all_paths_in_time_bytes_collectives_and_peak(seed: int) -> None:
    rng = random.Random(seed)
    problem = Problem((2, 2), (rng.randrange(1, 9), rng.randrange(1, 9)), 1)
    model = TableCost(seed)
    states = [parse_state(text, 2) for text in ("RR", "S(0)R", "S(1)S(0)", "S(0)S(0)", "S(0)[1]S(0)[0]", "RS(1)")]
    for source, target in itertools.permutations([*states, parse_state("P(sum)S(1)", 2)], 2):
        if target.partials:
            continue
        route = cheapest_route(problem, model, source, target)
        expected = least_key(problem, model, source, target)
        got = (round(route.seconds * 1e6), route.sent_bytes, route.num_collectives, route.peak_bytes)
        assert got == expected, f"{source} -> {target}"


@pytest.mark.parametrize("free", ["all_gather", "all_to_all", "all_reduce", "reduce_scatter"])
def test_a_kind_of_collective_that_costs_nothing_is_noticed(free: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the planner's choice: the comparison with all paths above must fail for it."""
    right = Pricing.__init__

    def mutant(self: Pricing, graph: object, problem: Problem, model: TableCost, cap: int | None) -> None:
        cheaper = TableCost(0)
        cheaper.terms = {key: terms for key, terms in model.terms.items() if key[0] != free}
        right(self, graph, problem, cheaper, cap)  # type: ignore[arg-type]

    monkeypatch.setattr(Pricing, "__init__", mutant)
    with pytest.raises(AssertionError, match=" -> "):
        for seed in range(20):
            test_the_path_is_the_least_of_all_paths_in_time_bytes_collectives_and_peak(seed)


def test_a_memory_cap_is_obeyed_and_one_that_forbids_all_is_refused() -> None:
    problem, model = Problem((2, 2), (8, 8), 1), TableCost(3)
    source, target = parse_state("S(0)S(1)", 2), parse_state("S(1)S(0)", 2)
    free = cheapest_route(problem, model, source, target)
    for cap in range(32, free.peak_bytes):
        expected = least_key(problem, model, source, target, cap)
        if expected:
            route = cheapest_route(problem, model, source, target, cap)
            assert (round(route.seconds * 1e6), route.peak_bytes) == (expected[0], expected[3])
        else:
            with pytest.raises(NoPath, match=f"at most {cap} bytes"):
                cheapest_route(problem, model, source, target, cap)
    with pytest.raises(NoPath):
        cheapest_route(problem, model, source, target, 16)


@pytest.mark.parametrize("seed", range(40))
def test_where_no_path_obeys_a_cap_the_one_that_holds_least_is_known(seed: int) -> None:
    rng = random.Random(seed)
    problem, model = Problem((2, 3), (rng.randrange(1, 9), rng.randrange(1, 9)), 1), TableCost(seed)
    source, target = (random_state(rng, 2, 2) for _ in range(2))
    if source == target:
        return
    route = least_peak_route(problem, model, source, target)
    # No cap below lets any path through, by relaxing every step under it.
    assert least_key(problem, model, source, target, route.peak_bytes - 1) is None
    expected = least_key(problem, model, source, target, route.peak_bytes)
    assert expected and (round(route.seconds * 1e6), route.peak_bytes) == (expected[0], expected[3])


def test_what_was_planned_before_does_not_change_a_path(children: Children) -> None:
    script = """
import random, sys
from distbench.planning.cost_profile import TorchCost
from distbench.planning.placement_states import parse_state
from distbench.planning.cheapest_path import Problem
from distbench.planning.cheapest_path import cheapest_route
texts = ["S(0)S(1)", "S(1)S(0)", "S(0)S(0)", "S(1)S(1)", "RS(0)", "S(1)R", "RR", "P(sum)R", "P(sum)S(1)"]
pairs = [(a, b) for a in texts for b in texts if "P" not in b]
random.Random(int(sys.argv[1])).shuffle(pairs)
model = TorchCost((4, 4), 1)
plan = lambda a, b: cheapest_route(Problem((4, 4), (64, 64), 4), model, parse_state(a, 2), parse_state(b, 2))
print("\\n".join(sorted(f"{a}{b}" + "->".join(map(str, plan(a, b).states)) for a, b in pairs)))
"""
    texts = [children.python("-c", script, seed, check=True).stdout for seed in ("1", "2")]
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == 63


def test_states_read_and_write_as_text() -> None:
    for text in ("S(0)S(1)", "RS(0)", "P(sum)P(avg)R", "S(1)[1]S(0)S(1)[0]", "R"):
        assert str(parse_state(text, 2)) == text
    assert parse_state("S(0)[1]S(0)[0]", 1).orders == ((1, 0),)
    assert parse_state("S(0)[0]S(0)[1]", 1) == parse_state("S(0)S(0)", 1)


@pytest.mark.parametrize("text", ["", "S(0", "S(0)x", "S(2)", "S(0)[1]", "S(0)[0]S(0)[0]", "Q"])
def test_texts_that_are_no_placements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="placement"):
        parse_state(text, 2)


def test_what_is_not_handled_says_so() -> None:
    with pytest.raises(NotHandled, match="MASK"):
        parse_state("P(MASK)", 1)
    with pytest.raises(NotHandled, match="not a plain number"):
        Problem((2,), (object(),), 4)  # type: ignore[arg-type]


def test_boxes_are_the_nested_ceil_chunks() -> None:
    # 5 rows over 2 then 2: chunks of 3 and 2, then 2+1 and 1+1; mesh dim 1 first when the order is turned.
    default, turned = parse_state("S(0)S(0)", 1), parse_state("S(0)[1]S(0)[0]", 1)
    cells = list(itertools.product(range(2), range(2)))
    assert [box_of(default, (5,), (2, 2), cell)[0] for cell in cells] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert [box_of(turned, (5,), (2, 2), cell)[0] for cell in cells] == [(0, 2), (3, 4), (2, 3), (4, 5)]
    # One row over 4: the first rank has it, the others are empty.
    assert [box_of(parse_state("S(0)", 1), (1,), (4,), (r,))[0] for r in range(4)] == [(0, 1), (1, 1), (1, 1), (1, 1)]


def test_a_routes_steps_add_up_to_it() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        problem, model = Problem((2, 4, 2), (rng.randrange(1, 40), rng.randrange(1, 40)), 4), TableCost(seed)
        source, target = parse_state("P(sum)S(1)S(1)", 2), parse_state("S(1)S(0)R", 2)
        route = cheapest_route(problem, model, source, target)
        prices = [step.price for step in priced_steps(problem, model, route.states)]
        assert sum(price.seconds for price in prices) == pytest.approx(route.seconds)
        assert sum(price.sent_bytes for price in prices) == route.sent_bytes
        assert sum(price.is_collective for price in prices) == route.num_collectives
        assert max(price.held_bytes for price in prices) == route.peak_bytes


def test_a_path_that_jumps_is_refused() -> None:
    states = [parse_state("S(0)S(0)", 2), parse_state("RS(0)", 2)]
    with pytest.raises(ValueError, match="no single step"):
        priced_steps(Problem((2, 2), (4, 4), 4), TableCost(0), states)


def test_the_receive_bound_of_a_known_pair() -> None:
    # 8 x 8 bytes on 2 x 4, S(0) to S(1) over 4: each rank needs 8 x 2, has 2 x 2 of them.
    problem = Problem((2, 4), (8, 8), 1)
    assert least_received_bytes(problem, parse_state("RS(0)", 2), parse_state("RS(1)", 2)) == 12
    assert least_received_bytes(problem, parse_state("RR", 2), parse_state("RS(1)", 2)) == 0


@pytest.mark.parametrize("mesh_shape", [(2, 3), (4, 2), (2, 2, 2), (3, 1, 2)])
def test_random_pairs_are_exact_on_even_and_uneven_tensors(mesh_shape: tuple[int, ...]) -> None:
    rng = random.Random(str(mesh_shape))
    for seed in range(40):
        unit, model = rng.choice((1, 24)), TableCost(seed)
        problem = Problem(mesh_shape, (rng.randrange(1, 9) * unit, rng.randrange(1, 9) * unit), 2)
        source, target = (random_state(rng, len(mesh_shape), 2, ops) for ops in (("sum",), ()))
        if source != target:
            route = cheapest_route(problem, model, source, target)
            got = (round(route.seconds * 1e6), route.sent_bytes, route.num_collectives, route.peak_bytes)
            assert got == least_key(problem, model, source, target), f"{source} -> {target} of {problem.shape}"


@pytest.mark.parametrize("mesh_shape", [(2, 3), (2, 2, 2)])
@pytest.mark.long
def test_targets_with_partial_are_exact_with_and_without_zero_fill(mesh_shape: tuple[int, ...]) -> None:
    rng, num_gained = random.Random(str(mesh_shape)), 0
    for seed in range(40):
        unit, model = rng.choice((1, 24)), TableCost(seed)
        problem = Problem(mesh_shape, (rng.randrange(1, 9) * unit, rng.randrange(1, 9) * unit), 2)
        source, target = (random_state(rng, len(mesh_shape), 2, ops) for ops in (("sum",), ("sum", "avg")))
        if source == target or not target.partials:
            continue
        ops = tuple({op for _, op in (*source.partials, *target.partials)})
        sums = tuple(mesh_dim for mesh_dim, op in target.partials if op == "sum")
        keys = []
        for filled in ((), sums):
            route = cheapest_route(problem, model, source, target, zero_fill=bool(filled))
            keys.append((round(route.seconds * 1e6), route.sent_bytes, route.num_collectives, route.peak_bytes))
            wanted = least_key(problem, model, source, target, None, ops, filled)
            assert keys[-1] == wanted, f"{source} -> {target} of {problem.shape}, {filled}"
        num_gained += keys[1] < keys[0]
    assert num_gained > 5


def test_a_replica_becomes_a_partial_at_once_where_local_steps_cost_nothing() -> None:
    """A cut and a zero-fill cost as little, and hold more on the way: the zeros, and their sum with the shard."""
    for shape in ((8, 8), (7, 5)):
        problem, model = Problem((2, 2), shape, 4), TorchCost((2, 2), 1)
        route = cheapest_route(problem, model, parse_state("RR", 2), parse_state("P(sum)R", 2), zero_fill=True)
        assert len(route.states) == 2 and route.peak_bytes == 2 * problem.num_bytes


def test_planning_leaves_torch_out(children: Children) -> None:
    script = "import sys, distbench.planning, distbench.planning.cost_profile; assert 'torch' not in sys.modules"
    children.python("-c", script, check=True)
