"""The process in which untrusted chat templates run, with limited memory."""

import resource
from functools import lru_cache
from typing import Any

from forerun.errors import ModelError, RequestError
from forerun.sandbox import serve
from forerun.text.template import Template

MEMORY = 1 << 29
"""Address space in bytes; rendering a megabyte of messages takes some dozens of megabytes."""
LONGEST = 1 << 24
"""Most characters of a prompt: more than any model's context holds."""


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the reply to one request of the server: {"text"}; {"refused"} if the names are at
    fault, {"unusable"} if the template is.

    request  `source` of the template and `names` for it; without names it is only compiled
    """
    try:
        template = _template(request["source"])
        text = template.render(request["names"]) if "names" in request else ""
    except RequestError as error:
        return {"refused": str(error)}
    except ModelError as error:
        return {"unusable": str(error)}
    if len(text) > LONGEST:
        return {"unusable": f"the chat template writes {len(text)} characters for these messages"}
    return {"text": text}


@lru_cache(maxsize=4)
def _template(source: str) -> Template:
    return Template(source)


def main() -> None:
    """Run the rendering process: limit its memory, then answer requests until standard
    input ends.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    serve(answer)


if __name__ == "__main__":
    main()
