"""Plans on real gloo ranks: every knob's loss and gradients against one device, through the shipped scenarios."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, ROOT
from processes import Children, Ranks

from distbench.launch import JobOutcome, Request, jobs_of
from distbench.records.run_file import read_run
from distbench.spec import Job, parse_mesh
from distbench.torch_private import needs_newer

NUM_LAYERS = 2
# Each with its choices.
SCENARIOS = {
    "fsdp_knobs": (f"num_layers={NUM_LAYERS}",),
    # Without a checkpoint nothing more is computed; test_trace.py has compiled blocks too.
    "recompute": ("num_layers=1", "checkpoint=blocks,attention"),
    "tp_styles": (),
    "shard_params": (),
}
NO_MEMORY = (str(ROOT / "tests" / "ranks" / "no_memory.py"),)
# A job of llama_3d stands there for all combinations of plans, each on a mesh of its own.
COMBINED = (str(ROOT / "tests" / "ranks" / "combined_plans.py"),)
COMBINATIONS = "llama_3d"
Variants = dict[str, dict[str, Any]]
Rows = dict[str, Variants]


def job_of(target: str, out: Path, mesh: str | None = None, check: str = "full", *choices: str) -> Job:
    """What `distbench run TARGET --quick` launches, with as few samples as it may take."""
    request = Request(
        targets=(target,),
        choices=choices,
        mesh=parse_mesh(mesh) if mesh else None,
        device="cpu",
        quick=True,
        check=check,
        out=out,
        timeout_s=120,
        started_at=time.time(),
    )
    (job,) = jobs_of(request, None)
    return replace(job, settings=replace(job.settings, warmup_iterations=1, min_samples=1, budget_s=0.1, passes=1))


def variants_of(job: Job, outcome: JobOutcome) -> Variants:
    """Variant to row; rows without a variant are known by their scenario."""
    assert outcome.status == "complete", outcome.message
    rows = ((row["case"]["params"], row) for row in read_run(Path(job.run_file)).cases)
    return {params["variant"] or params["scenario"]: row for params, row in rows}


@pytest.fixture(scope="module")
def rows(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Scenario name to variant to row, all of one launch; the stacks are as low as their plans allow."""
    folder = tmp_path_factory.mktemp("plans")
    jobs = [job_of(name, folder, None, "full", *choices) for name, choices in SCENARIOS.items()]
    every = tuple({"knob": knob} for knob in (*FURTHER_KNOBS, "symm_mem"))
    jobs[0] = replace(jobs[0], variants=(*jobs[0].variants, *({**jobs[0].variants[0], **one} for one in every)))
    jobs.append(job_of(COMBINATIONS, folder, "cp=2,tp=2"))
    outcomes = ranks.launch_all(jobs, COMBINED)
    assert {outcome.exit_code for outcome in outcomes} == {0}
    return {job.scenario: variants_of(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)}


def errors(row: dict[str, Any]) -> tuple[float, float]:
    return row["counters"]["loss_rel_error"], row["counters"]["grad_rel_error"]


EXACT_KNOBS = ("plain", "keep", "reshard_to_2", "hybrid", "columns", "largest_dim", "uneven", "tied", "frozen")
EXACT_KNOBS += ("prefetch_2", "accumulate", "accumulate_synced", "divide_by_1")
EXACT_KNOBS += ("all_reduce_once", "keep_over_microbatches", "not_in_backward", "unshard_ahead", "all_reduce_hook")
EXACT_KNOBS += ("own_all_gather", "own_reduce_scatter", "state_dict")
# Not in the scenario's axes: on a CPU they communicate as the plain plan does.
FURTHER_KNOBS = ("sum", "group_memory")
FURTHER_KNOBS += (
    () if needs_newer("set_separate_reduce_scatter_group") else ("own_group", "two_buffers", "unused_zeros")
)


NUM_PARAMETERS = (
    2 + NUM_LAYERS * 9 + 1
)  # embedding and output, in each block seven matrices and two norms, the last norm


@pytest.mark.parametrize("knob", [*EXACT_KNOBS, *FURTHER_KNOBS])
@pytest.mark.long
def test_an_fsdp_knob_computes_what_one_device_computes(rows: Rows, knob: str) -> None:
    row = rows["fsdp_knobs"][f"knob={knob}"]
    assert row["status"] == "ok" and max(errors(row)) <= 1e-5


