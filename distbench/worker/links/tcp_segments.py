"""TCP segments that this host has sent, and sent again: a lossy link is fast at times, and nothing else shows it.

The kernel counts them per network namespace, not per interface (tcpOutSegs and tcpRetransSegs of RFC 4022).
"""

from pathlib import Path
from typing import NamedTuple

SNMP = Path("/proc/self/net/snmp")


class Segments(NamedTuple):
    """Segments sent, and of these the ones that were sent again."""

    sent: int
    again: int


def segments_so_far(file: Path = SNMP) -> Segments | None:
    """Return the counts since the host started; None where the system has none."""
    try:
        names, values = (line.split() for line in file.read_text().splitlines() if line.startswith("Tcp:"))
        counts = dict(zip(names, values, strict=True))
        return Segments(int(counts["OutSegs"]), int(counts["RetransSegs"]))
    except (OSError, ValueError, KeyError):
        return None
