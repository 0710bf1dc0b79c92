"""Authentication between services: mutual proof of the cluster secret (handshake.proto)."""

from quire.shared.rpc.trust.acceptor import HandshakeAcceptor
from quire.shared.rpc.trust.dialler import Dialler
from quire.shared.rpc.trust.exposure import check_exposure

__all__ = ["Dialler", "HandshakeAcceptor", "check_exposure"]
