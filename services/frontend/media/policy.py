"""Policy for reading media: allowed sources, and limits on size and time."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from quire.shared.errors import InvalidArgument

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MIB = 1 << 20
ANY_DOMAIN = "*"
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last four bytes are an IPv4 address


@dataclass(frozen=True, slots=True)
class MediaBounds:
    """Limits that are checked before the cost they bound arises."""

    download_bytes: int = 64 * MIB  # of one item, as it is sent or fetched
    request_bytes: int = 256 * MIB  # of all items of one request
    pixels: int = 64_000_000  # width times height of one picture, read from its header
    side: int = 32_768  # of a picture, in pixels
    fetch_s: float = 15.0  # all attempts and redirects of one item together
    redirects: int = 5
    attempts: int = 3
    decode_s: float = 10.0  # processor time of one picture, or of one clip of sound
    frames: int = 250_000  # of one video, chosen or not
    video_s: float = 7200.0  # length of one video
    video_decode_s: float = 30.0  # processor time of one video
    audio_s: float = 600.0  # length of one clip of sound
    audio_file_s: float = 1500.0  # length of a file to transcribe
    audio_file_decode_s: float = 60.0  # processor time of one
    decode_bytes: int = 768 * MIB  # memory of a decoder process beyond what it begins with


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Sources that the operator allows. By default only data: URLs."""

    domains: frozenset[str] = frozenset()  # exact host names in lower case; "*": all; see check_address()
    networks: tuple[Network, ...] = ()  # addresses that are not public and are allowed all the same
    local_folder: Path | None = None  # file: URLs may name files beneath it
    bounds: MediaBounds = field(default_factory=MediaBounds)

    def check_domain(self, host: str) -> None:
        """Raises InvalidArgument unless media may be fetched from the host called `host`."""
        if ANY_DOMAIN in self.domains or host in self.domains:
            return
        allowed = ", ".join(sorted(self.domains)) or "none; the server allows them with --allowed-media-domains"
        raise InvalidArgument(
            f"The URL must be from one of the allowed domains: [{allowed}]. Input URL domain: {host:.100}",
            field="messages",
        )

    def check_address(self, address: Address) -> None:
        """Raises InvalidArgument for an address inside of some network that is not the public one: loopback, private,
        link-local (metadata services of clouds), multicast, reserved; also where IPv6 carries such an IPv4 address."""
        for reached in _reached(address):
            inside = any(reached.version == network.version and reached in network for network in self.networks)
            if not inside and not _is_public(reached):
                raise InvalidArgument(
                    f"The URL leads to {address}, which is not a public address; the server allows networks with "
                    "--allowed-media-networks",
                    field="messages",
                )


def _reached(address: Address) -> list[Address]:
    """Returns the addresses to check for `address`: itself and the IPv4 addresses that it carries (6to4, Teredo,
    NAT64); for an IPv4-mapped one only the carried."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    carried = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64:
        carried.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    found: list[Address] = [one for one in carried if one is not None]
    return found if address.ipv4_mapped is not None else [address, *found]


def _is_public(address: Address) -> bool:
    """Whether the address belongs to the public internet: neither private nor multicast, reserved or site-local."""
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (address.is_multicast or address.is_reserved or is_site_local)
