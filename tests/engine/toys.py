"""The toy target once more, written from its definition, and engines on it for tests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from forerun.control.policy import FixedPolicy
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.none import NoDrafter
from forerun.engine.request import Delta, Finish, Request, Stopping, choice_seed
from forerun.engine.thread import Engine, EngineOptions
from forerun.executors.toy import ToyExecutor
from forerun.interface.executor import ExecutorLimits
from forerun.interface.grammars import NoGrammars
from forerun.interface.slot_init import SlotInit
from forerun.speculative.accept import choose
from forerun.speculative.sampling import History, Sampling, process
from forerun.text.tokenizer import Tokenizer
from tests.engine.carrying import CarryingToy
from tests.engine.drafters import AdversaryDrafter, ErraticDrafter, OracleDrafter

VOCAB, ENDS = 259, (257, 258)
TOKENIZER = Tokenizer.byte_level()
GREEDY = Sampling(temperature=0.0, stop_tokens=ENDS)


def limits(
    page_size=4, pages=64, slots=4, max_nodes=16, context=192, max_scored=None, row_nodes=()
):
    return ExecutorLimits(page_size, pages, slots, max_nodes, context, VOCAB, max_scored, row_nodes)


def best(tokens: Sequence[int]) -> int:
    """The most likely next token, straight from the module docstring of the toy."""
    s, x, y = sum(tokens), tokens[-1], tokens[-2] if len(tokens) > 1 else 0
    return 257 if s % 256 == 0 else 97 + (x + 3 * y + 2 * s) % 16


def logits(tokens: Sequence[int]):
    away = (np.arange(VOCAB) - best(tokens)) % VOCAB
    return (-away / 2).astype(np.float32)


def following(tokens: Sequence[int], count: int, sampling=GREEDY, prompt_len=None) -> list[int]:
    """What plain decoding emits, one token at a time, blind to stop tokens."""
    text = list(tokens)
    prompt_len = len(text) if prompt_len is None else prompt_len
    for _ in range(count):
        history = History(np.array(text, np.int32), prompt_len)
        processed = process(logits(text), sampling, history)
        text.append(choose(processed, sampling, len(text) - prompt_len))
    return text[len(tokens) :]


def reference(request: Request, index: int = 0) -> tuple[list[int], str, Finish]:
    """Tokens, text and finish reason of one choice, decoded sequentially."""
    sampling = replace(request.sampling, seed=choice_seed(request.sampling.seed, index))
    stopping, text = request.stopping, ""
    out: list[int] = []
    early = 0  # Characters of the text before min_tokens, in which no stop string is complete.
    tokens = following(request.prompt.tolist(), stopping.max_tokens, sampling)
    for token in tokens:
        if len(out) <= sampling.min_tokens:
            early = len(text)
        out.append(token)
        if token in stopping.stop_tokens:
            return out, text, Finish.STOP
        text = TOKENIZER.decode(out, request.skip_special_tokens)
        hits = [
            (text.find(stop, max(0, early - len(stop) + 1)) + len(stop), -len(stop))
            for stop in stopping.stop
            if text.find(stop, max(0, early - len(stop) + 1)) >= 0
        ]
        if hits and len(out) > sampling.min_tokens:
            end, length = min(hits)
            return out, text[: end if stopping.include_stop else end + length], Finish.STOP
    return out, text, Finish.LENGTH


def foresee(slot_init: SlotInit, text: list[int], count: int) -> list[int]:
    return following(text, count, slot_init.sampling, slot_init.prompt_len)


def drafter(name: str, slots: int):
    return {
        "none": NoDrafter,
        "ngram": lambda: NgramDrafter(slots),
        "oracle": lambda: OracleDrafter(foresee),
        "adversary": lambda: AdversaryDrafter(foresee, VOCAB),
        "likeliest": lambda: OracleDrafter(lambda _, text, count: following(text, count)),
        "erratic": lambda: ErraticDrafter(foresee, VOCAB, seed=5),
    }[name]()


def make(name="none", nodes=4, depth=4, executor=None, policy=None, **shape) -> Engine:
    """An engine on the toy, not started. shape: see `limits`; options: max_waiting, ..."""
    names = ("max_waiting", "max_choices", "max_failures", "overlap")
    options = EngineOptions(**{key: shape.pop(key) for key in names if key in shape})
    executor = executor or ToyExecutor(limits(**shape))
    policy = policy or (FixedPolicy(nodes, depth) if name != "none" else FixedPolicy(0, 0))
    chosen = drafter(name, executor.limits.slots)
    if isinstance(executor, CarryingToy):
        executor.guided_by(chosen)
    return Engine(executor, chosen, policy, TOKENIZER, NoGrammars(), options)


def ask(id="r", prompt="Hello", max_tokens=16, **changes) -> Request:
    """A greedy request; `changes` are fields of Request, Stopping or Sampling."""
    tokens = np.array(list(prompt.encode()), np.int32) if isinstance(prompt, str) else prompt
    pools = {"stopping": Stopping(max_tokens, stop_tokens=ENDS), "sampling": GREEDY, "request": {}}
    for key, value in changes.items():
        if key in Stopping.__dataclass_fields__ and key != "stop_tokens":
            pools["stopping"] = replace(pools["stopping"], **{key: value})
        elif key == "stop_tokens":
            pools["stopping"] = replace(pools["stopping"], stop_tokens=value)
            pools["sampling"] = replace(pools["sampling"], stop_tokens=value)
        elif key in Sampling.__dataclass_fields__:
            pools["sampling"] = replace(pools["sampling"], **{key: value})
        else:
            pools["request"][key] = value
    return Request(
        id, np.asarray(tokens, np.int32), pools["sampling"], pools["stopping"], **pools["request"]
    )


def ints(*values):
    return np.array(values, np.int32)


def full_disk(write, failing):
    """`write` (cache.folder.write_at), which from its call number `failing` on finds no room."""
    calls = count()

    def full(*work):
        if next(calls) >= failing:
            raise OSError(28, "No space left on device")
        write(*work)

    return full


class RecordingSink:
    """A sink that records deltas, and asserts that none follows an end."""

    def __init__(self):
        self.deltas: list[Delta] = []
        self.ended: set[tuple[str, int]] = set()

    def __call__(self, delta: Delta) -> None:
        key = (delta.request, delta.index)
        assert key not in self.ended, f"{key} goes on after its end"
        self.deltas.append(delta)
        if delta.finish is not None:
            self.ended.add(key)

    def of(self, id="r", index=0) -> list[Delta]:
        return [d for d in self.deltas if (d.request, d.index) == (id, index)]

    def text(self, id="r", index=0) -> str:
        return "".join(d.text for d in self.of(id, index))

    def tokens(self, id="r", index=0) -> list[int]:
        return [token for d in self.of(id, index) for token in d.tokens]

    def last(self, id="r", index=0) -> Delta:
        return self.of(id, index)[-1]

    def expect(self, *requests: Request) -> None:
        """Every choice of each request is what sequential decoding says."""
        for request in requests:
            for index in range(request.n):
                tokens, text, finish = reference(request, index)
                assert self.tokens(request.id, index) == tokens
                assert self.text(request.id, index) == text
                assert self.last(request.id, index).finish == finish


def run(engine: Engine, *requests: Request, check=True) -> RecordingSink:
    """Submit and run to the end, checking for leaks after every step."""
    sink = RecordingSink()
    submit(engine, sink, *requests)
    finish(engine, check)
    return sink


def submit(engine: Engine, sink: RecordingSink, *requests: Request) -> None:
    for request in requests:
        engine.submit(request, sink)


def step(engine: Engine, times: int) -> None:
    for _ in range(times):
        engine.step_once()


def finish(engine: Engine, check=True) -> None:
    while engine.step_once():
        if check:
            engine.check()
    assert engine.stats().load.pages_held == 0
