"""Addresses of servers, and a check that a server replies there. Without it Flower would retry forever."""

import http.client
import ssl
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from halfmoon.core.errors import UserError

TIMEOUT_SECONDS = 3.0
"""Time limit of a check."""


class ServerUnreachable(UserError):
    """No server replies at an address, or not yet."""


@dataclass(frozen=True)
class Address:
    """A host (a name, IPv4 or IPv6) and a port of TCP."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse HOST:PORT, where HOST is a name, an IPv4 address, or an IPv6 address in brackets.

        Raises:
            UserError: the text is something else.
        """
        # An IPv6 address itself has colons, so it needs brackets.
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        host_is_valid = host and "/" not in host and (":" not in host or text.startswith("["))
        if not colon or not host_is_valid or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UserError(f"--server is {text!r}: it must be HOST:PORT, such as 192.0.2.7:9092.")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def local(self) -> "Address":
        """The address by which this machine reaches a server that listens here, also on all interfaces."""
        return Address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)


_TIME_ADVICE = {
    9: "check the clock of this machine",
    10: "the server's people renew it by `halfmoon federation rotate FOLDER --server`; if they did, check this machine's clock",
}
"""Advice by OpenSSL's verification codes for certificates that are not valid yet (9) and that have expired (10)."""


def tls_context(ca: Path) -> ssl.SSLContext:
    """Make a context that trusts the certificates that the authority in the PEM file `ca` signed; raises `UserError`."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(
            f"--ca {ca} is no file of certificates in PEM ({why}); ask the server's people for it."
        ) from error


def check_server(address: Address, ca: Path | None) -> None:
    """Check that the server of a federation accepts connections at an address, with TLS or without.

    Flower itself would retry forever without naming a reason.

    Args:
        address: the server.
        ca: the authority's certificate for TLS; None for plain text.

    Raises:
        ServerUnreachable: no server replies; it may later.
        UserError: a server replies with which no connection of this kind is possible.
    """
    if ca is None:
        link = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_SECONDS)
    else:
        link = http.client.HTTPSConnection(address.host, address.port, timeout=TIMEOUT_SECONDS, context=tls_context(ca))
    # The order matters: a certificate's error is a kind of SSLError, and this and ConnectionResetError are OSErrors.
    try:
        link.request("GET", "/health")
        status = link.getresponse().status
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _TIME_ADVICE:
            raise UserError(
                f"the certificate of {address} is not to be trusted ({error.verify_message}): "
                f"{_TIME_ADVICE[error.verify_code]}."
            ) from error
        raise UserError(
            f"the certificate of {address} is not to be trusted ({error.verify_message}): --ca must be the file of "
            "the authority that signed it, and the certificate must name this host."
        ) from error
    except ssl.SSLError as error:
        raise UserError(
            f"{address} does not speak TLS ({error.reason}); it was started without certificates."
        ) from error
    except (http.client.HTTPException, ConnectionResetError) as error:
        # A server with TLS closes a plain connection, or sends bytes that are not HTTP.
        if ca is None and _speaks_tls(address):
            raise _tls_only(address) from error
        raise ServerUnreachable(f"{address} closes the connection") from error
    except OSError as error:
        raise ServerUnreachable(f"{address} does not answer ({error.strerror or error})") from error
    finally:
        link.close()
    if status in (http.client.BAD_GATEWAY, http.client.SERVICE_UNAVAILABLE, http.client.GATEWAY_TIMEOUT):
        raise ServerUnreachable(f"{address} is a proxy whose server does not answer ({status})")
    if status == http.client.BAD_REQUEST and ca is None and _speaks_tls(address):  # the reply of a proxy
        raise _tls_only(address)
    if status != http.client.OK:
        raise UserError(f"something answers at {address}, but it is no server of a federation; check host and port.")


def _tls_only(address: Address) -> UserError:
    return UserError(f"{address} speaks TLS only: give the file of its authority by --ca FILE.")


def _speaks_tls(address: Address) -> bool:
    """Check whether a server speaks TLS, by a handshake: then the error of a plain connection can name what is missing.

    The certificate is not verified, and no request is sent.
    """
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    link = http.client.HTTPSConnection(address.host, address.port, timeout=TIMEOUT_SECONDS, context=unverified)
    try:
        link.connect()
    except OSError:
        return False
    finally:
        link.close()
    return True