@pytest.mark.parametrize("knob", ["bf16_params", "bf16_reduce", "f32_output"])
@pytest.mark.long
def test_a_policy_is_held_against_what_its_precision_costs_one_device(rows: Rows, knob: str) -> None:
    """Half a unit in bf16's last place is 2e-3: an error below it was no bf16, one of a quarter would hide mistakes."""
    row = rows["fsdp_knobs"][f"knob={knob}"]
    counters = row["counters"]
    assert 1e-3 < counters["grad_rel_error"] <= counters["tolerance"] < 0.25 and row["status"] == "ok"
    assert 1e-3 < counters["grad_rounding"] < counters["tolerance"]


@pytest.mark.parametrize(("knob", "bound"), [("gather_bf16", 5e-2), ("gather_int8", 0.1)])
@pytest.mark.long
def test_a_tolerance_that_the_scenario_names_holds(rows: Rows, knob: str, bound: float) -> None:
    row = rows["fsdp_knobs"][f"knob={knob}"]
    assert row["counters"]["tolerance"] == bound
    assert 1e-3 < row["counters"]["grad_rel_error"] <= bound and row["status"] == "ok"


@pytest.mark.long
def test_int8_travels_less_precisely_than_bf16(rows: Rows) -> None:
    knobs = rows["fsdp_knobs"]
    assert errors(knobs["knob=gather_int8"])[1] > errors(knobs["knob=gather_bf16"])[1]


@pytest.mark.long
def test_a_second_reduce_scatter_buffer_takes_the_memory_that_is_simulated(children: Children, tmp_path: Path) -> None:
    """On a CPU the option has no effect on time, because gloo's collectives and FSDP2's streams do not overlap."""
    if needs_newer("set_separate_reduce_scatter_group"):
        pytest.skip("needs torch 2.13")
    sizes = ("--set", "dim=256", "--set", "hidden=1024", "--set", "num_layers=6", "--set", "knob=plain,two_buffers")
    common = ("fsdp_knobs", "--quick", *sizes, "--results", tmp_path)
    assert children.cli("run", *common, "--passes", "1", timeout=120).returncode == 0
    (file,) = tmp_path.rglob("*-fsdp_knobs-*.jsonl")
    measured = {row["case"]["params"]["variant"]: row["counters"]["peak_bytes"] for row in read_run(file).cases}
    done = children.cli("simulate", *common, "--hardware", "h100", "--format", "json", timeout=120)
    simulated = {row["variant"]: row["memory"]["peak_live_bytes"] for row in json.loads(done.stdout)}
    added, predicted = (peaks["knob=two_buffers"] - peaks["knob=plain"] for peaks in (measured, simulated))
    assert added > 3e6 and predicted == pytest.approx(added, rel=0.15)


@pytest.mark.long
def test_symmetric_memory_is_skipped_with_its_reason(rows: Rows) -> None:
    row = rows["fsdp_knobs"]["knob=symm_mem"]
    assert row["status"] == "skipped" and "set_symm_mem_for_comm needs symmetric memory" in row["error"]


@pytest.mark.long
def test_a_round_trip_of_the_state_has_its_phases_and_each_rank_saves_its_quarter(rows: Rows) -> None:
    row = rows["fsdp_knobs"]["knob=state_dict"]
    assert set(row["phases_s"]) == {"forward", "backward", "optimizer", "save", "load"}
    # Parameters and AdamW's two moments in f32; each of the parameters has a step, which every rank keeps.
    assert row["counters"]["state_bytes"] == 3 * row["counters"]["parameter_bytes"] + 4 * NUM_PARAMETERS


@pytest.mark.long
def test_cpu_offload_is_skipped_on_a_cpu_with_its_reason(rows: Rows) -> None:
    row = rows["fsdp_knobs"]["knob=cpu_offload"]
    assert row["status"] == "skipped" and "are in host memory" in row["error"]


@pytest.mark.long
def test_the_row_tells_which_tensor_dims_were_sharded_and_what_was_left_whole(rows: Rows) -> None:
    counters = rows["fsdp_knobs"]["knob=largest_dim"]["counters"]
    # Two blocks of 7 matrices, of which w2 is wider than tall; two norms each, and the last one, of 64 elements.
    assert counters["fsdp_shards"] == "14 on tensor dim 0, 2 on tensor dim 1"
    assert len(counters["fsdp_kept_whole"].split(", ")) == 5 and "norm.weight" in counters["fsdp_kept_whole"]


