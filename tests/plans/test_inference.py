"""Forward-only scenarios: what they refuse, what they compute and keep, and the table of their latency."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from gate_runs import case as gate_case
from gate_runs import launches, records, taking_turns, write
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from distbench.cases.single_device_reference import compare, reference_of
from distbench.cases.step import step_cases
from distbench.judge.compare_runs import blocks_of, side_by_side
from distbench.judge.gate import gate
from distbench.judge.gate_text import text
from distbench.judge.history import OF_LATENCIES, series_of
from distbench.observe.module_attribution import communications_of
from distbench.plans.plan_changes import scenario_of
from distbench.plans.training_step import ForwardStep, output_of, step_of
from distbench.ranks.context import RankContext
from distbench.ranks.measure import no_stamp
from distbench.records.dataframe import frame_of
from distbench.records.run_file import Run, read_run
from distbench.report.section_protocol import ReportedRun
from distbench.report.steps import FORWARD_PASSES, TRAINING_STEPS
from distbench.show.terminal import text_of
from distbench.spec import CpPlan, DdpPlan, FsdpPlan, ParallelPlan, Scenario, UserError
from distbench.statistics.intervals import MIN_FOR_PERCENTILE, summarise
from distbench.statistics.verdicts import Options
from distbench.torch_private import fake_ranks

SIZES = {"dim": 32, "hidden": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "batch": 2, "prompt": 8}
# K and V of 2 layers: 2 samples, 2 heads, 16 positions, 8 numbers a head, 4 bytes.
CACHE_BYTES = 2 * 2 * (2 * 2 * 16 * 8 * 4)


@pytest.fixture(scope="module")
def shipped() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "scenarios"))
    try:
        import llama_inference

        yield llama_inference
    finally:
        sys.path.remove(str(ROOT / "scenarios"))
        for name in ("llama_inference", "cached", "llama_2d", "models"):
            sys.modules.pop(name, None)


def declared(shipped: Any, **given: Any) -> Scenario:
    scenario: Scenario = shipped.llama_inference(**SIZES, cache_length=16, **given)
    return scenario


def rank_0(mesh: Any) -> RankContext:
    assert torch.distributed.group.WORLD is not None
    return RankContext(0, torch.device("cpu"), mesh, "gloo", torch.distributed.group.WORLD, 1)


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": torch.optim.SGD}, "this scenario has optimizer; leave it out"),
        ({"loss": nn.functional.mse_loss}, "has a loss; leave it out"),
        ({"plan": ParallelPlan(microbatches=2)}, "has plan.microbatches"),
        ({"plan": ParallelPlan(ddp=DdpPlan())}, "has plan.ddp"),
        (
            {"plan": ParallelPlan(loss_parallel=True, checkpoint=("*",))},
            "plan.loss_parallel, plan.checkpoint; leave them",
        ),
        ({"plan": ParallelPlan(fsdp=FsdpPlan(reshard_each_microbatch=False))}, "has plan.fsdp.reshard_each_microbatch"),
        ({"plan": ParallelPlan(fsdp=FsdpPlan(prefetch_backward=1))}, "has plan.fsdp.prefetch_backward"),
        (
            {"plan": ParallelPlan(fsdp=FsdpPlan(configure={"set_gradient_divide_factor": 2.0}))},
            r"has plan.fsdp.configure\['set_gradient_divide_factor'\]",
        ),
        ({"plan": ParallelPlan(cp=CpPlan(seq_dim=0))}, "give CpPlan another seq_dim than 0"),
        ({"make_cache": lambda model, batch: {}}, r"give call\(model, batch, cache\)"),
    ],
)
def test_what_only_training_has_is_refused_in_a_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        Scenario(inference=True, **given)
    assert "\n" not in str(refused.value)


def test_a_cache_without_inference_is_refused_and_so_is_a_change_that_accumulates() -> None:
    with pytest.raises(UserError, match=r"use Scenario\(inference=True\)"):
        Scenario(make_cache=lambda model, batch: {})
    with pytest.raises(UserError, match=r"has plan\.microbatches"):
        scenario_of(lambda: Scenario(inference=True), {"plan.microbatches": 2})


def test_what_forward_reads_of_fsdp_is_taken() -> None:
    fsdp = FsdpPlan(wrap=("*",), reshard_after_forward=True, prefetch_forward=1)
    assert Scenario(inference=True, plan=ParallelPlan(fsdp=fsdp)).plan.fsdp == fsdp


def test_logits_are_found_in_what_models_return_and_nothing_else_will_do() -> None:
    logits = torch.ones(2, 3)
    for result in (logits, (logits, 1), {"loss": torch.zeros(()), "logits": logits}, SimpleNamespace(logits=logits)):
        assert output_of(Scenario(inference=True), lambda x, result=result: result, torch.ones(1)) is logits
    with pytest.raises(UserError, match=r"call \(.*test_inference.*\) returns None, but inference=True requires"):
        output_of(Scenario(inference=True, call=lambda model, batch: None), None, torch.ones(1))


# What is computed, on one rank of several that send nothing


def test_a_decode_step_gives_what_the_whole_sequence_gives_at_its_last_position(shipped: Any) -> None:
    with fake_ranks({"tp": 1}) as mesh:
        context = rank_0(mesh)
        step = step_of(declared(shipped, phase="decode"), context)
        assert isinstance(step, ForwardStep) and step.phases == ("forward",)
        first, again = step.whole_output(), step.whole_output()
        batch = step.microbatches[0]
        sequence = torch.cat([batch["prompt"], batch["token"]], dim=1)
        with torch.no_grad():
            whole = step.model(sequence, shipped.KvCache(16), 0)
        assert first.shape == (2, 1, 1000) and torch.equal(first, again)
        torch.testing.assert_close(first[:, 0], whole[:, -1])
        assert step.cache_bytes == CACHE_BYTES
        # One device computes it by itself, prompt and all.
        reference = reference_of(declared(shipped, phase="decode"), context)
        assert reference.output is not None and not reference.gradients
        torch.testing.assert_close(reference.output, first)


@pytest.mark.long
def test_the_cache_is_split_over_heads_and_each_layer_communicates_twice(shipped: Any) -> None:
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        scenario, context = declared(shipped, phase="decode", fsdp=True), rank_0(mesh)
        (spec,) = step_cases(scenario, "llama_inference/phase=decode", context)
        assert spec.case.params["mode"] == "inference" and spec.case.params["num_tokens"] == 2
        with spec.open() as opened_case:
            step: Any = opened_case.call
            step(no_stamp)
            # Half of the heads of half of the batch.
            assert step.cache_bytes == CACHE_BYTES // 4
            rows = communications_of(step, step.phases, step.plan, context, step.model)
            # With nothing sent, a rank has its own share of every sum.
            assert "the output differs" in str(opened_case.check())
            counters = opened_case.after()
    assert {row.phase for row in rows} == {"forward"} and all(row.owner is not None for row in rows)
    by_mesh_dim = [sum(row.mesh_dim == name for row in rows) for name in ("dp_shard", "tp")]
    # A gather a layer and one of the root; two sums a layer, the embedding's, and the logits.
    assert by_mesh_dim == [2 + 1, 2 * 2 + 2]
    assert counters["cache_bytes"] == CACHE_BYTES // 4 and counters["output_rel_error"] > 1e-3
    assert not {"loss_rel_error", "grad_rel_error"} & set(counters)
    assert counters["peak_by_kind"]["cache"] == CACHE_BYTES // 4
    assert sum(counters["peak_by_kind"].values()) == counters["peak_bytes"]


@pytest.mark.long
def test_logits_that_are_a_part_of_the_vocabulary_are_of_another_shape(shipped: Any) -> None:
    with fake_ranks({"tp": 2}) as mesh:
        scenario, context = declared(shipped, phase="decode"), rank_0(mesh)
        tp: Any = scenario.plan.tp
        local = replace(scenario, plan=ParallelPlan(tp={**tp, "output": ColwiseParallel()}))
        step = step_of(local, context)
        assert isinstance(step, ForwardStep)
        output = step.whole_output()
        result = compare(step.model, None, reference_of(local, context), context, None, output)
    assert output.shape == (2, 1, 500) and result.loss is None
    assert result.output is not None and result.output.apart == math.inf


def test_a_token_is_not_split_over_the_sequence(shipped: Any) -> None:
    assert declared(shipped, phase="decode", sequence_parallel=True) == Scenario()
    with pytest.raises(UserError, match="phase=sideways is unknown"):
        declared(shipped, phase="sideways")
    with pytest.raises(UserError, match="is too long for a cache of 8; use 1 to 7"):
        shipped.llama_inference(prompt=8, cache_length=8)


def test_a_prompt_under_context_parallel_is_gathered_for_the_check_alone(shipped: Any) -> None:
    with fake_ranks({"cp": 2}) as mesh:
        scenario, context = declared(shipped, rotate="allgather"), rank_0(mesh)
        step = step_of(scenario, context)
        assert isinstance(step, ForwardStep)
        assert step.forward().shape == (2, 4, 1000) and step.whole_output().shape == (2, 8, 1000)
        rows = communications_of(step, step.phases, step.plan, context, step.model)
        # K and V of each layer, half of 8 positions of 2 samples, gathered; the logits are not.
        assert [(row.phase, row.kind, row.mesh_dim, row.owner) for row in rows] == [
            ("forward", "all_gather", "cp", f"layers.{layer}.attention") for layer in range(2)
        ]
        assert step.cache_bytes == CACHE_BYTES  # the cache has room for 16 positions, whoever has them


@pytest.mark.long
def test_a_token_that_ranks_cannot_share_is_refused_on_those_without_it(shipped: Any) -> None:
    decode = declared(shipped, phase="decode")
    over_tp = replace(decode, plan=ParallelPlan(tp=shipped.TP_PLAN))
    with fake_ranks({"tp": 2}, rank=1) as mesh:
        step = step_of(over_tp, replace(rank_0(mesh), rank=1))
        with pytest.raises(UserError, match=r"attention_norm gets \[2,0,32\].*; leave sequence parallel out"):
            step(no_stamp)
    ring = CpPlan(load_balance=False, buffers={"rotations": 0})
    over_cp = replace(decode, plan=ParallelPlan(cp=ring), sequence_dims={"prompt": 1})
    with fake_ranks({"cp": 2}) as mesh:
        step = step_of(over_cp, rank_0(mesh))
        with pytest.raises(UserError, match="as in a decode step over a cache; leave cp out"):
            step(no_stamp)


# What is shown


def test_a_percentile_is_told_where_a_slower_sample_is_to_be_expected() -> None:
    # By hand: 0.9^29 = 0.047, 0.9^28 = 0.052; 0.99^299 = 0.0495, 0.99^298 = 0.0500 and a bit.
    assert MIN_FOR_PERCENTILE == {50: 5, 90: 29, 99: 299}
    assert 0.9**29 <= 0.05 < 0.9**28 and 0.99**299 <= 0.05 < 0.99**298
    result = summarise([[float(value) for value in range(1, count + 1)] for count in (4, 28, 29, 300)])
    known = [[float(result[f"p{percent}_s"][row]) for percent in (50, 90, 99)] for row in range(4)]
    assert str(known) == "[[nan, nan, nan], [14.0, nan, nan], [15.0, 27.0, nan], [150.0, 270.0, 297.0]]"


def run_of(num_samples: int, pipelined: int = 1, **more: Any) -> Run:
    def case(variant: str, scale: float, num_tokens: int) -> dict[str, Any]:
        params = {"variant": variant, "mode": "inference", "batch_size": 4, "computes": variant, **more}
        return {
            "type": "case",
            "case": {"id": f"step/{variant}", "kind": "step", "params": {**params, "num_tokens": num_tokens}},
            "status": "ok",
            "samples_s": [scale * (1 + number / 1000) for number in range(num_samples)],
            "counters": {"cache_bytes": 131072, "peak_bytes": 1048576, "output_rel_error": 4e-7},
        }

    settings = {"iterations_per_sample": pipelined}
    header = {"type": "run", "job": {"scenario": "mine", "settings": settings}}
    return Run(Path("mine.jsonl"), header, [case("prefill", 0.1, 1024), case("decode", 0.01, 4)], None, [])


def reported(num_samples: int, pipelined: int = 1) -> ReportedRun:
    run = run_of(num_samples, pipelined)
    return ReportedRun(run, frame_of([run]))


def test_the_table_has_percentiles_with_what_stands_behind_them_throughput_and_the_cache() -> None:
    run = reported(300)
    times, checks = FORWARD_PASSES.tables(run, True)
    prefill, decode = times.rows
    assert times.columns[1:6] == ("p50", "p90 (slower)", "p99 (slower)", "samples", "tokens/s")
    # Samples are 100, 100.1, ... ms: the 150th, 270th and 297th of 300, beyond which lie 30 and 3.
    assert [cell.strip() for cell in prefill[1:5]] == ["115 ms", "127 ms (30)", "130 ms (3)", "300"]
    assert float(decode[5].split()[0]) == pytest.approx(4 / 0.011495, rel=0.01)
    assert [cell.strip() for cell in checks.rows[0]][1:3] == ["128 KiB", "1 MiB"] and "4.0e-07" in checks.rows[0]
    assert TRAINING_STEPS.tables(run, True) == [] and FORWARD_PASSES.headline(run)[0].startswith(
        "median latency: prefill 115 ms, "
    )
    ((name, figure),) = FORWARD_PASSES.figures(run)
    assert name == "latency" and [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "p50",
        "p90",
        "p99",
    ]


def latencies(folder: Path, tail: float, start: float) -> Path:
    """Launches of a forward pass of 10 ms, every 25th of which takes `tail` times as long."""
    for index in range(6):
        level = 0.01 * (1 + 0.002 * (index % 3))
        samples = [level * (tail if number % 25 == 0 else 1 + number / 1e5) for number in range(100)]
        lines = records(f"{folder.name}-{index}", start + 100 * index, {"step/prefill": gate_case(samples)})
        lines[1]["case"] |= {"kind": "step", "params": {"variant": "prefill", "mode": "inference"}}
        write(folder / f"{index}.jsonl", lines)
    return folder


def test_verdicts_on_latencies_say_what_of_them_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbench.show.terminal._shows_notes", [True])
    folders = latencies(tmp_path / "even", 1.0, 1000.0), latencies(tmp_path / "tail", 1.9, 1050.0)
    gated = gate(*map(launches, folders), Options())
    # 4 % of passes that take 1.9 times as long: a mean 3.6 % slower, less than the tolerance, and not a word of p99.
    assert [case.verdict for case in gated.cases] == ["pass"]
    assert "mean and 10th percentile (p10), not the tail" in " ".join(text(gated).split())
    runs = [[read_run(path) for path in sorted(folder.glob("*.jsonl"))] for folder in folders]
    several = side_by_side(*runs, ("even", "tail"), Options())
    single = side_by_side(*(some[:1] for some in runs), ("even", "tail"), Options())
    shown = [" ".join(text_of(blocks_of(result)).split()) for result in (several, single)]
    assert "not the tail" in shown[0] and "Tails (p90, p99) are not compared" in shown[1]
    (series,), notes = series_of(launches(folders[0]), "*")
    assert len(series.points) == 6 and f"{series.scenario}: {OF_LATENCIES}" in notes


def test_of_training_steps_no_tail_is_spoken_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbench.show.terminal._shows_notes", [True])
    gated = gate(*map(launches, taking_turns(tmp_path, 0.01, 0.01)), Options())
    assert "tail" not in text(gated)


def test_too_few_samples_and_means_of_several_passes_tell_no_tail() -> None:
    (times, _), (means, _) = (FORWARD_PASSES.tables(run, True) for run in (reported(40), reported(400, pipelined=10)))
    assert times.columns[1:4] == ("p50", "p90 (slower)", "samples") and times.rows[0][2].endswith("(4)")
    assert "p99 needs 299 samples, but a row has only 40; measure with --passes 299" in times.notes
    assert means.columns[1:3] == ("p50", "samples") and any("--pipelined" in note for note in means.notes)


def test_a_single_sample_has_no_percentile_and_nothing_to_draw() -> None:
    assert list(FORWARD_PASSES.figures(reported(1))) == []
