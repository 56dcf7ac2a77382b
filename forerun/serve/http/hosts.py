"""Checks the host names that requests use for the server.

A web page may send requests to any server under the page's own name. DNS rebinding can make that
name resolve to 127.0.0.1, so that the page can read the answers of a server on its user's machine.
Such a name is a public one: addresses, and names that only a local network knows, are safe.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

from forerun.errors import ConfigError

PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".cluster.local", ".svc")
"""Suffixes of names that no public name server resolves (RFC 6761, 6762, 8375; ICANN's .internal),
and of names that Kubernetes gives to services.
"""

_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")

_HEADER = re.compile(
    r"(?:\[(?P<address>[0-9a-f:.]+(?:%25[0-9a-z._~-]+)?)\]|(?P<name>[0-9a-z._-]*))(?::[0-9]*)?"
)
"""A Host header in lower case."""


class AllowedHosts:
    """Checks whether a Host header names this server.

    bound    the address that the server listens on
    allowed  further names; `*.example.org` is any name below example.org, `*` any name

    Raises ConfigError if one of `allowed` is not a name.
    """

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        names = {name.lower() for name in allowed}
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"allowed-hosts has {name!r}, which is not a host name: give names without "
                    "scheme and port, such as llm.example.org, *.example.org, or * for any."
                )
        self._any = "*" in names
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._names = names | {bound.lower(), socket.gethostname().lower()}

    def admits(self, header: str | None) -> bool:
        """Return whether a request with this Host header may be answered. None: it had none, as in
        HTTP/1.0, which no browser uses.
        """
        if header is None or self._any:
            return True
        written = _HEADER.fullmatch(header.strip().lower())
        if written is None:
            return False
        name = written["address"] or written["name"].removesuffix(".")
        if _is_address(name) or name in self._names:
            return True
        return "." not in name or name.endswith((*PRIVATE, *self._below))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
