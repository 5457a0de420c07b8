"""Which launches may be compared: the fields of the environment that must agree, and those that are only shown."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distbench.records.launch_values import Launch
from distbench.records.run_file import MUST_AGREE
from distbench.spec.errors import UserError, nearest
from distbench.spec.printable_text import listed

DTYPE = "dtype"  # it stands in a case's id, not in the environment
_DTYPE_IN_ID = re.compile(r"(?<=/)([a-z]+\d+)(?=\[)")
MAX_LISTED = 3


@dataclass(frozen=True)
class Group:
    """Launches of one scenario, oldest first, that are held against each other.

    Args:
        label: the scenario's name, and what differs from another group of the same scenario.
        conflicts: sentences on fields that forbid the comparison; empty where it is allowed.
    """

    label: str
    baseline: Sequence[Launch]
    candidate: Sequence[Launch]
    conflicts: tuple[str, ...] = ()


def check_allowed(fields: Iterable[str]) -> tuple[str, ...]:
    """The fields that may differ; a UserError for a name that is none of MUST_AGREE or "dtype"."""
    names = (*MUST_AGREE, DTYPE)
    for name in fields:
        if name not in names:
            raise UserError(f"--allow-different {name!r} is no field that must agree ({nearest(name, names)})")
    return tuple(dict.fromkeys(fields))


def groups_of(baseline: Sequence[Launch], candidate: Sequence[Launch], allowed: Sequence[str]) -> list[Group]:
    """Launches of both sides put together by scenario and by all fields that must agree.

    What is left of a scenario on both sides cannot be compared and says why; what is left on one side stands alone.
    """
    groups: list[Group] = []
    for scenario in dict.fromkeys(launch.scenario for launch in (*baseline, *candidate)):
        sides = [[launch for launch in side if launch.scenario == scenario] for side in (baseline, candidate)]
        # Launches with the same parameters hold the same cases and are paired with each other. A scenario that has
        # gained a parameter is still compared.
        by_variants = {launch.variants for launch in sides[0]} == {launch.variants for launch in sides[1]}
        left, right = (_by_facts(side, allowed, by_variants) for side in sides)
        common = [key for key in left if key in right]
        labels = _labels(scenario, [left[key][0] for key in common])
        groups += [Group(label, left[key], right[key]) for key, label in zip(common, labels, strict=True)]
        alone = [
            [lone_launch for key, some in side.items() if key not in common for lone_launch in some]
            for side in (left, right)
        ]
        if any(alone):
            groups.append(Group(scenario, alone[0], alone[1], _conflicts(alone[0], alone[1], allowed)))
    return groups


def _by_facts(
    launches: Sequence[Launch], allowed: Sequence[str], by_variants: bool
) -> dict[tuple[str, ...], list[Launch]]:
    by_facts: dict[tuple[str, ...], list[Launch]] = {}
    for launch in launches:
        facts = tuple(repr(launch.facts.get(name)) for name in MUST_AGREE if name not in allowed)
        by_facts.setdefault((*facts, launch.variants if by_variants else ""), []).append(launch)
    return by_facts


def _labels(scenario: str, firsts: Sequence[Launch]) -> list[str]:
    differing = [name for name in MUST_AGREE if len({repr(launch.facts[name]) for launch in firsts}) > 1]
    return [
        f"{scenario} ({', '.join(f'{name} {launch.facts[name]}' for name in differing)})" if differing else scenario
        for launch in firsts
    ]


def _conflicts(baseline: Sequence[Launch], candidate: Sequence[Launch], allowed: Sequence[str]) -> tuple[str, ...]:
    if not baseline or not candidate:
        return ()
    sentences = differences(baseline, candidate, [name for name in MUST_AGREE if name not in allowed])
    return tuple(sentences) or ("no launch of one side agrees with one of the other in every field",)


def differences(baseline: Sequence[Launch], candidate: Sequence[Launch], fields: Iterable[str]) -> list[str]:
    """Sentences on those of `fields` whose values differ between the sides."""
    sentences = []
    for name in fields:
        left, right = _values(baseline, name), _values(candidate, name)
        if left and right and left != right:
            left_text, right_text = listed(left, MAX_LISTED, " and "), listed(right, MAX_LISTED, " and ")
            sentences.append(f"{name}: {left_text} in the baseline, {right_text} in the candidate")
    return sentences


def _values(launches: Sequence[Launch], name: str) -> list[str]:
    return sorted({_text(launch.facts.get(name)) for launch in launches})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items()) or "none"
    return "not recorded" if value is None else str(value)


def without_dtype(case_id: str) -> tuple[str, str | None]:
    """The id with its dtype blanked, and the dtype: `collective/f32[256]/x` is `collective/?[256]/x` in f32."""
    match = _DTYPE_IN_ID.search(case_id)
    if not match:
        return case_id, None
    return case_id[: match.start()] + "?" + case_id[match.end() :], match.group(1)
