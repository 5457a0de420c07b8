"""Random loss of the packets that arrive in a network namespace, by nftables, for kernels without netem.

`ip netns exec NAMESPACE python packet_loss.py ONE_IN` drops one packet in ONE_IN at random; 0 drops none. Sources: the
kernel's include/uapi/linux/netfilter/nfnetlink.h and nf_tables.h.
"""

import socket
import struct
import sys

NETLINK_NETFILTER, SUBSYSTEM, INET = 12, 10, 1
BEGIN, END, NEW_TABLE, DELETE_TABLE, NEW_CHAIN, NEW_RULE = 0x10, 0x11, 0xA00, 0xA02, 0xA03, 0xA06
REQUEST, ACKNOWLEDGE, CREATE, NESTED = 0x1, 0x4, 0x400, 0x8000
LOCAL_IN, RANDOM, REGISTER, VERDICT, ACCEPT = 1, 1, 1, 0, 1
TABLE, CHAIN = b"loss\0", b"arrivals\0"


def attribute(kind: int, value: bytes | int) -> bytes:
    """One attribute; a number is of four bytes."""
    data = struct.pack(">I", value) if isinstance(value, int) else value
    return struct.pack("HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute of attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def message(kind: int, flags: int, *attributes: bytes) -> bytes:
    """One message; those between BEGIN and END are one transaction."""
    family, resource = (0, SUBSYSTEM) if kind in (BEGIN, END) else (INET, 0)
    body = struct.pack(">BBH", family, 0, resource) + b"".join(attributes)
    return struct.pack("IHHII", 16 + len(body), kind, REQUEST | flags, 1, 0) + body


def expression(name: bytes, *attributes: bytes) -> bytes:
    """One expression of a rule."""
    return nested(1, attribute(1, name + b"\0"), nested(2, *attributes))


def rule(one_in: int) -> bytes:
    """Drop a packet if a random number below `one_in` is 0."""
    number = expression(b"numgen", attribute(1, REGISTER), attribute(2, one_in), attribute(3, RANDOM))
    is_zero = expression(b"cmp", attribute(1, REGISTER), attribute(2, 0), nested(3, attribute(1, 0)))
    drop = expression(b"immediate", attribute(1, VERDICT), nested(2, nested(2, attribute(1, 0))))
    parts = attribute(1, TABLE), attribute(2, CHAIN), nested(4, number, is_zero, drop)
    return message(NEW_RULE, CREATE | ACKNOWLEDGE, *parts)


def lose(one_in: int) -> None:
    """Lose one arriving packet in `one_in` in this namespace; 0: none. Raise OSError if the kernel rejects the rule."""
    table = attribute(1, TABLE)
    messages = [message(NEW_TABLE, CREATE | ACKNOWLEDGE, table), message(DELETE_TABLE, ACKNOWLEDGE, table)]
    if one_in:
        hook = nested(4, attribute(1, LOCAL_IN), attribute(2, 0))
        chain = table, attribute(3, CHAIN), hook, attribute(5, ACCEPT), attribute(7, b"filter\0")
        messages += [messages[0], message(NEW_CHAIN, CREATE | ACKNOWLEDGE, *chain), rule(one_in)]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.send(b"".join([message(BEGIN, 0), *messages, message(END, 0)]))
        for _ in messages:
            error = -struct.unpack_from("i", netlink.recv(1 << 16), 16)[0]
            if error:
                raise OSError(error, "nftables rejects the rule")


if __name__ == "__main__":
    lose(int(sys.argv[1]))
