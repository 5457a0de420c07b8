"""What can be timed: collectives, redistributions and their laboratory, operators,
a profile's steps, training, users' calls."""

from collections.abc import Iterator

from distbench.spec import Scenario
from distbench.worker.cases.calibration import calibration_cases
from distbench.worker.cases.call import call_cases
from distbench.worker.cases.collective import collective_cases
from distbench.worker.cases.compute import compute_cases
from distbench.worker.cases.redistribution import laboratory_cases, redistribution_cases
from distbench.worker.cases.step import step_cases
from distbench.worker.dtensor_operators import operator_cases
from distbench.worker.links import link_cases
from distbench.worker.rank.opened_case import CaseSpec
from distbench.worker.rank.rank_context import RankContext


def cases_of(scenario: Scenario, label: str, context: RankContext) -> Iterator[CaseSpec]:
    """Every case of one variant of a scenario; the label (scenario and axes) is its name in case ids."""
    yield from collective_cases(scenario, context)
    yield from redistribution_cases(scenario, context)
    yield from laboratory_cases(scenario, context)
    yield from calibration_cases(scenario, context)
    yield from operator_cases(scenario, context)
    yield from link_cases(scenario, context)
    yield from compute_cases(scenario, context)
    yield from step_cases(scenario, label, context)
    yield from call_cases(scenario, label, context)
