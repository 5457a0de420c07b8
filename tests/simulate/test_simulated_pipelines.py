"""Pipelines on the simulated clock: by hand, and torch's own schedules against what is published of them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from chakra_reader import check_times, nodes_of
from conftest import DATA
from processes import Children
from test_simulate_clock import HEAD, machine, matmul

from distbench.launch import Request, jobs_of
from distbench.records.run_file import read_run
from distbench.report.trace_rows import bubble_shares, bubbles_text, traces_of
from distbench.show.terminal import text_of
from distbench.simulate.allocator import replay_memory
from distbench.simulate.chakra_trace import chakra_files
from distbench.simulate.clock import Exposed, TimedStep, parts_of, replay_together
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.recording import (
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    PipelineFacts,
    Recording,
    StepBegun,
    load_recordings,
    ranks_of_pipeline,
    record_steps,
    save_recordings,
)
from distbench.simulate.simulated_run import write_simulated_run
from distbench.simulate.simulation import Simulation
from distbench.simulate.simulation_text import blocks_of
from distbench.spec import UserError
from distbench.spec.plan import SCHEDULES
from distbench.spec.versions import release

FREE = {"node_bytes_per_s": 1e30, "peer_bytes_per_s": 1e30, "memory_bytes_per_s": 1e30}
STAGES, PARTS = 4, 4
FACTS = PipelineFacts("pp", "gpipe", 2, 1, 0.5)


def message(kind: str, peer: int, seconds: float = 1, stream: int = 1, batch: int = 1) -> Collective:
    size, owner = int(seconds * 1e9), f"stage{1 - peer}.microbatch.0"
    ends = ((2, 1),)
    return Collective(
        stream, "forward", "pp", kind, "pp", 2, "bf16", size, owner, True, "", None, ends, f"c10d.{kind}", peer, batch
    )


def rank(number: int, *events: Event) -> Recording:
    """Of a pipeline of two stages, one on each rank."""
    head = replace(HEAD, mesh={"pp": 2}, rank=number, phases=("schedule",), pipeline=FACTS, case_id="step/i64[8]/mine")
    return Recording(head, [StepBegun(2), *events])


def two_stages() -> list[Recording]:
    """Rank 0 computes 2 s, sends for 1 s and computes 2 s more; rank 1 computes 1 s, and 3 s with what it receives."""
    first = (matmul(0, 2), EventRecorded(0, 0), EventWaited(1, 0), message("send", 1), matmul(0, 2))
    second = (message("recv", 0), EventRecorded(1, 0), matmul(0, 1), EventWaited(0, 0), matmul(0, 3))
    return [rank(0, *first), rank(1, *second)]


def test_a_message_begins_when_both_ends_are_ready_for_it() -> None:
    first, second = replay_together(two_stages(), machine())
    assert [(span.start_s, span.end_s) for span in first.spans] == [(0, 2), (2, 3), (2, 4)]
    assert [(span.start_s, span.end_s) for span in second.spans] == [(2, 3), (0, 1), (3, 6)]
    assert first.step_s == second.step_s == 6
    # Rank 0 waits for the other from 4 to 6, rank 1 from 1 to 2 and then receives, alone.
    (ours, theirs) = parts_of(first), parts_of(second)
    assert (ours.compute_s, ours.bubble_s, ours.idle_s, ours.exposed_s) == (4, 2, 0, {_path("send", 0): 0})
    assert (theirs.compute_s, theirs.bubble_s, theirs.idle_s, theirs.exposed_s) == (4, 1, 0, {_path("recv", 1): 1})


def _path(kind: str, stage: int) -> Exposed:
    return Exposed("pp", kind, "pp", f"stage{stage}.microbatch.0")


def test_between_nodes_a_message_takes_the_network() -> None:
    apart = machine(network_base_s=0.5, devices_per_node=1)
    assert [timed.step_s for timed in replay_together(two_stages(), apart)] == [2 + 0.5 + 10 + 3] * 2


def test_messages_of_one_batch_end_together_and_others_follow() -> None:
    """A send and a receive at once: what goes one way does not wait for the other way, the stream for both."""
    both = (message("send", 1, 1), message("recv", 1, 3), message("send", 1, 1, batch=2))
    others = (message("recv", 0, 1), message("send", 0, 3), message("recv", 0, 1, batch=2))
    first, second = replay_together([rank(0, *both), rank(1, *others)], machine())
    assert [(span.start_s, span.end_s) for span in first.spans] == [(0, 1), (0, 3), (3, 4)] and second.step_s == 4


def test_a_rank_continues_while_a_message_of_another_stream_waits() -> None:
    """Rank 0 sends first on stream 1, which rank 1 receives last, after the message of stream 2."""
    first = (message("send", 1), message("recv", 1, stream=2, batch=2), EventRecorded(2, 0), EventWaited(0, 0))
    second = (message("send", 0, stream=2), EventRecorded(2, 0), EventWaited(0, 0), matmul(0, 2))
    after = (EventRecorded(0, 1), EventWaited(1, 1), message("recv", 0, batch=2))
    one, other = replay_together([rank(0, *first, matmul(0, 1)), rank(1, *second, *after)], machine())
    assert [(span.start_s, span.end_s) for span in one.spans] == [(3, 4), (0, 1), (1, 2)]
    assert [(span.start_s, span.end_s) for span in other.spans] == [(0, 1), (1, 3), (3, 4)]
    assert not one.buffers_sends


def test_sends_that_wait_for_each_other_are_buffered() -> None:
    """Both ranks send before they receive on one stream: each receive starts after the own send."""
    ranks = [rank(0, message("send", 1, 1), message("recv", 1, 2, batch=2))]
    ranks += [rank(1, message("send", 0, 2), message("recv", 0, 1, batch=2))]
    first, second = replay_together(ranks, machine())
    assert [(span.start_s, span.end_s) for span in first.spans] == [(0, 1), (1, 3)]
    assert [(span.start_s, span.end_s) for span in second.spans] == [(0, 2), (2, 3)]
    text = " ".join(text_of(blocks_of(Simulation.all_of(ranks, machine(), False, ()))).split())
    assert first.buffers_sends and "warning: sends of this step wait for receives that are queued behind" in text


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (((message("recv", 1),), (message("recv", 0),)), "rank 0, 1 waits for a message whose other end is not"),
        (((message("send", 1),), ()), "rank 0 waits for a message whose other end is not recorded"),
        (((message("send", 1, 1),), (message("recv", 0, 2),)), "1,000,000,000 bytes on one end and 2,000,000,000 on"),
    ],
)
def test_messages_without_another_end_are_one_sentence(events: Any, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        replay_together([rank(0, *events[0]), rank(1, *events[1])], machine())
    with pytest.raises(UserError, match=r"rank 0 waits for a message .* all ranks of the pipeline"):
        assert Simulation(two_stages()[0], machine()).timed


def test_a_cpus_hardware_file_is_refused() -> None:
    with pytest.raises(UserError, match="h100 describes a CPU and has no measured messages between stages"):
        replay_together(two_stages(), replace(machine(), host=object()))  # type: ignore[arg-type]


def test_a_recording_keeps_its_pipeline_and_messages(tmp_path: Path) -> None:
    file = tmp_path / "step.jsonl"
    save_recordings(two_stages(), file)
    result = load_recordings(file)
    assert [one.head.pipeline for one in result] == [FACTS, FACTS]
    assert [(one.collectives[0].peer, one.collectives[0].batch) for one in result] == [(1, 1), (0, 1)]
    lines = file.read_text()
    for wrong, right, expected in (
        ('"peer":-1', '"peer":1', "peer is -1"),
        ('"kind":"all_gather"', '"kind":"send"', "peer is 1, but a message is a send or a recv"),
        (
            '"pipeline": {"mesh_dim": "tp"',
            '"pipeline": {"mesh_dim": "pp"',
            "pipeline.mesh_dim is not a mesh dim of the mesh",
        ),
    ):
        file.write_text(lines.replace(right, wrong))
        with pytest.raises(UserError, match=expected):
            load_recordings(file)


def test_ranks_of_a_pipeline_are_those_along_its_mesh_dim() -> None:
    assert ranks_of_pipeline({"dp": 2, "pp": 3, "tp": 2}, "pp", 9) == [7, 9, 11]


def test_a_run_file_says_bubbles_and_messages(tmp_path: Path) -> None:
    simulations = Simulation.all_of(two_stages(), machine(), False, ())
    run = read_run(write_simulated_run(simulations, tmp_path, {}, 1.6e9))
    assert not run.warnings
    counters = run.cases[0]["counters"]
    assert (counters["predicted_s"], counters["bubble_s"], counters["bubble_shares"]) == (6, 2, [2 / 6, 1 / 6])
    (trace,), failed = traces_of([run])
    assert not failed and set(trace.phases["phase"]) == {"schedule"}
    assert trace.rows[["kind", "group", "wire_bytes"]].values.tolist() == [["send", "0,1", 10**9], ["recv", "0,1", 0]]
    assert bubble_shares(trace) == {0: 2 / 6, 1: 1 / 6}
    assert str(bubbles_text(trace)).startswith("bubbles are 25 % of the step per rank (rank 1 17 %, rank 0 33 %)")
    text = " ".join(text_of(blocks_of(simulations)).split())
    assert "bubbles are 25.0 % of the step per rank; 50.0 % with stages of equal time" in text
    assert "bubble (waits for another stage) 2.00 s 33.3 %" in text
    # Forward of both stages, three times, by what both devices could do in 6 s.
    assert simulations[0].model_share == pytest.approx(3 * 8e9 / (2 * 6 * 989.4e12))


@pytest.fixture(scope="module")
def recorded(children: Children) -> dict[str, list[Recording]]:
    """By schedule, all ranks."""
    jobs = jobs_of(Request((str(DATA / "equal_stages.py"),), device="cpu", full_mesh=True, shapes_only=True), None)
    result: dict[str, list[Recording]] = {}
    with children.forked():
        for one in record_steps(jobs, ranks=None)[0].recordings:
            result.setdefault(one.head.variant.removeprefix("schedule="), []).append(one)
    return result


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.long
def test_the_bubble_is_the_published_one_where_messages_are_free(
    recorded: dict[str, list[Recording]], schedule: str, stages: int
) -> None:
    """(p-1)/(v m + p-1): Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2, of the whole step."""
    ranks = recorded[schedule]
    assert [one.head.rank for one in ranks] == list(range(STAGES))
    steps: list[TimedStep] = replay_together(ranks, machine(**FREE))
    for timed in steps:
        parts = parts_of(timed)
        assert parts.bubble_s / timed.step_s == pytest.approx((STAGES - 1) / (stages * PARTS + STAGES - 1), rel=0.01)
        assert parts.idle_s / timed.step_s < 0.01 and sum(parts.exposed_s.values()) / timed.step_s < 0.01


@pytest.mark.skipif(release(torch.__version__) < (2, 13), reason="defer_pp_recv needs torch 2.13")
def test_deferred_receives_are_simulated_with_buffered_sends(recorded: dict[str, list[Recording]]) -> None:
    """Without torch's early receives, neighbours send to each other first, on their one communicator."""
    ranks = recorded["interleaved_1f1b_deferred"]
    deferred, early = (replay_together(of, machine(**FREE)) for of in (ranks, recorded["interleaved_1f1b"]))
    assert deferred[0].buffers_sends and not early[0].buffers_sends
    assert deferred[0].step_s == pytest.approx(early[0].step_s, rel=0.01)
    assert [one.head.pipeline and one.head.pipeline.schedule for one in ranks] == ["interleaved_1f1b"] * STAGES


