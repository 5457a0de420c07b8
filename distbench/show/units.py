"""Numbers as text: three significant digits and a suitable unit; "-" where there is no number."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

NOTHING = "-"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_DISK = ("B", "kB", "MB", "GB", "TB")
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def known(value: object) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def decimals_for(value: float) -> int:
    """Decimals that give `value` three significant digits, never a negative number of them."""
    if value == 0:
        return 2
    # Rounded first, so that 9.996 counts as 10.0 and not as 10.00.
    magnitude = math.floor(math.log10(float(f"{abs(value):.2e}")))
    return max(2 - magnitude, 0)


def time_scale(seconds: float) -> tuple[float, str]:
    """(seconds in one unit, the unit's name) for a time of about `seconds`."""
    for scale, name in _TIMES:
        if float(f"{abs(seconds):.2e}") >= scale:
            return scale, name
    return _TIMES[-1]


def time_text(seconds: float) -> str:
    """`641 us`, `1.23 ms`, `12.0  s`; names of units are two wide, so that a right-aligned column lines up."""
    if not known(seconds):
        return NOTHING
    scale, name = time_scale(seconds)
    return f"{_plain(seconds / scale)} {name:>2}"


def brief_time_text(seconds: float) -> str:
    """`641 us`, `12.0 s`: a time for running text, with one space before the unit."""
    return time_text(seconds).replace("  ", " ")


def time_ci_text(center: float, low: float, high: float) -> str:
    """`[576, 757]` in the unit and with the decimals of its centre (seconds)."""
    if not (known(center) and known(low) and known(high)):
        return NOTHING
    scale, _ = time_scale(center)
    decimals = decimals_for(center / scale)
    return f"[{low / scale:.{decimals}f}, {high / scale:.{decimals}f}]"


QUARTILES, CONFIDENCE = "quartiles", "95 % CI"


def spread_of(rows: Iterable[Mapping[Any, Any]]) -> tuple[str, Callable[[Mapping[Any, Any]], str]]:
    """The interval of medians: CONFIDENCE, from passes, where some row has enough of them, else QUARTILES."""
    if any(known(row["ci_low_s"]) for row in rows):
        return CONFIDENCE, lambda row: time_ci_text(row["median_s"], row["ci_low_s"], row["ci_high_s"])
    return QUARTILES, quartiles_text


def quartiles_text(row: Mapping[Any, Any]) -> str:
    """The quartiles of a row's samples."""
    return time_ci_text(row["median_s"], row["q1_s"], row["q3_s"])


def p95_notes(rows: Iterable[Mapping[Any, Any]]) -> list[str]:
    """Why some rows have no 95th percentile, where some have none."""
    few = any(not known(row["p95_s"]) for row in rows)
    return ["p95: of fewer than 20 samples it would be their maximum, so there is none"] if few else []


def ratio_text(center: float, low: float, high: float) -> str:
    """`0.81 [0.78, 0.85]`."""
    if not known(center):
        return NOTHING
    text = f"{center:.2f}" if center < 100 else f"{center:.0f}"
    return f"{text} [{low:.2f}, {high:.2f}]" if known(low) and known(high) else text


def times_text(
    ratio: float,
    than: str,
    low: float | None = None,
    high: float | None = None,
    words: tuple[str, str] = ("slower", "faster"),
) -> str:
    """`1.7x slower than plain (95 % CI 1.5-1.9x)` of a ratio of times above 1, else `... faster than ...`.

    Args:
        words: of a ratio above 1 and below 1.
    """
    if not known(ratio) or ratio <= 0:
        return NOTHING
    is_slower = ratio >= 1
    times = _times(ratio if is_slower else 1 / ratio)
    word, same = words[not is_slower], "as fast as" if words[0] == "slower" else "equal to"
    text = f"{times}x {word} than {than}" if times != "1" else f"{same} {than}"
    if not (known(low) and known(high) and low > 0):
        return text
    ends = (low, high) if is_slower else (1 / high, 1 / low)
    return f"{text} (95 % CI {_times(ends[0])}-{_times(ends[1])}x)"


def _times(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio < 100 else f"{ratio:.0f}"


def decimal_text(value: float | None) -> str:
    """`1.25`."""
    return f"{value:.2f}" if known(value) else NOTHING


def size_text(size_bytes: float) -> str:
    """`512 B`, `64 KiB`, `1.5 MiB`: powers of two, whole numbers without decimals."""
    if not known(size_bytes):
        return NOTHING
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit < len(_SIZES) - 1:
        value /= 1024
        unit += 1
    return f"{value:.0f} {_SIZES[unit]}" if value == int(value) else f"{_plain(value)} {_SIZES[unit]}"


def disk_text(num_bytes: float) -> str:
    """`12.3 MB` of files, in powers of ten as rates are; memory is in powers of two (`size_text`)."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_DISK) - 1:
        value /= 1000
        unit += 1
    return f"{_plain(value) if unit else int(value)} {_DISK[unit]}"


def bandwidth_text(gb_per_s: float) -> str:
    """GB/s (1e9 bytes per second), at most four decimals; padded behind, so that a column lines up at its points."""
    if not known(gb_per_s):
        return NOTHING
    decimals = min(decimals_for(gb_per_s), 4)
    return f"{gb_per_s:.{decimals}f}" + " " * (4 - decimals if decimals else 5)


def count_text(value: float) -> str:
    """`812`, `5.21 k`, `1.30 M`."""
    if not known(value):
        return NOTHING
    for scale, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{_plain(value / scale)} {name}"
    return _plain(value) if value != int(value) else str(int(value))


def rate_text(value: float | None) -> str:
    """Of tokens or samples per second: `5,762`, and where that would be few digits `0.431`."""
    if not known(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else _plain(value)


def error_text(relative: float) -> str:
    """A relative error: `4.4e-07`, `0`."""
    if isinstance(relative, float) and math.isinf(relative):
        return "inf"
    if not known(relative):
        return NOTHING
    return f"{relative:.1e}" if relative else "0"


def percent_text(share: float) -> str:
    """A share of one as `12 %`."""
    return f"{100 * share:.0f} %"


def whole_text(value: float) -> str:
    """A count that is always whole: `12`."""
    return str(int(value)) if known(value) else NOTHING


def counts_text(counts: Mapping[str, int]) -> str:
    """`3 ok, 1 wrong`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def source_text(source: str) -> str:
    """The origin of a collective: parallelisms as `FSDP`, others (`redistribute`, `model`) as they are."""
    return source.upper() if source in ("fsdp", "ddp", "tp", "cp", "ep", "pp") else source


def word_text(value: object) -> str:
    """A text as it is; NOTHING for any other value."""
    return value if isinstance(value, str) else NOTHING


def key_text(value: object) -> str:
    """What rows were grouped by: a text, a truth value or a number."""
    return f"{value:g}" if known(value) else str(value) if isinstance(value, str | bool) else NOTHING


def _plain(value: float) -> str:
    return f"{value:.{decimals_for(value)}f}"
