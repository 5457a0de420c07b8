"""What a sweep tries: meshes, changes, and what may be said of them on the command line."""

from dataclasses import replace

import pytest
from sweep_plans import FACTS, space

from distbench.plans.plan_changes import mesh_dims_of, sharding_dims_of
from distbench.search.predicted import no_plan_error
from distbench.search.space import Candidate, Space, all_of, count_of, factorizations, lower_bound_bytes, set_up
from distbench.search.sweep import BYTES, amount
from distbench.search.sweep_result import SweepState
from distbench.spec import ParallelPlan, UserError
from distbench.spec.job import brief_mesh, mesh_of, parse_brief_mesh, parse_choices, split_variant


def test_every_mesh_of_a_world_is_tried() -> None:
    assert sorted(factorizations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    # C(6 + 2, 2) ways to share six factors of 2 between three mesh dims.
    assert len(list(factorizations(64, 3))) == 28
    result = [one.mesh_text for one in space().meshes]
    assert result == ["dp_shard=4", "dp_shard=2,tp=2", "tp=4"]
    assert next(one.mesh for one in space().meshes) == {"dp_shard": 4, "tp": 1}


def test_mesh_dims_that_the_scenario_does_not_declare_stand_in_their_order() -> None:
    hybrid = Space({"dp_shard": 4, "tp": 1}, ["dp_replicate", "cp", "dp_shard"], 4, FACTS, {})
    assert [*hybrid.meshes[0].mesh] == ["dp_shard", "tp"]
    assert {tuple(one.mesh) for one in hybrid.meshes if one.mesh.get("dp_replicate", 1) == 2} == {
        ("dp_replicate", "dp_shard", "tp"),
        ("dp_replicate", "dp_shard", "cp", "tp"),
    }


def test_a_mesh_that_the_batch_cannot_be_split_over_is_not() -> None:
    assert [one.mesh_text for one in space(batch_size=2).meshes] == ["dp_shard=2,tp=2", "tp=4"]
    setup = set_up("fsdp_stack", (), 4, None, False)
    one_dim = Space({"dp_shard": 2}, ["dp_shard"], 4, {**FACTS, "batch_size": 3}, {})
    with pytest.raises(
        UserError, match="no mesh over dp_shard has 4 ranks over which a global batch of 3 can be split"
    ):
        setup.require_meshes(one_dim)


def test_a_batch_that_rules_meshes_out_is_named_with_one_that_does_not() -> None:
    # 4 samples on 7 ranks: tp=7 is left, and may fail for a reason of its own.
    seven = space(world=7)
    assert [one.mesh_text for one in seven.meshes] == ["tp=7"]
    setup = set_up("llama_2d", ("batch=4",), 7, None, False)
    message = setup.unsplit_text(seven)
    assert message.startswith("a global batch of 4 cannot be split over dp_shard=7 (1 of 2 meshes;")
    assert "--set batch=7" in message
    assert set_up("llama_2d", ("batch=4",), 4, None, False).unsplit_text(space()) == ""
    state = SweepState(seven, left_out={seven.meshes[0]: "7 does not divide 512"})
    assert f"{message}; of the other meshes, tp=7: 7 does not divide 512" in str(no_plan_error(setup, state, None))


def test_experts_over_several_mesh_dims_are_sharded_over_each() -> None:
    plan = ParallelPlan(ep={"experts": None}, ep_dim=("ep", "tp"))
    assert mesh_dims_of(plan) == ["ep", "tp"] == sharding_dims_of(plan)
    assert lower_bound_bytes({**FACTS, "shard_dims": sharding_dims_of(plan)}, {"ep": 2, "tp": 2}) == 16_000 // 4


def test_every_change_of_a_plan_is_tried_where_it_has_something_to_change() -> None:
    options = {
        one.mesh_text: {name.removeprefix("plan."): values[1:] for name, values in space().alternatives(one).items()}
        for one in space().meshes
    }
    common = {"reshard_after_forward": [False], "prefetch": [2], "checkpoint": ["full"]}
    assert options == {
        "dp_shard=4": common,
        "dp_shard=2,tp=2": {**common, "microbatches": [2]},
        "tp=4": {**common, "microbatches": [2, 4]},
    }
    assert count_of(space()) == len(set(all_of(space()))) == 8 + 16 + 24
    selective = space(checkpoint=["layers.*"], is_selective=True)
    assert selective.alternatives(selective.meshes[0])["plan.checkpoint"][1:] == ["none", "full"]
    pinned = replace(space(), pinned=frozenset({"plan.prefetch"}))
    assert "plan.prefetch" not in pinned.alternatives(pinned.meshes[0])


def test_ranks_of_experts_have_different_parts_of_the_batch() -> None:
    mixture = Space({"ep": 2, "dp_shard": 2}, ["ep", "dp_shard"], 4, {**FACTS, "batch_size": 2}, {})
    assert mixture.meshes == []


def test_neighbours_differ_by_one_change() -> None:
    written = space().meshes[0]
    assert [one.changes_text for one in space().neighbours(written)] == [
        "checkpoint=full",
        "reshard_after_forward=False",
        "prefetch=2",
    ]
    changed = written.with_choice("plan.prefetch", 2)
    assert written in space().neighbours(changed)
    assert [one.mesh_text for one in space().moved_meshes(written)] == ["dp_shard=2,tp=2"]


def test_the_lower_bound_is_of_shards_of_parameters_gradients_and_optimizer() -> None:
    # 4,000 bytes of parameters, as many of gradients, and twice as many of AdamW's moments, over 4 ranks.
    assert lower_bound_bytes(FACTS, {"dp_shard": 2, "tp": 2}) == (4_000 + 4_000 + 8_000) // 4
    assert lower_bound_bytes(FACTS, {"dp_replicate": 8, "tp": 2}) == 8_000
    # What is frozen has neither gradients nor optimizer state.
    assert lower_bound_bytes({**FACTS, "trained_bytes": 1_000}, {"tp": 1}) == 4_000 + 1_000 + 2_000


def test_changes_of_a_plan_are_parameters_of_any_scenario() -> None:
    chosen = parse_choices(["plan.mesh=dp_shard4,dp_shard2xtp2", "plan.microbatches=2"], {})
    assert chosen == {"plan.mesh": ["dp_shard4", "dp_shard2xtp2"], "plan.microbatches": [2]}
    assert split_variant({"dim": 1, "plan.prefetch": 2}) == ({"dim": 1}, {"plan.prefetch": 2})
    assert brief_mesh({"dp_shard": 2, "cp": 1, "tp": 2}) == "dp_shard2xtp2"
    assert parse_brief_mesh("dp_replicate2xtp16") == {"dp_replicate": 2, "tp": 16}
    assert mesh_of({"plan.mesh": "tp4"}, {"dp_shard": 2, "tp": 2}) == {"dp_shard": 1, "tp": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan.reshard=True", "plan.reshard is not a change to a plan (nearest: "),
        ("plan.rotate=left", "--set plan.rotate=left is unknown; use allgather, alltoall, ulysses"),
        ("plan.microbatches=0", "give a whole number from 1"),
        ("plan.mesh=4", "is not a mesh; write for example --set plan.mesh=dp_shard2xtp2"),
        ("plan.prefetch=two", "plan.prefetch=two is not valid; give int values such as 2"),
    ],
)
def test_a_change_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_choices([text], {})
    assert message in str(refused.value)


def test_a_mesh_of_other_ranks_than_the_launch_is_refused() -> None:
    with pytest.raises(UserError, match="has 8 ranks, but the launch has 4"):
        mesh_of({"plan.mesh": "tp8"}, {"tp": 4})


def test_the_batch_grows_with_the_world_where_nobody_gave_one() -> None:
    setup = set_up("llama3_8b", (), 64, None, False)
    assert setup.base["batch"] == 128 and "from 16 (8 ranks) to 128 (64 ranks)" in setup.note
    assert setup.command(Candidate((("dp_shard", 64),))) == "distbench run llama3_8b --mesh dp_shard=64 --set batch=128"
    assert set_up("llama3_8b", ("batch=64",), 64, None, False).base["batch"] == 64


def test_the_command_measures_the_candidate_alone() -> None:
    """Of a scenario with axes, and of values to try, the one that the plan has."""
    setup = set_up("fsdp_stack", ("batch=8,16", "dim=64"), 4, None, False)
    plain = Candidate((("dp_shard", 4),))
    own = "--set reshard_after_forward=True --set batch=8"
    assert setup.base["reshard_after_forward"] is True and "reshard_after_forward" in setup.axes
    assert setup.command(plain) == f"distbench run fsdp_stack --mesh dp_shard=4 --set dim=64 {own}"
    other = setup.command(plain.with_choice("batch", 16))
    assert "--set batch=16" in other and "batch=8" not in other and "--set reshard_after_forward=True" in other


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("80", 80e9), ("79.5 GiB", 79.5 * (1 << 30)), ("1tb", 1e12)]
)
def test_amounts_of_memory(text: str, size: float) -> None:
    assert amount(text, "--memory", BYTES, "GB", 1e15) == size