@pytest.mark.skipif(release(torch.__version__) < (2, 15), reason="pipeline_per_edge_p2p needs torch 2.15")
def test_with_communicators_per_edge_deferred_receives_need_no_buffers(recorded: dict[str, list[Recording]]) -> None:
    ranks = recorded["interleaved_1f1b_deferred_edges"]
    assert not any(timed.buffers_sends for timed in replay_together(ranks, machine(**FREE)))
    # Rank 1 sends to and receives from two neighbours.
    assert len({each.stream for each in ranks[1].collectives}) == 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_its_chakra_traces_take_the_same_time(recorded: dict[str, list[Recording]], schedule: str) -> None:
    simulations = Simulation.all_of(recorded[schedule], load_hardware("h100"), False, ())
    *traces, _groups = chakra_files(simulations)
    assert len(traces) == STAGES
    step_us = check_times([nodes_of(trace) for _, trace in traces])
    assert step_us == pytest.approx(1e6 * simulations[0].timed.step_s, abs=1)


def test_every_message_is_one_of_the_schedule(recorded: dict[str, list[Recording]]) -> None:
    size = 2 * 4096 * 4  # a micro-batch of 2 samples, f32
    ends = {0: [1], 1: [0, 2], 2: [1, 3], 3: [2]}
    for one in recorded["1f1b"]:
        result = Counter((each.kind, each.phase, each.peer, each.payload_bytes) for each in one.collectives)
        ours = one.head.rank
        assert result == {
            (kind, phase, peer, size): PARTS
            for peer in ends[ours]
            for kind in ("send", "recv")
            for phase in ("forward" if (kind == "send") == (peer > ours) else "backward",)
        }


