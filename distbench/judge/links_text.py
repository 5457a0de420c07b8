"""Text and figures of a run's links: the verdict, the ranking, matrices of times and rates, heat maps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distbench.judge.links import (
    BANDWIDTH,
    COMPUTE,
    GROUP,
    GROUPS,
    HOST,
    HOSTS,
    LATENCY,
    LINK,
    MIN_LIKE,
    MIN_PASSES,
    RANK,
    THRESHOLD,
    LinkRun,
    LinkVerdict,
    Loss,
    Outlier,
    Segments,
    is_lossy,
    link_run_of,
    losses_of,
    relative_to,
    verdict_of,
)
from distbench.records.run_file import Run
from distbench.show import plots as style
from distbench.show.blocks import Table, table_of
from distbench.show.plots import Spot, hover
from distbench.show.units import bandwidth_text, brief_time_text, decimals_for, ratio_text, times_text
from distbench.spec import UserError
from distbench.spec.devices import DRIVER_FIELDS
from distbench.spec.printable_text import count_text, listed
from distbench.statistics.intervals import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_NAMED, MAX_MATRIX = 4, 16
MAX_SHOWN = 10.0  # a larger upper end of a slowdown is reported as "too noisy"
UNNOTICED = 2.0  # a check that cannot exclude this slowdown is not conclusive
# Fields of the environment in a run file's header.
DRIVEN_BY = ("device", "device_name", "backend", "torch", *DRIVER_FIELDS)
SLOW_IN = {LATENCY: "small messages", BANDWIDTH: "large messages", GROUPS: "all_reduce", COMPUTE: "computing"}
PLURALS = {RANK: "ranks", HOST: "hosts", HOSTS: "pairs of hosts", LINK: "links", GROUP: "groups"}
Pair = tuple[int, int]


def _name_of(outlier: Outlier | Loss, links: LinkRun) -> str:
    """Return `rank 5 (on b)`, `host b`, `hosts a and b` or `link 2-7 (on a and b)`; for a rank also its accelerator."""
    if outlier.kind in (HOST, HOSTS):
        return f"{outlier.kind} {outlier.host}"
    where = [f"on {outlier.host}"] if len(set(links.hosts)) > 1 else []
    if outlier.kind == RANK and links.devices:
        where.insert(0, links.devices[outlier.ranks[0]])
    ranks = "-".join(map(str, outlier.ranks)) if outlier.kind in (RANK, LINK) else ",".join(map(str, outlier.ranks))
    return f"{outlier.kind} {ranks}" + (f" ({' '.join(where)})" if where else "")


class LinksVerdict(NamedTuple):
    """The verdict on links: sentences, whether a rank or link is slow, whether the check is conclusive, the next
    command, and the judged links.
    """

    lines: tuple[str, ...]
    is_slow: bool
    is_conclusive: bool
    next_command: str
    links: LinkRun
    verdict: LinkVerdict

    @property
    def word(self) -> str:
        """FAIL, PASS or UNKNOWN."""
        return "FAIL" if self.is_slow else "PASS" if self.is_conclusive else "UNKNOWN"

    @property
    def parts(self) -> tuple[Outlier | Loss, ...]:
        """The slow and lossy ranks, hosts and links."""
        return (*self.verdict.outliers, *self.verdict.losses)


def slow_in(part: Outlier | Loss) -> str:
    """Return the slow quantity in words; "packets" for lost packets."""
    return "packets" if isinstance(part, Loss) else SLOW_IN[part.quantity]


def link_lines(run: Run) -> Iterator[str]:
    """Yield the verdict for the first screen; no line for a run without links."""
    if verdict := judged(run):
        yield from loss_lines(run)
        yield from verdict.lines
        yield verdict.next_command


def loss_lines(run: Run) -> Iterator[str]:
    """Yield warnings about hosts that lose packets, if the verdict names no lossy part of them. TCP retransmits
    packets, so a lossy link may look fast."""
    links = link_run_of(run)
    if links is None or losses_of(links):
        return
    totals: dict[tuple[str, str], Segments] = {}
    for (_, rank, interface), (sent, again) in links.segments.items():
        total = totals.get((links.hosts[rank], interface), (0, 0))
        totals[links.hosts[rank], interface] = total[0] + sent, total[1] + again
    for (host, interface), segments in totals.items():
        if is_lossy(segments):
            yield (
                f"warning: host {host} loses {_share_of(segments)} on {interface}. Run `ip -s link` and "
                f"`ethtool -S {interface}` on that host; check its cable and switch port"
            )


def _share_of(segments: Segments) -> str:
    sent, again = segments
    return f"{100 * again / sent:.1f} % of its packets ({again:,} of {sent:,} TCP segments retransmitted)"


def judged(run: Run, earlier: Run | None = None) -> LinksVerdict | None:
    """Return the verdict, on changes if an earlier run is given; None for a run without links.

    Raises:
        UserError: the earlier run measured no links or different links.
    """
    if (links := link_run_of(run)) is None:
        return None
    if earlier:
        if (before := link_run_of(earlier)) is None:
            raise UserError(f"{earlier.path.name} measured no links; give a run file of scenario links")
        links = relative_to(links, before)
    return verdict_on(links, run.scenario, f"since {earlier.path.name}, " if earlier else "")


def verdict_on(links: LinkRun, scenario: str = "links", since: str = "") -> LinksVerdict:
    """Return the verdict on measured links; `since` begins its sentences."""
    verdict = verdict_of(links)
    again = f"Next: distbench run {scenario} --passes {2 * max(verdict.num_passes, MIN_PASSES)}"
    if verdict.why_not:
        return LinksVerdict((f"UNKNOWN: {since}{verdict.why_not}",), False, False, again, links, verdict)
    parts: list[Outlier | Loss] = [*verdict.outliers, *verdict.losses]
    slow = [sentence_of(part, links) for part in parts]
    sentences = listed(slow, MAX_NAMED, "; ")
    has_no_links = bool(verdict.too_few) and not verdict.at_most.keys() & {LATENCY, BANDWIDTH}
    is_conclusive = all(at < UNNOTICED for at in verdict.at_most.values() or [np.inf]) and not has_no_links
    unmeasured = [] if links.is_relative else _unmeasured(links)
    heat_map = f"Next: distbench report {scenario} --page links.html   (heat map of all links)"
    if sentences:
        lines = f"FAIL: {since}{sentences}.", f"All others: {_at_most(verdict)}", *unmeasured
        return LinksVerdict(lines, True, is_conclusive, heat_map, links, verdict)
    checked = f"({verdict.num_compared} checked): {_at_most(verdict)}"
    if is_conclusive:
        lines = f"PASS: {since}no slow rank or link {checked}", *unmeasured
        return LinksVerdict(lines, False, True, heat_map, links, verdict)
    if has_no_links:
        earlier_run = f"Next: distbench run {scenario} --against RUN   (compares each link with an earlier run)"
        line = f"UNKNOWN: {since}too few links {checked}"
        return LinksVerdict((line,), False, False, earlier_run, links, verdict)
    why = f"too noisy to exclude a rank or link that is {UNNOTICED:g}x slower"
    line, again = f"UNKNOWN: {since}{why} {checked}", f"{again}   (on an idle machine)"
    return LinksVerdict((line,), False, False, again, links, verdict)


def link_hosts_note(run: Run, earlier: Run) -> Iterator[str]:
    """Yield warnings about different hosts, versions or drivers of the earlier run, because ranks are compared by
    number."""
    names = [list(dict.fromkeys(links.hosts)) if (links := link_run_of(side)) else [] for side in (earlier, run)]
    if names[0] != names[1]:
        then, now = (f"host{'s' * (len(hosts) > 1)} {listed(hosts, MAX_NAMED)}" for hosts in names)
        yield f"warning: the earlier run used {then}, but this run uses {now}; the hardware may differ"
    for name in DRIVEN_BY:
        was, is_now = (getattr(side.about.environment, name, None) for side in (earlier, run))
        if was and is_now and was != is_now:
            yield f"warning: {name.replace('_', ' ')} was {was} in the earlier run and is {is_now} now"


def _unmeasured(links: LinkRun) -> Iterator[str]:
    """Yield a warning if not all pairs of ranks were measured."""
    pairs = {pair for group in links.groups if group.quantity == BANDWIDTH for pair in group.members}
    num_ranks, met = len(links.hosts), Counter(rank for pair in pairs for rank in pair)
    if missing := num_ranks * (num_ranks - 1) // 2 - len(pairs):
        least = min(met[rank] for rank in range(num_ranks))
        problem = (
            f"{missing:,} of {missing + len(pairs):,} links were not measured (each rank met {least} or more others)"
        )
        yield f"warning: {problem}. Measure all with --set max_rounds={num_ranks}"


def sentence_of(part: Outlier | Loss, links: LinkRun) -> str:
    """Return `rank 5 is 2.01x slower than other ranks (95 % CI 1.9-2.12x) in large messages`, or the lost packets."""
    if isinstance(part, Loss):
        return f"{_name_of(part, links)} loses {_share_of(part.segments)} on {', '.join(part.interfaces)}"
    level = f" {part.level}" if part.level else ""
    slower = times_text(part.slowdown, f"other {PLURALS[part.kind]}", part.low, part.high)
    verb = "are" if part.kind == HOSTS else "is"
    passes = min(len(group.times_s) for group in links.groups)
    at_times = f" at times ({part.num_slow} of {passes} passes)" if part.low <= 1 + THRESHOLD else ""
    return f"{_name_of(part, links)} {verb} {slower} in {SLOW_IN[part.quantity]}{level}{at_times}"


def _at_most(verdict: LinkVerdict) -> str:
    """`at most 1.2x slower in computing, 1.6x in small messages (95 % CI, 8 passes)`."""
    within = {quantity: at for quantity, at in verdict.at_most.items() if at <= MAX_SHOWN}
    slowdowns = ", ".join(f"{at:.2g}x in {SLOW_IN[quantity]}" for quantity, at in within.items())
    too_noisy = [SLOW_IN[quantity] for quantity in verdict.at_most if quantity not in within]
    passes = count_text(verdict.num_passes, "pass", "passes")
    limits = (
        f"at most {slowdowns.replace('x', 'x slower', 1)} (95 % CI, {passes})" if slowdowns else "no limit is known"
    )
    sentences = [limits]
    if too_noisy:
        sentences.append(f"Too noisy: {', '.join(too_noisy)}")
    if verdict.too_few:
        sentences.append(f"Not compared, fewer than {MIN_LIKE} links of a kind: {', '.join(verdict.too_few)}")
    return ". ".join(sentences)


def link_tables(run: Run) -> list[Table]:
    """Return the tables of all pairs, and the ranking with the verdict."""
    if (judgement := judged(run)) is None:
        return []
    links, verdict = judgement.links, judgement.verdict
    columns = [
        ("<what", lambda outlier: _name_of(outlier, links)),
        ("<slow in", lambda outlier: SLOW_IN[outlier.quantity]),
        ("<where", lambda outlier: outlier.level or "-"),
        ("slowdown", lambda outlier: ratio_text(outlier.slowdown, outlier.low, outlier.high)),
    ]
    notes = (*judgement.lines, judgement.next_command)
    return [*_matrices(links, verdict), table_of("Slow ranks, hosts and links", columns, verdict.outliers, notes)]


def _matrices(links: LinkRun, verdict: LinkVerdict) -> Iterator[Table]:
    """Yield each pair's median as a matrix of ranks, if the matrix fits a screen; slow links have a mark."""
    if len(links.hosts) > MAX_MATRIX:
        return
    for quantity, title in ((BANDWIDTH, "algbw each way, GB/s"), (LATENCY, "time of a small message each way")):
        pairs, slow = _pair_values(links, quantity), _slow_pairs(verdict, quantity)
        text_of = (lambda rate: bandwidth_text(rate).strip()) if quantity == BANDWIDTH else brief_time_text
        cells = {pair: text_of(value) + "!" * (pair in slow) for pair, value in pairs.items()}
        if not pairs:
            continue
        ranks, several = range(len(links.hosts)), len(set(links.hosts)) > 1
        rows = [
            (
                f"{rank} ({links.hosts[rank]})" if several else str(rank),
                *(cells.get((min(rank, other), max(rank, other)), "-") for other in ranks),
            )
            for rank in ranks
        ]
        note = "!: slower than the other links" if slow else "no slow link"
        yield Table(title, ("<rank", *map(str, ranks)), rows, [note])


