"""The web UI: static files from `ui`, with headers that allow no other code there."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

FOLDER = Path(__file__).parent.parent / "ui"

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""Content-Security-Policy: code, styles and connections of this server only, no inline code, and
HTML from text only through the sanitiser (its Trusted Types policy is called dompurify).
"""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # A browser checks each time whether its copy is current: a new version shows at once.
    "cache-control": "no-cache",
}


class UiFiles:
    """ASGI application: the files of `folder`, each with HEADERS. 404 for anything else."""

    def __init__(self, folder: Path) -> None:
        self._files = StaticFiles(directory=folder)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises HTTPException (404, 405)."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                pairs = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        await self._files(scope, receive, with_headers)


async def index(request: Request) -> Response:
    """GET /: the web UI's page. Everything that it loads is below /ui/."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


def ui_routes() -> list[BaseRoute]:
    """Return the routes of the web UI: its page at / and its files below /ui/."""
    return [Route("/", index), Mount("/ui", UiFiles(FOLDER))]
