"""One rank's real step on the simulated device: what it communicates, computes and holds, and `distbench simulate`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import DATA, ROOT
from processes import Children

from distbench.cli.main import main
from distbench.judge.communication_signature import counted, load
from distbench.launch import Request, jobs_of
from distbench.plans.training_step import TrainingStep
from distbench.ranks.context import RankContext
from distbench.simulate.allocator import replay_memory
from distbench.simulate.clock import replay_together
from distbench.simulate.hardware_file import HostFigures, load_hardware
from distbench.simulate.operator_recorder import nested_ranks
from distbench.simulate.recorded_step import as_two_steps, busier_ranks, differing_along, would_repeat
from distbench.simulate.recording import (
    ATTENTION,
    MATMUL,
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    HostWaited,
    Operator,
    RecordedSteps,
    Recording,
    StepBegun,
    load_recordings,
    ranks_of,
    record_steps,
)
from distbench.simulate.simulation import Simulation
from distbench.spec import CpPlan, Job, ParallelPlan, UserError

# The others are compared by benchmarks/bench_simulation.py.
SCENARIOS = ("fsdp_stack", "tp_mlp")
UNSIMULABLE, FIRST_STEPS = (str(DATA / f"{name}.py") for name in ("unsimulable", "first_steps"))


def quick_jobs(*names: str, choices: tuple[str, ...] = (), mesh: dict[str, int] | None = None) -> list[Job]:
    return jobs_of(Request(names, choices, mesh, "cpu", quick=True, full_mesh=True, shapes_only=True), None)


# Where ranks differ: 1,000 rows over 3 ranks, and causal attention whose blocks are dealt out in order.
CHOSEN = {
    # With an all-reduce of which parameters were used; test_sim_scenarios.py has buckets that are made anew.
    "ddp": (("ddp",), ("knob=find_unused",), None),
    "uneven shards": (("fsdp_stack",), ("batch=9", "reshard_after_forward=True", "num_layers=1"), {"dp_shard": 3}),
    "uneven work": (("cp_attention",), ("load_balance=False", "rotate=allgather", "unshard_output=False"), {"cp": 4}),
}


@pytest.fixture(scope="module")
def recorded(children: Children) -> dict[str, RecordedSteps]:
    """By scenario, all in one child process."""
    chosen = [quick_jobs(*names, choices=choices, mesh=mesh)[0] for names, choices, mesh in CHOSEN.values()]
    with children.forked():
        jobs = [*quick_jobs(*SCENARIOS, UNSIMULABLE, FIRST_STEPS), *chosen]
        return dict(
            zip([*SCENARIOS, "unsimulable", "first_steps", *CHOSEN], record_steps(jobs, ranks=None), strict=True)
        )


@pytest.mark.parametrize("name", [*SCENARIOS, "ddp"])
def test_collectives_are_those_of_the_signature(recorded: dict[str, RecordedSteps], name: str) -> None:
    """Kind, mesh dim, bytes, owner and phase: the file was written by another method, on tensors with values."""
    result, left_out = recorded[name]
    signature = load(ROOT / "signatures" / f"{name}.signature")
    ours = {
        recording.head.variant: dict(counted([one._asdict() for one in recording.collectives])) for recording in result
    }
    theirs = {case.rpartition(name)[2].removeprefix("/"): dict(paths) for case, paths in signature.cases.items()}
    assert ours == {variant: theirs[variant] for variant in ours} and all(ours.values()) and not left_out
    assert name == "ddp" or ours.keys() == theirs.keys()


def test_ranks_that_differ_are_recorded_too(recorded: dict[str, RecordedSteps]) -> None:
    assert all(one.head.rank == 0 for name in SCENARIOS for one in recorded[name].recordings)
    first, last = recorded["uneven shards"].recordings
    assert (first.head.rank, last.head.rank) == (0, 2)
    # FSDP2 pads what it gathers, so both hold as much; what the optimizer works on is 334 rows and 332.
    assert sum(one.num_bytes for one in operators(first, "optimizer")) > sum(
        one.num_bytes for one in operators(last, "optimizer")
    )
    first, last = recorded["uneven work"].recordings
    assert (first.head.rank, last.head.rank) == (0, 3)
    # The first rank's queries see their own block of keys, causally: a half. The last one's see three more whole ones.
    flops = [sum(one.flops for one in operators(rank, "forward") if one.kind == ATTENTION) for rank in (first, last)]
    assert flops[1] == 7 * flops[0] > 0


def operators(recording: Recording, phase: str | None = None) -> list[Operator]:
    return [event for event in recording.step if isinstance(event, Operator) and phase in (None, event.phase)]


@pytest.mark.parametrize(
    ("ranks", "lengths", "differing"),
    [
        ((0, 1, 2, 3), {8, 12}, []),
        ((0, 1, 2, 3), {8, 10}, [3]),  # 3, 3, 3, 1
        ((0, 2, 4, 6), {5}, [4, 6]),  # 2, 2, 1, 0
        ((0, 8, 16), {2}, [16]),  # 1, 1, 0
        ((0,), {5}, []),
    ],
)
def test_ranks_differ_where_torch_chunk_gives_them_less(
    ranks: tuple[int, ...], lengths: set[int], differing: list[int]
) -> None:
    assert differing_along(ranks, lengths) == differing


def only(recorded: dict[str, RecordedSteps], name: str) -> Recording:
    return recorded[name].recordings[0]


def test_matmuls_are_three_times_forwards_two_operations_a_parameter_and_token(
    recorded: dict[str, RecordedSteps],
) -> None:
    # w1, w2 and w3 of 256 x 1024 on 4 ranks, 4 x 128 tokens: 2 x 3 x 256 x 1024/4 x 512 operations in forward. In
    # backward as many for the weights and as many for inputs: of w1 and w3 the input is the batch, which needs none.
    forward = 2 * 3 * 256 * 1024 // 4 * 512
    step = only(recorded, "tp_mlp").step
    flops = {
        phase: sum(event.flops for event in step if isinstance(event, Operator) and event.phase == phase)
        for phase in ("forward", "backward", "optimizer")
    }
    assert flops == {"forward": forward, "backward": forward + forward // 3, "optimizer": 0}
    owners = {event.owner for event in step if isinstance(event, Operator) and event.kind == MATMUL}
    assert owners == {"w1", "w2", "w3"}


def test_what_a_step_holds_is_known_by_its_kind(recorded: dict[str, RecordedSteps]) -> None:
    recording = only(recorded, "fsdp_stack")
    held: dict[str, int] = {}
    for (kind, _), num_bytes in replay_memory(recording.events).alive.items():
        held[kind] = held.get(kind, 0) + num_bytes
    shards = recording.head.num_parameters * 4 // 4  # fp32 on four ranks
    assert held["parameters"] == shards
    assert held["optimizer"] == 2 * shards  # AdamW's two moments; its counts of steps are on the host
    assert held["batch"] == 2 * 8 // 4 * 64 * 8  # inputs and targets: 2 of 8 samples, 64 tokens of 8 bytes
    assert held["activations"] > 0 and "other" not in held


def test_fsdp_communicates_on_streams_of_its_own(recorded: dict[str, RecordedSteps]) -> None:
    recording = only(recorded, "fsdp_stack")
    streams = {one.kind: one.stream for one in recording.collectives if one.source == "fsdp"}
    assert streams["all_gather"] != streams["reduce_scatter"] and 0 not in streams.values()
    resharded, kept = recorded["fsdp_stack"].recordings
    peaks = [replay_memory(one.events).live_bytes for one in (resharded, kept)]
    assert len(resharded.collectives) > len(kept.collectives) and peaks[0] < peaks[1]


def test_ddps_buckets_are_reduced_while_backward_goes_on_and_waited_for_at_its_end(
    recorded: dict[str, RecordedSteps],
) -> None:
    recording = only(recorded, "ddp")
    step = recording.step
    issued = [place for place, event in enumerate(step) if isinstance(event, Collective)]
    waited = [place for place, event in enumerate(step) if isinstance(event, EventWaited) and event.stream == 0]
    buckets = [step[place] for place in issued[:-1]]
    assert {one.stream for one in buckets} != {0} and len({one.stream for one in buckets}) == 1
    # While the first one is reduced, layers are still gone back through; of the last one only the embedding's gradient
    # was missing. Nobody waits in between, and all of that is over when the optimizer begins.
    beside = [event for event in step[issued[0] : issued[1]] if isinstance(event, Operator)]
    assert {event.owner.partition(".")[0] for event in beside if event.kind == MATMUL} == {"layers"}
    optimizer = next(
        place for place, event in enumerate(step) if isinstance(event, Operator) and event.phase == "optimizer"
    )
    assert issued[-1] < waited[0] and len(waited) == len(issued) and waited[-1] < optimizer
    copied = [event for event in step[waited[0] : optimizer] if isinstance(event, Operator)]
    assert {event.name for event in copied} == {"aten.copy_.default"}
    # Into a bucket each gradient is divided as it is copied; back again it is copied alone.
    divided = [event for event in operators(recording, "backward") if event.name == "aten.mul.out"]
    assert len(divided) == len(copied) == 21 and {"layers.1.feed_forward.w2", "output"} <= {
        one.owner for one in divided
    }


def test_ddps_buckets_are_gradients(recorded: dict[str, RecordedSteps]) -> None:
    recording = only(recorded, "ddp")
    alive = replay_memory(recording.events).alive
    held = {kind: sum(size for (other, _), size in alive.items() if other == kind) for kind, _ in alive}
    assert held["gradients"] >= 4 * recording.head.num_parameters == held["parameters"] and "other" not in held


def test_ring_attention_passes_keys_and_values_on_while_it_attends(recorded: dict[str, RecordedSteps]) -> None:
    """As an eager step does: what is passed on is waited for where the next block of it is needed."""
    step = recorded["uneven work"].recordings[0].step
    issued = next(place for place, event in enumerate(step) if isinstance(event, Collective) and event.source == "cp")
    waited = next(place for place in range(issued, len(step)) if isinstance(step[place], EventWaited))
    between = [event.kind for event in step[issued:waited] if isinstance(event, Operator)]
    assert between.count("attention") == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("item", "it cannot be simulated: its step needs a tensor's value, which a simulated step does not have"),
        (
            "mask",
            "it cannot be simulated: its step needs values (aten.index.Tensor), in the root module; give --assume ",
        ),
        (
            "flex",
            "it cannot be simulated: its step calls flex_attention, which torch runs on no simulated device; use ",
        ),
        ("pattern", "checkpoint pattern 'layers' matches no module (nearest: linear)"),
        ("loss", "it cannot be simulated, because its step raises RuntimeError: "),
        ("declared", "the scenario raises ValueError: no such model"),
    ],
)
def test_a_step_that_cannot_be_simulated_is_one_sentence(
    recorded: dict[str, RecordedSteps], fault: str, message: str
) -> None:
    result, left_out = recorded["unsimulable"]
    assert [recording.head.variant for recording in result] == ["fault=none", "fault=offload"]
    sentence = left_out[f"unsimulable/fault={fault}"]
    assert sentence.startswith(message) and "\n" not in sentence
    # With where the model asks for it, or raises.
    assert ("unsimulable.py:" in sentence) == (fault in ("item", "mask", "flex", "loss", "declared"))


def test_offloaded_shards_are_copied_for_each_gather_and_stepped_on_the_host(
    recorded: dict[str, RecordedSteps],
) -> None:
    kept, offloaded = recorded["unsimulable"].recordings
    names = {"all_gather": "gather", "reduce_scatter": "scatter", "to_device": "in", "to_host": "out"}
    order = [names[event.kind] for event in offloaded.step if getattr(event, "kind", "") in names]
    assert order == ["in", "in", "gather", "scatter", "out", "out"]  # weight and bias; the root is not gathered again
    copies = [event for event in operators(offloaded) if event.kind in ("to_device", "to_host")]
    shard_bytes = [64 * 32 * 4 // 4, 32 * 4 // 4]
    assert [event.num_bytes for event in copies] == 2 * shard_bytes
    assert len({event.stream for event in copies}) == 2 and all(event.stream for event in copies)
    of_optimizer = [event for event in operators(offloaded) if event.phase == "optimizer"]
    assert {event.kind for event in of_optimizer} == {"on_host"}
    # AdamW reads or writes 80 bytes per parameter on a host, in 8 operators per tensor.
    assert sum(event.num_bytes for event in of_optimizer) == pytest.approx(80 * sum(shard_bytes) / 4, rel=0.01)
    place = next(place for place, event in enumerate(offloaded.step) if event == of_optimizer[0])
    assert sum(isinstance(event, HostWaited) for event in offloaded.step[:place]) == 2  # a gradient's copy each
    held = [{kind for kind, _ in replay_memory(recording.events).alive} for recording in (kept, offloaded)]
    assert held[0] - held[1] >= {"parameters", "optimizer"} and not {"gradients"} & held[1]
    simulation = Simulation(offloaded, load_hardware("h100"))
    assert simulation.parts.on_host_s > 0 and not Simulation(kept, load_hardware("h100")).parts.on_host_s
    with pytest.raises(UserError, match="describes a CPU, whose shards are in host memory already"):
        replay_together([offloaded], replace(load_hardware("h100"), host=cast(HostFigures, object())))


def test_the_last_of_unbalanced_context_parallel_ranks_has_more_to_do() -> None:
    ranks = SimpleNamespace(mesh=SimpleNamespace(mesh=torch.arange(4)), mesh_dims=("cp",), size=lambda name: 4)

    def busier(**of_cp: Any) -> tuple[int, ...]:
        step = SimpleNamespace(plan=ParallelPlan(cp=CpPlan(**of_cp)))
        return busier_ranks(cast(TrainingStep, step), cast(RankContext, ranks))

    assert busier(load_balance=False) == (3,) and busier() == () and busier(rotate="ulysses") == ()


def test_a_disk_that_is_full_costs_nothing_of_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "run.jsonl")

    monkeypatch.setattr("distbench.simulate.simulated_run.write_simulated_run", full)
    requested = ["simulate", "--recording", str(DATA / "recording_v1.jsonl"), "--results", str(tmp_path)]
    done = CliRunner().invoke(main, requested)
    assert done.exit_code == 2 and "run.jsonl cannot be written (No space left on device)" in done.output
    assert "where the time goes" in done.output


@pytest.mark.parametrize(
    ("ranks", "loops"),
    [
        (range(8), [(8, 1)]),
        (range(0, 64, 8), [(8, 8)]),
        ([0, 1, 2, 3, 8, 9, 10, 11], [(2, 8), (4, 1)]),
        ([0], [(1, 0)]),
        ([0, 1, 3], [(1, 0), (1, 1), (1, 3)]),
        ([4, 5], [(2, 1)]),
        ([9, 1, 17], [(3, 8)]),
        ([5], []),
    ],
)
def test_a_group_is_written_as_loops_of_ranks(ranks: Sequence[int], loops: list[tuple[int, int]]) -> None:
    result = nested_ranks(ranks)
    assert ranks_of(result) == [rank - min(ranks) for rank in sorted(ranks)] and (result == loops or len(ranks) == 1)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `results/` may be made."""
    monkeypatch.chdir(tmp_path)


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_the_command_records_saves_and_replays(forked_children: None, tmp_path: Path) -> None:
    file = str(tmp_path / "step.jsonl")
    first = simulate("tp_mlp", "--quick", "--set", "sequence_parallel=True", "--mesh", "tp=2", "--save", file)
    assert first.exit_code == 0, first.output
    assert "tp_mlp/sequence_parallel=True, simulated on h100" in first.output
    assert "mesh tp=2 (2 devices, 1 node)" in first.output
    assert all(len(line) <= 120 for line in first.stdout.splitlines())
    assert first.stderr.splitlines()[-1].startswith("run file: results/simulated-h100/")
    again = simulate("--recording", file, "--format", "json", "--hardware", "h100_96gb", "--expandable-segments")
    (record,) = json.loads(again.stdout)
    assert record["hardware"] == "h100_96gb" and record["memory"]["expandable_segments"] is True
    assert load_recordings(Path(file))[0].head.mesh == {"tp": 2}
    failed = simulate(UNSIMULABLE, "--set", "fault=item")
    assert failed.exit_code == 2 and failed.output.startswith(
        "distbench: unsimulable/fault=item: it cannot be simulated"
    )
    collectives = simulate("collectives", "--quick")
    assert collectives.exit_code == 2 and "has no step to simulate; add build_model" in collectives.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "simulate needs either a SCENARIO or --recording FILE; give one"),
        (("tp_mlp", "--recording", "x.jsonl"), "give one"),
        (("--recording", "x.jsonl", "--mesh", "tp=2"), "cannot be combined with --recording"),
        (("--recording", "missing.jsonl"), "recording missing.jsonl cannot be read: No such file"),
        (("tp_mlp", "--rank", "0,x"), "--rank '0,x' is not a list of ranks; give different integers >= 0"),
        (("tp_mlp", "--rank", "4", "--mesh", "tp=4"), "--rank 4 is not on the mesh; give ranks from 0 to 3"),
        (("tp_mlp", "--hardware", "h1000"), "--hardware 'h1000' is unknown"),
        (("tp_mlp", "--mesh", "tp=65536,dp_shard=2"), "give a mesh of at most 65,536"),
        (("tp_mlp", "--save", "step.jsonl"), "has 2 variants; choose a variant with FILE::NAME or --set NAME=VALUE"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    known_host: None, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = simulate(*arguments)
    assert done.exit_code == 2 and message in done.output and done.output.count("\n") == 1


def test_a_model_of_real_size_is_not_run_on_a_cpu(known_host: None) -> None:
    with pytest.raises(UserError, match=r"llama3_8b is a model at its real size.*; use distbench simulate"):
        jobs_of(Request(("tp_mlp", "llama3_8b"), device="cpu"), None)
    (job,) = jobs_of(Request(("llama3_8b",), device="cpu", shapes_only=True), None)
    assert job.mesh == {"dp_replicate": 1, "dp_shard": 8, "cp": 1}


PARTS: dict[str, list[Event]] = {
    "before": [Allocated(0, 64, 0, "parameters", "")],
    "once": [StepBegun(1), Allocated(1, 8, 0, "activations", ""), EventRecorded(0, 0), Freed(1)],
    "gradient": [Allocated(2, 64, 0, "gradients", "")],
    "setup": [StepBegun(2), Allocated(3, 128, 0, "optimizer", ""), Allocated(4, 64, 0, "other", ""), Freed(4)],
    "again": [StepBegun(3), Allocated(5, 64, 0, "optimizer", ""), Freed(5), Freed(2)],
}


def in_parts(**changed: Sequence[Event]) -> list[Event]:
    return [event for part in ({**PARTS, **changed}).values() for event in part]


def test_one_recorded_forward_and_backward_become_two_steps() -> None:
    events = in_parts()
    assert would_repeat(events)
    first = [Allocated(7, 8, 0, "activations", ""), Freed(7), Allocated(8, 64, 0, "gradients", "")]
    assert as_two_steps(events) == [
        *PARTS["before"],
        *(StepBegun(1), *first, *PARTS["setup"][1:], Freed(8)),
        *(StepBegun(2), *PARTS["once"][1:], *PARTS["gradient"], *PARTS["again"][1:]),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient": [*PARTS["gradient"], Allocated(6, 8, 0, "activations", "")]},
        {"once": [*PARTS["once"], Freed(0)]},
        {"setup": [*PARTS["setup"], EventWaited(0, 0)]},
        {"setup": [*PARTS["setup"], Freed(2)], "again": [StepBegun(3)]},
    ],
    ids=["a cache is kept", "a parameter is freed", "the optimizer waits", "the optimizer frees gradients"],
)
def test_a_step_that_leaves_a_trace_would_not_repeat(changed: dict[str, list[Event]]) -> None:
    assert not would_repeat(in_parts(**changed))


def test_a_step_that_differs_from_the_first_is_recorded_itself(recorded: dict[str, RecordedSteps]) -> None:
    done, left_out = recorded["first_steps"]
    assert not left_out
    names = {
        recording.head.variant: [(event.phase, event.name) for event in recording.step if isinstance(event, Operator)]
        for recording in done
    }
    # Weight and bias, by an optimizer that drops their gradients.
    assert names["differs=optimizer"][-2:] == 2 * [("optimizer", "aten.add_.Tensor")]
    assert names["differs=module"] and not any("std" in name for _, name in names["differs=module"])
