"""A step's peak of memory: where it lies, to the byte, and that nothing else in the launch moves it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DATA, run_files
from processes import Ranks
from torch import nn

from distbench.observe.memory import measured_step_peak, peak_of, predicted_peak_bytes
from distbench.observe.module_attribution import RunningModules
from distbench.plans.training_step import Stamp
from distbench.records.run_file import read_run
from distbench.spec import ParallelPlan
from distbench.torch_private import Allocation

NUMEL = 1000
N = 4 * NUMEL  # bytes of each tensor of the toy


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.sine = Scaled(), Sine()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sine(self.scaled(x))


class ToyStep:
    """As much of a TrainingStep as its memory is taken from."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.microbatches, self.optimizer = model, [(batch,)], optimizer
        self.plan, self.cache_tensors = ParallelPlan(), ()
        self.phases = ("forward", "backward", "optimizer") if optimizer else ("forward", "backward")

    def __call__(self, stamp: Stamp) -> None:
        loss = self.model(self.microbatches[0][0]).sum()
        stamp()
        loss.backward()
        stamp()
        if self.optimizer:
            self.optimizer.step()
            stamp()
        self.model.zero_grad()


def measured(step: Any) -> Any:
    return measured_step_peak(step)


def test_the_peak_of_a_toy_is_where_its_derivatives_put_it() -> None:
    """The derivative of sin is grad * self.cos() (torch's derivatives.yaml): beside the parameter, the batch and the
    saved input of sin there are then the cosine and the product, the loss, and the gradient that backward begins at."""
    step = ToyStep(Toy(), torch.ones(NUMEL))
    peak = measured(step)
    assert (peak.num_bytes, peak.phase, peak.owner) == (5 * N + 2 * 4, "backward", "sine")
    assert peak.by_kind == {"parameters": N, "batch": N, "gradients": 0, "other": 3 * N + 2 * 4}


def test_the_optimizers_peak_counts_gradients_and_states() -> None:
    """AdamW on one parameter: its two states and the step count, the gradient, and torch's root of the second state and
    its quotient (`_single_tensor_adam`: sqrt, then divided), which is one more tensor each while it is computed."""
    model = nn.Linear(NUMEL, 1, bias=False)
    step = ToyStep(model, torch.ones(1, NUMEL), torch.optim.AdamW(model.parameters(), foreach=False))
    step(lambda: None)
    peak = measured(step)
    assert (peak.phase, peak.owner) == ("optimizer", None)
    assert {kind: peak.by_kind[kind] for kind in ("parameters", "batch", "optimizer", "gradients")} == {
        "parameters": N,
        "batch": N,
        "optimizer": 2 * N + 4,
        "gradients": N,
    }
    assert 2 * N <= peak.by_kind["other"] < 3 * N


def test_what_a_module_keeps_is_held_and_nothing_is_left_behind() -> None:
    resize = torch.UntypedStorage.resize_
    step: Any = ToyStep(Toy(), torch.ones(NUMEL))
    before = measured(step)
    step.model.sine.kept = [torch.ones(7)]
    assert measured(step).num_bytes == before.num_bytes + 7 * 4
    assert predicted_peak_bytes(step) >= 2 * N
    hooks = [(*one._forward_hooks, *one._forward_pre_hooks, *one._backward_hooks) for one in step.model.modules()]
    assert not any(hooks) and torch.UntypedStorage.resize_ is resize
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def step_of(number: int, *allocations: tuple[int, int], phase: str = "forward") -> list[Allocation]:
    inside = (f"distbench step {number} {phase}", "distbench module: a.b")
    return [Allocation(pointer, num_bytes, inside) for pointer, num_bytes in allocations]


def test_a_block_that_another_thread_let_go_late_counts_as_long_as_the_step_held_it() -> None:
    """Each step takes 100 at pointer 1, lets it go, and takes 60 and 30; a thread of gloo has a buffer of its own."""
    gloo = Allocation(9, 1000, ("gloo:all_gather",))
    early = [(1, 100), (1, -100), (2, 60), (3, 30), (2, -60), (3, -30)]
    late = [(1, 100), (2, 60), (1, -100), (3, 30), (2, -60), (3, -30)]
    held = {5: ("parameters", 7)}
    for orders in ([early, late, late], [late, early, late], [late, late, early]):
        record = [one for number, order in enumerate(orders) for one in (gloo, *step_of(number, *order))]
        peak = peak_of(record, held, (), RunningModules())
        assert (peak.num_bytes, peak.phase, peak.owner) == (107, "forward", "a.b")
    assert peak_of([], held, (), RunningModules()).num_bytes == 7


def test_blocks_that_are_carried_from_step_to_step_are_held_until_they_are_replaced() -> None:
    """A step takes 10 before it lets go of the 10 that the last one took; the other block is what it holds beside."""
    record = [
        *step_of(0, (1, 10), (2, 5), (2, -5)),
        *step_of(1, (3, 10), (1, -10), (2, 5), (2, -5)),
        *step_of(2, (1, 10), (3, -10), (2, 5), (2, -5)),
    ]
    peak = peak_of(record, {}, (), RunningModules())
    assert peak.num_bytes == 20
    # Held already as a module's own: counted once.
    assert peak_of(record, {3: ("other", 10)}, (), RunningModules()).num_bytes == 20


@pytest.fixture(scope="module")
def peaks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Counters by variant of three launches: all in order, all in another, and one alone."""
    result = []
    orders = ("plain,holds,again,holds_more", "holds_more,again,holds,plain", "plain")
    for order in orders:
        folder = tmp_path_factory.mktemp("memory")
        done = ranks.run_here(
            *("run", str(DATA / "holding.py"), "--set", f"variant={order}", "--passes", "1"),
            *("--budget", "0.2", "--quick", "--quiet", "--results", str(folder)),
        )
        assert done.exit_code == 0, done.output
        [file] = run_files(folder)
        cases = read_run(Path(file)).cases
        result.append({record["case"]["params"]["variant"].partition("=")[2]: record["counters"] for record in cases})
    return result


@pytest.mark.long
def test_the_same_variant_first_last_or_alone_needs_the_same_to_the_byte(
    peaks: list[dict[str, dict[str, Any]]],
) -> None:
    forth, back, alone = peaks
    assert len(forth) == 4 and forth.keys() == back.keys()
    names = ("peak_bytes", "peak_phase", "peak_owner", "peak_by_kind", "predicted_peak_bytes")
    for name in names:
        assert {variant: result[name] for variant, result in forth.items()} == {
            variant: result[name] for variant, result in back.items()
        }
        assert alone["plain"][name] == forth["plain"][name] == forth["again"][name]
    assert forth["plain"]["predicted_peak_bytes"] > 0


@pytest.mark.long
def test_a_variant_that_keeps_more_shows_exactly_that_much_more(peaks: list[dict[str, dict[str, Any]]]) -> None:
    forth = peaks[0]
    plain = forth["plain"]["peak_bytes"]
    assert forth["holds"]["peak_bytes"] == plain + 1000 * 4
    assert forth["holds_more"]["peak_bytes"] == plain + 3000 * 4
