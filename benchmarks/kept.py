"""Parts of long benchmarks, kept per state of the code, so that an interrupted benchmark continues."""

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "bench"


def kept(part: str, measure: Callable[[], Any], *paths: str) -> Any:
    """Return the plain data that `measure` returned for this code, now or in an earlier run.

    Args:
        part: the name of its file.
        paths: files and folders that it measures in addition to distbench; a change of others leaves it as it is.
    """
    file = FOLDER / _state("distbench", *paths) / f"{part}.json"
    if not file.exists():
        data = measure()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data))
    return json.loads(file.read_text())


def _state(*paths: str) -> str:
    """Return a digest of measured files: their objects in the commit, and changes since then."""
    commands = ["rev-parse", *(f"HEAD:{path}" for path in paths)], ["diff", "HEAD", "--", *paths]
    outputs = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout for words in commands]
    return hashlib.sha256(b"".join(outputs)).hexdigest()[:12]