def _pair_values(links: LinkRun, quantity: str, is_relative: bool = False) -> dict[Pair, float]:
    """Each pair's median over the passes: GB/s each way for BANDWIDTH, else seconds. With `is_relative`, the logarithm
    of the pair's time over the median of comparable pairs."""
    values: dict[Pair, float] = {}
    for group in links.groups:
        if group.quantity == quantity:
            of_group = np.median(group.times_s, axis=0)
            if is_relative:
                of_group = np.log(of_group / np.median(of_group))
            elif quantity == BANDWIDTH:
                of_group = group.size_bytes / of_group / 1e9
            values.update(zip(((a, b) for a, b in group.members), of_group.tolist(), strict=True))
    return values


def _slow_pairs(verdict: LinkVerdict, quantity: str) -> set[Pair]:
    """Links that are outliers, without links that are slow because of a slow rank or host."""
    of = [outlier.ranks for outlier in verdict.outliers if outlier.kind == LINK and outlier.quantity == quantity]
    return {(first, second) for first, second in of}


# Units for values in seconds or GB/s: name and factor.
UNITS = {BANDWIDTH: (("GB/s", 1.0), ("MB/s", 1e3)), LATENCY: (("ms", 1e3), ("\u00b5s", 1e6))}
WHAT = {BANDWIDTH: "Large messages: algbw each way", LATENCY: "Small messages: time each way"}
# Ratios to comparable links with the palest and the darkest colour.
PALEST, DARKEST = 1.0, 3.0
PALE = 0.4  # opacity of links without a significant difference
MAX_HOSTS = 16  # the names of this many hosts fit next to an axis


