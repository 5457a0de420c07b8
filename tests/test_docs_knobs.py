"""The table of knobs: each names a field of a plan, and a shipped scenario with a value that shows it."""

import dataclasses
import re

import pytest
from conftest import ROOT

from distbench.spec import (
    CompilePlan,
    CpPlan,
    DdpPlan,
    Entry,
    FsdpPlan,
    LargestDim,
    ParallelPlan,
    PipelinePlan,
    ShardParam,
    list_entries,
)
from distbench.spec.job import parse_choices
from distbench.spec.mesh import parse_mesh
from distbench.spec.parallel import ATTENTION_KERNELS
from distbench.spec.plan_knobs import KNOBS

ENTRIES = {entry.name: entry for entry in list_entries()}
PLANS = (ParallelPlan, DdpPlan, FsdpPlan, CpPlan, CompilePlan, ShardParam, LargestDim, PipelinePlan)
# Values of parameters that are no axes, as a header lists those.
OTHER_VALUES = {
    "kernel": ATTENTION_KERNELS,
    "causal": (True, False),
    "bf16": (True, False),
    "async_tp": (True, False),
    "checkpoint": ("selective",),
    "inside": ("fsdp", "tp"),
    "plan.compile": KNOBS["plan.compile"].values,
}


def rows() -> list[list[str]]:
    lines = [line for line in (ROOT / "docs" / "knobs.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


ROWS = [(row[0], row[1], row[2].strip("`"), row[3] if len(row) > 3 else "") for row in rows()]


def choices(cell: str, entry: Entry) -> dict[str, list[object]]:
    return parse_choices([text for text in re.findall(r"`([^`]+)`", cell) if "--mesh" not in text], entry.params)


@pytest.mark.parametrize(("knob", "fields", "scenario", "values"), ROWS, ids=[row[0] for row in ROWS])
def test_a_knob_names_fields_of_a_plan_and_a_scenario_that_has_such_values(
    knob: str, fields: str, scenario: str, values: str
) -> None:
    entry = ENTRIES[scenario]
    for name, given in choices(values, entry).items():
        assert set(given) <= set(entry.axes.get(name) or OTHER_VALUES[name]), f"{knob}: {name}"
    for mesh in re.findall(r"`--mesh ([^`]+)`", values):
        assert set(parse_mesh(mesh)) <= set(entry.mesh)
    known = {f"{plan.__name__}.{field.name}" for plan in PLANS for field in dataclasses.fields(plan)}
    named = re.findall(r"`([^`]+)`", fields)
    assert named and set(named) <= known


def test_every_field_of_a_plan_is_in_the_table() -> None:
    told = " ".join(fields for _, fields, _, _ in ROWS)
    for plan in PLANS:
        for field in dataclasses.fields(plan):
            assert f"`{plan.__name__}.{field.name}`" in told


@pytest.mark.parametrize(
    "scenario", [name for name, entry in ENTRIES.items() if entry.axes and {"tp", "cp", "fsdp"} & set(entry.tags)]
)
def test_every_value_of_every_axis_of_a_plan_is_in_the_table(scenario: str) -> None:
    entry = ENTRIES[scenario]
    told = [choices(values, entry) for _, _, name, values in ROWS if name == scenario]
    for axis, values in entry.axes.items():
        # The three-dimensional plan rotates as attention alone does, in a row of its own.
        if (scenario, axis) != ("llama_3d", "rotate"):
            assert {value for one in told for value in one.get(axis, [])} == set(values), axis
