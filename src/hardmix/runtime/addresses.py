"""Addresses by which the machines of a job reach each other, and what is often wrong with them."""

import os
import socket
from typing import Any

from hardmix.runtime.console import warn
from hardmix.runtime.launch import Launch


def check_addresses(store: Any, launch: Launch) -> None:
    """Warn where gloo would offer an address that no other machine can reach."""
    if launch.rank or launch.world_size == launch.local_world_size:
        return
    found = [store.get(f"here-{each}").decode().partition(" ") for each in range(launch.world_size)]
    wrong = sorted({host for host, _, address in found if address.startswith("127.")})
    if wrong and "GLOO_SOCKET_IFNAME" not in os.environ:
        warn(f"{', '.join(wrong)} resolves to a loopback address.{interface_hint(launch)}")


def interface_hint(launch: Launch) -> str:
    """Return a hint on the most common network problem; empty on a single machine."""
    if launch.world_size == launch.local_world_size:
        return ""
    return (
        " If a host's own name resolves to 127.0.1.1 (Debian's /etc/hosts), others cannot reach"
        " it: set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME, to the network interface on"
        " every node, such as eth0 or ib0 (docs/scaling.md)."
    )


def own_address() -> str:
    """Return the address that this host's own name resolves to; empty if it does not."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
