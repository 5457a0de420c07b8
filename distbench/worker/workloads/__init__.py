"""What can be timed: collectives, redistributions and their laboratory, a profile's steps, training, users' calls."""

from collections.abc import Iterator

from distbench.spec import Scenario
from distbench.worker.bench import Bench
from distbench.worker.place import Place
from distbench.worker.workloads.calibration import calibration_benches
from distbench.worker.workloads.call import call_benches
from distbench.worker.workloads.collective import collective_benches
from distbench.worker.workloads.laboratory import laboratory_benches
from distbench.worker.workloads.redistribution import redistribution_benches
from distbench.worker.workloads.step import step_benches


def benches_of(scenario: Scenario, label: str, place: Place) -> Iterator[Bench]:
    """Every case of one variant of a scenario.

    Args:
        scenario: the variant.
        label: the variant's name in case ids: scenario and axes.
        place: the ranks and the mesh.
    """
    yield from collective_benches(scenario, place)
    yield from redistribution_benches(scenario, place)
    yield from laboratory_benches(scenario, place)
    yield from calibration_benches(scenario, place)
    yield from step_benches(scenario, label, place)
    yield from call_benches(scenario, label, place)


__all__ = ["benches_of"]
