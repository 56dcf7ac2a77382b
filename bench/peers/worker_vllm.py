"""vLLM's CPU build on the dequantised file."""

import os
import time

from protocol import Load, Stream, serve


class Vllm:
    """fp32, since AVX2 emulates bf16; its own n-gram speculation where asked."""

    def load(self, load: Load) -> None:
        """In this process: no server, no second interpreter."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
        os.environ["OMP_NUM_THREADS"] = str(load.threads)
        from vllm import LLM  # noqa: PLC0415 - the environment must be set first

        extra = {}
        if load.speculation:
            extra["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 4,
            }
        self.llm = LLM(load.folder, dtype="float32", max_model_len=load.context, **extra)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        """All prompts at once; per-stream first-token times come from its own metrics."""
        from vllm import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        begin = time.perf_counter()
        answers = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False
        )
        last = time.perf_counter() - begin
        return [Stream(float("nan"), last, list(a.outputs[0].token_ids)) for a in answers]


serve(Vllm())
