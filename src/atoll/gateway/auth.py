"""Who may call, and under which name.

Keys are hashed as they come in and compared as hashes, in constant time; no key is kept, logged or shown.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final

from atoll.config import ServerSettings
from atoll.errors import ConfigError, NotAuthenticated, NotPermitted

_SCHEME: Final = b"bearer "
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_LABEL_CHARS: Final = 8
_WITHOUT_KEY: Final = (
    "This gateway needs an API key, sent as 'Authorization: Bearer KEY'. The server has its keys under server.api_keys"
)


class KeyRing:
    """The API keys of a server. Without any, everybody who can connect may call."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._labels_by_digest = {_digest(key.encode()): f"key-{_label(key)}" for key in keys}
        self.is_open = not keys

    def authenticate(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The key's label for the ledger, None where no keys are set. Raises NotAuthenticated."""
        if self.is_open:
            return None
        value = headers.get(b"authorization", b"")
        if value[: len(_SCHEME)].lower() != _SCHEME:
            raise NotAuthenticated(_WITHOUT_KEY)
        given = _digest(value[len(_SCHEME) :].strip())
        label = None
        # Every digest is compared, whichever fits, so that time tells nothing.
        for digest, name in self._labels_by_digest.items():
            if hmac.compare_digest(given, digest):
                label = name
        if label is None:
            raise NotAuthenticated("The API key is not known here. Check it against the server's server.api_keys")
        return label


class HostCheck:
    """Refuses requests whose Host header names somebody else, so that no web page can call a gateway on this machine.

    A page can make a browser resolve the page's own name to 127.0.0.1 (DNS rebinding); the Host header still tells.
    Only a gateway bound to loopback is checked by default; `allowed_hosts` adds names, and sets the check for other
    addresses.
    """

    def __init__(self, server: ServerSettings) -> None:
        names = {name.lower() for name in server.allowed_hosts}
        self._allowed = names | _LOCAL_NAMES if is_loopback(server.host) else names
        self._seen: set[bytes] = set()

    def check(self, host: bytes | None) -> None:
        """Raises NotPermitted."""
        if not self._allowed or host in self._seen:
            return
        name = _host_name((host or b"").decode("latin-1")).lower()
        if name not in self._allowed:
            raise NotPermitted(
                f"The Host header {name[:100]!r} is none of this gateway's names: {', '.join(sorted(self._allowed))}. "
                "Add it to server.allowed_hosts if it is meant",
                code="host_not_allowed",
            )
        # Ports make few variants of few names; the bound keeps it so whatever a client sends.
        if host is not None and len(self._seen) < 1000:
            self._seen.add(host)


def check_exposure(server: ServerSettings) -> None:
    """Raises ConfigError where a server would be open to other machines without a key."""
    if not server.api_keys and not is_loopback(server.host):
        raise ConfigError(
            f"server.host {server.host!r} can be reached from other machines, and server.api_keys is empty. "
            "Set at least one key, or bind to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """`localhost` of `localhost:8700`, `::1` of `[::1]:8700`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _label(key: str) -> str:
    """Says which key it was and cannot be turned back: a few characters of a hash of the hash."""
    return hashlib.sha256(b"atoll key label" + _digest(key.encode())).hexdigest()[:_LABEL_CHARS]
