"""Memory of a plan as a sweep estimates it from few layers, against that of all layers recorded.

`python -m benchmarks.memory_estimates [SCENARIO [WORLD [NUM_PLANS [NAME=VALUE ...]]]]`: by default 8 plans of llama3_8b
with 12 layers on 8 devices, drawn at random; a minute of CPU a plan. docs/sweep.md has what it printed.
"""

import random
import sys

from distbench.search.predicted import Predictor, layers_of
from distbench.search.space import all_of, set_up
from distbench.search.sweep_child import SweepChild, facts_of
from distbench.simulate.hardware_file import load_hardware

DEFAULTS = ("llama3_8b", "8", "8", "num_layers=12")
SEED = 5


def main(arguments: list[str]) -> None:
    """Print a line a plan, and the range."""
    scenario, world, num_plans, *choices = [*arguments, *DEFAULTS[len(arguments) :]]
    setup = set_up(scenario, choices, int(world), None, False)
    errors: list[float] = []
    with SweepChild(setup.entry.file, setup.entry.name) as child:
        plans = [*all_of(setup.space(facts_of(setup, child)))]
        layers = layers_of(setup.base, setup.axes)
        predictor = Predictor(child, setup.base, load_hardware("h100"), lambda *_: None, (), layers)
        for plan in random.Random(SEED).sample(plans, len(plans)):
            if len(errors) == int(num_plans):
                break
            ((_, few),) = predictor.outcomes([plan])
            ((_, whole),) = predictor.outcomes([plan], whole=True)
            if isinstance(few, str) or isinstance(whole, str):
                continue
            errors.append(few.reserved_bytes / whole.reserved_bytes - 1)
            sizes = f"{few.reserved_bytes / 1e9:.1f} GB estimated, {whole.reserved_bytes / 1e9:.1f} GB recorded"
            print(f"{plan.text}: {sizes} ({errors[-1]:+.1%})", flush=True)
    print(f"{len(errors)} plans: {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
