"""Numbers as text with three significant digits and a suitable unit, or "-" without a number."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

NOTHING = "-"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_DISK = ("B", "kB", "MB", "GB", "TB")
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def known(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def decimals_for(value: float) -> int:
    """The number of decimals for three significant digits of `value`, at least 0."""
    if value == 0:
        return 2
    # Rounded first, so that 9.996 is 10.0 rather than 10.00.
    magnitude = math.floor(math.log10(float(f"{abs(value):.2e}")))
    return max(2 - magnitude, 0)


def time_scale(seconds: float) -> tuple[float, str]:
    """(seconds per unit, name of the unit) for a time of about `seconds`."""
    for scale, name in _TIMES:
        if float(f"{abs(seconds):.2e}") >= scale:
            return scale, name
    return _TIMES[-1]


def time_text(seconds: float) -> str:
    """A time such as `641 us`, `1.23 ms` or `12.0  s`. Units have two characters, so that columns are aligned."""
    if not known(seconds):
        return NOTHING
    scale, name = time_scale(seconds)
    return f"{_plain(seconds / scale)} {name:>2}"


def brief_time_text(seconds: float) -> str:
    """A time such as `641 us` or `12.0 s` for running text, with one space before the unit."""
    return time_text(seconds).replace("  ", " ")


def time_ci_text(center: float, low: float, high: float) -> str:
    """An interval such as `[576, 757]`, in the unit and with the decimals of `center` (seconds)."""
    if not (known(center) and known(low) and known(high)):
        return NOTHING
    scale, _ = time_scale(center)
    decimals = decimals_for(center / scale)
    return f"[{low / scale:.{decimals}f}, {high / scale:.{decimals}f}]"


QUARTILES, CONFIDENCE = "quartiles", "95 % CI"


def spread_of(rows: Iterable[Mapping[Any, Any]]) -> tuple[str, Callable[[Mapping[Any, Any]], str]]:
    """Name and text function of intervals: CONFIDENCE if a row has enough passes, else QUARTILES."""
    if any(known(row["ci_low_s"]) for row in rows):
        return CONFIDENCE, lambda row: time_ci_text(row["median_s"], row["ci_low_s"], row["ci_high_s"])
    return QUARTILES, quartiles_text


def quartiles_text(row: Mapping[Any, Any]) -> str:
    """The quartiles of a row's samples."""
    return time_ci_text(row["median_s"], row["q1_s"], row["q3_s"])


def p95_notes(rows: Iterable[Mapping[Any, Any]]) -> list[str]:
    """A note on rows without a 95th percentile, if there are such rows."""
    few = any(not known(row["p95_s"]) for row in rows)
    return ["p95: needs 20 samples, because the p95 of fewer samples is their maximum"] if few else []


def ratio_text(center: float, low: float, high: float) -> str:
    """A text such as `0.81 [0.78, 0.85]`."""
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
        words: the word for a ratio above 1, and for a ratio below 1.
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
    """A number with two decimals."""
    return f"{value:.2f}" if known(value) else NOTHING


def size_text(size_bytes: float) -> str:
    """A size in powers of two, such as `512 B`, `64 KiB` or `1.5 MiB`."""
    if not known(size_bytes):
        return NOTHING
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit < len(_SIZES) - 1:
        value /= 1024
        unit += 1
    return f"{value:.0f} {_SIZES[unit]}" if value == int(value) else f"{_plain(value)} {_SIZES[unit]}"


def disk_text(num_bytes: float) -> str:
    """A size of files in powers of ten, such as `12.3 MB`. Memory is in powers of two (`size_text`)."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_DISK) - 1:
        value /= 1000
        unit += 1
    return f"{_plain(value) if unit else int(value)} {_DISK[unit]}"


def bandwidth_text(gb_per_s: float) -> str:
    """A rate in GB/s (1e9 bytes per second) with at most four decimals, padded so that decimal points are aligned."""
    if not known(gb_per_s):
        return NOTHING
    decimals = min(decimals_for(gb_per_s), 4)
    return f"{gb_per_s:.{decimals}f}" + " " * (4 - decimals if decimals else 5)


def short_count_text(value: float) -> str:
    """A count such as `812`, `5.21 k` or `1.30 M`."""
    if not known(value):
        return NOTHING
    for scale, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{_plain(value / scale)} {name}"
    return _plain(value) if value != int(value) else str(int(value))


def rate_text(value: float | None) -> str:
    """A rate such as `5,762`, or `0.431` below 100."""
    if not known(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else _plain(value)


def error_text(relative: float) -> str:
    """A relative error such as `4.4e-07` or `0`."""
    if isinstance(relative, float) and math.isinf(relative):
        return "inf"
    if not known(relative):
        return NOTHING
    return f"{relative:.1e}" if relative else "0"


def percent_text(share: float) -> str:
    """A share between 0 and 1 as a text such as `12 %`."""
    return f"{100 * share:.0f} %"


def whole_text(value: float) -> str:
    """A whole number, such as `12`."""
    return str(int(value)) if known(value) else NOTHING


def counts_text(counts: Mapping[str, int]) -> str:
    """A text such as `3 ok, 1 wrong`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def source_text(source: str) -> str:
    """The source of a collective, with parallelisms in capitals such as `FSDP`."""
    return source.upper() if source in ("fsdp", "ddp", "tp", "cp", "ep", "pp") else source


def word_text(value: object) -> str:
    """A text, or NOTHING for any other value."""
    return value if isinstance(value, str) else NOTHING


def key_text(value: object) -> str:
    """The text of a key of a grouping, which is a text, a truth value or a number."""
    return f"{value:g}" if known(value) else str(value) if isinstance(value, str | bool) else NOTHING


def _plain(value: float) -> str:
    return f"{value:.{decimals_for(value)}f}"
