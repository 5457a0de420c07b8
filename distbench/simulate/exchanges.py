"""Messages between ranks of a pipeline: which send is whose receive, when both ends are there, how long it takes."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from distbench.simulate.hardware.hardware_file import Hardware
from distbench.simulate.recording import Collective
from distbench.spec.errors import UserError


@dataclass
class MessageEnds:
    """One message: when each end that is there was ready for it, s, by kind ("send", "recv")."""

    num_bytes: int
    ready_s: dict[str, float] = field(default_factory=dict)

    @property
    def has_both(self) -> bool:
        """Whether both ends are there."""
        return len(self.ready_s) > 1

    @property
    def start_s(self) -> float:
        """When it begins: NCCL sends nothing before somebody receives it."""
        return max(self.ready_s.values())


class Exchanges:
    """Sends and receives of all ranks; between two ranks, in one direction, they match by their order."""

    def __init__(self) -> None:
        self.num_posted = 0
        self._posted: Counter[tuple[int, int, str]] = Counter()
        self._found: defaultdict[tuple[int, int], list[MessageEnds]] = defaultdict(list)

    def post(self, rank: int, message: Collective, ready_s: float) -> MessageEnds:
        """One end of a message is ready.

        Raises:
            UserError: the other end has another size.
        """
        assert message.peer is not None
        ends = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
        place = self._posted[*ends, message.kind]
        self._posted[*ends, message.kind] += 1
        self.num_posted += 1
        if place == len(self._found[ends]):
            self._found[ends].append(MessageEnds(message.payload_bytes))
        exchange = self._found[ends][place]
        if exchange.num_bytes != message.payload_bytes:
            sizes = f"{exchange.num_bytes:,} bytes on one end and {message.payload_bytes:,} on the other"
            raise UserError(f"message {place} from rank {ends[0]} to {ends[1]} has {sizes}; record the step anew")
        exchange.ready_s[message.kind] = ready_s
        return exchange


def message_s(message: Collective, rank: int, hardware: Hardware) -> float:
    """Seconds of one message that has its links to itself: a fixed part, and its bytes from one device to another."""
    assert message.peer is not None
    is_near = rank // hardware.devices_per_node == message.peer // hardware.devices_per_node
    rate = hardware["peer_bytes_per_s" if is_near else "network_bytes_per_s"]
    return hardware["node_base_s" if is_near else "network_base_s"] + message.payload_bytes / rate
