"""The fit of a recipe's step on a device, and the nearest plan that fits.

Few layers are recorded. If the other layers repeat them (`simulate.repeated_layers`), the memory is exact; otherwise it
is extrapolated from three recordings whose peaks are on a line, or recorded whole.
"""

import contextlib
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distbench.plans.batch import batch_of
from distbench.plans.model import blueprint
from distbench.plans.plan_check import problems
from distbench.ranks.failure import one_line
from distbench.simulate import repeated_layers
from distbench.simulate.hardware_file import load_hardware
from distbench.simulate.recorded_step import SEED, recorded
from distbench.simulate.recording import Allocated, Collective, Freed, Operator, Recording, StepBegun
from distbench.simulate.repeated_layers import NotRepeated
from distbench.spec import Scenario, UserError
from distbench.spec.mesh import BATCH_DIMS, mesh_size
from distbench.torch_private import Unsupported, fake_ranks
from distbench.worker.plan_rehearsal import rank_of
from distbench.worker.rank_session import declared

# Recorded numbers of layers of a model whose layers differ; they differ by a multiple of the period of alternating
# layers. Two of them may not suffice: DeepSeek-V3 671B has three dense layers, so its first 4 and 6 layers have one and
# three with experts, of which FSDP gathers one and two at once. On 64 devices, their line gave four times the memory.
NUMBERS_OF_LAYERS = 4, 6, 8, 10, 12
ALL = "all"
# f32 parameters, gradients and the two moments of AdamW.
BYTES_PER_PARAMETER = 16
MAX_DEVICES = 1 << 14
TP_WITHIN_NODE = 8


@dataclass(frozen=True)
class Fit:
    """The memory of one rank.

    Args:
        params: arguments of the scenario that differ from its defaults, in addition to the batch.
        peak_bytes: peak of the tensors' bytes; if `why_not` is set, bytes of parameters, gradients and optimizer only.
        depth: ALL if the memory is that of all layers, otherwise the recorded numbers of layers, as text.
        why_not: the reason why no step was recorded, or "".
    """

    mesh: dict[str, int]
    params: dict[str, Any]
    peak_bytes: float
    depth: str = ""
    why_not: str = ""
    problems: list[str] = field(default_factory=list)


class TooLong(BaseException):
    """The end of a row's time limit; not an Exception, because torch and this file handle every Exception."""


