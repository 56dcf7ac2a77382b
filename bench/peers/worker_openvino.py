"""OpenVINO GenAI's continuous batching on the same GGUF."""

import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Load, Stream, serve


class OpenVino:
    """It reads GGUF directly and keeps its own 4-bit form."""

    def load(self, load: Load) -> None:
        """Compile the pipeline."""
        self.pipe = genai.LLMPipeline(load.gguf, "CPU", INFERENCE_NUM_THREADS=load.threads)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        """One left-padded batch."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.do_sample, config.ignore_eos = False, True
        width = max(map(len, prompts))
        ids = np.array([[0] * (width - len(p)) + p for p in prompts], np.int64)
        mask = np.array([[0] * (width - len(p)) + [1] * len(p) for p in prompts], np.int64)
        begin = time.perf_counter()
        result = self.pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask)), config)
        last = time.perf_counter() - begin
        first = result.perf_metrics.get_ttft().mean / 1000
        return [Stream(first, last, list(row)) for row in result.tokens]


serve(OpenVino())
