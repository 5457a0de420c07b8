"""The smallest useful scenario: one collective at one size."""

from distbench.spec import Collectives, Scenario, scenario


@scenario(mesh={"tp": 2}, tags=("test",))
def tiny(*, size_bytes: int = 4096) -> Scenario:
    """One all_gather."""
    return Scenario(collectives=(Collectives(ops=("all_gather",), sizes_bytes=(size_bytes,)),))
