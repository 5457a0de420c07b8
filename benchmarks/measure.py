"""`python -m benchmarks.measure MODULE FILE FUNCTION`: run a benchmark for `__main__.py`; rows go to FILE as JSON."""

import importlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType


def stop(number: int, frame: FrameType | None) -> None:
    """Leave by way of every `finally`, so that namespaces, cgroups and daemons are removed."""
    sys.exit(f"stopped by {signal.Signals(number).name}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    module, file, function = sys.argv[1:]
    Path(file).write_text(json.dumps(getattr(importlib.import_module(module), function)(), default=float))
