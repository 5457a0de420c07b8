"""run --trace-paths: rows from what was told, another method that must agree, and one launch on real gloo ranks."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conftest import DATA
from processes import Children, Ranks

from benchmarks.dispatch_mode import differences, dispatched_collectives
from distbench.launch import Request, jobs_of
from distbench.observe.module_attribution import Communication, Traced, TracedRow, tables
from distbench.records.run_file import PHASE_COLUMNS, TRACE_COLUMNS, read_run
from distbench.spec import Job, list_entries
from distbench.torch_private import Unsupported, fake_ranks, needs_newer, require, timed_collectives
from distbench.torch_private.probe import KERNELS, SPMD_MESH

PHASES = ("forward", "backward")


def seen(kind: str, group: str = "0,1", payload_bytes: int = 64, phase: str = "forward") -> Communication:
    size = len(group.split(","))
    known = ("f32", payload_bytes, "layers.0", True, "", None, group)
    return Communication(phase, "tp", kind, "op", "tp", size, *known)


def told(start_s: float) -> Traced:
    """A step that began at `start_s`: two collectives over one group, one over another, one after the other."""
    rows = [
        TracedRow(seen("all_gather"), start_s + 1, start_s + 2),
        TracedRow(seen("reduce_scatter", "0,2", phase="backward"), start_s + 4, start_s + 6),
        TracedRow(seen("all_reduce", phase="backward"), start_s + 7, None),
    ]
    return Traced(start_s, [start_s + 3, start_s + 9], 0.1, rows)


def table(ranks: Sequence[Traced], clock_shared: bool) -> dict[str, Any]:
    place: Any = SimpleNamespace(backend="gloo", gather=lambda own: [[one] for one in ranks])
    return tables([ranks[0]], PHASES, place, clock_shared)


def test_a_trace_has_a_row_a_collective_with_its_sequence_number_bytes_and_the_backends_own_op() -> None:
    result = table([told(100.0)], clock_shared=True)
    assert result["columns"] == TRACE_COLUMNS and result["steps_s"] == [9.0]
    rows = [dict(zip(TRACE_COLUMNS, row, strict=True)) for row in result["rows"]]
    assert [(row["group"], row["seq"]) for row in rows] == [("0,1", 0), ("0,2", 0), ("0,1", 1)]
    assert [row["backend_op"] for row in rows] == ["all_gather", "all_reduce", "all_reduce"]
    assert [row["wire_bytes"] for row in rows] == [32, 32, 64]
    assert [(row["issued_s"], row["completed_s"]) for row in rows] == [(1, 2), (4, 6), (7, None)]
    assert {row["exposed_s"] for row in rows} == {None}
    assert result["phases"] == {"columns": PHASE_COLUMNS, "rows": [[0, 0, "forward", 0, 3], [0, 0, "backward", 3, 9]]}


def test_moments_count_from_the_last_rank_in_only_where_ranks_share_a_clock() -> None:
    ranks = [told(100.0), told(102.0)]
    shared, apart = (table(ranks, clock_shared) for clock_shared in (True, False))
    issued = TRACE_COLUMNS.index("issued_s")
    assert [row[issued] for row in shared["rows"]] == [-1, 2, 5, 1, 4, 7]
    assert [row[issued] for row in apart["rows"]] == [1, 4, 7, 1, 4, 7]


def test_a_rank_without_times_leaves_the_others_theirs_and_no_step_a_length() -> None:
    """As where one rank's profiler lost its events: which step a length is of must not shift."""
    blind = Traced(0.0, [], 0.1, [TracedRow(seen("all_gather"))])
    result = table([told(100.0), blind], clock_shared=False)
    assert result["steps_s"] == [] and {row[0] for row in result["phases"]["rows"]} == {0}
    place: Any = SimpleNamespace(backend="gloo", gather=lambda own: [own])
    two = tables([blind, told(100.0)], PHASES, place, False)
    assert two["num_steps"] == 2 and two["steps_s"] == []


def test_a_difference_in_anything_but_the_operators_name_is_found() -> None:
    rows = [seen("all_gather"), seen("all_reduce"), seen("all_gather", "2,3")]
    assert differences(rows, [replace(row, op="other") for row in rows]) == []
    for other in (seen("all_reduce", payload_bytes=32), seen("all_reduce", "0,2"), replace(rows[1], owner="layers.1")):
        [difference] = differences(rows, [rows[0], other, rows[2]])
        assert difference.startswith("collective 1: ")
    assert differences(rows, rows[:2])[0].endswith("nothing by the dispatch mode")


