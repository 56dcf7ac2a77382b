"""OpenVINO GenAI's continuous batching behind the part of the OpenAI chat API that we measure.

    python server_openvino.py MODEL.gguf THREADS PORT

OpenVINO GenAI brings no server of its own on the registry; this adds nothing to its pipeline but
HTTP: one thread steps the pipeline, each request polls its own handle.
"""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

MODEL, THREADS, PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Pipeline:
    """The pipeline and the thread that steps it."""

    def __init__(self) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.dynamic_split_fuse = True
        self.pipe = genai.ContinuousBatchingPipeline(
            MODEL, scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS}
        )
        self.tokenizer = self.pipe.get_tokenizer()
        self.lock, self.work = threading.Lock(), threading.Event()
        self.number = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, messages: list[dict[str, Any]], tokens: int) -> Any:
        """A handle to the answer."""
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.do_sample, config.ignore_eos = False, True
        with self.lock:
            self.number += 1
            handle = self.pipe.add_request(self.number, prompt, config)
        self.work.set()
        return handle

    def _run(self) -> None:
        while True:
            self.work.wait()
            with self.lock:
                if self.pipe.has_non_finished_requests():
                    self.pipe.step()
                else:
                    self.work.clear()


pipeline = Pipeline()


async def chat(request: Request) -> StreamingResponse:
    """A streamed answer."""
    body = await request.json()
    handle = await asyncio.to_thread(pipeline.add, body["messages"], body["max_tokens"])

    async def events() -> AsyncIterator[str]:
        count = 0
        while count < body["max_tokens"]:
            if not handle.can_read():
                await asyncio.sleep(0.0005)
                continue
            for output in handle.read().values():
                ids = list(output.generated_ids)
                count += len(ids)
                delta = {"choices": [{"delta": {"content": pipeline.tokenizer.decode(ids) or " "}}]}
                yield f"data: {json.dumps(delta)}\n\n"
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
uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=PORT, log_level="warning")
