"""`forerun run --batch`: requests in OpenAI's batch format, answered by the server's own code.

A line of the input is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; a
line of the output is {"id", "custom_id", "response": {"status_code", "request_id", "body"},
"error"}. Answers are written as they arrive. Requests with an answer in the output are skipped, so
the same command continues an interrupted run. An invalid line gets an error of its own in the
output. An output file that contains any other line is refused and left unchanged.
"""

import argparse
import asyncio
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import httpx

from forerun.build.engine import Loaded
from forerun.cli.console import bars, emit, load_shown, say
from forerun.errors import ConfigError, reason_of
from forerun.options.config import EngineConfig, SamplingConfig, ServeSettings
from forerun.options.flags import configured
from forerun.serve.app import create_app
from forerun.serve.bodies.wire import parse_json
from forerun.serve.http.errors import ApiError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
AT_ONCE = 16
"""Requests in flight, unless --max-sequences is larger."""
FAILED = 500
"""Statuses from this one on are the server's fault: such requests are sent again."""
DAY = 86400.0

Line = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if a request was not answered with 200."""
    source = Path(arguments.batch)
    if not arguments.out:
        raise ConfigError("--batch needs --out FILE for the answers.")
    # If it is a link, replace the file it points to, not the link.
    target = Path(arguments.out).resolve()
    if arguments.prompt is not None or arguments.raw or arguments.system:
        raise ConfigError("--batch brings its own prompts; leave PROMPT, --raw and --system out.")
    if given := _of_one_answer(arguments):
        raise ConfigError(
            f"--batch: each request says itself how it is answered; leave {given[0]} out."
        )
    requests, refused = read_requests(source)
    if target.exists() and target.samefile(source):
        raise ConfigError(f"--out {arguments.out} is the file of the requests; name another file.")
    answered = keep_answers(target)
    waiting = [line for line in requests if line["custom_id"] not in answered]
    if len(waiting) < len(requests):
        say(f"{len(requests) - len(waiting)} of {len(requests)} were answered before")
    failed = sum(status != httpx.codes.OK for status in answered.values()) + len(refused)
    config = configured(EngineConfig, arguments)
    config = replace(config, max_sequences=max(config.max_sequences, AT_ONCE))
    with target.open("a", encoding="utf-8") as file:
        file.writelines(map(_written, refused))
    for line in refused:
        say(f"{source}, line {line['error']['line']}: {line['error']['message']}")
    if waiting:
        loaded = load_shown(config)
        with bars() as progress, target.open("a", encoding="utf-8") as file:
            failed += asyncio.run(_answer_all(loaded, waiting, file, progress))
    count = len(requests) + len(refused)
    facts = {"requests": count, "answered": count - failed, "failed": failed}
    done = f"{count} answers in {arguments.out}" + (f", {failed} of them errors" if failed else "")
    emit(arguments, facts | {"out": arguments.out}, lambda: say(done))
    return 1 if failed else 0


def _of_one_answer(arguments: argparse.Namespace) -> list[str]:
    """Return the given flags that apply only to a single prompt."""
    sampling = {item.name for item in fields(SamplingConfig)}
    own = ("compare", "schema", "regex", "grammar")
    flags = [one.where for one in arguments.given if not sampling.isdisjoint(one.option.fields)]
    return flags + [f"--{name}" for name in own if getattr(arguments, name)]


def read_requests(path: Path) -> tuple[list[Line], list[Line]]:
    """Return the requests, with their bodies as JSON bytes, and the output lines for invalid lines.
    Raises ConfigError if the file cannot be read or has no line.
    """
    try:
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The requests in {path} cannot be read: {reason_of(error)}.") from error
    requests: dict[str, Line] = {}
    refused: list[Line] = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line, problem = _request(text)
        name = line.get("custom_id")
        if problem is None and name in requests:
            problem = f"the custom_id {name!r} was there before."
        if problem is None:
            requests[str(name)] = line
        else:
            fault = {"code": "invalid_request", "message": problem, "line": number}
            refused.append(_answered(name, None, fault))
    if not requests and not refused:
        raise ConfigError(f"{path} holds no request.")
    return list(requests.values()), refused


def _request(text: str) -> tuple[Line, str | None]:
    """Return a line's JSON object, and why it is not a valid request; None if it is valid."""
    try:
        line = parse_json(text.encode())
    except ApiError as error:
        reason = str(error).removeprefix("The body cannot be read as JSON: ")
        reason = re.sub(r"line 1 (column \d+) \(char \d+\)", r"\1", reason)
        return {}, f"it is not JSON: {reason}"
    if not isinstance(line, dict):
        return {}, "it is JSON, but not an object; it needs a custom_id, a url and a body."
    if problem := _problem(line):
        return line, problem
    # The model that a line names is ignored.
    body = {name: value for name, value in line["body"].items() if name != "model"}
    return line | {"body": json.dumps(body).encode()}, None


