"""Delays packets on the links of a lab: a process that carries frames between the two TAP devices of each link.

It needs no module of the kernel beyond TAP, unlike netem. The lab runs this file as a script in the switch's
namespace: standard library only.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP segmentation for IPv4 and IPv6: a read returns up to 64 KiB
FRAME = 10 + 14 + 65_536  # header of virtio_net, header of Ethernet, payload


def tap(name: str) -> int:
    """Create a TAP device, and return the descriptor that reads what it sends and writes what it receives."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOADS)
    return device


def carry(peers: Mapping[int, int], seconds: float) -> None:
    """Deliver each frame to the device's peer after ``seconds``, without end."""
    under_way: deque[tuple[float, int, bytes]] = deque()  # one delay for all links: frames are due in order of arrival
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        for device in select.select([*peers], [], [], wait)[0]:
            with suppress(BlockingIOError):
                while True:
                    frame = os.read(device, FRAME)
                    under_way.append((time.monotonic() + seconds, peers[device], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, to, frame = under_way.popleft()
            with suppress(OSError):  # a device that is down loses frames
                os.write(to, frame)


def main(seconds: float, links: int) -> None:
    """Create devices p0 and e0, p1 and e1, ..., print "ready", and carry frames between them."""
    peers: dict[int, int] = {}
    for link in range(links):
        port, end = tap(f"p{link}"), tap(f"e{link}")
        peers |= {port: end, end: port}
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # workers that compute must not delay frames further
    print("ready", flush=True)
    carry(peers, seconds)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
