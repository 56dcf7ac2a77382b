"""Longest gap of a stream, and longest answer of /health, beside each kind of hostile request.

    python bench/attacks.py [ATTACK ...] [--models 1 2] [--seconds 6] [--out x.json]
    python bench/attacks.py --url http://127.0.0.1:8000 --model NAME [--api-key KEY]

Without `--url` it starts a toy server, of one model and then of two, whose steps take 10 ms. One
client always has a stream open, another asks /health; each attack is repeated for some seconds
beside them. "nothing" is the machine's own part: no gap means anything below it.
"""

import argparse
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from bench.records import ended, keep

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Send = Callable[[str, bytes], int]
"""Posts a body to a path and returns the status of the answer."""


def chat(model: str, **fields: Any) -> bytes:
    """Return the body of a short chat request with other fields."""
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 4} | fields).encode()


def completion(model: str, **fields: Any) -> bytes:
    """Return the body of a short completion with other fields."""
    return json.dumps({"model": model, "prompt": "Hi", "max_tokens": 4} | fields).encode()


def schema(rules: Any) -> dict[str, Any]:
    """Return the field that asks for a strict schema."""
    wrapped = {"name": "x", "strict": True, "schema": rules}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


def chain(definitions: int) -> dict[str, Any]:
    """Return a schema whose definitions each name the next one."""
    names = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(definitions)
    }
    return {"$defs": names | {f"d{definitions}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def called(arguments: str) -> list[dict[str, Any]]:
    """Return a history with a call of these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]


def attacks(model: str, context: int) -> dict[str, list[tuple[str, bytes]]]:
    """Return paths and bodies by what is attacked: 1 strings, 2 chunks (`dripped`), 3 models and
    bodies, 4 JSON in JSON, 5 long answers, 6 prompts.

    "3 loading" loads and unloads another model, where there is one.
    """
    nested = "[" + "[]," * 1_300_000 + "[]]"
    opened = b'{"prompt":"' + b"[" * 131_073
    escaped = completion(model, prompt="@").replace(b"@", b"\\u0061" * 50_000)
    wide = {f"p{i}": {"type": "string", "pattern": "^a{1,9}$"} for i in range(40_000)}
    tokens = list(range(97, 113)) * (context // 16)
    prompts = [tokens[i:-9] for i in range(8)]
    long = {"n": 8, "logprobs": 20, "max_tokens": 1500, "ignore_eos": True, "temperature": 1.5}
    tools = [{"type": "function", "function": {"name": "f", "parameters": chain(3400)}}]
    ollama = [
        json.dumps({"model": name, "prompt": "Hi", "options": {"num_predict": 4}, "keep_alive": 0})
        for name in (model, "other")
    ]
    return {
        "nothing": [],
        "1 escapes, never closed": [
            (COMPLETIONS, opened + b'\\"' * many) for many in (16_000, 120_000)
        ],
        "1 escapes, closed": [(COMPLETIONS, escaped)],
        "3 two containers a letter": [(COMPLETIONS, f'{{"prompt":{nested}}}'.encode())],
        "3 a name of 3 MB": [(COMPLETIONS, completion("x" * 3_000_000))],
        "3 keep_alive": [("/api/generate", ollama[0].replace(": 0}", ": 1e400}").encode())],
        "3 bodies of 4 MB": [(COMPLETIONS, completion(model, prompt="a " * 2_000_000))],
        "3 loading": [("/api/generate", ollama[1].encode())],
        "4 schema as text": [(CHAT, chat(model, json_schema=nested))],
        "4 arguments": [(CHAT, chat(model, messages=called(nested)))],
        "4 schema of 3 MB": [(CHAT, chat(model, **schema({"type": "object", "properties": wide})))],
        "4 definitions": [
            (CHAT, chat(model, **schema(chain(3400)))),
            (CHAT, chat(model, tools=tools, tool_choice="required")),
        ],
        "5 log-probabilities": [
            (COMPLETIONS, completion(model, **long)),
            (COMPLETIONS, completion(model, prompt=tokens[8:], echo=True, logprobs=20)),
        ],
        "6 prompts": [(COMPLETIONS, completion(model, prompt=prompts, max_tokens=1))],
    }


def sending(url: str, headers: dict[str, str]) -> Send:
    """Return what posts a body on a connection of its own."""

    def send(path: str, body: bytes) -> int:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        try:
            kind = {"content-type": "application/json"}
            connection.request("POST", path, body, kind | headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except OSError:  # It was closed before all was sent.
            return 0
        finally:
            connection.close()

    return send


def dripped(url: str, seconds: float) -> Iterator[int]:
    """Send chunks of one byte, without a key, for so long. Yields how each connection ended."""
    parts = urlsplit(url)
    piece = b"1\r\n \r\n" * 43_690
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("transfer-encoding", "chunked")
        connection.endheaders()
        with suppress(OSError):
            while time.monotonic() < until:
                connection.send(piece)
        connection.close()
        yield 0


class WaitingClients:
    """Two clients that wait: one always has a stream open, one asks /health again and again."""

    def __init__(self, url: str, model: str, headers: dict[str, str]) -> None:
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)
        self._model, self._end = model, threading.Event()
        self.gaps = {"stream": 0.0, "health": 0.0}
        self._since = dict.fromkeys(self.gaps, time.monotonic())
        self._threads = [threading.Thread(target=each) for each in (self._read, self._ask)]

    def __enter__(self) -> "WaitingClients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _note(self, name: str) -> None:
        now = time.monotonic()
        self.gaps[name] = max(self.gaps[name], now - self._since[name])
        self._since[name] = now

    def _read(self) -> None:
        body = json.loads(completion(self._model, max_tokens=1500, ignore_eos=True, stream=True))
        body["speculative"] = {"enabled": False}
        while not self._end.is_set():
            with self._http.stream("POST", COMPLETIONS, json=body) as answer:
                for _ in answer.iter_lines():
                    self._note("stream")
                    if self._end.is_set():
                        return

    def _ask(self) -> None:
        while not self._end.is_set():
            self._since["health"] = time.monotonic()
            self._http.get("/health")
            self._note("health")
            self._end.wait(0.05)


def beside(
    url: str, model: str, headers: dict[str, str], bodies: Any, seconds: float
) -> dict[str, Any]:
    """Return the longest gaps beside one attack by two clients, and the statuses of its answers."""
    send, until = sending(url, headers), time.monotonic() + seconds
    statuses: set[int] = set()

    def attack() -> None:
        if bodies is None:
            statuses.update(dripped(url, seconds))
        while bodies and time.monotonic() < until:
            statuses.update(send(path, body) for path, body in bodies)

    with WaitingClients(url, model, headers) as watched:
        threads = [threading.Thread(target=attack) for _ in range(2 if bodies else 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(max(until - time.monotonic(), 0.0))
    return {name: round(gap, 3) for name, gap in watched.gaps.items()} | {
        "statuses": sorted(statuses)
    }


def measured(url: str, model: str, args: argparse.Namespace, context: int) -> dict[str, Any]:
    """Return the rows of a server's table, printed as they come."""
    console, rows = Console(), {}
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    every: dict[str, Any] = attacks(model, context) | {"2 chunks of one byte": None}
    for name, bodies in sorted(every.items(), key=lambda item: (item[0] != "nothing", item)):
        if args.attacks and name.split()[0] not in args.attacks:
            continue
        rows[name] = row = beside(url, model, headers, bodies, args.seconds)
        console.print(f"{name:28} {row['stream']:7.3f} {row['health']:7.3f}  {row['statuses']}")
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", help="nothing, 1 to 6")
    parser.add_argument("--models", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--url")
    parser.add_argument("--model", default="toy")
    parser.add_argument("--api-key")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    Console().print("attack                       seconds: stream, /health; statuses")
    if args.url:
        results[args.url] = measured(args.url, args.model, args, 2048)
    else:
        from tests.worlds.servers import serving  # noqa: PLC0415 - where no server is given

        for count in args.models:
            names = ["toy", "other"][:count] if count > 1 else None
            Console().print(f"{count} model{'s' if count > 1 else ''}")
            with (
                tempfile.TemporaryDirectory() as folder,
                serving(Path(folder), delay=0.01, models=names) as server,
            ):
                results[f"{count}"] = measured(server.root, "toy", args, 4096)
    if args.out:
        keep(args.out, {"rows": results})


if __name__ == "__main__":
    ended(main)
