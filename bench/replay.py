"""What the control of speculation wins on recorded answers, on a virtual clock: no machine needed.

    python bench/replay.py record answers.json --prompts prompts.jsonl     once, with the model
    python bench/replay.py run answers.json [--rows 1 2 4 8] [--set PROBE_EVERY=64 ...]

`run` plays the answers back through the real n-gram drafter and the real policy. A step takes
what COSTS says of its nodes, LOOK_MS more where the drafter was asked, and NOISE; the policy sees
reports only, as in service. Printed: speed over plain decoding, tokens per step and row, and how
often speculation was disabled. `--wrong` replaces every draft by wrong tokens called likely.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from forerun.bench.workload import read_prompts
from forerun.build.engine import encode_chat, make_engine, open_target
from forerun.build.with_cpu import ngram_drafter
from forerun.client.completion import complete, make_request
from forerun.config import EngineConfig
from forerun.control import acceptance, adaptive, cost_model, slowdown_guard
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.report import step_report
from forerun.control.step_costs import StepCosts
from forerun.hub.catalog import shipped_draft
from forerun.interface.drafter import Drafter
from forerun.interface.plan import Outcome, Plan, SlotInit
from forerun.models.ngram_table import FILE, read_ngram_table
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft

COSTS = {
    "cpu": StepCosts((1, 2, 4, 8, 16, 32, 64), (4.0, 4.4, 5.2, 10.1, 20.1, 38.3, 78.8)),
    "flat": StepCosts((1, 8, 64, 256), (10.0, 10.5, 12.0, 20.0)),
    "steep": StepCosts((1, 2, 4, 8, 16, 64), (10.6, 16.1, 28.8, 54.8, 86.6, 312.0)),
}
LOOK_MS = 0.1
"""Of the drafter and of choosing, in a step that asks it (docs/log.md: 80 to 180 us a step)."""
NOISE = 0.05
"""Relative spread of a step's time. One step in fifty takes three times as long, and one in 300
begins a spell of fifty steps that take 1.4 times as long: neighbours."""


@dataclass
class Stream:
    """One slot: the answer it plays and how far it is."""

    prompt: list[int]
    output: list[int]
    done: int = 0

    @property
    def left(self) -> list[int]:
        """What is still to come."""
        return self.output[self.done :]


@dataclass
class Replay:
    """Plays answers over `rows` slots; counts steps, tokens and virtual milliseconds."""

    costs: StepCosts
    drafter: Drafter
    answers: Iterator[dict[str, list[int]]]
    wrong: bool = False
    policy: AdaptivePolicy = None  # type: ignore[assignment]
    ms: float = 0.0
    plain_ms: float = 0.0
    tokens: int = 0
    rows: int = 0
    verified: int = 0
    spell: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    streams: dict[int, Stream] = field(default_factory=dict)

    def fill(self, rows: int) -> bool:
        """Give free slots new answers; False when there is none left for anyone."""
        for slot in range(rows):
            if slot not in self.streams and (answer := next(self.answers, None)):
                self.streams[slot] = Stream(answer["prompt"], answer["output"], 1)
                text = np.array([*answer["prompt"], answer["output"][0]], np.int32)
                self.drafter.begin(SlotInit(slot, text, len(text) - 1, Sampling()))
                self.policy.open(slot)
        return bool(self.streams)

    def step(self) -> None:
        """Advance every stream once."""
        slots = np.array(sorted(self.streams), np.int32)
        streams = [self.streams[slot] for slot in slots.tolist()]
        kv_len = np.array([len(s.prompt) + s.done - 1 for s in streams], np.int32)
        budgets = self.policy.budgets(slots, kv_len)
        left = np.array([len(s.left) - 1 for s in streams])
        depth = np.minimum([b.depth for b in budgets], left).astype(np.int32)
        plan = Plan(
            slots=slots,
            kv_len=kv_len,
            known=tuple(np.zeros(1, np.int32) for _ in streams),
            samples=np.ones(len(slots), np.bool_),
            max_nodes=np.where(depth > 0, [b.nodes for b in budgets], 0).astype(np.int32),
            max_depth=depth,
            page_table=np.zeros((len(slots), 1), np.int32),
            constrained=np.zeros(len(slots), np.bool_),
            min_prob=min((b.min_prob for b in budgets if b.nodes), default=0.0),
        )
        drafts = [Draft()] * len(slots)
        if asked := bool(plan.max_nodes.any()):
            proposed = self.drafter.propose(plan)
            if self.wrong:
                proposed = [bad(min(int(d), 4)) for d in depth]
            drafts = self.policy.select(plan, self.policy.calibrate(plan, proposed))
        self._settle(plan, streams, drafts, asked)

    def _settle(self, plan: Plan, streams: list[Stream], drafts: list[Draft], asked: bool) -> None:
        out = [s.left[: accepted(d, s.left) + 1] for s, d in zip(streams, drafts, strict=True)]
        counts = np.array(list(map(len, out)), np.int32)
        tokens = np.full((len(out), counts.max()), -1, np.int32)
        for row, said in enumerate(out):
            tokens[row, : len(said)] = said
        sizes = np.array(list(map(len, drafts)), np.int32)
        outcome = Outcome(counts, tokens, sizes, np.ones(len(out), np.bool_))
        self.drafter.observe(plan, None, outcome)  # type: ignore[arg-type]
        nodes = len(out) + int(sizes.sum())
        noise = float(self.random.normal(1.0, NOISE)) * (3.0 if self.random.random() < 0.02 else 1)
        self.spell = 50 if self.random.random() < 1 / 300 else max(self.spell - 1, 0)
        noise *= 1.4 if self.spell else 1.0
        step = float(self.costs.verify(np.array(nodes)))
        look = LOOK_MS * asked
        self.policy.observe(
            step_report(
                plan,
                outcome,
                False,
                {"draft": look, "verify": step * noise, "mask": 0.0},
                step * noise + look,
            )
        )
        self.ms += step + look
        self.plain_ms += float(self.costs.verify(np.array(len(out)))) * counts.sum() / len(out)
        self.tokens += int(counts.sum())
        self.rows += len(out)
        self.verified += int(sizes.sum())
        for slot, stream, said in zip(plan.slots.tolist(), streams, out, strict=True):
            stream.done += len(said)
            if not stream.left:
                self.drafter.end(slot)
                del self.streams[slot]


def bad(count: int) -> Draft:
    """Tokens that no text continues with, called likely."""
    parents = np.arange(-1, count - 1, dtype=np.int32)
    return Draft(np.full(count, 3, np.int32), parents, np.full(count, 0.9, np.float32))


def accepted(draft: Draft, truth: list[int]) -> int:
    """Length of the path below the root that spells the truth; one token is the target's own."""
    node, length = -1, 0
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    for token in truth[:-1]:
        below = [i for i, above in enumerate(parents) if above == node and tokens[i] == token]
        if not below:
            break
        node, length = below[0], length + 1
    return length


