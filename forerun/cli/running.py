"""Queries routes of a running server."""

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from forerun.errors import ConfigError

SECONDS = 10.0


def get_json(url: str, path: str, key: str = "") -> dict[str, Any]:
    """Return the JSON of a route. Raises ConfigError if no server answers there, or it refuses."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url} is not an address such as http://127.0.0.1:8000.")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(base + path, headers=headers), timeout=SECONDS) as answer:  # noqa: S310
            body = json.loads(answer.read())
    except HTTPError as error:
        why = "it needs a key: --api-key" if error.code == 401 else f"it answers {error.code}"
        raise ConfigError(f"The server at {base} refused the request: {why}.") from error
    except (URLError, OSError, ValueError, HTTPException) as error:
        raise ConfigError(
            f"No server answers at {base}; start one with: forerun serve, or name it with --url."
        ) from error
    if not isinstance(body, dict):
        raise ConfigError(f"The program at {base} is not a model server.")
    return body
