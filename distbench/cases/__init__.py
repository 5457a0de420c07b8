"""The kinds of cases that can be timed."""

from collections.abc import Iterator

from distbench.cases.calibration import calibration_cases, compute_cases
from distbench.cases.checkpoint import checkpoint_cases
from distbench.cases.collective import collective_cases
from distbench.cases.dtensor_operator import operator_cases
from distbench.cases.links import link_cases
from distbench.cases.redistribution import laboratory_cases, redistribution_cases
from distbench.cases.step import step_cases
from distbench.cases.user_call import call_cases
from distbench.ranks.case_protocol import CaseSpec
from distbench.ranks.context import RankContext
from distbench.spec import Scenario
from distbench.spec.plugins import load_plugin


def cases_of(scenario: Scenario, label: str, context: RankContext) -> Iterator[CaseSpec]:
    """Yield every case of one variant of a scenario; `label` (scenario and axes) is the variant's name in case ids."""
    yield from collective_cases(scenario, context)
    yield from redistribution_cases(scenario, context)
    yield from laboratory_cases(scenario, context)
    yield from calibration_cases(scenario, context)
    yield from operator_cases(scenario, context)
    yield from link_cases(scenario, context)
    yield from compute_cases(scenario, context)
    yield from step_cases(scenario, label, context)
    yield from checkpoint_cases(scenario, label, context)
    yield from call_cases(scenario, label, context)
    for kind, declared in scenario.plugins.items():
        yield from load_plugin("cases", kind)(declared, label, context)
