"""Writes down what stages of a pipeline send and receive, as NCCL would run it: on which streams, and who waits."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from distbench.simulate.recording import Collective
from distbench.worker.simulated.differing_ranks import nested_ranks
from distbench.worker.simulated.recorder import Recorder
from distbench.worker.simulated.sim_device import STREAMS, SimEvent, SimStream
from distbench.worker.torch_internals import CollectiveCall, messages_of_stages


class Sent:
    """Messages that were asked for together.

    Args:
        event: happens when all of them have ended; None of a step that is not written down.
        tensors: what NCCL's work keeps until somebody waits for it.
    """

    def __init__(self, event: SimEvent | None, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self.tensors = event, tensors

    def wait(self) -> None:
        """Have the current stream wait for them."""
        STREAMS.current.wait_event(self._event)
        self.tensors = ()


class StageMessages:
    """What one rank's stages send and receive, among the events of a recorder.

    torch asks for sends alone, or receives alone, one by one: NCCL runs them on a communicator of the two ranks, whose
    stream takes one after another. Both together run at once, on the communicator of the whole group.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder, self._rank = recorder, rank
        self._streams: dict[tuple[int, ...], SimStream] = {}
        self._last: dict[tuple[int, ...], Sent] = {}
        self._num_batches = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Write down what is inside; the recorder must be on around it."""
        with messages_of_stages(self._issue):
            yield

    def _issue(self, tensors: Sequence[torch.Tensor], messages: Sequence[CollectiveCall]) -> list[Sent]:
        if len({message.kind for message in messages}) > 1:
            return [self._at_once((*messages[0].ranks, -1), tensors, messages)]
        return [
            self._at_once(tuple(sorted((self._rank, message.peer or 0))), [tensor], [message])
            for tensor, message in zip(tensors, messages, strict=True)
        ]

    def _at_once(
        self, communicator: tuple[int, ...], tensors: Sequence[torch.Tensor], messages: Sequence[CollectiveCall]
    ) -> Sent:
        recorder = self._recorder
        recorder.use(tensors)
        if (tracker := recorder.tracker) is None:
            return Sent(None, ())
        self._num_batches += 1
        stream = self._streams.setdefault(communicator, SimStream())
        stream.wait_stream(STREAMS.current)
        for message in messages:
            assert message.peer is not None
            found = tracker.communication(message, tracker.issue_context(message))
            fields = {name: getattr(found, name) for name in Collective._fields if hasattr(found, name)}
            ends = nested_ranks((self._rank, message.peer))
            issued = Collective(stream=stream.number, ranks=ends, **fields)
            recorder.events.append(issued._replace(peer=message.peer, batch=self._num_batches))
        # NCCL's watchdog drops what an earlier work keeps once it has ended, which nobody may have waited for.
        if (last := self._last.get(communicator)) is not None:
            last.tensors = ()
        self._last[communicator] = Sent(stream.record_event(), tensors)
        return self._last[communicator]
