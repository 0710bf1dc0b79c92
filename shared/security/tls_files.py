"""A group of settings: the files of TLS on one kind of link."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Tls(BaseModel):
    """Written `cert=FILE,key=FILE,ca=FILE,clients=require`. Nothing set: no TLS. All files are PEM, and are read again
    when they change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: str = Field("", description="own certificate, the chain behind it; shown when listening and when dialling")
    key: str = Field("", description="its private key")
    ca: str = Field("", description="certificates that the other side's must come from; empty: those of the system")
    clients: Literal["none", "require"] = Field("none", description="require: callers show a certificate of the CA")
    server_name: str = Field("", description="name that a dialled certificate must have; empty: the address dialled")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert and key belong together")
        if self.clients == "require" and not (self.cert and self.ca):
            raise ValueError("clients=require needs cert, key and ca")
        return self

    @property
    def serves(self) -> bool:
        """Whoever listens with this speaks TLS."""
        return bool(self.cert)

    @property
    def dials(self) -> bool:
        """Whoever dials with this speaks TLS."""
        return bool(self.cert or self.ca)

    @property
    def is_mutual(self) -> bool:
        return self.clients == "require"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path)


NO_TLS = Tls.model_validate({})
