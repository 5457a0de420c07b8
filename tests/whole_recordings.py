"""`python whole_recordings.py CASES`: each step recorded from few layers, and from all after a whole step as setup;
prints where they differ.

A case is [scenario, file, mesh, variant, whether few layers are enough].
"""

import json
import sys
from itertools import count
from typing import Any

from conftest import ROOT

from distbench.simulate import recorded_step
from distbench.simulate.allocator import replay_memory
from distbench.simulate.recorded_step import recorded, would_repeat
from distbench.simulate.recording import Collective, Event, Operator
from distbench.worker.child_verbs import fewer_layers
from distbench.worker.rank_session import declared, load_scenario

NUM_LAYERS = 16
NUMBERED = "block", "event", "stream"


def numbered(events: list[Event]) -> list[tuple[Any, ...]]:
    """The events with blocks, events and streams numbered in the order of first use."""
    numbers: dict[tuple[str, int], int] = {}
    fresh = {name: count() for name in NUMBERED}

    def number(name: str, old: int) -> int:
        if (name, old) not in numbers:
            numbers[name, old] = next(fresh[name])
        return numbers[name, old]

    result = []
    for event in events:
        changes: dict[str, Any] = {
            name: number(name, getattr(event, name)) for name in NUMBERED if hasattr(event, name)
        }
        if isinstance(event, Operator):
            for name in ("reads", "writes"):
                changes[name] = [(number("block", block), size) for block, size in getattr(event, name)]
            changes["attention"] = list(event.attention)
        elif isinstance(event, Collective):
            changes["ranks"] = [tuple(pair) for pair in event.ranks]
        result.append((type(event).__name__, *event._replace(**changes)))
    return result


def main() -> None:
    answers = []
    for name, file, mesh, variant, _ in json.loads(sys.argv[1]):
        function = load_scenario(ROOT / "scenarios" / f"{file}.py", name)
        variant = {**variant, "num_layers": NUM_LAYERS}
        scenario = declared(function, variant)
        short = recorded(scenario, name, "", mesh, fewer=fewer_layers(function, variant)).recording
        recorded_step.would_repeat = lambda _: False
        whole = recorded(scenario, name, "", mesh).recording
        recorded_step.would_repeat = would_repeat
        pairs = zip(numbered([*short.step]), numbered([*whole.step]), strict=False)
        difference = next((str(pair) for pair in pairs if pair[0] != pair[1]), None)
        if difference is None and len(short.step) != len(whole.step):
            difference = f"{len(short.step)} and {len(whole.step)} events"
        memory = [replay_memory(recording.events) for recording in (short, whole)]
        if difference is None and memory[0] != memory[1]:
            difference = f"{memory[0]} and {memory[1]}"
        answers.append({"is_repeated": short.head.recorded_layers > 0, "first_difference": difference})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
