"""OpenVINO GenAI's continuous batching behind the part of the OpenAI chat API that we measure.

OpenVINO GenAI brings no server of its own on the registry; this adds nothing to its pipeline but
HTTP. One thread owns the pipeline: before each step it takes in new requests, after it
hands each request its tokens, decoded in one call. Nothing polls, and nothing waits for a lock.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("threads", type=int)
    parser.add_argument("port", type=int, help="to listen on, at 127.0.0.1")
    return parser.parse_args()


ARGS = arguments()  # --help needs none of the packages below, which the peer's environment has.

import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


@dataclass(frozen=True)
class Ask:
    """One request on its way to the pipeline.

    loop, news  where its pieces go: text, and how many tokens it is
    """

    messages: list[dict[str, Any]]
    tokens: int
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[tuple[str, int]]

    def tell(self, text: str, count: int) -> None:
        """From the pipeline's thread."""
        self.loop.call_soon_threadsafe(self.news.put_nowait, (text, count))


class Pipeline:
    """The pipeline, the requests that wait for it, and the thread that steps it."""

    def __init__(self) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self.pipe = genai.ContinuousBatchingPipeline(
            ARGS.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": ARGS.threads}
        )
        self.tokenizer = self.pipe.get_tokenizer()
        self.waiting: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _add(self, number: int, ask: Ask) -> Any:
        prompt = self.tokenizer.apply_chat_template(ask.messages, add_generation_prompt=True)
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = ask.tokens
        config.do_sample, config.ignore_eos = False, True
        return self.pipe.add_request(number, prompt, config)

    def _run(self) -> None:
        number, active = 0, dict[int, tuple[Ask, Any, int]]()
        while True:
            while not active or not self.waiting.empty():
                ask, number = self.waiting.get(), number + 1
                active[number] = (ask, self._add(number, ask), ask.tokens)
            self.pipe.step()
            finished = []
            for key, (_, handle, _) in active.items():
                if handle.can_read():
                    pieces = handle.read().values()
                    finished.append((key, [i for piece in pieces for i in piece.generated_ids]))
            texts = self.tokenizer.decode([ids for _, ids in finished]) if finished else []
            for (key, ids), text in zip(finished, texts, strict=True):
                ask, handle, left = active.pop(key)
                ask.tell(text or " ", len(ids))
                if left > len(ids):
                    active[key] = (ask, handle, left - len(ids))


pipeline = Pipeline()


async def chat(request: Request) -> StreamingResponse:
    """A streamed answer."""
    body = await request.json()
    news: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    wanted = body["max_tokens"]
    pipeline.waiting.put(Ask(body["messages"], wanted, asyncio.get_running_loop(), news))

    async def events() -> AsyncIterator[str]:
        count = 0
        while count < wanted:
            text, more = await news.get()
            count += more
            yield f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"
        usage = {"choices": [], "usage": {"completion_tokens": count}}
        yield f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(_: Request) -> JSONResponse:
    """The one model."""
    return JSONResponse({"data": [{"id": "model"}]})


async def health(_: Request) -> JSONResponse:
    """Ready as soon as it answers: the pipeline is compiled before."""
    return JSONResponse({})


routes = [
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/models", models),
    Route("/health", health),
]
uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=ARGS.port, log_level="warning")