@pytest.mark.long
def test_microbatches_add_up_to_the_same_phases(rows: Rows) -> None:
    row = rows["fsdp_knobs"]["knob=accumulate"]
    assert set(row["phases_s"]) == {"forward", "backward", "optimizer"}
    medians = {name: sorted(values)[len(values) // 2] for name, values in row["phases_s"].items()}
    assert sum(medians.values()) > 0.5 * sorted(row["samples_s"])[len(row["samples_s"]) // 2]


@pytest.mark.parametrize("checkpoint", ["blocks", "attention"])
@pytest.mark.long
def test_compiled_and_checkpointed_blocks_compute_what_one_device_computes(rows: Rows, checkpoint: str) -> None:
    row = rows["recompute"][f"checkpoint={checkpoint},compile_backend=aot_eager"]
    assert row["status"] == "ok" and max(errors(row)) <= 1e-5


# Parameters of the quick model (vocabulary 1000, dim 64, hidden 128) that each style shards over 4 ranks.
ALL_OF_IT = 64000 + 2 * 64 + (64 * 128 + 128) + (128 * 64 + 64) + (64000 + 1000)
UP, DOWN, OUTPUT = 64 * 128 + 128, 128 * 64, 64000 + 1000
SHARDED = {
    "embedding_rows": 64000,
    "embedding_columns": 64000,
    "linear": UP + DOWN,
    "linear_dtensor": UP + DOWN,
    "rows_of_whole": DOWN,
    "vocabulary": 64000 + OUTPUT,
    "sequence": 64000 + UP + DOWN + OUTPUT,
    "sequence_dtensor": 64000 + UP + DOWN + OUTPUT,
    "prepare_input": OUTPUT,
    "prepare_output": OUTPUT,
    "prepare_both": 0,
    "loss_parallel": OUTPUT,
    "callable": UP + DOWN + OUTPUT,
}


@pytest.mark.parametrize("style", SHARDED)
@pytest.mark.long
def test_a_tensor_parallel_style_shards_what_it_should_and_computes_what_one_device_computes(
    rows: Rows, style: str
) -> None:
    row = rows["tp_styles"][f"style={style}"]
    assert row["status"] == "ok" and max(errors(row)) <= 1e-5
    assert row["counters"]["parameter_bytes"] == 4 * (ALL_OF_IT - SHARDED[style] * 3 // 4)


@pytest.mark.long
def test_linears_without_bias_are_sharded_too(rows: Rows) -> None:
    row = rows["tp_styles"]["style=linear_no_bias"]
    biases = 128 + 64 + 1000
    assert max(errors(row)) <= 1e-5
    assert row["counters"]["parameter_bytes"] == 4 * (ALL_OF_IT - biases - 2 * 64 * 128 * 3 // 4)


@pytest.mark.parametrize(
    ("layout", "shares"),
    [("rows", 3 / 2), ("rows_of_both", 3 / 4), ("rows_then_columns", 2 / 4 + 1 / 2), ("rows_of_rows", 2 / 2 + 1 / 4)],
)
@pytest.mark.long
def test_annotated_parameters_are_held_in_shares_and_compute_what_one_device_computes(
    rows: Rows, layout: str, shares: float
) -> None:
    row = rows["shard_params"][f"layout={layout}"]
    assert row["status"] == "ok" and max(errors(row)) <= 1e-5
    assert row["counters"]["parameter_bytes"] == 4 * 128 * 512 * shares


@pytest.fixture(scope="module")
def combined(rows: Rows, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Variants:
    """ "ranks: number scenario mesh" to row: every combination of plans, on four ranks or eight."""
    mesh = "dp_shard=2,cp=2,tp=2"
    job = job_of(COMBINATIONS, tmp_path_factory.mktemp("combined"), mesh)
    outcome = ranks.launch(job, COMBINED)
    on_four, on_eight = rows[COMBINATIONS], variants_of(job, outcome)
    assert outcome.exit_code == 0 and len(on_four) == 6 and len(on_eight) == 4
    return {f"{count}: {name}": row for count, result in ((4, on_four), (8, on_eight)) for name, row in result.items()}


def combination(combined: Variants, name: str) -> dict[str, Any]:
    (row,) = (row for whole, row in combined.items() if whole.startswith(name))
    assert row["status"] == "ok" and max(errors(row)) <= 1e-5
    return row


# Parameters of the small llama, and how many ranks share each: TP shards matrices only, norms go to FSDP alone.
MATRICES = 2 * 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256)
NORMS = 5 * 64


@pytest.mark.parametrize(
    ("name", "share", "tp"),
    [
        pytest.param("8: 0 llama_3d", 8, 2, id="TP x CP x FSDP"),
        pytest.param("8: 1 llama_3d", 4, 2, id="HSDP x TP"),
        pytest.param("4: 0 llama_3d", 4, 1, id="CP x FSDP"),
        pytest.param("4: 1 llama_3d", 4, 2, id="CP x TP"),
        pytest.param("8: 2 llama_3d", 4, 2, id="HSDP x CP x TP, the output made whole"),
        pytest.param("4: 2 llama_3d", 4, 2, id="TP x CP by Ulysses x FSDP"),
    ],
)
@pytest.mark.long
def test_combined_plans_compute_what_one_device_computes(combined: Variants, name: str, share: int, tp: int) -> None:
    row = combination(combined, name)
    assert row["counters"].get("output_rel_error", 0) <= 1e-5
    assert ("output_rel_error" in row["counters"]) == (name == "8: 2 llama_3d")
    assert row["counters"]["parameter_bytes"] == 4 * (MATRICES // share + NORMS * tp // share)


@pytest.mark.long
def test_plans_on_one_spmd_mesh_compute_what_one_device_computes(combined: Variants) -> None:
    row = combination(combined, "4: 5 spmd_mesh")
    embedding = 1000 * 64  # is sharded by FSDP alone, as norms are
    assert row["counters"]["parameter_bytes"] == 4 * ((MATRICES - embedding) // 4 + (embedding + NORMS) // 2)
    row = combination(combined, "8: 3 hybrid_spmd")
    # Of three matrices two are in quarters, one in halves; over dp_replicate they are whole.
    assert row["counters"]["parameter_bytes"] == 4 * 64 * 64 * (2 / 4 + 1 / 2)


@pytest.mark.parametrize("name", ["4: 3 cp_attention", "4: 4 cp_attention"])
@pytest.mark.long
def test_full_ring_attention_computes_what_one_device_computes(combined: Variants, name: str) -> None:
    combination(combined, name)


@pytest.fixture(scope="module")
def mistaken(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variants]:
    """How much of a step is checked, to the mistakes of wrong_plans.py and their rows, all of one launch."""
    jobs = {
        check: job_of(str(DATA / "wrong_plans.py"), tmp_path_factory.mktemp(check), None, check)
        for check in ("full", "loss", "none")
    }
    outcomes = ranks.launch_all(list(jobs.values()), NO_MEMORY)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 0]
    return {
        check: {name.partition("=")[2]: row for name, row in variants_of(job, outcome).items()}
        for (check, job), outcome in zip(jobs.items(), outcomes, strict=True)
    }


def test_a_plan_that_computes_something_else_comes_out_wrong(mistaken: dict[str, Variants]) -> None:
    assert {name: row["status"] for name, row in mistaken["full"].items()} == {
        "none": "ok",
        "positions": "wrong",
        "not_averaged": "wrong",
    }
    # Without the average the loss is still right, so only the gradients can tell.
    counters = mistaken["full"]["not_averaged"]["counters"]
    assert counters["loss_rel_error"] <= 1e-5 and counters["grad_rel_error"] > 0.1


@pytest.mark.parametrize(
    ("check", "wrong", "kept"),
    [("loss", ["positions"], {"check", "tolerance", "loss", "loss_rel_error"}), ("none", [], {"check"})],
)
def test_less_of_a_step_is_checked_where_that_is_asked_for(
    mistaken: dict[str, Variants], check: str, wrong: list[str], kept: set[str]
) -> None:
    rows = mistaken[check]
    assert [name for name, row in rows.items() if row["status"] == "wrong"] == wrong
    assert len(rows) == 3 and {row["counters"]["check"] for row in rows.values()} == {check}
    of_checks = {"check", "tolerance", "loss", "loss_rel_error", "grad_rel_error", "worst_grad"}
    assert all(of_checks & row["counters"].keys() == kept for row in rows.values())
