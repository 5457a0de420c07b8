"""A benchmark that never ends, with a process that it started; it removes what it made when it is stopped."""

import subprocess
import time
from pathlib import Path


def main() -> list[tuple[str, float, float]]:
    print("on the way", flush=True)
    sleeper = subprocess.Popen(["sleep", "1000"])
    Path("sleeper").write_text(str(sleeper.pid))
    Path("made").touch()
    try:
        time.sleep(1000)
    finally:
        Path("made").unlink()
    return []
