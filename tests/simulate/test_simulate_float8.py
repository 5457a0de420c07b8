"""What float8 changes in a simulated step: plain data, worked by hand."""

from dataclasses import replace

import pytest
from test_simulate_clock import elementwise, gather, machine, matmul, run
from test_simulate_rules import GIB, block

from distbench.simulate.allocator import replay_memory
from distbench.simulate.compile_float8 import in_float8, in_float8_by, patterns_of
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.operator_costs import operator_s
from distbench.simulate.recording import Allocated, Freed, Operator
from distbench.simulate.simulation import Simulation
from distbench.spec import UserError


def test_float8_casts_each_input_once_and_gathers_half() -> None:
    gib = 10**9
    linear = matmul(0, 4, "layers.0.ffn.w1")._replace(reads=[(1, gib), (2, gib)], num_bytes=2 * gib)
    copied = elementwise(2, [(2, gib)], [(2, gib)], "layers.0")._replace(name="fsdp.split_with_sizes_copy.default")
    other = matmul(0, 4, "output")
    recording = run(gather(1, 2), copied, linear, linear, other)
    step = in_float8(recording, ["layers.0"])
    operators = [event for event in step.step if isinstance(event, Operator)]
    # 1 is looked through and cast, once for both; 2 is a gathered weight, cast where it is sharded.
    names = [operator.name for operator in operators]
    assert names[1:4] == ["float8.largest", "float8.cast", "aten.mm.default"] and len(names) == 6
    assert [operator.dtype for operator in operators[3:]] == ["float8", "float8", "bf16"]
    assert operators[2].num_bytes == 1.5 * gib and operators[3].num_bytes == gib and operators[0].num_bytes == gib
    assert [gathered.payload_bytes for gathered in step.collectives] == [2 * gib]
    # Read for the largest element, read and written in half as many bytes, copied: 1 + 1.5 s; 4 s at twice the rate.
    # The file of h100 has FP8's peak, 2.0002 times that of BF16, and no rate of float8 matmuls.
    taken = [operator_s(operator, machine()) for operator in operators]
    assert taken == pytest.approx([1, 1, 1.5, 2, 2, 4], rel=1e-3)


def test_float8_is_what_tensor_parallel_gathers_too() -> None:
    into, out = (gather(0, 1, owner)._replace(source="tp") for owner in ("layers.0.attention", "output"))
    reduced = into._replace(kind="reduce_scatter")
    result = in_float8(run(into, reduced, out, matmul(0, 1, "layers.0.attention.wq")), ["layers.0"]).collectives
    # Gathers of what goes into float8 matmuls alone: sums stay in bf16.
    assert [one.payload_bytes for one in result] == [into.payload_bytes // 2, into.payload_bytes, into.payload_bytes]


def test_float8_transposes_what_a_weights_gradient_is_made_from() -> None:
    gradient = matmul(0, 1, "layers.0.w1")._replace(reads=[(1, 8), (2, 8)], phase="backward")
    result = in_float8(run(gradient), ["layers.0"]).step
    assert [event.name for event in result if isinstance(event, Operator)][:-1] == [
        *("float8.largest", "float8.cast", "float8.cast") * 2
    ]


def test_a_float8_copy_has_memory_until_the_last_matmul_of_its_phase_that_reads_it() -> None:
    def linear(phase: str) -> Operator:
        read = [(1, 4 * GIB), (2, GIB)]  # an activation and a gathered weight
        return matmul(0, 1, "layers.0.w1")._replace(reads=read, num_bytes=5 * GIB, phase=phase)

    weight = elementwise(2, [(2, GIB)], [(2, GIB)], "layers.0")._replace(name="fsdp.split_with_sizes_copy.default")
    events = [
        block(1, 4),
        weight,
        linear("forward"),
        linear("forward"),
        block(3),
        linear("backward"),
        Freed(3),
        Freed(1),
    ]
    result = in_float8(run(*events), ["layers.0"]).events
    made = [event for event in result if isinstance(event, Allocated) and event.block > 3]
    # A byte an element where there were two; backward casts what was kept in bf16 again.
    assert [(one.num_bytes, one.held) for one in made] == [(2 * GIB, "activations"), (2 * GIB, "backward")]
    names = [getattr(event, "name", type(event).__name__) for event in result]
    assert names[3:10] == [
        *("float8.largest", "Allocated", "float8.cast", "aten.mm.default", "aten.mm.default", "Freed", "Allocated")
    ]
    assert replay_memory(result).live_bytes == (4 + 2 + 1) * GIB


def test_float8_is_of_the_modules_that_patterns_match() -> None:
    events = [matmul(0, 1, f"layers.{number}.ffn.w{one}") for number in (0, 1) for one in (1, 2)]
    recording = run(*events, matmul(0, 1, "output"))

    def chosen(*patterns: str) -> list[str]:
        step = in_float8_by(recording, patterns).step
        return [event.owner for event in step if isinstance(event, Operator) and event.dtype == "float8"]

    assert chosen("layers.*") == [event.owner for event in events]
    assert chosen("layers.*.ffn.w1", "output") == ["layers.0.ffn.w1", "layers.1.ffn.w1", "output"]
    with pytest.raises(UserError, match=r"--float8 layer\.\* matches no module with a matmul \(nearest: layers\.\*"):
        chosen("layer.*")
    wide = run(matmul(0, 1, "output")._replace(dtype="f32"))
    with pytest.raises(UserError, match=r"matches modules that compute in f32, but float8 replaces bf16 or f16"):
        in_float8_by(wide, ("output",))
    message = Simulation.all_of([recording], load_hardware("h100"), False, ("layers.*",))[0].not_simulated[0]
    assert message.startswith("float8 is simulated by rules") and message.endswith("(layers.*)")


def test_float8_needs_patterns_and_a_rate() -> None:
    assert patterns_of("layers.*, output", load_hardware("h100")) == ("layers.*", "output")
    with pytest.raises(UserError, match=r"--float8 'a,' has no modules; give glob patterns, such as"):
        patterns_of("a,", load_hardware("h100"))
    plain = load_hardware("h100")
    without = replace(plain, figures={name: one for name, one in plain.figures.items() if "fp8" not in name})
    with pytest.raises(
        UserError, match=r"hardware file h100 has no float8 rate \(peak_fp8_flops\); leave --float8 out"
    ):
        patterns_of("layers.*", without)
