"""What compiling, shapes and many devices change in a simulated step: plain data, worked by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_simulate_clock import HEAD, elementwise, gather, machine, matmul, replay_time, run, spans

from distbench.search.predicted import memory_for, predicted, with_memory
from distbench.search.space import Candidate
from distbench.show.terminal import text_of
from distbench.simulate.allocator import replay_memory
from distbench.simulate.compile_float8 import compiled_memory
from distbench.simulate.hardware_file import FOLDER, Figure, Hardware, HostFigures, load_hardware
from distbench.simulate.operator_costs import collective_s, operator_s, slowest
from distbench.simulate.recording import Allocated, Event, Freed, Operator, Recording, StepBegun
from distbench.simulate.simulation import Simulation
from distbench.simulate.simulation_text import assumptions, blocks_of
from distbench.spec import UserError
from distbench.spec.plan import LOSS

GIB = 1 << 30
COMPILED = replace(HEAD, compiled=("layers.0",))


def test_what_is_compiled_is_one_kernel_that_never_writes_what_dies_in_it() -> None:
    gib = 10**9  # a second each
    events: list[Event] = [
        elementwise(2, [(1, gib)], [(2, gib)]),
        elementwise(3, [(2, gib), (3, gib)], [(4, gib)]),
        Freed(2),
        elementwise(2, [(4, gib)], [(5, gib)]),
        matmul(0, 1),
        elementwise(2, [(5, gib)], [(6, gib)]),
        elementwise(2, [(6, gib)], [(7, gib)], owner="norm"),
    ]
    alone = replay_time(run(*events), machine()).step_s
    assert alone == pytest.approx(2 + 3 + 2 + 1 + 2 + 2)
    # Reads 1 and 3, writes 4 and 5, which outlive it; the last two are a kernel each: "norm" is not compiled.
    compiled = replay_time(run(*events, head=replace(HEAD, compiled=("layers.0",))), machine()).step_s
    assert compiled == pytest.approx(4 + 1 + 2 + 2)


def test_complex_numbers_stay_kernels_of_their_own_where_compiled() -> None:
    gib = 10**9  # a second each; torch's inductor calls aten for them: fallback_node_due_to_unsupported_type
    turned = elementwise(2, [(1, gib)], [(2, gib)])._replace(dtype="complex64")
    events = [elementwise(2, [(0, gib)], [(1, gib)]), turned, Freed(1), elementwise(2, [(2, gib)], [(3, gib)])]
    assert replay_time(run(*events, head=COMPILED), machine()).step_s == pytest.approx(2 + 2 + 2)
    in_bf16 = [events[0], turned._replace(dtype="bf16"), *events[2:]]
    assert replay_time(run(*in_bf16, head=COMPILED), machine()).step_s == pytest.approx(3)  # reads 0, writes 2 and 3


def block(number: int, size: int = 1) -> Allocated:
    return Allocated(number, size * GIB, 0, "activations", "layers.0")


def op(kind: str, reads: Sequence[int], writes: Sequence[int], phase: str = "forward") -> Operator:
    one = matmul(0, 1, "layers.0.ffn") if kind == "matmul" else elementwise(1, [], [])
    touched: list[list[Any]] = [[[number, GIB] for number in numbers] for numbers in (reads, writes)]
    return one._replace(reads=touched[0], writes=touched[1], phase=phase)


def live_gib(*events: Event, compiled: bool = True) -> float:
    recording = Recording(COMPILED if compiled else HEAD, [StepBegun(2), *events])
    return replay_memory(compiled_memory(recording)).live_bytes / GIB


def test_compiled_what_nothing_of_backward_reads_is_not_kept_for_it() -> None:
    # 2 is kept for backward and never read there (as by selective checkpointing); 3 is read.
    events = (
        block(1),
        block(2),
        op("matmul", [1], [2]),
        block(3),
        op("matmul", [2], [3]),
        block(4, 2),
        op("matmul", [3], [4]),
        op("matmul", [4, 3], [], "backward"),
        Freed(2),
        Freed(3),
        Freed(4),
        Freed(1),
    )
    assert live_gib(*events, compiled=False) == 1 + 1 + 1 + 2
    assert live_gib(*events) == 1 + 1 + 2


def test_compiled_a_collective_still_has_what_it_reads() -> None:
    # As a row-wise linear layer's partial sums: nobody but the reduce-scatter reads them.
    events = [StepBegun(2), block(1), op("matmul", [], [1]), gather(1, 1), op("matmul", [], [], "backward"), Freed(1)]
    result = compiled_memory(Recording(COMPILED, events))
    assert [type(event).__name__ for event in result[1:]] == [
        *("Allocated", "Operator", "Collective", "Freed", "Operator")
    ]


def test_compiled_what_one_kernel_makes_and_frees_has_no_memory() -> None:
    events = (
        block(1),
        op("matmul", [], [1]),
        block(2, 8),
        op("memory", [1], [2]),
        block(3),
        op("memory", [2], [3]),
        Freed(2),
        op("matmul", [3], []),
        Freed(3),
        Freed(1),
    )
    assert live_gib(*events, compiled=False) == 10
    assert live_gib(*events) == 2


@pytest.mark.parametrize(("reader", "at_peak"), [("memory", 1 + 4), ("matmul", 1 + 4)])
def test_compiled_what_can_be_made_again_from_what_is_kept_is_not_kept(reader: str, at_peak: int) -> None:
    # 2 is elementwise of 1, which backward has anyway. A kernel makes it anew; for a matmul it is put in memory again.
    events = (
        block(1),
        op("matmul", [], [1]),
        block(2, 2),
        op("memory", [1], [2]),
        op("matmul", [2], []),
        block(5, 4),
        op("matmul", [], [5]),
        Freed(5),
        op("matmul", [], [], "backward"),
        op(reader, [2, 1], [], "backward"),
        Freed(2),
        op("memory", [1], [], "backward"),
        Freed(1),
    )
    assert live_gib(*events, compiled=False) == 1 + 2 + 4
    assert live_gib(*events) == at_peak


def test_compiled_the_first_step_allocates_what_the_second_one_does() -> None:
    # Operators are recorded in the second step alone; without this the first one would keep what none needs.
    state = Allocated(9, GIB, 0, "optimizer", "")

    def step(number: int, *operators: Event) -> list[Event]:
        one, two = number * 10, number * 10 + 1
        return [StepBegun(number), block(one), *operators[:1], block(two, 3), *operators[1:], Freed(one), Freed(two)]

    operators = (
        op("matmul", [], [20]),
        op("matmul", [20], [21]),
        op("matmul", [21], [], "backward"),
        op("memory", [], [], "optimizer"),
    )
    events = [*step(1), state, *step(2, *operators)]
    for head in (HEAD, COMPILED):
        assert replay_memory(compiled_memory(Recording(head, events))).live_bytes == 5 * GIB
    assert sum(isinstance(event, Allocated) for event in compiled_memory(Recording(COMPILED, events))) == 5


@pytest.mark.parametrize(
    ("kind", "shape", "seconds"),
    [
        ("attention", [], 1),
        ("attention", [8192, 8192, 1], 1),
        ("attention", [8192, 8192, 0], 0.5),
        ("attention_backward", [8192, 8192, 0], 0.25),
        # Half the rate at the length that the file says, for the shorter of queries and keys.
        ("attention", [256, 8192, 1], 2),
    ],
)
def test_attention_takes_time_by_its_shape(kind: str, shape: list[int], seconds: float) -> None:
    one = matmul(0, 1)._replace(kind=kind, attention=shape)
    half = 256.0 if shape[:1] == [256] else 0.0
    rates = {"attention_full_flops": 2e9, "attention_backward_full_flops": 4e9, "attention_half_length": half}
    assert operator_s(one, machine(**rates)) == pytest.approx(seconds)


@pytest.mark.parametrize(("count", "deviations"), [(1, 0.0), (8, 1.4236), (100, 2.5076)])
def test_all_wait_for_the_slowest_device(count: int, deviations: float) -> None:
    # The mean of the largest of n draws: Harter, Biometrika 48 (1961), has 1.4236 for 8 and 2.5076 for 100.
    assert slowest(machine(device_spread=0.1), count) == pytest.approx(1 + 0.1 * deviations, abs=2e-3)
    assert spans(matmul(0, 1), device_spread=0.1)[0][1] == pytest.approx(1.1424, abs=2e-3)  # HEAD's mesh has 8


def test_ring_attention_passes_a_block_to_one_neighbour() -> None:
    ring = gather(0, 1)._replace(kind="all_to_all", source="cp", payload_bytes=10**9, group_size=8, ranks=[[8, 1]])
    assert collective_s(ring, machine(peer_bytes_per_s=5e8)) == pytest.approx(2)
    assert collective_s(ring._replace(source="tp"), machine(peer_bytes_per_s=5e8)) == pytest.approx(7 / 8)
    # Ulysses' all-to-alls are DTensor's: each device sends a share to all others.
    assert collective_s(ring._replace(redistribution="S(1)->S(2)"), machine(peer_bytes_per_s=5e8)) == pytest.approx(
        7 / 8
    )


def test_a_ring_of_more_than_two_devices_of_a_node_has_a_rate_of_its_own() -> None:
    ring = gather(0, 1)._replace(kind="all_to_all", source="cp", payload_bytes=10**9)
    plain = machine(peer_bytes_per_s=5e8, network_bytes_per_s=2.5e8)
    slower = replace(plain, figures={**plain.figures, "ring_bytes_per_s": Figure(1e8, "fitted", "here")})
    four, over_nodes = {"group_size": 4, "ranks": [[4, 1]]}, {"group_size": 4, "ranks": [[4, 8]]}
    assert [collective_s(ring._replace(**shape), slower) for shape in ({}, four, over_nodes)] == pytest.approx(
        [2, 10, 4]
    )
    assert collective_s(ring._replace(**four), plain) == pytest.approx(2)
    # Nothing else that these devices do.
    assert collective_s(ring._replace(**four, kind="all_gather"), slower) == pytest.approx(3 / 4)


def test_of_an_accelerators_memory_a_reserve_is_not_usable() -> None:
    h100 = load_hardware("h100")
    assert h100.usable_bytes == pytest.approx(h100["memory_bytes"] - 4.34e9)
    own = replace(h100, figures={**h100.figures, "reserve_bytes": Figure(1e9, "measured", "here")})
    assert own.usable_bytes == h100["memory_bytes"] - 1e9
    assert with_memory(h100, 8e9).usable_bytes == pytest.approx(7.2e9)
    assert replace(h100, host=HostFigures(4, {}, {}, {})).usable_bytes == h100["memory_bytes"]
    assert memory_for(h100, 7.2e9) == pytest.approx(8e9) and memory_for(h100, 100e9) == pytest.approx(104.34e9)


@pytest.mark.parametrize(
    ("num_gib", "fits", "takes_reserve", "message"),
    [
        (74, True, False, "; the step fits"),
        (77, False, True, "leaves less than 4.04 GiB for the context"),
        (80, False, False, "out of memory"),
    ],
)
def test_a_plan_that_leaves_no_reserve_does_not_fit(
    num_gib: int, fits: bool, takes_reserve: bool, message: str
) -> None:
    recording = Recording(HEAD, [StepBegun(1), block(1, num_gib), matmul(0, 1), StepBegun(2), matmul(0, 1)])
    h100 = load_hardware("h100")
    result = predicted(Candidate((("tp", 8),)), [recording], h100)
    assert (result.fits, result.takes_reserve) == (fits, takes_reserve)
    assert message in " ".join(text_of(blocks_of([Simulation(recording, h100)])).split())


def test_what_a_hardware_file_lacks_is_extrapolated_and_said() -> None:
    whole = machine(matmul_bf16_flops=600e12, peak_bf16_flops=1000e12)
    left_out = ("peak_fp8_flops", "matmul_fp8_flops", "device_spread", "attention_full_flops", "peer_bytes_per_s")
    left_out += ("ring_bytes_per_s", "host_bytes_per_s", "reserve_bytes")  # which only one shipped file has, and none
    left_out += ("num_units", "matmul_fill_bytes", "overlap_slowdown")  # of files written before
    some = Hardware("mine", "", {name: one for name, one in whole.figures.items() if name not in left_out})
    assert some["matmul_fp8_flops"] == pytest.approx(1200e12) and some["device_spread"] == 0
    assert [some[name] for name in ("num_units", "matmul_fill_bytes", "overlap_slowdown")] == [0, 0, 0]
    assert some["attention_full_flops"] == some["attention_flops"] and set(left_out) == set(some.extrapolated)
    simulation = Simulation(run(matmul(0, 1)), some)
    text = " ".join(assumptions(simulation))
    assert "not in hardware file mine, and extrapolated: attention_full_flops (attention_flops), device_spread" in text
    assert simulation.to_record()["extrapolated"]["peak_fp8_flops"] == "twice peak_bf16_flops"


def test_software_replaces_figures_of_a_hardware_file(tmp_path: Path) -> None:
    h100, fa3 = load_hardware("h100"), load_hardware("h100@fa3")
    assert fa3.name == "h100@fa3" and fa3["attention_flops"] > 1.5 * h100["attention_flops"]
    assert fa3["matmul_bf16_flops"] == h100["matmul_bf16_flops"]
    file = tmp_path / "at@home.json"
    file.write_text((FOLDER / "h100.json").read_text())
    assert load_hardware(str(file)).name == "h100"
    assert load_hardware(f"{file}@triton")["attention_flops"] < h100["attention_flops"]
    with pytest.raises(
        UserError, match=r"h100 has no software 'fa4' \(it has cudnn, fa3, triton\); use --hardware h100"
    ):
        load_hardware("h100@fa4")
    with pytest.raises(UserError, match=r"b200 has no software 'fa3' \(it has none\)"):
        load_hardware("b200@fa3")
    record = json.loads(file.read_text())
    record["software"] = {"mine": {"attention_flop": record["figures"]["attention_flops"]}}
    file.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"attention_flop is unknown"):
        load_hardware(str(file))


def test_the_accelerators_that_float8_is_published_of() -> None:
    # NVIDIA's H100 and A100, AMD's MI300X data sheets, dense: of A100, which has no float8, what BF16 reaches.
    peaks = {"h100": 1978.9e12, "h200": 1978.9e12, "mi300x": 2615e12, "b200": 4500e12, "a100": 312e12}
    assert {name: load_hardware(name)["peak_fp8_flops"] for name in peaks} == peaks


def test_compiled_loss_keeps_logits_instead_of_their_log_softmax() -> None:
    """Logits of 2 GiB in bf16; their copies and gradients in fp32 have 4 GiB. Backward reads only the logits again."""

    def loss(reads: Sequence[tuple[int, int]], write: tuple[int, int], phase: str) -> Operator:
        touched = [[[number, size * GIB] for number, size in blocks] for blocks in (reads, [write])]
        one = elementwise(0, [], [], owner=LOSS)
        num_bytes = sum(size for _, size in [*reads, write]) * GIB
        return one._replace(num_bytes=num_bytes, reads=touched[0], writes=touched[1], phase=phase)

    events: list[Event] = [
        StepBegun(2),
        block(1, 2),
        op("matmul", [], [1]),
        block(2, 4),
        loss([(1, 2)], (2, 4), "forward"),
        block(3, 4),
        loss([(2, 4)], (3, 4), "forward"),
        Freed(2),
        Freed(1),
        block(4, 4),
        loss([], (4, 4), "backward"),
        block(5, 4),
        loss([(4, 4), (3, 4)], (5, 4), "backward"),
        Freed(4),
        Freed(3),
        block(6, 2),
        loss([(5, 4)], (6, 2), "backward"),
        Freed(5),
        op("matmul", [6], [], "backward"),
        Freed(6),
    ]

    def simulated(*compiled: str) -> Simulation:
        recording = Recording(replace(HEAD, compiled=compiled), events)
        (simulation,) = Simulation.all_of([recording], machine(), False, ())
        return simulation

    eager, compiled = simulated("layers.0"), simulated("layers.0", LOSS)
    assert eager.memory.live_bytes == (4 + 4 + 4) * GIB
    assert compiled.memory.live_bytes == (2 + 2) * GIB
    # Two kernels: one reads the logits, one reads them and writes their gradient.
    apart = eager.timed.step_s - compiled.timed.step_s
    assert apart == pytest.approx(((4 + 2) + (4 + 4) + 4 + (4 + 4 + 4) + (4 + 2) - 2 - (2 + 2)) * GIB / 1e9)
    assert (eager.traits.mode, simulated(LOSS).traits.mode) == ("compile", "eager")
