"""A device type `sim` with streams and events that write down what they are told, for torch's PrivateUse1 key."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

from distbench.simulate.recording import Event, EventRecorded, EventWaited, HostWaited
from distbench.torch_private import simulated_device

DEVICE_TYPE = "sim"


class Streams:
    """The streams of a process.

    Args:
        tell: called with each event that is recorded or waited for; drops it to begin with.
        stream_numbers, event_numbers: of those to come.
        entered: streams whose contexts are open, the current one last; the first is the default one.
    """

    def __init__(self) -> None:
        self.tell: Callable[[Event], None] = lambda _: None
        self.stream_numbers, self.event_numbers = itertools.count(), itertools.count()
        self.entered = [SimStream(of=self)]

    @property
    def default(self) -> "SimStream":
        """The one that is current where nothing else is said."""
        return self.entered[0]

    @property
    def current(self) -> "SimStream":
        """The innermost that was entered."""
        return self.entered[-1]

    @current.setter
    def current(self, stream: "SimStream") -> None:
        self.entered[-1] = stream


class SimStream:
    """A stream as torch's device modules have them; `number` is its name in a recording, 0 the default stream's."""

    def __init__(self, device: Any = None, priority: int = 0, of: Streams | None = None) -> None:
        self._of = of if of is not None else STREAMS
        self.number = next(self._of.stream_numbers)
        self.priority = priority
        # How torch names a stream where it hands one on; since 2.15 FSDP2 does. 20 is PrivateUse1.
        self.stream_id, self.device_index, self.device_type = self.number, 0, 20

    def record_event(self, event: "SimEvent | None" = None) -> "SimEvent":
        """An event that has happened when all that was issued to this stream has."""
        event = event or SimEvent()
        event.record(self)
        return event

    def wait_event(self, event: "SimEvent | None") -> None:
        """Nothing that is issued to this stream from now on begins before the event; one never recorded is no event."""
        if event is not None and event.number is not None:
            self._of.tell(EventWaited(self.number, event.number))

    def wait_stream(self, other: "SimStream") -> None:
        """Wait for all that was issued to another stream."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for all that was issued to this stream."""
        self._of.tell(HostWaited(self.number))

    def __enter__(self) -> "SimStream":
        self._of.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._of.entered.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class SimEvent:
    """An event as torch's device modules have them; `number` is None until it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number: int | None = None

    def record(self, stream: SimStream | None = None) -> None:
        """It has happened when all that was issued to the stream (the current one) has."""
        self.number = next(STREAMS.event_numbers)
        STREAMS.tell(EventRecorded((stream or STREAMS.current).number, self.number))

    def wait(self, stream: SimStream | None = None) -> None:
        """Have a stream (the current one) wait for it."""
        (stream or STREAMS.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for it: taken as a wait for the stream that is current."""
        STREAMS.current.synchronize()

    def query(self) -> bool:
        """It has happened: no time passes while a step is recorded."""
        return True


STREAMS = Streams()


class SimModule:
    """What `torch.get_device_module("sim")` is: one device, its streams, no kernels."""

    Stream = SimStream
    Event = SimEvent

    def current_stream(self, device: Any = None) -> SimStream:
        """As torch's device modules have it, like all that follows."""
        return STREAMS.current

    def default_stream(self, device: Any = None) -> SimStream:
        """The one that is current where nothing else is said."""
        return STREAMS.default

    def stream(self, stream: SimStream | None) -> contextlib.AbstractContextManager[Any]:
        """Make a stream current for as long as the context is open."""
        return stream if stream is not None else contextlib.nullcontext()

    def set_stream(self, stream: SimStream) -> None:
        """Make a stream current."""
        STREAMS.current = stream

    def is_initialized(self) -> bool:
        """There is nothing to initialise."""
        return True

    def is_available(self) -> bool:
        """Yes."""
        return True

    def current_device(self) -> int:
        """The only one."""
        return 0

    def set_device(self, device: Any) -> None:
        """The only one it is."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """There are no values to draw."""

    def device_count(self) -> int:
        """One."""
        return 1

    def synchronize(self, device: Any = None) -> None:
        """The host waits for the device."""
        STREAMS.default.synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of a generator that is never drawn from; checkpointing keeps it."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """See `get_rng_state`."""

    def memory_allocated(self, device: Any = None) -> int:
        """Memory is accounted for when a recording is replayed."""
        return 0


def simulate_device() -> torch.device:
    """The device, known to torch from now on; Unsupported where this torch cannot know one."""
    simulated_device(DEVICE_TYPE, SimModule())
    return torch.device(DEVICE_TYPE, 0)
