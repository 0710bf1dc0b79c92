"""Lookup of the network interface that has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

from quire.shared.errors import InvalidArgument

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux: the first IPv4 address
NAME_BYTES, AT = 256, slice(20, 24)


def interface_of(address: str) -> str:
    """Returns the name of this host's interface whose first IPv4 address is `address`; "lo" for 127.x. Raises
    InvalidArgument if none has it."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked.fileno(), GET_ADDRESS, struct.pack(f"{NAME_BYTES}s", name.encode()))
            except OSError:
                continue  # no IPv4 address
            if socket.inet_ntoa(found[AT]) == address:
                return name
    text = f"no interface of this host has {address} as its first address"
    raise InvalidArgument(f"master_addr: {text}", field="master_addr")
