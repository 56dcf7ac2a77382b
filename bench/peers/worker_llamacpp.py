"""llama.cpp through llama-cpp-python: batched decoding over its C interface."""

import ctypes
import time

import llama_cpp as lib
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Load, Stream, serve


class LlamaCpp:
    """Plain decoding steps all sequences in one batch; its own prompt lookup knows one stream."""

    def load(self, load: Load) -> None:
        """One context for all streams."""
        self.speculation = load.speculation
        draft = LlamaPromptLookupDecoding(num_pred_tokens=4) if load.speculation else None
        self.llama = lib.Llama(
            model_path=load.gguf,
            n_ctx=load.context * load.streams,
            n_batch=512,
            n_threads=load.threads,
            n_threads_batch=load.threads,
            logits_all=load.speculation,
            draft_model=draft,
            verbose=False,
        )
        if not load.speculation:
            self._batched_context(load)

    def _batched_context(self, load: Load) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = load.context * load.streams
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = load.streams
        params.n_threads = params.n_threads_batch = load.threads
        params.kv_unified = True
        self.model = self.llama.model
        self.context = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(512, 0, 1)

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        """All prompts at once."""
        if self.speculation:
            assert len(prompts) == 1, "llama-cpp-python's prompt lookup serves one stream"
            return [self._speculate(prompts[0], max_tokens)]
        return self._decode(prompts, max_tokens)

    def _speculate(self, prompt: list[int], max_tokens: int) -> Stream:
        begin = time.perf_counter()
        tokens: list[int] = []
        first = 0.0
        self.llama.reset()
        for token in self.llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            first = first or time.perf_counter() - begin
            tokens.append(int(token))
            if len(tokens) == max_tokens:
                break
        return Stream(first, time.perf_counter() - begin, tokens)

    def _decode(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        begin = time.perf_counter()
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        firsts = [0.0] * len(prompts)
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), 512):
                chunk = prompt[start : start + 512]
                rows = [(token, start + i, sequence) for i, token in enumerate(chunk)]
                self._eval(rows, only_last=True)
            outputs[sequence].append(self._argmax(-1))
            firsts[sequence] = time.perf_counter() - begin
        for step in range(max_tokens - 1):
            rows = [(outputs[s][-1], len(prompts[s]) + step, s) for s in range(len(prompts))]
            self._eval(rows, only_last=False)
            for sequence in range(len(prompts)):
                outputs[sequence].append(self._argmax(sequence))
        last = time.perf_counter() - begin
        return [Stream(f, last, o) for f, o in zip(firsts, outputs, strict=True)]

    def _eval(self, rows: list[tuple[int, int, int]], only_last: bool) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = not only_last or i == len(rows) - 1
        if code := lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _argmax(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self.context, row)
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self.vocab)).contents
        return int(np.frombuffer(floats, np.float32).argmax())


serve(LlamaCpp())
