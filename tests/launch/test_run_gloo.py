"""Real gloo ranks: every shipped scenario, what its run file holds, and joining somebody else's launch."""

import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, ROOT, run_files
from processes import Ranks

from distbench.launch import Request, jobs_of
from distbench.records.run_file import AGAIN, Run, read_run

SCENARIOS = ("collectives", "tp_mlp", "cp_attention", "llama_2d", "ddp", "redistribute")
SCENARIOS += ("dtensor_ops", "llama_inference", "pipeline", "moe_tp", "replicate_tp")
SCENARIOS += ("state_checkpoint", "cp_documents")
IN_PASSES = "tp_mlp"
# Without --all, the launch has only these.
CORE = ("collectives", "tp_mlp", "llama_2d")
MIN_SAMPLES, FEWER = (
    5,
    dict.fromkeys(("redistribute", "dtensor_ops", "llama_2d", *SCENARIOS[-6:], "cp_attention"), 1),
)
# Of scenarios with many variants, those that launches of other tests do not have; and none that is skipped.
SOME = {"ddp": slice(1, None, 3), "llama_inference": slice(2, 3), "pipeline": slice(1, 2)}
SOME |= {"moe_tp": slice(5, 7), "replicate_tp": slice(2, None), "cp_documents": slice(1, None, 4)}
# On a mesh of its own.
PROMPT = {"phase": "prefill", "sequence_parallel": True, "rotate": "allgather", "plan.mesh": "cp2xtp2"}
SKIPPED = ({"rotate": "ulysses", "load_balance": True}, {"rotate": "alltoall", "unshard_output": False})
SMALL = ("max_bytes=65536", "small=32", "large=32", "ops=add")


def only_core(names: tuple[str, ...]) -> list[Any]:
    """Parameters of which only those of CORE are tested without --all."""
    return [pytest.param(name, marks=() if name in CORE else pytest.mark.long) for name in names]