def slots_by_torch(schedule: str) -> list[int]:
    """Return the most micro-batches of its stages that each rank holds, by torch's analyser.

    The last rank of 1f1b is left out: torch 2.15 numbers its forwards from 1, which the analyser rejects.
    """
    from torch.distributed import pipelining

    kind = SCHEDULES[schedule]
    num_stages = STAGES * kind.stages_per_rank
    stage = create_autospec(pipelining.PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, STAGES, None, num_stages
    build = pipelining.schedules.get_schedule_class(kind.torch_name)
    analysed = build(stage if kind.stages_per_rank == 1 else [stage] * kind.stages_per_rank, PARTS)
    slots = []
    for rank in range(STAGES - (schedule == "1f1b")):
        result = pipelining.analyze_pipeline_activation_liveness(
            analysed, pp_rank=rank, stage_indices=range(rank, num_stages, STAGES), granularity="stage_microbatch"
        )
        slots.append(result.num_slots)
    return slots


def most_alive(recording: Recording, first_layers: set[str]) -> int:
    """Return the most blocks alive of those that a stage's first layer allocates first for each micro-batch."""
    size, counted = 2 * 4096 * 4, Counter[str]()
    alive, most = set[int](), 0
    for event in recording.step:
        if isinstance(event, Freed):
            alive.discard(event.block)
        elif isinstance(event, Allocated) and event.held == "activations" and event.num_bytes == size:
            if event.owner in first_layers and counted[event.owner] % 4 == 0:  # a layer keeps four tensors
                alive.add(event.block)
            counted[event.owner] += 1
        most = max(most, len(alive))
    assert [counted[layer] for layer in first_layers] == [4 * PARTS] * len(first_layers)
    return most


@pytest.mark.skipif(release(torch.__version__) < (2, 15), reason="torch has its analyser of activations since 2.15")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_as_many_activations_are_alive_as_by_torchs_analyser(
    recorded: dict[str, list[Recording]], schedule: str
) -> None:
    per_stage = 2 // SCHEDULES[schedule].stages_per_rank  # of 8 layers
    alive = []
    for one in recorded[schedule]:
        stages = range(one.head.rank, 8 // per_stage, STAGES)
        alive.append(most_alive(one, {f"layers.{stage * per_stage}" for stage in stages}))
    slots = slots_by_torch(schedule)
    assert alive[: len(slots)] == slots and len(slots) >= STAGES - 1


def test_memory_shows_the_microbatches_that_are_in_flight(recorded: dict[str, list[Recording]]) -> None:
    """GPipe keeps all of them on every rank; 1F1B as many as there are stages from a rank to the end."""
    gpipe, one_f_one_b = (
        [replay_memory(one.events).live_bytes for one in recorded[schedule]] for schedule in ("gpipe", "1f1b")
    )
    tensor = 2 * 4096 * 4  # 2 samples, f32
    of_one = 2 * 4 * tensor  # two layers keep four tensors each
    assert gpipe[1] == gpipe[2]
    # 3 and 2 of them. torch 2.15 frees what it has sent: at the peak rank 1 has 4 tensors fewer, rank 2 has 5.
    one_more = tensor if release(recorded["1f1b"][0].head.torch) >= (2, 15) else 0
    assert one_f_one_b[1] - one_f_one_b[2] == pytest.approx(of_one + one_more, rel=0.01)
    assert gpipe[2] - one_f_one_b[2] == pytest.approx(2 * of_one, rel=0.25)  # 4 and 2, and what torch still refers to
    assert one_f_one_b[0] > one_f_one_b[3] + of_one
