"""Measurements for a cost profile; `distbench calibrate` runs this scenario and writes the profile."""

from distbench.spec import Calibration, Scenario, scenario


@scenario(
    mesh={"dp_shard": 2, "tp": 2},
    quick={"max_bytes": 2097152, "step": 8},
    tags=("redistribute", "calibrate"),
)
def calibrate(*, min_bytes: int = 4096, max_bytes: int = 33554432, step: int = 4) -> Scenario:
    """Steps of redistributions by size, for a cost profile. Every step of DTensor's redistributions over every mesh
    dim, and the direct exchange, 4 KiB to 32 MiB.
    """
    sizes = []
    size = min_bytes
    while size < max_bytes:
        sizes.append(size)
        size *= step
    # One size in every second gap is held out to validate the fitted lines.
    held_out = [2 * size for size in sizes[::2] if 2 * size < max_bytes]
    return Scenario(calibrations=(Calibration((*sizes, max_bytes), tuple(held_out)),))