# Some variants of the scenarios that have many.
KNOBS = {"knob=reshard_to_2", "knob=hybrid", "knob=largest_dim", "knob=accumulate", "knob=gather_int8"}
KNOBS |= {"knob=own_all_gather", "knob=own_reduce_scatter", "knob=all_reduce_hook"}
STYLES = {"style=sequence", "style=vocabulary", "style=loss_parallel", "style=callable"}
RECOMPUTED = {"checkpoint=blocks,compile_backend=aot_eager"}
ROTATIONS = {f"rotate=alltoall,load_balance={balanced},unshard_output={balanced}" for balanced in (False, True)}
ROTATIONS |= {"rotate=ulysses,load_balance=False,unshard_output=True"}
SOME = {"fsdp_knobs": KNOBS, "tp_styles": STYLES, "recompute": RECOMPUTED, "cp_attention": ROTATIONS}
SOME |= {"pipeline": {"schedule=1f1b", "schedule=interleaved_zero_bubble"}, "ddp": {"knob=plain", "knob=find_unused"}}
# How tokens are spread over experts changes no collective of a step.
SOME |= {
    "moe": {"load=zipf,capacity=0.0", "load=uniform,capacity=1.25"},
    "replicate_tp": {"knob=plain", "knob=accumulate"},
}
SOME |= {"moe_tp": {"load=zipf,capacity=0.0,expert_tp=False", "load=uniform,capacity=1.25,expert_tp=True"}}
SOME |= {"llama_inference": {f"phase={one},sequence_parallel={one == 'prefill'}" for one in ("prefill", "decode")}}
SOME |= {"shard_params": {"layout=rows_of_both", "layout=rows_then_columns"}}


def variants_of_interest(job: Job) -> Job:
    names = SOME.get(job.scenario)
    labels = [",".join(f"{name}={variant[name]}" for name in job.axes) for variant in job.variants]
    chosen = [variant for variant, label in zip(job.variants, labels, strict=True) if not names or label in names]
    return replace(job, variants=chosen)