def record(path: Path, prompts: Path | None, count: int, tokens: int) -> None:
    """Answers of the default model, half of them greedy."""
    target = open_target(EngineConfig(kv_tokens=16384, context=2048))
    engine = make_engine(target, target.config)
    engine.start()
    requests = [
        make_request(
            encode_chat(target, prompt.messages),
            target.tokenizer.eos_ids,
            max_tokens=tokens,
            temperature=0.8 * (index % 2),
            seed=index,
        )
        for index, prompt in enumerate(islice(read_prompts(prompts), count))
    ]
    done = complete(engine, requests, 4)
    engine.shutdown()
    target.close()
    answers = [
        {"prompt": request.prompt.tolist(), "output": list(choice.tokens)}
        for request, (choice,) in zip(requests, done, strict=True)
    ]
    path.write_text(json.dumps(answers))


def run(options: argparse.Namespace) -> None:
    """Print one line per cost table and number of rows."""
    for change in options.set:
        name, value = change.split("=")
        for module in (acceptance, adaptive, cost_model, slowdown_guard):
            if hasattr(module, name):
                setattr(module, name, type(getattr(module, name))(float(value)))
    answers = [a for a in json.loads(options.answers.read_text()) if len(a["output"]) > 1]
    draft = shipped_draft("smollm2-135m")
    table = read_ngram_table(Path(draft) / FILE, 49152) if draft else None
    for name in options.tables:
        for rows in options.rows:
            played = islice(cycle(answers), max(len(answers), 8 * rows))
            replay = Replay(COSTS[name], ngram_drafter(rows, table), played, options.wrong)
            told = COSTS[options.told or name]
            while head := list(islice(played, options.fresh * rows or None)):
                replay.policy = AdaptivePolicy(told, 8, 8, free=True)
                replay.answers = iter(head)
                while replay.fill(rows):
                    replay.step()
            facts = replay.policy.describe()
            sys.stdout.write(
                f"{name:6} {rows:3} rows: {replay.plain_ms / replay.ms:.3f} of plain, "
                f"{replay.tokens / replay.rows:.2f} tokens per step, "
                f"{replay.verified / replay.rows:.2f} draft tokens, "
                f"disabled {facts['times_disabled']}\n"
            )


def main() -> None:
    """Record or run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "run"))
    parser.add_argument("answers", type=Path)
    parser.add_argument("--prompts", type=Path, help="jsonl of chats (default: built in)")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tables", nargs="+", default=list(COSTS))
    parser.add_argument("--set", nargs="*", default=[], help="constants of control/constants.py")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--fresh", type=int, default=0, help="a new policy after so many answers")
    parser.add_argument("--told", choices=COSTS, help="what start-up measured, if not the truth")
    options = parser.parse_args()
    if options.what == "record":
        record(options.answers, options.prompts, options.count, options.tokens)
    else:
        run(options)


if __name__ == "__main__":
    main()