def link_figures(run: Run) -> "Iterator[tuple[str, Figure]]":
    """Yield (name, figure) for a run's links; nothing for a run without links."""
    links = link_run_of(run)
    if links is None:
        return
    quantities = [quantity for quantity in (BANDWIDTH, LATENCY) if _pair_values(links, quantity)]
    if not quantities:
        return
    verdict = verdict_of(links)
    side = min(2.6 + 0.46 * len(links.hosts), 9.0)
    figure, axes = style.new_figure(len(quantities), 1.6 + side * len(quantities), side + 1.5, share=False)
    for panel, quantity in zip(axes, quantities, strict=True):
        image = _panel(panel, links, verdict, quantity)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02, extend="max")
    ticks = (1, 1.5, 2, 3)
    bar.set_ticks(np.log(ticks).tolist(), labels=[f"{tick:g}x" for tick in ticks])
    bar.set_label("time relative to comparable links")
    bar.outline.set_visible(False)  # type: ignore[operator]
    style.title(figure, f"{run.scenario}: {verdict.why_not or _found(verdict, links)}")
    numbers = f"numbers: medians of {count_text(verdict.num_passes, 'pass', 'passes')}"
    style.caption(figure, f"{numbers}; framed: significantly slower than comparable links; pale: may be chance")
    yield "links", figure