@pytest.mark.long
def test_two_methods_agree_on_every_shipped_step_and_see_the_sixty_collectives_of_four_blocks(
    children: Children, tmp_path: Path
) -> None:
    names = [
        entry.name
        for entry in list_entries()
        if not {"laboratory", "calibrate", "links", "real-size"} & set(entry.tags)
        and not (entry.name == "spmd_mesh" and needs_newer(SPMD_MESH))
    ]
    jobs = [variants_of_interest(job) for job in jobs_of(Request(tuple(names), device="cpu", quick=True), None)]
    sizes = ("dim=64", "hidden=256", "sequence=32", "num_layers=4")
    jobs += jobs_of(Request(("llama_2d",), sizes, device="cpu"), None)
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps([job.to_record() for job in jobs]))
    done = children.run(children.forked_python, "-m", "benchmarks.dispatch_mode", file, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert {name: case for name, case in cases.items() if case.get("differences", True)} == {}
    scenarios = {case.split("/")[2] for case in cases}
    without_steps = {"collectives", "collective_ways", "expert_exchange", "redistribute", "dtensor_ops", "cp_documents"}
    assert scenarios == set(names) - without_steps
    llamas = [case for name, case in cases.items() if name.split("/")[2] in ("llama_2d", "llama_3d")]
    assert len(llamas) == 3 and all(case["num_owned"] == case["num_rows"] > 30 for case in llamas)
    # What was counted by other means: 4 blocks, TP with sequence parallel x FSDP2 on 2x2.
    tp = {"tp all_gather": 19, "tp reduce_scatter": 18, "tp all_reduce": 9}
    largest = max(cases.values(), key=lambda case: case.get("num_rows", 0))
    assert largest["counts"] == {**tp, "dp_shard all_gather": 9, "dp_shard reduce_scatter": 5}


def every_collective(mesh: Any) -> None:
    group, one, two = mesh.get_group(), torch.ones(2), torch.ones(4)
    result: Any = functional.all_gather_into_tensor_coalesced([one, two], group)
    result += functional.reduce_scatter_tensor_coalesced([one, two], "sum", [0, 0], group)
    result += functional.all_reduce_coalesced([one, two], "sum", group)
    result.append(functional.all_to_all_single(one, None, None, group))
    for tensor in result:
        tensor + 0  # waits
    dist.all_gather([torch.empty(4), torch.empty(4)], two)
    dist.reduce_scatter(torch.empty(2), [one, one])
    dist.all_to_all([torch.empty(2), torch.empty(2)], [one, one])
    dist.all_reduce(two, async_op=True).wait()
    dist.broadcast(one, src=0)
    dist.reduce(two, dst=0)
    dist.gather(one, [torch.empty(2), torch.empty(2)], dst=0)
    dist.scatter(one, src=1)  # to a rank that has nothing to give
    dist.send(one, 1)
    dist.recv(two, 1)
    dist.barrier()


# torch 2.11 has only the names that 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_every_kind_of_collective_is_told_as_the_dispatch_mode_sees_it() -> None:
    """Coalesced ones too, and through the default group and through the mesh."""
    told: list[Any] = []
    dispatched: list[Any] = []
    with fake_ranks({"tp": 2}) as mesh:
        with timed_collectives(told.append):
            every_collective(mesh)
        with dispatched_collectives(dispatched.append):
            every_collective(mesh)  # nobody is told
    facts = [(one.call.kind, one.call.ranks, one.call.payload_numel) for one in told]
    assert facts == [(one.kind, one.ranks, one.payload_numel) for one in dispatched]
    assert [fact[0] for fact in facts] == [
        *("all_gather", "reduce_scatter", "all_reduce", "all_to_all"),
        *("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "reduce", "gather", "scatter"),
        *("send", "recv"),
    ]
    assert [fact[2] for fact in facts] == [12, 6, 6, 2, 8, 4, 4, 4, 2, 4, 2, 4, 2, 4]
    assert all(one.completed_s >= one.issued_s for one in told)


def test_a_traced_run_has_times_of_every_collective_and_keeps_what_was_measured(ranks: Ranks, tmp_path: Path) -> None:
    request = Request((f"{DATA}/traced.py",), device="cpu", quick=True, out=tmp_path, timeout_s=120, trace_paths=True)
    [job] = jobs_of(replace(request, started_at=time.time()), None)
    job = replace(job, settings=replace(job.settings, min_samples=2, budget_s=0.1, passes=1))
    outcome = ranks.launch(job)
    assert outcome.exit_code == 0, outcome.message
    run = read_run(Path(job.run_file))
    assert run.warnings == [] and [record["status"] for record in run.cases] == ["ok", "ok"]
    assert all(len(record["samples_s"]) >= 2 for record in run.cases)
    failed, trace = run.traces
    assert "this model raises where collectives are timed" in failed["error"]
    assert trace["case_id"] == run.cases[1]["case"]["id"]
    a_trace_is_whole(trace)


def a_trace_is_whole(trace: dict[str, Any]) -> None:
    rows = [dict(zip(trace["columns"], row, strict=True)) for row in trace["rows"]]
    # Two units on two ranks in three steps: gathered in forward and again in backward, and their gradients scattered.
    assert Counter(row["kind"] for row in rows) == {"all_gather": 4 * 2 * 3, "reduce_scatter": 2 * 2 * 3}
    ends = {(rank, step): end for rank, step, _, _, end in trace["phases"]["rows"]}
    for row in rows:
        assert row["issued_s"] < row["completed_s"] <= ends[row["rank"], row["step"]]
        assert row["owner"] in ("layers.0", "layers.1") and row["source"] == "fsdp" and row["mesh_dim"] == "dp_shard"
        assert (row["group"], row["group_size"], row["wire_bytes"]) == ("0,1", 2, row["payload_bytes"] / 2)
    key = lambda row: (row["step"], row["group"], row["seq"])  # noqa: E731
    for _, matched in groupby(sorted(rows, key=lambda row: (key(row), row["rank"])), key):
        one, other = matched
        assert (one["rank"], other["rank"]) == (0, 1)
        assert [one[name] for name in TRACE_COLUMNS[3:12]] == [other[name] for name in TRACE_COLUMNS[3:12]]
        # They are the same collective: neither rank is done before the other has begun.
        assert max(one["issued_s"], other["issued_s"]) <= min(one["completed_s"], other["completed_s"])
    of_rank = [row["issued_s"] for row in rows if (row["rank"], row["step"]) == (0, 0)]
    assert all(before < after for before, after in pairwise(of_rank))
    assert len(trace["steps_s"]) == 3 and trace["clock_shared"] is True
    assert len(trace["overhead"]["bare_cpu_s"]) == trace["overhead"]["rounds"] and trace["overhead"]["ratio"] > 0
    assert trace["memory"]["predicted_peak_bytes"] > 2 * 2 * 17 * 16


def test_a_run_without_steps_says_that_there_is_nothing_to_trace(tmp_path: Path) -> None:
    from distbench.cli.run import _of_traces
    from distbench.records.run_file import Case, CaseResult, append

    file = tmp_path / "run.jsonl"
    append(file, {"type": "run", "schema_version": 1})
    append(file, CaseResult(Case("collective/x", "collective"), "ok").to_record())
    assert _of_traces(file) == "--trace-paths traced no step, because no case of this scenario is a step"
    append(file, CaseResult(Case("step/x", "step"), "ok").to_record())
    append(file, {"type": "trace", "case_id": "step/x", "error": "RuntimeError: no"})
    assert _of_traces(file) == "no step was traced; step/x was not traced: RuntimeError: no"


def test_this_torch_has_what_timing_collectives_needs() -> None:
    require(KERNELS)
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(torch._C._distributed_c10d, "PythonCallbackWork")
        with pytest.raises(Unsupported, match=rf"{KERNELS}: torch .* has no .*PythonCallbackWork"):
            require(KERNELS)
