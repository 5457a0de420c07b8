"""The meter, with a clock and ranks that are told what to say: every figure is exact."""

from typing import Any

import pytest
import torch

from distbench.ranks import measure
from distbench.ranks.device import EventClock, HostClock
from distbench.ranks.measure import DeviceStart, Meter, RankGroup, stop_reason
from distbench.spec import Settings


class FakeRanks(RankGroup):
    """This rank, and another that starts `late` seconds later and takes `slower` times as long."""

    def __init__(self, late: float = 0.0, slower: float = 1.0) -> None:
        self.world_size = 2
        self.meetings = 0
        self._late, self._slower = late, slower

    def wait_for_all(self) -> None:
        self.meetings += 1

    def gather(self, stamps: torch.Tensor) -> torch.Tensor:
        first = stamps[:, :1]
        return torch.stack([stamps, first + self._late + (stamps - first) * self._slower])


class FakeTime:
    """Time that passes only when the measured call says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meter_of(time: FakeTime, ranks: FakeRanks, **settings: float) -> Meter:
    return Meter(ranks, HostClock(time), Settings(**settings), shared_clock=True)


def test_a_sample_is_the_slowest_ranks_time() -> None:
    time = FakeTime()

    def call(stamp: object) -> None:
        time.now += 0.010

    samples = meter_of(time, FakeRanks(slower=3.0), min_samples=5).measure(call, (), 0.01)
    assert samples.samples_s == pytest.approx([0.030] * len(samples.samples_s))
    assert samples.rank_median_s == pytest.approx([0.010, 0.030])
    assert samples.stop_reason == "steady"


def test_entry_skew_is_apart_from_the_time_between_last_in_and_last_out() -> None:
    time = FakeTime()

    def call(stamp: object) -> None:
        time.now += 0.010

    samples = meter_of(time, FakeRanks(late=0.004, slower=2.0), min_samples=5).measure(call, (), 0.01)
    assert samples.entry_skew_s == pytest.approx(0.004)
    assert samples.isolated_s == pytest.approx(0.020)


def test_stretches_that_are_seen_together_are_told_apart() -> None:
    """Of different lengths, one of them with phases; on the other rank, whose clock is this one's doubled, all takes
    twice as long."""

    class Doubled(FakeRanks):
        num_gathers = 0

        def gather(self, stamps: torch.Tensor) -> torch.Tensor:
            self.num_gathers += 1
            return torch.stack([stamps, 2 * stamps])

    time, ranks = FakeTime(), Doubled()
    meter = meter_of(time, ranks)

    def plain(stamp: object) -> None:
        time.now += 0.010

    def phased(stamp: object) -> None:
        for seconds in (0.003, 0.005):
            time.now += seconds
            stamp()  # type: ignore[operator]

    taken = [meter.take(plain, (), 3), meter.take(phased, ("forward", "backward"), 2)]
    first, second = meter.see(taken, "passes")
    assert (ranks.num_gathers, ranks.meetings, first.stop_reason) == (1, 5, "passes")
    assert first.samples_s == pytest.approx([0.020] * 3) and first.phases_s == {}
    assert second.samples_s == pytest.approx([0.016] * 2) and second.rank_median_s == pytest.approx([0.008, 0.016])
    assert second.phases_s["forward"] == pytest.approx([0.006] * 2)


@pytest.mark.parametrize("repeats", [1, 4])
def test_phases_add_up_also_when_iterations_are_pipelined(repeats: int) -> None:
    time = FakeTime()

    def call(stamp: object) -> None:
        for seconds in (0.003, 0.005):
            time.now += seconds
            stamp()  # type: ignore[operator]

    meter = meter_of(time, FakeRanks(), min_samples=5, iterations_per_sample=repeats)
    assert meter.warm_up(call) == pytest.approx(0.008)
    samples = meter.measure(call, ("forward", "backward"), 0.008)
    assert samples.samples_s == pytest.approx([0.008] * len(samples.samples_s))
    assert samples.phases_s["forward"] == pytest.approx([0.003] * len(samples.samples_s))
    assert samples.phases_s["backward"] == pytest.approx([0.005] * len(samples.samples_s))


def test_every_sample_starts_with_a_meeting_and_warm_up_is_thrown_away() -> None:
    time, ranks = FakeTime(), FakeRanks()
    calls = []

    def call(stamp: object) -> None:
        time.now += 1.0 if len(calls) < 3 else 0.01
        calls.append(time.now)

    meter = meter_of(time, ranks, warmup_iterations=3, min_samples=5)
    meter.warm_up(call)
    samples = meter.measure(call, (), 0.01)
    assert max(samples.samples_s) == pytest.approx(0.01)
    assert ranks.meetings == len(calls) == 3 + len(samples.samples_s)


def test_a_turn_takes_what_it_was_given_and_no_more() -> None:
    time = FakeTime()

    def call(stamp: object) -> None:
        time.now += 0.01

    meter = meter_of(time, FakeRanks(), min_samples=30)
    samples = meter.measure(call, (), 0.01, Settings(min_samples=4, max_samples=4, target_ci=0.0))
    assert samples.samples_s == pytest.approx([0.01] * 4)


def test_a_pass_takes_its_share_of_a_case() -> None:
    share = Settings(min_samples=5, max_samples=200, max_case_s=1.0, passes=4).of_a_pass()
    assert (share.min_samples, share.max_samples, share.max_case_s) == (2, 50, 0.25)


def test_a_budget_is_shared_by_all_cases_and_no_quick_cap_keeps_it_from_being_spent() -> None:
    settings = Settings.quick().with_budget(60.0)
    assert settings.case_limit_s(30) == 2.0 and settings.case_limit_s(2) == Settings().max_case_s
    assert settings.max_samples == Settings().max_samples and settings.min_samples == Settings.quick().min_samples


def test_noise_is_sampled_until_the_time_is_spent() -> None:
    time = FakeTime()
    calls = []

    def call(stamp: object) -> None:
        calls.append(1)
        time.now += 0.01 if len(calls) % 2 else 0.02

    samples = meter_of(time, FakeRanks(), min_samples=5, max_case_s=1.0).measure(call, (), 0.015)
    assert samples.stop_reason == "max_case_s"
    assert 1.0 <= sum(samples.samples_s) <= 1.2


def test_the_sample_cap_is_kept_exactly() -> None:
    time = FakeTime()
    calls = []

    def call(stamp: object) -> None:
        calls.append(1)
        time.now += 1e-6 * (1 + len(calls) % 2)

    samples = meter_of(time, FakeRanks(), min_samples=5, max_samples=37, max_case_s=9.0).measure(call, (), 1e-6)
    assert len(samples.samples_s) == 37 and samples.stop_reason == "max_samples"


def test_few_samples_are_taken_whatever_they_cost() -> None:
    settings = Settings(min_samples=5, max_case_s=1.0)
    assert stop_reason([10.0, 20.0, 30.0, 5.0], 65.0, settings) is None
    assert stop_reason([10.0, 20.0, 30.0, 5.0, 7.0], 72.0, settings) == "max_case_s"


def test_a_call_that_raised_leaves_nothing_to_the_next() -> None:
    time = FakeTime()

    def refuse(stamp: object) -> None:
        raise ValueError("no")

    def call(stamp: object) -> None:
        time.now += 0.01

    meter = meter_of(time, FakeRanks(), min_samples=5)
    with pytest.raises(ValueError, match="no"):
        meter.warm_up(refuse)
    assert meter.measure(call, (), 0.01).samples_s == pytest.approx([0.01] * 5)


class Device:
    """A device with one stream: work is enqueued with seconds, its clock is what was enqueued up to a stamp."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay_s: float = 1e-4) -> None:
        self.now, self.done, self.moments = 0.0, [], []
        self.groups: list[Any] = []
        monkeypatch.setattr(measure, "delay", lambda device, times: self.work(delay_s * times, f"delay {times}"))
        monkeypatch.setattr(measure, "EventClock", lambda device: self.clock())
        monkeypatch.setattr(measure.dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> None:
        assert tensor.numel() == 1
        self.groups.append(group)
        self.work(1e-5, "all_reduce")

    def work(self, seconds: float, what: str) -> None:
        self.now += seconds
        self.done.append(what)

    def clock(self) -> EventClock:
        device = self

        class Clock(EventClock):
            def __init__(self) -> None: ...

            def stamp(self) -> None:
                device.moments.append(device.now)
                device.done.append("event")

            def read(self) -> list[float]:
                moments, device.moments = device.moments, []
                return [moment - moments[0] for moment in moments]

        return Clock()


def on_device(monkeypatch: pytest.MonkeyPatch, **settings: float) -> tuple[Device, Meter]:
    device = Device(monkeypatch)
    clock = device.clock()
    monkeypatch.setattr(measure, "EventClock", type(clock))
    ranks = FakeRanks(slower=3.0)
    ranks.device = torch.device("cpu")
    return device, Meter(ranks, clock, Settings(**settings), shared_clock=False)


def test_a_collective_starts_behind_one_of_its_own_group_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the barrier's skew nor the launch is in a sample: the clock starts after a delay and a collective."""
    device, meter = on_device(monkeypatch, min_samples=5, iterations_per_sample=2)
    monkeypatch.setattr(measure, "_delay_s", lambda device: 1e-4)
    started = meter.started_on("tp")  # type: ignore[arg-type]  # a group is only handed on
    samples = started.measure(lambda _: device.work(0.01, "call"), (), 0.01)
    assert device.done[:6] == ["delay 1", "all_reduce", "event", "call", "call", "event"]
    assert set(device.groups) == {"tp"}
    assert samples.samples_s == pytest.approx([0.03] * len(samples.samples_s)), "of the slowest rank"
    assert samples.isolated_s == pytest.approx(0.01), "of the rank that came last, whose sample is the shortest"
    assert samples.entry_skew_s is None


def test_what_starts_on_no_group_starts_as_its_hosts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    device, meter = on_device(monkeypatch, min_samples=5)
    assert meter.started_on(None) is meter
    assert meter.measure(lambda _: device.work(0.01, "call"), (), 0.01).isolated_s is None
    assert "all_reduce" not in device.done
    on_host = meter_of(FakeTime(), FakeRanks())
    assert on_host.started_on("tp") is on_host  # type: ignore[arg-type]


def test_the_device_waits_until_its_host_has_launched_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_delay_s", lambda device: 1e-4)
    start = DeviceStart("tp", torch.device("cpu"))  # type: ignore[arg-type]
    result = []
    for launch_s in (0.0, 3e-4, 1.0):
        start.took(launch_s)
        result.append(start.num_delays)
    assert result == [1, 6, measure.MAX_DELAYS]


def test_a_device_is_warmed_up_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    device, meter = on_device(monkeypatch, warmup_iterations=3)
    assert meter.warm_up(lambda _: device.work(0.001, "call")) == pytest.approx(0.003)
    assert device.done.count("call") == 3 + 30, "another rank took 3 ms each: 9 of the 100 ms, then 91 more"
    device.done.clear()
    meter.warm_up(lambda _: device.work(0.5, "call"))
    assert device.done.count("call") == 3