def _problem(line: Line) -> str | None:
    """Return why an object is not a valid request; None if it is valid."""
    fields = {"custom_id": (str, "a text"), "url": (str, "a text"), "body": (dict, "an object")}
    if missing := [name for name in fields if name not in line]:
        return f"it needs a custom_id, a url and a body, and has no {' and no '.join(missing)}."
    for name, (kind, what) in fields.items():
        if not isinstance(line[name], kind):
            return f"its {name} must be {what}."
    if line.get("method", "POST") != "POST" or line["url"] not in URLS:
        return f"a request is a POST to one of {', '.join(URLS)}."
    return "a batch cannot stream; leave stream out." if line["body"].get("stream") else None


def _answered(name: Any, response: Line | None, error: Line | None = None) -> Line:
    """Return a line of the output, with an answer or an error."""
    id = f"batch_req_{uuid.uuid4().hex}"
    return {"id": id, "custom_id": name, "response": response, "error": error}


def _written(line: Line) -> str:
    """Return a line as text for the file. A lone surrogate, which UTF-8 cannot encode, is
    escaped.
    """
    try:
        text = json.dumps(line, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(line)
    return text + "\n"


def keep_answers(path: Path) -> dict[str, int]:
    """Return the status of each answer in the output file by custom_id, and delete errors and a
    truncated line from the file; creates it if it does not exist. Raises ConfigError if the file
    cannot be used, or has a line that no batch run wrote.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"--out {path} cannot be used: it is a folder or a device, not a file.")
    answered: dict[str, int] = {}
    lines: list[str] = []
    try:
        path.touch()
        *texts, cut = path.read_text(encoding="utf-8").split("\n")
        for number, text in enumerate([*texts, cut], 1):
            line = _object(text)
            answer = line.get("response") or {}
            known = {"custom_id", "response", "error"} <= line.keys() and isinstance(answer, dict)
            if not known and number <= len(texts):
                raise ConfigError(
                    f"--out {path} cannot be used: line {number} is not an answer of a batch and "
                    "would be lost; name another file."
                )
            status = answer.get("status_code") if known else None
            if isinstance(status, int) and status < FAILED:
                answered[str(line.get("custom_id"))] = status
                lines.append(text + "\n")
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--out {path} cannot be used: {error}.") from error
    return answered


def _object(text: str) -> Line:
    """Return a line's JSON object; {} if it is not one, such as a truncated line."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


async def _answer_all(
    loaded: Loaded,
    waiting: Sequence[Line],
    file: IO[str],
    progress: Callable[[str, int, int], None],
) -> int:
    """Run all requests and write each answer as it arrives. Returns the number that were not
    200.
    """
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
                file.write(_written(answer))
                file.flush()
                done += 1
                failed += answer["response"]["status_code"] != httpx.codes.OK
                progress("requests", done, len(waiting))

        await asyncio.gather(*(worker() for _ in range(loaded.config.max_sequences)))
    return failed


async def _answer(client: httpx.AsyncClient, line: Line) -> Line:
    """Send one request and return its line of the output."""
    kind = {"content-type": "application/json"}
    answer = await client.post(line["url"], content=line["body"], headers=kind)
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": answer.json(),
    }
    return _answered(line["custom_id"], response)
