"""The clock, collectives and hardware files of a simulation: plain data, every expected time worked by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA

from distbench.show.terminal import text_of
from distbench.simulate import error_bars
from distbench.simulate.clock import Exposed, TimedStep, parts_of, replay_together
from distbench.simulate.error_bars import Residual
from distbench.simulate.hardware_file import FOLDER, Figure, Hardware, load_hardware, shipped_hardware
from distbench.simulate.operator_costs import collective_s, ranks_by_node
from distbench.simulate.recording import (
    Allocated,
    Collective,
    Event,
    EventRecorded,
    EventWaited,
    Freed,
    Head,
    HostWaited,
    Operator,
    Recording,
    StepBegun,
    load_recordings,
    ranks_of,
    save_recordings,
)
from distbench.simulate.simulation import Simulation
from distbench.simulate.simulation_text import assumptions, blocks_of
from distbench.spec import UserError

HEAD = Head("mine", "", {"dp_shard": 8}, "2.13.0", 1000, 16, 4096, 1, ("forward", "backward"))


def machine(**values: float) -> Hardware:
    """One on which a matmul of 1 FLOP, a byte of memory and a byte on a link take 1 ns, and nothing else any time."""
    plain = load_hardware("h100")
    zero = {name: 0.0 for name in plain.figures if name.endswith("_s") and "bytes" not in name}
    zero |= {"device_spread": 0.0, "attention_half_length": 0.0, "overlap_slowdown": 0.0}
    rates = ("matmul_bf16_flops", "matmul_fp8_flops", "memory_bytes_per_s", "node_bytes_per_s", "peer_bytes_per_s")
    ones = {name: 1e9 for name in plain.figures if name in rates or (name.startswith("attention_") and "flops" in name)}
    chosen = {**ones, "memory_share": 1.0, "network_bytes_per_s": 1e8, **zero, **values}
    figures = {name: replace(figure, value=chosen.get(name, figure.value)) for name, figure in plain.figures.items()}
    return replace(plain, figures=figures)


def matmul(stream: int, seconds: float, owner: str = "") -> Operator:
    return Operator(stream, "aten.mm.default", "matmul", int(seconds * 1e9), "bf16", 0, [], [], "forward", owner)


def elementwise(seconds: float, reads: Sequence[Any], writes: Sequence[Any], owner: str = "layers.0.ffn") -> Operator:
    return Operator(0, "aten.mul", "memory", 0, "bf16", int(seconds * 1e9), reads, writes, "forward", owner)


def gather(stream: int, seconds: float, owner: str = "layers.0", ranks: Sequence[Any] = ((2, 1),)) -> Collective:
    size = int(seconds * 1e9) * 2  # of two ranks, each moves a half
    return Collective(
        stream, "forward", "fsdp", "all_gather", "dp_shard", 2, "bf16", size, owner, True, "", None, ranks
    )


def run(*events: Event, head: Head = HEAD, **values: float) -> Recording:
    return Recording(head, [StepBegun(2), *events])


def replay_time(recording: Recording, hardware: Hardware) -> TimedStep:
    """Of one rank alone."""
    return replay_together([recording], hardware)[0]


def test_communicators_of_the_same_ranks_share_the_links_but_not_the_queue() -> None:
    """Two collectives of 10 s on one communicator end after 10 and 20 s. On two communicators, each at half speed, both
    end after 20 s; a short one does not wait for the long one that runs already.
    """
    long, short = gather(0, 10), gather(1, 10)
    assert spans(long, short) == [(0, 10), (10, 20)]
    assert spans(long, short._replace(communicator=1)) == [(0, 20), (0, 20)]
    brief = gather(1, 2)._replace(communicator=1)
    assert spans(long, brief) == [(0, 12), (0, 4)]
    # Other ranks have links of their own here.
    assert spans(long, brief._replace(communicator=0, ranks=((2, 2),))) == [(0, 10), (0, 2)]


def spans(*events: Event, **values: float) -> list[tuple[float, float]]:
    timed = replay_time(run(*events), machine(**values))
    return [(round(span.start_s, 9), round(span.end_s, 9)) for span in timed.spans]


def test_streams_run_beside_one_another_and_each_in_order() -> None:
    assert spans(matmul(0, 2), matmul(1, 3), matmul(0, 1)) == [(0, 2), (0, 3), (2, 3)]


def test_a_stream_waits_for_what_was_issued_before_the_event() -> None:
    events = (matmul(0, 2), EventRecorded(0, 5), matmul(0, 4), EventWaited(1, 5), matmul(1, 1))
    assert spans(*events) == [(0, 2), (2, 6), (2, 3)]


def test_the_host_issues_one_thing_after_another_and_may_be_what_limits() -> None:
    assert spans(matmul(0, 1), matmul(0, 1), host_s=0.25, launch_s=0.5) == [(0.75, 1.75), (1.75, 2.75)]
    assert spans(matmul(0, 0.1), matmul(0, 0.1), host_s=0.25) == [(0.25, 0.35), (0.5, 0.6)]
    timed = replay_time(run(matmul(0, 0.1), matmul(0, 0.1)), machine(host_s=0.25))
    parts = parts_of(timed)
    assert parts.compute_s == pytest.approx(0.2) and parts.idle_s == pytest.approx(0.4)


def test_the_host_waits_for_a_stream() -> None:
    assert spans(matmul(0, 3), HostWaited(0), matmul(1, 1), host_s=0.5) == [(0.5, 3.5), (4.0, 5.0)]


def test_one_communicator_is_one_queue() -> None:
    other = ((2, 4),)
    result = spans(gather(1, 2), gather(2, 2), gather(3, 2, ranks=other))
    assert result == [(0, 2), (2, 4), (0, 2)]


def copy(stream: int, seconds: float, kind: str) -> Operator:
    """Of a machine that copies a byte per nanosecond, like the operators of its host."""
    return Operator(stream, "aten._to_copy.default", kind, 0, "f32", int(seconds * 1e9), [], [], "forward", "layers.0")


def test_copies_run_beside_kernels_one_at_a_time_per_direction_and_the_host_runs_its_operators_itself() -> None:
    machine_with_host = machine(copy_bytes_per_s=1e9)
    figures = {**machine_with_host.figures, "host_bytes_per_s": Figure(1e9, "guess", "a byte per nanosecond")}
    events = [
        copy(1, 2, "to_device"),  # 0 to 2
        EventRecorded(1, 0),
        EventWaited(2, 0),
        gather(2, 1),  # 2 to 3
        EventRecorded(2, 1),
        EventWaited(0, 1),
        matmul(0, 2),  # 3 to 5
        EventRecorded(0, 2),
        EventWaited(3, 2),
        copy(1, 3, "to_device"),  # 2 to 5, next to gather and matmul
        copy(4, 1, "to_device"),  # its stream is free, and the queue is not: 5 to 6
        copy(3, 1.5, "to_host"),  # in the other direction, 5 to 6.5
        HostWaited(3),
        copy(0, 4, "on_host"),  # 6.5 to 10.5
        matmul(0, 1),  # issued after that: 10.5 to 11.5
    ]
    simulation = Simulation(run(*events), replace(machine_with_host, figures=figures))
    times = [(round(span.start_s, 9), round(span.end_s, 9)) for span in simulation.timed.spans]
    assert times == [(0, 2), (2, 3), (3, 5), (2, 5), (5, 6), (5, 6.5), (6.5, 10.5), (10.5, 11.5)]
    parts = simulation.parts
    assert parts.compute_s == pytest.approx(3) and parts.on_host_s == pytest.approx(4)
    assert parts.idle_s == pytest.approx(0)
    assert parts.exposed_s == {
        Exposed("host", "to_device", "copy", "layers.0"): pytest.approx(3),
        Exposed("host", "to_host", "copy", "layers.0"): pytest.approx(0.5),
        Exposed("dp_shard", "all_gather", "fsdp", "layers.0"): pytest.approx(1),
    }
    assert parts.communication_s == {"host": pytest.approx(7.5), "dp_shard": pytest.approx(1)}
    text = " ".join(text_of(blocks_of([simulation])).split())
    assert "exposed copies from and to the host 3.50 s" in text and "operators on the host 4.00 s" in text
    assert "copies between host and device run at copy_bytes_per_s" in " ".join(assumptions(simulation))


def test_defaults_of_copies_are_listed_for_steps_that_copy() -> None:
    hardware = load_hardware("h100")
    figures = {name: figure for name, figure in hardware.figures.items() if name != "copy_bytes_per_s"}
    lacking = replace(hardware, figures=figures)
    assert lacking["copy_bytes_per_s"] == 25e9 and lacking["host_bytes_per_s"] == 10e9
    names = [{*Simulation(run(*events), lacking).extrapolated} for events in ([], [copy(0, 1, "to_device")])]
    assert "copy_bytes_per_s" not in names[0] and names[1] - names[0] == {"copy_bytes_per_s"}


def test_the_parts_of_a_step_are_the_step() -> None:
    # Compute 0-2 and 5-6; gathers 1-4 and, of another communicator, 3-5: 2-4 is the first one's, 4-5 the second's.
    events = (
        matmul(9, 1),
        EventRecorded(9, 1),
        matmul(0, 2),
        EventWaited(1, 1),
        gather(1, 3, "layers.0"),
        matmul(8, 1),
        matmul(7, 2),
        matmul(6, 3),
    )
    early = (matmul(0, 2), EventRecorded(0, 0), gather(1, 4, "a"), EventRecorded(1, 3), EventWaited(0, 3), matmul(0, 1))
    parts = parts_of(replay_time(run(*early), machine()))
    assert parts.compute_s == pytest.approx(3) and parts.idle_s == pytest.approx(0)
    assert parts.exposed_s == {Exposed("dp_shard", "all_gather", "fsdp", "a"): pytest.approx(2)}
    assert parts.communication_s == {"dp_shard": pytest.approx(4)}
    assert parts_of(replay_time(run(*events), machine())).compute_s == pytest.approx(3)


def test_of_several_collectives_the_first_is_what_is_waited_for() -> None:
    both = (matmul(0, 1), gather(1, 4, "a"), gather(2, 6, "b", ranks=((2, 4),)), HostWaited(2), matmul(0, 1))
    exposed = parts_of(replay_time(run(*both), machine())).exposed_s
    assert {key.owner: seconds for key, seconds in exposed.items()} == {"a": pytest.approx(3), "b": pytest.approx(2)}


def test_a_matmul_takes_its_operations_or_its_bytes() -> None:
    by_bytes = matmul(0, 1)._replace(num_bytes=3 * 10**9)
    by_f32 = matmul(0, 1)._replace(dtype="f32")
    assert spans(by_bytes) == [(0, 3)]
    assert spans(by_f32, matmul_f32_flops=5e8) == [(0, 2)]


@pytest.mark.parametrize(
    ("kind", "ranks", "size", "seconds"),
    [
        # Within a node: (n-1)/n of S, or twice that, over the links.
        ("all_gather", ((8, 1),), 8, 0.5 + 7 / 8),
        ("all_reduce", ((8, 1),), 8, 0.5 + 2 * 7 / 8),
        ("broadcast", ((8, 1),), 8, 0.5 + 1),
        # One device of each of 4 nodes: a tenth of the bandwidth; 2 hops more than between two nodes, or one level
        # more of a tree, up and down.
        ("all_gather", ((4, 8),), 4, 0.25 + 2 * 0.125 + 10 * 3 / 4),
        ("all_reduce", ((4, 8),), 4, 0.25 + 2 * 0.125 + 10 * 2 * 3 / 4),
        # All devices of four nodes: the ring also passes seven further devices of each node, by 1.9 / 4 of a hop each.
        ("all_gather", ((32, 1),), 32, 0.25 + 2 * (1 + 7 * 1.9 / 4) * 0.125 + 31 / 32 / 0.8),
        # All devices of two nodes: eight network links together.
        ("reduce_scatter", ((16, 1),), 16, 0.25 + 15 / 16 / 0.8),
        # The same of eight and four: as fast as the node with four links.
        ("all_gather", ((12, 1),), 12, 0.25 + 11 / 12 / 0.4),
        # Each rank's own link carries what is for other nodes: a half over two nodes, 24 of 32 parts over four.
        ("all_to_all", ((16, 1),), 16, 0.25 + 8 / 16 / 0.1),
        ("all_to_all", ((32, 1),), 32, 0.25 + 2 * 0.125 + 24 / 32 / 0.1),
        # One device of each node: the bus bandwidth is that of one link (nccl-tests, issue 130).
        ("all_to_all", ((4, 8),), 4, 0.25 + 2 * 0.125 + 3 / 4 / 0.1),
        ("all_to_all", ((12, 1),), 12, 0.25 + 8 / 12 / 0.1),
        ("all_to_all", ((8, 1),), 8, 0.5 + 7 / 8),
        ("all_gather", ((1, 3),), 1, 0.0),
    ],
)
def test_a_collective_takes_its_share_of_the_links_it_crosses(
    kind: str, ranks: Sequence[Any], size: int, seconds: float
) -> None:
    links = machine(node_base_s=0.5, network_base_s=0.25, network_hop_s=0.125)
    one = gather(0, 1)._replace(kind=kind, ranks=ranks, group_size=size, payload_bytes=10**9)
    assert collective_s(one, links) == pytest.approx(seconds)


@pytest.mark.parametrize("nodes", [2, 4, 8, 64])
def test_an_all_to_all_has_the_bus_bandwidth_that_nccl_tests_publishes(nodes: int) -> None:
    # nccl-tests, issue 130: N / (N - 1) times the bandwidth of one link, for N nodes, at most the node's.
    h100, size, payload = load_hardware("h100"), 8 * nodes, 10**12
    exchange = gather(0, 1)._replace(kind="all_to_all", ranks=((size, 1),), group_size=size, payload_bytes=payload)
    busbw = (size - 1) / size * payload / collective_s(exchange, h100)
    published = min(h100["node_bytes_per_s"], h100["network_bytes_per_s"] * nodes / (nodes - 1))
    assert busbw == pytest.approx(published, rel=0.15)


def test_operators_and_collectives_slow_each_other_down_while_both_run() -> None:
    # Alone: matmul 0-4, gather 0-1. A quarter of the matmul overlaps, and all of the gather.
    events = (gather(1, 1), matmul(0, 4), matmul(0, 2))
    assert spans(*events, overlap_slowdown=0.5) == [(0, 1.5), (0, 4.5), (4.5, 6.5)]
    assert spans(*events, overlap_slowdown=0.0) == [(0, 1), (0, 4), (4, 6)]
    # Copies to and from the host take no multiprocessors.
    assert spans(copy(1, 1, "to_device"), matmul(0, 4), overlap_slowdown=0.5)[1] == (0, 4)


def test_groups_are_loops_of_ranks() -> None:
    assert ranks_of([[2, 8], [3, 1]]) == [0, 1, 2, 8, 9, 10]
    assert ranks_of([[1, 0], [1, 5]]) == [0, 5]
    assert ranks_by_node(((2, 8), (3, 1)), 8) == (3, 3) and ranks_by_node(((4, 2),), 4) == (2, 2)
    assert ranks_by_node(((4, 2),), 8) == (4,) and ranks_by_node(((12, 1),), 8) == (8, 4)


def test_the_page_of_a_simulation_says_what_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = run(
        Allocated(1, 1 << 30, 0, "parameters", ""),
        Allocated(2, 2 << 30, 0, "activations", "layers.3.ffn"),
        matmul(0, 2, "layers.0"),
        EventRecorded(0, 0),
        gather(1, 3),
        EventRecorded(1, 1),
        EventWaited(0, 1),
        matmul(0, 1)._replace(phase="backward"),
    )
    simulation = Simulation(recording, machine())
    monkeypatch.setattr(error_bars, "held_out", lambda: ())
    text, notes = text_of(blocks_of([simulation])), " ".join(assumptions(simulation))
    # 4,096 tokens on 8 devices in 4 s; forward 2e9 operations, three times that of 4 s x 989.4e12.
    assert "Simulated: 4.00 s per step on h100, 128 tokens/s/device, MFU 0.0 %" in text
    assert simulation.model_share == pytest.approx(6e9 / 4 / 989.4e12)
    assert "exposed communication over dp_shard 1.00 s 25.0 %" in " ".join(text.split())
    assert (
        "activations of layers.*.ffn" in text
        and "3 GiB of 79.1 GiB reserved at the peak, 3 GiB of it alive; the step fits" in text
    )
    alone = gather(1, 0, ranks=((1, 1),))._replace(group_size=1, mesh_dim="tp", payload_bytes=0)
    lone = text_of(blocks_of([Simulation(replace(recording, events=[*recording.events, alone]), machine())]))
    assert "over dp_shard" in lone and "over tp" not in lone  # a group of one moves nothing
    assert "fitted in hardware file h100: device_spread" in notes
    assert "guessed in hardware file h100: attention_backward_flops" in notes
    answer = text.splitlines()[-3:]
    assert "notes: -v shows them" in text and answer[-1].startswith("Largest exposed communication: ")
    assert answer[-1].endswith(", 1.00 s (25.0 % of the step)")
    record = simulation.to_record()
    assert record["simulated"] is True and record["memory"]["peak_live_bytes"] == 3 << 30
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize("name", shipped_hardware())
def test_a_shipped_hardware_file_is_read_and_says_where_each_figure_is_from(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name and hardware.devices_per_node > 0
    assert all(figure.source for figure in hardware.figures.values())
    assert hardware.of_basis("guess") and hardware.of_basis("published")


def changed(tmp_path: Path, change: Any) -> str:
    record = json.loads((FOLDER / "h100.json").read_text())
    change(record)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(record))
    return str(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["figures"].pop("host_s"), r"figures.host_s is missing"),
        (lambda record: record["figures"]["host_s"].pop("source"), r"figures.host_s.source is missing"),
        (
            lambda record: record["figures"]["memory_bytes"].update(value=80),
            r"figures.memory_bytes.value is 80, not a number from 2.68435e\+08 to",
        ),
        (lambda record: record["figures"]["host_s"].update(value=-1), r"figures.host_s.value is -1, not"),
        (lambda record: record["figures"]["host_s"].update(basis="sure"), r"basis is 'sure', not one of published"),
        (
            lambda record: record["figures"].update(nic=record["figures"]["host_s"]),
            r"figures.nic is unknown \(available: ",
        ),
        (lambda record: record["figures"].update(host_s=1), r"figures.host_s is 1, not an object"),
        (
            lambda record: record["figures"].update(matmul_fp8_flops={"value": 4e15, "basis": "guess", "source": "x"}),
            "matmul_fp8_flops is above figures.peak_fp8_flops",
        ),
        (
            lambda record: record["figures"]["matmul_bf16_flops"].update(value=1e15),
            "matmul_bf16_flops is above figures.peak_bf16_flops",
        ),
        (lambda record: record["figures"]["devices_per_node"].update(value=8.5), "is 8.5, not a whole number from 1"),
        (lambda record: record.pop("name"), "name is missing"),
        (lambda record: record.pop("figures"), "figures is missing"),
        (lambda record: record.update(figures=[]), "figures is a list of 0, not an object"),
        (lambda record: record.pop("hardware_version"), "hardware_version is missing"),
        (lambda record: record.update(name="n" * 101), "name is 'nn.*, not a name of up to 100 characters"),
        (
            lambda record: record["figures"]["attention_backward_flops"].update(value=1e16),
            "attention_backward_flops is above figures.peak_bf16_flops",
        ),
        (lambda record: record.update(hardware_version=2), "is newer than this distbench"),
        (lambda record: record.update(hardware_version="x"), "hardware_version is 'x', not a whole number"),
    ],
)
def test_a_hardware_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_hardware(changed(tmp_path, change))


def test_an_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"--hardware 'h10' is unknown \(nearest: h100.*\); use a known name, or a path"
    ):
        load_hardware("h10")


def test_a_recording_is_read_as_it_was_saved(tmp_path: Path) -> None:
    recording = run(
        Allocated(1, 512, 0, "other", ""),
        elementwise(1, [[1, 512]], [[1, 512]])._replace(attention=[8, 16, 1]),
        gather(1, 2, ranks=[[2, 1]]),
        EventRecorded(1, 0),
        EventWaited(0, 0),
        HostWaited(0),
        Freed(1),
    )
    other = replace(recording, head=replace(HEAD, rank=7, case_id="step/f32[1]/mine", params={"batch_size": 16}))
    save_recordings([recording, other], tmp_path / "step.jsonl")
    assert load_recordings(tmp_path / "step.jsonl") == [recording, other]
    save_recordings([other, replace(other, head=replace(HEAD, mesh={"dp_shard": 4}))], tmp_path / "two.jsonl")
    with pytest.raises(UserError, match=r"two.jsonl, line 10: mine is another step than mine, but a file has one step"):
        load_recordings(tmp_path / "two.jsonl")


def test_a_recording_that_was_cut_between_two_lines_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step.jsonl"
    save_recordings([run(HostWaited(0), HostWaited(0))], file)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"line 1: the file ends after 2 of 3 events; record the step again"):
        load_recordings(file)


def test_a_recording_of_version_1_is_read() -> None:
    """As it was written before: rank 0 alone, and nothing of the case."""
    recording = load_recordings(DATA / "recording_v1.jsonl")[0]
    assert recording.head.rank == 0 and recording.head.case_id == "" and recording.collectives[0].op == ""
    simulation = Simulation(recording, machine())
    assert simulation.timed.step_s == pytest.approx(3) and simulation.memory.live_bytes == 2048


WIDE = {"recording_version": 2, **asdict(HEAD), "mesh": {"dp_shard": 65536, "tp": 2}}
LOOPS = {"is": "collective", **gather(0, 1)._asdict(), "ranks": [[1000, 1000], [1_000_000, 1]]}


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (1, '{"recording_version": 7}', "is newer than this distbench"),
        (2, '{"recording_version": 7}', "is newer than this distbench"),
        (
            1,
            '{"schema_version": 2}',
            "is not a recording; write a recording with distbench simulate SCENARIO --save FILE",
        ),
        (1, '{"recording_version": 1, "scenario": "x"}', "line 1: variant is missing"),
        (2, '{"is": "sleep"}', "line 2: it is not an event of a recording"),
        (2, '{"is": ["step"]}', "line 2: it is not an event of a recording"),
        (2, "[]", "line 2: it is a list of 0, not an object"),
        (2, '{"is": "step"', "line 2: column 14 is not valid JSON"),
        (2, '{"is": "free", "block": 4}', "line 2: block 4 is freed, but not allocated"),
        (2, '{"is": "wait", "stream": 0, "event": -1}', "line 2: event is -1, not a whole number >= 0"),
        (2, '{"is": "host_wait", "stream": 0}', "has no step; record the step again"),
        (1, json.dumps(WIDE), "line 1: its mesh has more than 65,536 ranks"),
        (1, json.dumps(WIDE | {"mesh": {"tp": 2}, "rank": 2}), "line 1: rank 2 is not in the mesh"),
        (2, json.dumps(LOOPS), "line 2: ranks lists 1000000000 ranks, but group_size is 2"),
        (1, "\x00", "line 1: "),
        (1, "", "line 1: "),
    ],
)
def test_a_damaged_recording_is_one_sentence(tmp_path: Path, line: int, text: str, message: str) -> None:
    file = tmp_path / "step.jsonl"
    save_recordings([run()], file)
    lines = file.read_text().splitlines()
    lines[line - 1] = text
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message):
        load_recordings(file)


@pytest.mark.parametrize(
    ("capacity_gib", "message"),
    [
        (64, "of 64 GiB reserved at the peak, 4 GiB of it alive; the step fits"),
        (5, "only because the allocator frees its cache once"),
        (4, "an allocation of 2 GiB fails"),
    ],
)
def test_the_page_says_whether_it_fits(capacity_gib: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_bars, "held_out", lambda: ())
    gib = 1 << 30
    recording = run(
        Allocated(1, 2 * gib, 0, "activations", "a"),
        Freed(1),
        Allocated(2, 2 * gib, 1, "activations", "b"),
        Allocated(3, 2 * gib, 2, "activations", "c"),
        matmul(0, 1),
    )
    # Streams share nothing: 6 GiB are reserved, 4 after the first is given back. Within 4 the last has room; within
    # 4 GiB less 2 MiB it has not.
    capacity = capacity_gib * gib - (2 << 20 if capacity_gib == 4 else 0)
    text = text_of(blocks_of([Simulation(recording, machine(memory_bytes=float(capacity)))]))
    assert message in " ".join(text.split())


def test_a_simulation_has_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """In text and as data: a third slower, and 10 % less memory, of all held-out rows."""
    error, memory = math.log(0.75), math.log(10 / 9)
    of = {
        "name": "a",
        "split": "held-out",
        "model": "",
        "hardware": "h100",
        "plan": "",
        "dtype": "bf16",
        "mode": "eager",
    }
    rows = tuple(Residual(source=source, log_error=error, memory_log_error=memory, **of) for source in "abc")
    monkeypatch.setattr(error_bars, "held_out", lambda: rows)
    gib = 1 << 30
    recording = run(Allocated(1, 10 * gib, 0, "activations", "a"), matmul(0, 3))
    simulation = Simulation(recording, machine())
    text = " ".join(text_of(blocks_of([simulation])).split())
    assert "Simulated: 3.00 s per step (4.00 to 4.00 s) on h100" in text
    assert "Memory: 10 GiB (9 to 9 GiB) of 79.1 GiB reserved" in text
    assert simulation.to_record()["step_range_s"] == pytest.approx([4.0, 4.0])
    assert simulation.to_record()["memory"]["peak_reserved_range_bytes"] == pytest.approx([9.0 * gib] * 2)
    assert "3 held-out published rows of 3 sources" in " ".join(assumptions(simulation))
    other = Simulation(recording, replace(machine(), name="mine"))
    assert "no held-out row of hardware file mine" in " ".join(assumptions(other))
    monkeypatch.setattr(error_bars, "held_out", tuple)
    assert simulation.to_record()["step_range_s"] is None
    assert "no error bar" in " ".join(assumptions(simulation))
