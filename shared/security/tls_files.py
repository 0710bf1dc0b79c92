"""Settings group for the TLS files of one kind of link."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Tls(BaseModel):
    """Written `cert=FILE,key=FILE,ca=FILE,clients=require`. Nothing set: no TLS. All files are PEM, and are read
    again when they change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: str = Field(
        "", description="own certificate, followed by its chain; presented when listening and when dialling"
    )
    key: str = Field("", description="its private key")
    ca: str = Field(
        "", description="CA certificates that the peer's certificate must chain to; empty: those of the system"
    )
    clients: Literal["none", "require"] = Field(
        "none", description="require: callers must present a certificate of the CA"
    )
    server_name: str = Field("", description="name that the server's certificate must have; empty: the dialled address")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Checks that settings that need each other are set together; raises ValueError."""
        if bool(self.cert) != bool(self.key):
            raise ValueError("cert and key must be given together")
        if self.clients == "require" and not (self.cert and self.ca):
            raise ValueError("clients=require requires cert, key and ca")
        return self

    @property
    def serves(self) -> bool:
        """Whether servers with these settings use TLS."""
        return bool(self.cert)

    @property
    def dials(self) -> bool:
        """Whether clients with these settings use TLS."""
        return bool(self.cert or self.ca)

    @property
    def is_mutual(self) -> bool:
        return self.clients == "require"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path)


NO_TLS = Tls.model_validate({})