def _found(verdict: LinkVerdict, links: LinkRun) -> str:
    """`slow: rank 5 (on b), 2x in large messages`; of several outliers, only the names."""
    slow = verdict.outliers
    if not slow:
        return "no slow rank or link"
    if len(slow) == 1:
        return f"slow: {_name_of(slow[0], links)}, {slow[0].slowdown:.2g}x in {SLOW_IN[slow[0].quantity]}"
    return f"slow: {', '.join(dict.fromkeys(_name_of(outlier, links) for outlier in slow))}"


def _panel(axes: "Axes", links: LinkRun, verdict: LinkVerdict, quantity: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    count, pairs = len(links.hosts), _pair_values(links, quantity)
    slow = LinearSegmentedColormap.from_list("slow", ["#FFFFFF", style.ORANGE, style.RED])
    colors = slow.with_extremes(bad=style.GRID)
    ratios = _square(_pair_values(links, quantity, is_relative=True), count)
    # Pale: differences that may be chance are visible but not prominent.
    opaque = np.where(_is_named(verdict, quantity, count) | np.isnan(ratios), 1.0, PALE)
    image = axes.imshow(
        ratios, cmap=colors, vmin=np.log(PALEST), vmax=np.log(DARKEST), aspect="equal", alpha=opaque.tolist()
    )
    _frames(axes, links, verdict, quantity)
    # The first unit in which the value of the median pair is at least 1.
    middle = float(np.median(list(pairs.values())))
    unit, scale = next(((name, by) for name, by in UNITS[quantity] if middle * by >= 1), UNITS[quantity][-1])
    axes.set_title(f"{WHAT[quantity]} ({unit})", fontweight="normal", pad=24 if len(set(links.hosts)) > 1 else 6)
    if count <= MAX_MATRIX:
        for (row, column), value in np.ndenumerate(_square(pairs, count) * scale):
            if np.isfinite(value):
                text = f"{value:,.{decimals_for(value)}f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5)
    hover(axes, [_spot(links, pair, value, quantity) for pair, value in pairs.items()])
    _name_ranks(axes, links.hosts)
    return image


def _square(pairs: dict[Pair, float], count: int) -> Floats:
    """Values by row and column; a pair's value is in both cells of the pair."""
    values = np.full((count, count), np.nan)
    for (first, second), value in pairs.items():
        values[first, second] = values[second, first] = value
    return values


def _is_named(verdict: LinkVerdict, quantity: str, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """Cells of slow pairs, and of all pairs of slow ranks."""
    mask = np.zeros((count, count), dtype=bool)
    for outlier in (outlier for outlier in verdict.outliers if outlier.quantity == quantity):
        if outlier.kind == RANK:
            mask[list(outlier.ranks), :] = mask[:, list(outlier.ranks)] = True
        if outlier.kind == HOST:
            mask[np.ix_(outlier.ranks, outlier.ranks)] = True
    for first, second in _slow_pairs(verdict, quantity):
        mask[first, second] = mask[second, first] = True
    return mask


def _frames(axes: "Axes", links: LinkRun, verdict: LinkVerdict, quantity: str) -> None:
    """Draw frames around the row and column of a slow rank and the cells of a slow link, and lines between hosts."""
    from matplotlib.patches import Rectangle

    count, places = len(links.hosts), []
    for outlier in verdict.outliers:
        if outlier.kind == RANK and outlier.quantity == quantity:
            places += [(-0.5, outlier.ranks[0] - 0.5, count, 1), (outlier.ranks[0] - 0.5, -0.5, 1, count)]
    for first, second in _slow_pairs(verdict, quantity):
        places += [(first - 0.5, second - 0.5, 1, 1), (second - 0.5, first - 0.5, 1, 1)]
    for left, top, width, height in places:
        frame = Rectangle((left, top), width, height, fill=False, edgecolor=style.BLACK, linewidth=2.2, clip_on=False)
        frame.set_zorder(3)
        axes.add_patch(frame)
    for edge in [at for at in range(1, count) if links.hosts[at] != links.hosts[at - 1]]:
        axes.axhline(edge - 0.5, color=style.GREY, linewidth=1)
        axes.axvline(edge - 0.5, color=style.GREY, linewidth=1)


def _name_ranks(axes: "Axes", hosts: Sequence[str]) -> None:
    """Label both axes with ranks, and with hosts if their names fit."""
    step = max(len(hosts) // MAX_MATRIX, 1)
    ticks = range(0, len(hosts), step)
    spans = [(name, list(ranks)) for name, ranks in groupby(range(len(hosts)), key=lambda rank: hosts[rank])]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, labels=list(map(str, ticks)))
        axis.set_tick_params(length=0)
        axis.set_label_text("rank")
    if 1 < len(spans) <= MAX_HOSTS:
        for name, ranks in spans:
            at, host = (ranks[0] + ranks[-1]) / 2, f"host {name}"
            axes.text(at, 1.01, host, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
            axes.text(1.01, at, host, transform=axes.get_yaxis_transform(), ha="left", va="center", rotation=270)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _spot(links: LinkRun, pair: Pair, value: float, quantity: str) -> Spot:
    text = f"{value:.3g} GB/s" if quantity == BANDWIDTH else brief_time_text(value)
    hosts = " and ".join(dict.fromkeys(links.hosts[rank] for rank in pair))
    return Spot(pair[1], pair[0], f"ranks {pair[0]} and {pair[1]} ({hosts})\n{text}")
