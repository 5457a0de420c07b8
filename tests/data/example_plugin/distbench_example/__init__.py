"""One plug-in of each kind for distbench; pyproject.toml names them."""

from pathlib import Path

EXAMPLE_GPU = Path(__file__).with_name("example_gpu.json")