def recipe_fit(scenario: Scenario, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `distbench check --all` as plain data.

    Args:
        scenario: of the configuration, with all layers.
        question: `function` of the scenario, `variant`, `mesh`, `world` (number of devices), `hardware` (name of a
            hardware file), `search_s` (CPU seconds of this process after which no further plan is tried), and `limit_s`
            (time limit of the row in seconds).

    Raises:
        UserError: the configuration cannot be built, or it takes longer than `limit_s`.
    """
    signal.signal(signal.SIGALRM, _too_long)
    try:
        signal.setitimer(signal.ITIMER_REAL, question["limit_s"])
        return _row(scenario, question)
    except TooLong as error:
        raise UserError(f"no answer within {question['limit_s']:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(*_: object) -> None:
    raise TooLong


def _row(scenario: Scenario, question: Mapping[str, Any]) -> dict[str, Any]:
    world, usable = question["world"], load_hardware(question["hardware"]).usable_bytes
    recipe = Recipe(question["function"], question["variant"], question["mesh"], scenario)
    row: dict[str, Any] = {"num_parameters": recipe.num_parameters, "usable_bytes": usable, "omits": scenario.omits}
    first = recipe.fit(recipe.own_mesh(world), {})
    if first.why_not and "plan" in question["variant"] and not first.problems:
        row["own_plan"], first = first.why_not, recipe.fit(recipe.own_mesh(world), {"plan": "fsdp"})
    row |= {"mesh": first.mesh, "set": first.params, "peak_bytes": first.peak_bytes, "depth": first.depth}
    row |= {"why_not": first.why_not, "problems": first.problems}
    row["fits"] = not (first.why_not or first.problems) and first.peak_bytes <= usable
    if not row["fits"] and not (first.why_not and first.peak_bytes <= usable):
        near = recipe.nearest(first, usable, question["search_s"])
        row["nearest"] = near and {
            "mesh": near.mesh,
            "set": near.params,
            "peak_bytes": near.peak_bytes,
            "depth": near.depth,
        }
    return row | {"process_s": round(time.process_time(), 1)}


class Recipe:
    """A configuration, with its memory on different meshes.

    Args:
        mesh: the scenario's default mesh, whose data parallel ranks share the default batch.
    """

    def __init__(
        self, function: Callable[..., Scenario], variant: Mapping[str, Any], mesh: Mapping[str, int], scenario: Scenario
    ) -> None:
        self._function, self._variant = function, variant
        assert scenario.build_model is not None
        model = blueprint(scenario.build_model, SEED, with_values=False).model
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_layers = longest_list(name for name, _ in model.named_modules())
        self._num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._has_tp = scenario.step_plan.tp is not None
        self._batch_per_rank = batch_of(scenario).length / _data_parallel(mesh)

    def own_mesh(self, world: int) -> dict[str, int]:
        """Return the mesh to try first: the configuration's degree of TP, and FSDP over the remaining factor of
        devices."""
        degree = getattr(sys.modules[self._function.__module__], "own_tensor_parallel", None)
        return _mesh(world, degree(self._variant["config"]) if degree else 1)

    def fit(self, mesh: dict[str, int], params: dict[str, Any]) -> Fit:
        """Return the memory of rank 0 for a step, or a lower bound if no step can be recorded."""
        at_least = BYTES_PER_PARAMETER * self._num_trained / mesh_size(mesh)
        try:
            scenario = self._scenario(mesh, params, NUMBERS_OF_LAYERS[0])
            if sentences := _problems(scenario, mesh):
                return Fit(mesh, params, at_least, why_not="its plan is not valid", problems=sentences)
            return self._recorded(mesh, params)
        except (UserError, Unsupported) as error:
            sentence = (
                str(error).removeprefix("it cannot be simulated, because ").removeprefix("it cannot be simulated: ")
            )
            return Fit(mesh, params, at_least, why_not=sentence)
        except Exception as error:
            return Fit(mesh, params, at_least, why_not=f"it raises {one_line(error)}")

    def nearest(self, first: Fit, usable: float, limit_s: float) -> Fit | None:
        """Return the first plan that fits, out of recomputed activations, more devices, then tensor parallel within a
        node."""
        world, own_tp = mesh_size(first.mesh), first.mesh["tp"]
        for degree in dict.fromkeys((own_tp, TP_WITHIN_NODE) if self._has_tp else (own_tp,)):
            held = BYTES_PER_PARAMETER * self._num_trained
            size = max(world, degree)
            while size <= MAX_DEVICES and time.process_time() < limit_s:
                if held / size < usable:
                    fit = self.fit(_mesh(size, degree), {**first.params, "checkpoint": "full"})
                    if fit.why_not:
                        break
                    if fit.peak_bytes <= usable:
                        return fit
                    # With more devices, each device has fewer parameters, but the same activations.
                    if (rest := fit.peak_bytes - held / size) >= usable:
                        break
                    while held / (2 * size) + rest > usable:
                        size *= 2
                size *= 2
        return None

    def _scenario(self, mesh: Mapping[str, int], params: Mapping[str, Any], layers: int) -> Scenario:
        batch = round(self._batch_per_rank * _data_parallel(mesh))
        return declared(self._function, {**self._variant, **params, "layers": layers, "batch": batch})

    def _recorded(self, mesh: dict[str, int], params: dict[str, Any]) -> Fit:
        with contextlib.suppress(NotRepeated):
            return Fit(mesh, params, max(peaks_of(self._recording(mesh, params, 0, repeated_layers.FEW)).values()), ALL)
        points: list[Point] = []
        for layers in NUMBERS_OF_LAYERS:
            recording = self._recording(mesh, params, layers)
            points.append(Point(layers, recording.head.num_parameters, peaks_of(recording)))
            if points[-1].num_parameters >= self.num_parameters:
                break
            line = points[-3:]
            if are_on_a_line(line) and (peak := peak_with(self.num_layers, self.num_parameters, line)) is not None:
                few, more, most = (at.layers for at in line)
                return Fit(mesh, params, peak, f"{few}, {more} and {most} of {self.num_layers}")
        is_whole = points[-1].num_parameters == self.num_parameters
        peak_bytes = max(points[-1].peaks.values()) if is_whole else self.whole_peak_bytes(mesh, params)
        return Fit(mesh, params, peak_bytes, ALL)

    def whole_peak_bytes(self, mesh: dict[str, int], params: dict[str, Any]) -> int:
        """Return the peak bytes of a recording of all layers; errors as of `recorded`."""
        return max(peaks_of(self._recording(mesh, params, 0)).values())

    def _recording(
        self, mesh: dict[str, int], params: dict[str, Any], layers: int, repeated: int | None = None
    ) -> Recording:
        """Record a number of layers, 0 for all; with `repeated`, record so many and raise NotRepeated if the others
        differ."""
        fewer = None if repeated is None else self._scenario(mesh, params, repeated)
        scenario = self._scenario(mesh, params, layers)
        step_args = scenario, self._variant["config"], "", mesh
        return recorded(*step_args, fewer=fewer, only_repeated=repeated is not None).recording


def _mesh(world: int, degree: int) -> dict[str, int]:
    return {"dp_shard": max(world // degree, 1), "tp": degree}


def _data_parallel(mesh: Mapping[str, int]) -> int:
    return mesh_size({name: size for name, size in mesh.items() if name in BATCH_DIMS})


def _problems(scenario: Scenario, shape: Mapping[str, int]) -> list[str]:
    assert scenario.build_model is not None
    with fake_ranks(shape) as mesh:
        model = blueprint(scenario.build_model, SEED, with_values=False).model
        return problems(model, batch_of(scenario), scenario.step_plan, rank_of(mesh, SEED))


class Point(NamedTuple):
    """A recording of a number of layers; `peaks` as `peaks_of` returns them."""

    layers: int
    num_parameters: int
    peaks: Mapping[str, int]


def are_on_a_line(points: Sequence[Point]) -> bool:
    """Return whether three recordings have parameters and peaks of each phase that are linear in the layers."""
    if len(points) < 3:
        return False
    values = [[at.layers, at.num_parameters, *at.peaks.values()] for at in points]
    return all(second - first == third - second for first, second, third in zip(*values, strict=True))


def peak_with(num_layers: int, num_parameters: int, points: Sequence[Point]) -> float | None:
    """Return the peak bytes of a model from points on a line; None if its further layers have other parameters."""
    before, last = points[-2:]
    times = (num_layers - last.layers) / (last.layers - before.layers)
    if last.num_parameters + (last.num_parameters - before.num_parameters) * times != num_parameters:
        return None
    return max(peak + (peak - before.peaks[phase]) * times for phase, peak in last.peaks.items())


def longest_list(names: Iterable[str]) -> int:
    """Return the length of the longest list of modules that is in no other list, from the names of all modules.

    >>> longest_list(["", "layers.0", "layers.0.experts.7", "layers.1", "norm"])
    2
    """
    matches = (re.match(r"(\D*)(\d+)(?:\.|$)", name) for name in names)
    parts = {(match[1], match[2]) for match in matches if match}
    return max(Counter(of_list for of_list, _ in parts).values(), default=0)


def peaks_of(recording: Recording) -> dict[str, int]:
    """Return the peak bytes of each phase of the last step.

    The peak of a phase is linear in the number of equal layers; the peak of the step is not.
    """
    sizes: dict[int, int] = {}
    alive, phase, peaks = 0, recording.head.phases[0], dict.fromkeys(recording.head.phases, 0)
    for event in recording.events:
        if isinstance(event, Allocated):
            sizes[event.block] = event.num_bytes
            alive += event.num_bytes
        elif isinstance(event, Freed):
            alive -= sizes.pop(event.block)
        elif isinstance(event, StepBegun):
            peaks = dict.fromkeys(peaks, 0)
        elif isinstance(event, Operator | Collective):
            phase = event.phase
        peaks[phase] = max(peaks.get(phase, 0), alive)
    return peaks