@pytest.fixture(scope="module")
def shipped(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("results")
    names, choices = (SCENARIOS, SMALL) if pytestconfig.getoption("--all") else (CORE, SMALL[:1])
    request = Request(targets=names, choices=choices, device="cpu", quick=True, out=folder, timeout_s=120)
    jobs = []
    for job in jobs_of(request, None):
        # As few samples as an interval needs: what is tested is what a row says, not how long anything takes.
        passes = 2 if job.scenario == IN_PASSES else 1
        min_samples = FEWER.get(job.scenario, MIN_SAMPLES)
        settings = replace(job.settings, warmup_iterations=1, min_samples=min_samples, budget_s=0.2, passes=passes)
        variants = [
            one
            for one in job.variants[SOME.get(job.scenario, slice(None))]
            if not any(left_out.items() <= one.items() for left_out in SKIPPED)
        ]
        variants += [{**job.variants[0], **PROMPT}] if job.scenario == "llama_inference" else []
        # Of the redistributions those to three of the nine targets.
        chosen = {"redistribute": '"->S(0)"', "state_checkpoint": "not async_process"}.get(job.scenario, "")
        jobs.append(replace(job, settings=settings, variants=variants, chosen=chosen))
    outcomes = ranks.launch_all(jobs)
    assert [outcome.exit_code for outcome in outcomes] == [0] * len(jobs), [outcome.message for outcome in outcomes]
    return {job.scenario: read_run(Path(job.run_file)) for job in jobs}


@pytest.mark.parametrize("name", only_core(SCENARIOS))
def test_every_case_of_a_shipped_scenario_is_ok(shipped: dict[str, Run], name: str) -> None:
    run = shipped[name]
    assert run.cases and {record["status"] for record in run.cases} == {"ok"}
    assert all(len(record["samples_s"]) >= FEWER.get(name, MIN_SAMPLES) for record in run.cases)
    assert run.footer is not None and run.footer["status"] == "complete"
    assert len({record["case"]["id"] for record in run.cases}) == len(run.cases)


def test_the_header_tells_what_was_measured_where(shipped: dict[str, Run]) -> None:
    environment = shipped["llama_2d"].header["environment"]
    assert environment["backend"] == "gloo" and environment["world_size"] == 4
    assert environment["torch"].startswith("2.") and environment["cpu_model"] and environment["num_cpus"] > 0
    assert environment["scheduler"] == ("batch" if len(os.sched_getaffinity(0)) < 8 else "other")
    assert not set(environment["variables"]) & {"PATH", "HOME"}
    assert shipped["llama_2d"].header["job"]["mesh"] == {"dp_shard": 2, "tp": 2}


def test_the_footer_says_how_the_time_was_spent(shipped: dict[str, Run]) -> None:
    footer = shipped["collectives"].footer
    assert footer is not None
    assert set(footer["spent_s"]) == {"launch", "imports", "set-up", "warm-up", "timed", "checking", "other"}
    assert sum(footer["spent_s"].values()) == pytest.approx(footer["wall_s"], rel=0.01)
    assert footer["spent_s"]["timed"] > 0.1
    assert 0 <= footer["foreign_cpu"] <= 1


def test_in_passes_every_case_is_come_back_to_after_all_others(shipped: dict[str, Run]) -> None:
    run = shipped[IN_PASSES]
    message = (Path(run.header["job"]["log_dir"]) / "progress.jsonl").read_text().splitlines()
    begun = [event["id"] for event in map(json.loads, message) if event["event"] == "case"]
    ids = [record["case"]["id"] for record in run.cases]
    assert len(ids) > 1 and begun[: len(ids)] == ids and sorted(begun[len(ids) :]) == sorted(ids)
    for record in run.cases:
        numbers, counts = zip(*record["passes"], strict=True)
        assert numbers == (0, 1) and sum(counts) == len(record["samples_s"])
    # Each pass takes its half of the least, rounded up.
    assert all(len(record["samples_s"]) >= 6 for record in run.cases)


def test_collectives_carry_sizes_groups_and_the_operation_the_backend_runs(shipped: dict[str, Run]) -> None:
    by_id = {record["case"]["id"]: record for record in shipped["collectives"].cases}
    gathered = by_id["collective/f32[16384]/all_gather/tp"]
    assert (gathered["payload_bytes"], gathered["wire_bytes"], gathered["group_size"]) == (65536, 32768, 2)
    assert gathered["mesh_dim"] == "tp" and len(gathered["rank_median_s"]) == 4
    assert by_id["collective/f32[16384]/reduce_scatter/tp"]["backend_op"] == "all_reduce"
    ops = {record["case"]["params"]["op"] for record in shipped["collectives"].cases}
    assert ops == {"all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"}


@pytest.mark.parametrize("name", only_core(("tp_mlp", "cp_attention", "llama_2d", "ddp", "moe_tp", "replicate_tp")))
def test_steps_have_phases_tokens_memory_and_the_gradients_of_one_device(shipped: dict[str, Run], name: str) -> None:
    for record in [one for one in shipped[name].cases if not one["case"]["id"].endswith(AGAIN)]:
        phases = record["phases_s"]
        assert set(phases) == {"forward", "backward", "optimizer"}
        assert all(len(values) == len(record["samples_s"]) for values in phases.values())
        params, counters = record["case"]["params"], record["counters"]
        assert params["batch_size"] == params["shape"][0]
        assert params["num_tokens"] == params["shape"][0] * params["shape"][1]
        assert sum(counters["peak_by_kind"].values()) == counters["peak_bytes"]
        assert counters["peak_phase"] in phases
        assert "memory_reason" not in counters and counters["predicted_peak_bytes"] > 0
        assert record["counters"]["loss_rel_error"] <= 1e-5 and record["counters"]["grad_rel_error"] <= 1e-5


@pytest.mark.long
def test_a_forward_pass_has_the_logits_of_one_device_and_a_cache(shipped: dict[str, Run]) -> None:
    for record in shipped["llama_inference"].cases:
        counters = record["counters"]
        assert set(record["phases_s"]) == {"forward"} and counters["output_rel_error"] <= 1e-5
        # K and V of 2 layers for 4 samples, one of 4 heads (two where tp has two ranks), 128 positions of 16 numbers.
        heads = 2 if "cp" in record["mesh_dim"] else 1
        assert counters["cache_bytes"] == counters["peak_by_kind"]["cache"] == 2 * 2 * 4 * heads * 128 * 16 * 4
        assert sum(counters["peak_by_kind"].values()) == counters["peak_bytes"]


@pytest.mark.long
def test_a_pipeline_has_one_phase_for_forward_and_backward_and_says_how_long_ranks_are_idle(
    shipped: dict[str, Run],
) -> None:
    (record,) = shipped["pipeline"].cases
    counters = record["counters"]
    assert set(record["phases_s"]) == {"schedule", "optimizer"}
    assert counters["loss_rel_error"] <= 1e-5 and counters["grad_rel_error"] <= 1e-5
    assert len(counters["idle_shares"]) == 4 and all(0 <= share < 1 for share in counters["idle_shares"])
    assert counters["least_idle_share"] == pytest.approx(3 / 11)  # (p-1)/(m+p-1) of 4 ranks and 8 micro-batches
    assert counters["peak_bytes"] > 0 and counters["predicted_peak_bytes"] > 0


@pytest.mark.long
def test_context_parallel_runs_every_rotation_balanced_or_not_with_the_output_sharded_or_whole(
    shipped: dict[str, Run],
) -> None:
    cases = shipped["cp_attention"].cases
    assert [record["case"]["params"]["variant"] for record in cases] == [
        f"rotate={rotate},load_balance={balance},unshard_output={whole}"
        for rotate, balance in (*itertools.product(("allgather", "alltoall"), (True, False)), ("ulysses", False))
        for whole in (False, True)
        if whole or rotate != "alltoall"
    ]
    # What is whole is compared value by value, in its original order.
    for record in cases:
        is_whole = record["case"]["params"]["variant"].endswith("True")
        assert record["counters"].get("output_rel_error", 0) <= 1e-5
        assert ("output_rel_error" in record["counters"]) is is_whole


@pytest.mark.long
def test_redistribution_moves_every_source_to_a_target_with_both_planners(shipped: dict[str, Run]) -> None:
    cases = shipped["redistribute"].cases
    # 16 sources to 3 targets, less those to themselves; small and large are one size, nothing is measured again.
    assert len(cases) == (16 * 3 - 3) * 2
    for record in cases:
        path = record["counters"]["path"]
        assert path.startswith(record["case"]["params"]["source"][0])
        assert record["counters"]["planning_cold_s"] > record["counters"]["planning_warm_s"] > 0
        assert (record["wire_bytes"] == 0) == (record["counters"]["num_collectives"] == 0)


@pytest.mark.long
def test_an_operator_says_what_it_redistributes_unasked_and_each_planner_pays_its_own_way(
    shipped: dict[str, Run],
) -> None:
    rows = {record["case"]["id"].split("/", 2)[2]: record for record in shipped["dtensor_ops"].cases}
    assert rows and all(name.startswith("add/") for name in rows)
    # By hand: half the matrix is reduced (2 x 1/2 of it sent), then gathered (1/2 of the whole); or the whole is
    # gathered first, and 1/2 of half of it scattered.
    size = 64 * 64 * 4
    paid = {planner: rows[f"add/S(0)S(0),S(1)P(sum)/{planner}"] for planner in ("greedy", "min_cost")}
    assert (paid["greedy"]["wire_bytes"], paid["min_cost"]["wire_bytes"]) == (size, size * 3 // 4)
    counters = paid["min_cost"]["counters"]
    assert counters["forward_pays"].endswith("S(1)P(sum)->S(0)S(0): reduce_scatter tp")
    assert (counters["num_implicit"], counters["backward_pays"], counters["result"]) == (2, "", "S(0)S(0)")
    assert set(paid["greedy"]["phases_s"]) == {"forward", "backward"}


@pytest.mark.long
def test_the_planners_take_different_paths_where_they_should(shipped: dict[str, Run]) -> None:
    paths: dict[tuple[str, ...], dict[str, str]] = {}
    for record in shipped["redistribute"].cases:
        params = record["case"]["params"]
        key = (params["source"], params["target"], str(params["shape"]))
        paths.setdefault(key, {})[params["planner"]] = record["counters"]["path"]
    differing = sum(pair["greedy"] != pair["min_cost"] for pair in paths.values())
    # 40 to 75 % of pairs in an earlier, independent comparison of the two planners over many meshes and shapes.
    assert 0.2 <= differing / len(paths) <= 0.8


def test_what_gloo_really_runs_is_what_we_say_it_runs(ranks: Ranks, tmp_path: Path) -> None:
    from distbench.torch_private import BACKEND_OPS

    out = tmp_path / "spans.json"
    ranks.torchrun(2, ROOT / "tests" / "ranks" / "backend_spans.py", out, check=True)
    spans = json.loads(out.read_text())
    names = {"send_recv": "send"}
    message = {op: BACKEND_OPS.get(("gloo", op), names.get(op, op)) for op in spans}
    assert message == {op: seen[0] for op, seen in spans.items()}


def test_under_torchrun_the_command_joins_as_a_rank_and_pipelined_samples_are_recorded_as_such(
    ranks: Ranks, tmp_path: Path
) -> None:
    given = ("run", DATA / "tiny.py", "--quick", "--budget", "0.2", "--pipelined", "10", "--results", tmp_path)
    done = ranks.torchrun(2, "-m", "distbench", *given)
    assert done.returncode == 0, done.stderr
    (file,) = run_files(tmp_path)
    run = read_run(file)
    assert [record["status"] for record in run.cases] == ["ok"]
    assert run.header["environment"]["world_size"] == 2 and run.footer is not None
    assert run.header["job"]["settings"]["iterations_per_sample"] == 10


def test_under_srun_the_command_joins_as_a_rank(ranks: Ranks, tmp_path: Path) -> None:
    def rank(number: int) -> subprocess.Popen[str]:
        variables = {
            "SLURM_PROCID": str(number),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(number),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "MASTER_PORT": "29713",
        }
        given = ("run", DATA / "tiny.py", "--quick", "--budget", "0.2", "--results", tmp_path)
        command = (ranks.forked_python, "-m", "distbench", *given)
        return ranks.start(*command, variables=variables, stderr=subprocess.PIPE)

    started = [rank(0), rank(1)]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    (file,) = run_files(tmp_path)
    assert read_run(file).header["environment"]["world_size"] == 2


def test_the_scenario_in_the_readme_is_this_file_and_runs(ranks: Ranks, tmp_path: Path) -> None:
    file = DATA / "readme_scenario.py"
    assert f"```python\n{file.read_text()}```" in (ROOT / "README.md").read_text()
    done = ranks.run_here("run", str(file), "--quick", "--budget", "0.5", "--mesh", "tp=2", "--results", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    shown = ranks.run_here("report", "--full", "--results", str(tmp_path))
    assert "hidden=1024" in shown.stdout and "hidden=4096" in shown.stdout
