"""The worker without the untimed steps that measure memory: for tests of what steps compute."""

import sys
from typing import Any

from distbench.cases import step
from distbench.worker.__main__ import main


def nothing(*_: object) -> dict[str, Any]:
    """No counters of memory, which tests/observe/test_step_memory.py holds."""
    return {}


step.memory_counters = nothing

if __name__ == "__main__":
    main(sys.argv[1])
