"""Cases of differential fuzzing: their definition and random generation."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.options.algorithms import Algorithm, capacity
from forerun.types import Ints

SHAPES = ("page_size", "max_sequences", "chunked_prefill_size", "context", "kv_tokens")
"""Fields that change the executor, which then has to be opened again."""


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """One request of a case.

    prompt    token ids
    options   keyword options of forerun.client.completion.make_request
    grammar   a name of fuzz.GRAMMARS, or None
    speculation  fields of forerun.engine.request.Speculation
    arrives   step before which it is submitted
    aborts    step before which it is aborted, or None
    """

    prompt: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    grammar: str | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    arrives: int = 0
    aborts: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Fields of EngineConfig that differ from the given configuration, and the requests."""

    changes: dict[str, Any]
    requests: tuple[FuzzRequest, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed case, its number (from 1) among those that its seed draws, and what was wrong, as
    text.
    """

    number: int
    case: Case
    what: str


class CaseSource:
    """Draws cases from a seed.

    texts    int32[.] token ids that prompts are cut from
    vocab    V, vocabulary size
    overlap  whether the executor can overlap steps
    grammars names of the grammars that requests may have
    """

    def __init__(
        self, texts: list[Ints], vocab: int, overlap: bool, grammars: Iterable[str], seed: int
    ) -> None:
        self._texts, self._vocab, self._overlap = texts, vocab, overlap
        self._grammars = tuple(grammars)
        self._random = np.random.default_rng(seed)

    def _pick(self, *values: Any) -> Any:
        return values[int(self._random.integers(len(values)))]

    def shape(self) -> dict[str, Any]:
        """Draw the EngineConfig fields in SHAPES, with which the executor is opened. Advances the
        random generator.
        """
        return {
            "page_size": self._pick(1, 2, 16, 16, 64),
            "max_sequences": self._pick(1, 4, 8, 16),
            "chunked_prefill_size": self._pick(16, 64, 512),
            "context": 256,
            "kv_tokens": self._pick(256, 256, 256, 2048),
        }

    def drafting(self, method: Algorithm) -> dict[str, Any]:
        """Draw EngineConfig fields, valid together, with which an engine speculates with `method`;
        in one of ten cases speculation is off. Advances the random generator.
        """
        if self._random.random() < 0.1:
            return {"speculative_algorithm": "OFF"}
        shape: dict[str, Any] = {}
        nodes = self._pick(1, 2, 4, 8, 16)
        steps = min(nodes, self._pick(1, 2, 4, 8), method.max_steps or nodes)
        if method.model and method.name != "AUTO":
            width = min(self._pick(1, 2, 4), method.max_topk or 4)
            nodes = min(nodes, capacity(steps, width, method.block) - 1)
            shape = {"speculative_eagle_topk": width}
        return shape | {
            "speculative_num_draft_tokens": nodes + 1,
            "speculative_num_steps": steps,
            "policy": self._pick("fixed", "fixed", "adaptive"),
            "overlap": self._overlap and self._pick(False, True),
        }

    def requests(self) -> tuple[FuzzRequest, ...]:
        """Draw 1 to 9 requests with any sampling parameters, arriving within 40 steps. Some share a
        prompt, so that the prefix cache is used; some are aborted. Advances the random generator.
        """
        requests: list[FuzzRequest] = []
        for _ in range(int(self._random.integers(1, 10))):
            again = requests and self._random.random() < 0.3
            prompt = self._pick(*(one.prompt for one in requests)) if again else self._prompt()
            arrives = int(self._random.integers(0, 40))
            aborts = arrives + int(self._random.integers(1, 30))
            requests.append(
                FuzzRequest(
                    prompt=prompt,
                    options=self._options(),
                    grammar=self._pick(*self._grammars) if self._random.random() < 0.25 else None,
                    speculation=self._pick({}, {}, {}, {"max_nodes": 2}, {"enabled": False}),
                    arrives=arrives,
                    aborts=aborts if self._random.random() < 0.15 else None,
                )
            )
        return tuple(requests)

    def _prompt(self) -> tuple[int, ...]:
        text: Ints = self._texts[int(self._random.integers(len(self._texts)))]
        length = int(self._random.integers(1, min(len(text), 90) + 1))
        ids = text[:length].tolist()
        if self._random.random() < 0.2:  # Repetition, for n-gram lookup.
            ids = (ids[-12:] * 8)[:90]
        return tuple(ids)

    def _options(self) -> dict[str, Any]:
        """Draw sampling parameters; most stay at their defaults."""
        ids = self._random.integers(0, self._vocab, 3).tolist()
        usual: dict[str, tuple[Any, ...]] = {
            "temperature": (0.0, 0.0, 0.3, 0.8, 1.5),
            "seed": (0, 1, 2**63 - 1),
            "top_k": (0, 0, 0, 1, 20),
            "top_p": (1.0, 1.0, 0.9, 0.5),
            "min_p": (0.0, 0.0, 0.05),
            "repetition_penalty": (1.0, 1.0, 1.2, 0.9),
            "frequency_penalty": (0.0, 0.0, 0.7),
            "presence_penalty": (0.0, 0.0, -0.5),
            "logit_bias": ((), (), tuple((token, 4.0) for token in ids)),
            "logprobs": (None, None, None, 0, 3),
            "prompt_logprobs": (None,) * 7 + (1,),
            "min_tokens": (0, 0, 0, 5),
            "stop_token_ids": ((), (), (), tuple(ids)),
            "n": (1, 1, 1, 3),
            "stop": ((), (), ("e",), ("th", "an o")),
            "include_stop": (False, True),
            "ignore_eos": (False, True),
        }
        options = {name: self._pick(*values) for name, values in usual.items()}
        longest = self._pick(48, 48, 150)
        return options | {"max_tokens": int(self._random.integers(5, longest))}
