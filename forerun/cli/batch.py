"""`forerun run --batch`: requests in OpenAI's batch format, answered by the server's own code.

A line of the input is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; a
line of the output is {"id", "custom_id", "response": {"status_code", "request_id", "body"},
"error"}. Answers are written as they come. What the output already holds is not asked again, so
the same command goes on where it was stopped.
"""

import argparse
import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import httpx

from forerun.build.engine import Loaded
from forerun.cli.console import bars, emit_json, load_shown, say
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig, ServeSettings
from forerun.options.flags import configured
from forerun.serve.app import create_app

URLS = ("/v1/chat/completions", "/v1/completions")
AT_ONCE = 16
"""Requests at once, unless --max-sequences says more."""
FAILED = 500
"""Answers from this status on are the server's fault: they are asked again."""
DAY = 86400.0

Line = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    """Run the command. 1 where a request was not answered with 200."""
    source, target = Path(arguments.batch), arguments.out
    if not target:
        raise ConfigError("--batch needs --out FILE for the answers.")
    if arguments.prompt is not None or arguments.raw or arguments.system:
        raise ConfigError("--batch brings its own prompts; leave PROMPT, --raw and --system out.")
    asked = read_requests(source)
    answered = keep_answers(Path(target))
    waiting = [line for line in asked if line["custom_id"] not in answered]
    if len(waiting) < len(asked):
        say(f"{len(asked) - len(waiting)} of {len(asked)} were answered before")
    failed = sum(status != httpx.codes.OK for status in answered.values())
    config = configured(EngineConfig, arguments)
    config = replace(config, max_sequences=max(config.max_sequences, AT_ONCE))
    if waiting:
        loaded = load_shown(config)
        with bars() as progress, Path(target).open("a", encoding="utf-8") as file:
            failed += asyncio.run(_answer_all(loaded, waiting, file, progress))
    facts = {"requests": len(asked), "answered": len(asked) - failed, "failed": failed}
    if arguments.json:
        emit_json(facts | {"out": target})
    else:
        say(f"{len(asked)} answers in {target}" + (f", {failed} of them errors" if failed else ""))
    return 1 if failed else 0


def read_requests(path: Path) -> list[Line]:
    """All lines, checked before the first is asked. Raises ConfigError naming the line."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The requests in {path} cannot be read: {error}.") from error
    found: dict[str, Line] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line, place = _object(text), f"{path}, line {number}"
        name = line.get("custom_id")
        if not isinstance(name, str) or not isinstance(line.get("body"), dict):
            raise ConfigError(f"{place}: it needs a custom_id, a url and a body.")
        if line.get("method", "POST") != "POST" or line.get("url") not in URLS:
            raise ConfigError(f"{place}: a request is a POST to one of {', '.join(URLS)}.")
        if line["body"].get("stream"):
            raise ConfigError(f"{place}: stream has no place in a batch.")
        if name in found:
            raise ConfigError(f"{place}: the custom_id {name!r} was there before.")
        found[name] = line
    if not found:
        raise ConfigError(f"{path} holds no request.")
    return list(found.values())


def keep_answers(path: Path) -> dict[str, int]:
    """custom_id -> status of what was answered before; anything else is taken out of the file.

    Raises ConfigError where the file cannot be used.
    """
    if not path.exists():
        return {}
    found: dict[str, int] = {}
    kept: list[str] = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = _object(text)
            status = (line.get("response") or {}).get("status_code")
            if isinstance(status, int) and status < FAILED:
                found[str(line.get("custom_id"))] = status
                kept.append(text + "\n")
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--out {path} cannot be used: {error}.") from error
    return found


def _object(text: str) -> Line:
    """A line's JSON object; an empty one where it is none, such as a line that was cut short."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


async def _answer_all(
    loaded: Loaded,
    waiting: Sequence[Line],
    file: IO[str],
    progress: Callable[[str, int, int], None],
) -> int:
    """Ask all and write each answer when it is there: how many were not 200."""
    app = create_app(loaded, ServeSettings(request_seconds=DAY))
    lines, done, failed = iter(waiting), 0, 0
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=DAY) as client,
    ):

        async def worker() -> None:
            nonlocal done, failed
            for line in lines:
                answer = await _answer(client, line)
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
                file.flush()
                done += 1
                failed += answer["response"]["status_code"] != httpx.codes.OK
                progress("requests", done, len(waiting))

        await asyncio.gather(*(worker() for _ in range(loaded.config.max_sequences)))
    return failed


async def _answer(client: httpx.AsyncClient, line: Line) -> Line:
    """One line of the output. Whatever model a line names, this one answers."""
    body = {name: value for name, value in line["body"].items() if name != "model"}
    answer = await client.post(line["url"], json=body)
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": answer.json(),
    }
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": line["custom_id"], "response": response, "error": None}
