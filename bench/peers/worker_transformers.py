"""transformers on the dequantised file, eager, its own static batching."""

import time

import torch
from protocol import Load, Stream, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class _Clock(BaseStreamer):
    """Notes when the first new token came (the prompt is put first)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """bf16 is emulated on this class of machine's AVX2, so fp32 is the fair choice there."""

    def load(self, load: Load) -> None:
        """From the safetensors folder that `run.py` wrote from the same GGUF."""
        torch.set_num_threads(load.threads)
        self.speculation = load.speculation
        self.model = AutoModelForCausalLM.from_pretrained(load.folder, dtype=torch.float32)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        """One left-padded batch; first-token time is known for a single stream only."""
        begin = time.perf_counter()
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        clock = _Clock() if len(prompts) == 1 else None
        extra = {"prompt_lookup_num_tokens": 4} if self.speculation else {}
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
                streamer=clock if not self.speculation else None,
                **extra,
            )
        last = time.perf_counter() - begin
        first = clock.times[1] - begin if clock and len(clock.times) > 1 else float("nan")
        return [Stream(first, last, row[width:].tolist()) for row in out]


serve(Transformers())
