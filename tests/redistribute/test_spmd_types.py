"""Types of spmd_types as layouts; which pairs its own bridge refuses, and that the library plans all of them."""

from itertools import permutations
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.random_states import spmd_shardings
from distbench import redistribute
from distbench.planning.placement_states import parse_state
from distbench.redistribute.layouts import layout_of
from distbench.spec.errors import UserError
from distbench.torch_private import fake_ranks

spmd = pytest.importorskip("spmd_types", reason="spmd_types is not installed; pip install spmd_types")
SIZES = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("given", "state", "gradient"),
    [
        (spmd.PartitionSpec("dp", "tp"), "S(0)S(1)", "S(0)S(1)"),
        (spmd.PartitionSpec(("tp", "dp"), None), "S(0)[1]S(0)[0]", "S(0)[1]S(0)[0]"),
        (spmd.PartitionSpec("dp"), "S(0)R", "S(0)P(sum)"),
        (spmd.SpmdType({"dp": spmd.P, "tp": spmd.S(-1)}), "P(sum)S(1)", "RS(1)"),
        (spmd.SpmdType({"dp": spmd.I, "tp": spmd.R}), "RR", "RP(sum)"),
        (spmd.SpmdType({"dp": spmd.V, "tp": spmd.P}, spmd.PartitionSpec("dp")), "S(0)P(sum)", "S(0)R"),
        (spmd.TensorSharding("dp", None), "S(0)R", "S(0)R"),
    ],
)
def test_types_are_layouts_with_the_gradients_that_spmd_types_defines(given: Any, state: str, gradient: str) -> None:
    assert layout_of(given, 2, SIZES, None) == (parse_state(state, 2), parse_state(gradient, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (spmd.PartitionSpec("pp"), "axis 'pp' is not a mesh dim; use dp, tp"),
        (spmd.PartitionSpec(None, None, "tp"), "more entries than tensor dims"),
        (spmd.PartitionSpec("tp", "tp"), "names axis tp twice"),
        (spmd.PartitionSpec(3), "axis 3 is not a mesh dim"),
        (spmd.SpmdType({"dp": spmd.S(4)}), "a 2-D tensor lacks"),
        (spmd.SpmdType({"dp": spmd.S(-3)}), "a 2-D tensor lacks"),
        (spmd.SpmdType({"dp": spmd.V}), "has no tensor dim"),
    ],
)
def test_types_that_do_not_fit_are_refused_in_a_sentence(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        layout_of(given, 2, SIZES, None)
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # spmd_types uses names that torch 2.13 renamed
@pytest.mark.parametrize(
    ("shape", "num_pairs", "num_refused"), [((2, 4), 110, 68), ((2, 2, 2), 2352, 2172)], ids=("2x4", "2x2x2")
)
@pytest.mark.long
def test_pairs_that_its_bridge_refuses_are_planned(shape: tuple[int, ...], num_pairs: int, num_refused: int) -> None:
    refused, pairs = 0, 0
    names = ("dp", "cp", "tp")[: len(shape)]
    sizes = dict(zip(names, shape, strict=True))
    with fake_ranks(sizes) as mesh:
        states = {repr(one): layout_of(one, 2, sizes, None)[0] for one in spmd_shardings(names)}
        for source, target in permutations(spmd_shardings(names), 2):
            placements = [Replicate()] * len(shape)
            for mesh_dim, placement in enumerate(states[repr(source)].placements()):
                if placement.tensor_dim is not None:
                    placements[mesh_dim] = Shard(placement.tensor_dim)
            local = [1024, 1024]
            for mesh_dim, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    local[placement.dim] //= shape[mesh_dim]
            pairs += 1
            try:
                x = DTensor.from_local(torch.empty(local), mesh, placements, run_check=False)
                spmd.spmd_redistribute(x, source, target)
            except NotImplementedError:
                refused += 1
            assert redistribute.plan(source, target, (1024, 1024), sizes).target == states[repr(target)]
    assert (pairs, refused) == (num_pairs, num_refused)
