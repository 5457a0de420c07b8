"""The result of a preflight: expected rates, causes, and the state of each host; as JSON, OpenMetrics and lists."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distbench.judge.links import BANDWIDTH, HOSTS, LINK, LinkRun, Loss, Outlier, Ranks
from distbench.judge.links_text import SLOW_IN, LinksVerdict, sentence_of, slow_in
from distbench.records.exports import metric_lines
from distbench.show.units import bandwidth_text
from distbench.spec.printable_text import count_text

# The smallest fault of hardware (a lost lane or port) halves the rate. This limit is the geometric mean of one half and
# 1.
LEAST_SHARE = 0.7
GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
WITHIN, BETWEEN = "within a host", "between hosts"
# The same codes as those of `gate --strict`: an unknown outcome is not a success.
EXIT_CODES = {"PASS": 0, "FAIL": 1, "UNKNOWN": 3}
METRIC = "distbench_preflight_host"


class ExpectedRates(NamedTuple):
    """Rates of a hardware file: level to the fixed part of a message in seconds, and its bytes per second."""

    name: str
    of_level: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class LevelRates:
    """The links of one level in large messages.

    Args:
        expected: GB/s each way; None without a hardware file.
        rates: pair of ranks to its median over the passes, GB/s each way.
    """

    level: str
    expected: float | None
    rates: Mapping[Ranks, float]

    @property
    def slow(self) -> dict[Ranks, float]:
        """The links below LEAST_SHARE of the expected rate."""
        least = LEAST_SHARE * (self.expected or 0.0)
        return {pair: rate for pair, rate in self.rates.items() if rate < least}

    def sentence(self, name: str) -> str:
        """Return `all 8 links between hosts reach 11 to 12 GB/s; h100 expects 45 GB/s`."""
        links = self.slow or self.rates
        number = count_text(len(links), "link")
        which = f"all {number}" if len(links) == len(self.rates) else f"{len(links)} of {len(self.rates)} links"
        low, high = (bandwidth_text(rate).strip() for rate in (min(links.values()), max(links.values())))
        span = low if low == high else f"{low} to {high}"
        return f"{which} {self.level} reach {span} GB/s each way; {name} expects {self.expected:.3g} GB/s"


def level_rates(links: LinkRun, expected: ExpectedRates | None) -> list[LevelRates]:
    """Return the rates of all measured links within hosts, and of all measured links between hosts."""
    levels = []
    for level in (WITHIN, BETWEEN):
        rates, size_bytes = {}, 0
        for group in links.groups:
            if group.quantity == BANDWIDTH:
                medians_s = np.median(group.times_s, axis=0).tolist()
                size_bytes = group.size_bytes
                for pair, seconds in zip(group.members, medians_s, strict=True):
                    if (len({links.hosts[rank] for rank in pair}) == 1) == (level == WITHIN):
                        rates[pair] = size_bytes / seconds / 1e9
        if rates:
            base_s, bytes_per_s = expected.of_level[level] if expected else (0.0, 0.0)
            rate = size_bytes / (base_s + size_bytes / bytes_per_s) / 1e9 if expected else None
            levels.append(LevelRates(level, rate, rates))
    return levels


FILES = (f"{GOOD}_hosts", f"{BAD}_hosts", "preflight.json", "preflight.prom")


@dataclass(frozen=True)
class Preflight:
    """The result of a preflight.

    Args:
        run_file: name of the run file.
        verdicts: on this run, and on its changes since an earlier run.
        levels: measured and expected rates.
        hardware: name of the hardware file, or "".
        failure: the reason if a case of the launch failed, or "".
    """

    run_file: str
    verdicts: Sequence[LinksVerdict]
    levels: Sequence[LevelRates]
    hardware: str = ""
    failure: str = ""

    @property
    def verdict(self) -> str:
        """PASS, FAIL or UNKNOWN."""
        if (
            self.failure
            or any(verdict.is_slow for verdict in self.verdicts)
            or any(level.slow for level in self.levels)
        ):
            return "FAIL"
        return "PASS" if all(verdict.is_conclusive for verdict in self.verdicts) else "UNKNOWN"

    def rate_lines(self) -> list[str]:
        """Return a line per level with expected rates."""
        expected = [level for level in self.levels if level.expected is not None]
        return [
            f"FAIL: {level.sentence(self.hardware)}, of which {100 * LEAST_SHARE:.0f} % is required."
            if level.slow
            else f"PASS: {level.sentence(self.hardware)}."
            for level in expected
        ]

    def hosts(self) -> dict[str, str]:
        """Return each host's state: GOOD, BAD (it has a cause) or UNKNOWN (it may have a cause, or the check is not
        conclusive)."""
        known = not self.failure and all(verdict.is_conclusive for verdict in self.verdicts)
        hosts = (host for verdict in self.verdicts for host in verdict.links.hosts)
        states = dict.fromkeys(hosts, GOOD if known else UNKNOWN)
        # A slow link between two hosts does not show which of them is at fault.
        for cause in sorted(self.causes(), key=lambda cause: len(cause["hosts"]) == 1):
            states |= dict.fromkeys(cause["hosts"], BAD if len(cause["hosts"]) == 1 else UNKNOWN)
        return states

    def causes(self) -> list[dict[str, Any]]:
        """Return a record per slow or lossy part, and per level below its expected rate; parts come first."""
        records = []
        for number, verdict in enumerate(self.verdicts):
            links = verdict.links
            for part in verdict.parts:
                record: dict[str, Any] = {"kind": part.kind, "ranks": [*part.ranks]}
                record |= {"hosts": _unique(links, part.ranks), "slow_in": slow_in(part)}
                if links.devices:
                    record["devices"] = [links.devices[rank] for rank in part.ranks]
                if isinstance(part, Loss):
                    sent, again = part.segments
                    record |= {"interfaces": [*part.interfaces], "segments": sent, "retransmitted": again}
                else:
                    record |= {"level": part.level, "slowdown": part.slowdown, "low": part.low, "high": part.high}
                    record |= {"num_slow_passes": part.num_slow} | self._rates_of(part)
                records.append(record | {"is_change": number > 0, "text": sentence_of(part, links)})
        for level in self.levels:
            if level.slow:
                ranks = sorted({rank for pair in level.slow for rank in pair})
                record = {"kind": "level", "ranks": ranks, "hosts": _unique(self.verdicts[0].links, ranks)}
                record |= {"slow_in": SLOW_IN[BANDWIDTH], "level": level.level, "links": [*map(list, level.slow)]}
                record |= {"gb_per_s": float(np.median([*level.slow.values()])), "expected_gb_per_s": level.expected}
                records.append(record | {"is_change": False, "text": level.sentence(self.hardware)})
        return records

    def _rates_of(self, part: Outlier) -> dict[str, float]:
        """The median rate of a slow part's links, and of the other links of the same level."""
        if part.quantity != BANDWIDTH:
            return {}
        for level in self.levels:
            inside = {*part.ranks}
            needed = 2 if part.kind in (LINK, HOSTS) else 1
            own = [rate for pair, rate in level.rates.items() if len(inside & {*pair}) >= needed]
            others = [rate for pair, rate in level.rates.items() if len(inside & {*pair}) < needed]
            if own and others:
                return {"gb_per_s": float(np.median(own)), "others_gb_per_s": float(np.median(others))}
        return {}

    def record(self) -> dict[str, Any]:
        """Return the record of `preflight --json`."""
        first = self.verdicts[0]
        num_ranks = len(first.links.hosts)
        failed = [f"FAIL: {self.failure}"] if self.failure else []
        return {
            "verdict": self.verdict,
            "exit_code": EXIT_CODES[self.verdict],
            "lines": [*failed, *(line for verdict in self.verdicts for line in verdict.lines), *self.rate_lines()],
            "causes": self.causes(),
            "hosts": self.hosts(),
            "num_passes": first.verdict.num_passes,
            "at_most": {SLOW_IN[name]: at for name, at in first.verdict.at_most.items()},
            "num_links": num_ranks * (num_ranks - 1) // 2,
            "num_links_measured": sum(len(level.rates) for level in self.levels),
            "levels": [
                {
                    "level": level.level,
                    "num_links": len(level.rates),
                    "median_gb_per_s": float(np.median([*level.rates.values()])),
                    "least_gb_per_s": min(level.rates.values()),
                    "expected_gb_per_s": level.expected,
                }
                for level in self.levels
            ],
            "hardware": self.hardware or None,
            "run_file": self.run_file,
        }

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield (name, content) of the files of --verdict-out."""
        states = self.hosts()
        for name, state in zip(FILES, (GOOD, BAD), strict=False):
            yield name, "".join(f"{host}\n" for host in states if states[host] == state)
        yield "preflight.json", json.dumps(self.record(), indent=1) + "\n"
        samples = [
            ({"host": host, "state": name}, float(state == name))
            for host, state in states.items()
            for name in (GOOD, BAD, UNKNOWN)
        ]
        lines = metric_lines(METRIC, "1 for the state of a host in the newest preflight, else 0.", samples)
        code = metric_lines(
            "distbench_preflight_exit_code", "0 PASS, 1 FAIL, 3 UNKNOWN.", [({}, EXIT_CODES[self.verdict])]
        )
        yield "preflight.prom", "\n".join([*lines, *code, "# EOF", ""])


def _unique(links: LinkRun, ranks: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(links.hosts[rank] for rank in ranks))
