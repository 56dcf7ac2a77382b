"""What the control of speculation wins on recorded answers, on a virtual clock: no machine needed.

    python bench/replay.py record answers.json --prompts prompts.jsonl     once, with a model
        [--model MODEL.gguf --raw]                                         base models: no template
    python bench/replay.py run answers.json [--rows 1 2 4 8] [--set PLAIN_EVERY=64 ...]
        [--table TABLE.safetensors | none] [--capacity 1000000] [--draft-tokens 8 --always]

Answers keep the temperature and seed that they were sampled with: the drafter knows the noise of
their positions, as in service.

`run` plays the answers back through the real n-gram drafter and the real policy. A step takes
what COSTS says of its nodes, LOOK_MS and ROW_LOOK_MS more where the drafter ran, and NOISE;
the policy sees reports only, as in service. Printed, of `--seeds` runs: speed over plain decoding
(mean, range, and range of rounds, which have a policy each); of plain decoding's time what was lost
(below 0: won) by verifying draft tokens, and what by looking for them; tokens per step and row, and
draft tokens. `--wrong` replaces every draft by wrong tokens called likely; `--oracle` verifies of
what was found exactly what comes true, which no policy can better. A server's first round:
`--tokens 96 --fresh 1 --startup --warm 8`: a new policy, which has what start-up measured from
noisy steps, and saw short answers end one after another before.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from bench.records import ended
from forerun.build.calibration import NODES, REPEATS, SECONDS, estimated_ms
from forerun.build.engine import encode_chat, make_engine
from forerun.build.target import open_target
from forerun.build.with_cpu import ngram_drafter
from forerun.client.completion import complete, make_request
from forerun.control import account, adaptive, costs, host_drafts
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.constants import MIN_REPEATS
from forerun.control.policy import FixedPolicy, Policy
from forerun.control.step_costs import StepCosts
from forerun.drafts.ngram_table import FILE, NgramTable, read_ngram_table
from forerun.engine.step import step_report
from forerun.hub.catalog import shipped_draft
from forerun.interface.drafter import Drafter, DrafterTraits
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft
from forerun.types import Ints

COSTS = {
    "cpu": StepCosts((1, 2, 4, 8, 16, 32, 64), (4.0, 4.4, 5.2, 10.1, 20.1, 38.3, 78.8)),
    "zen3": StepCosts((1, 2, 3, 4, 6, 8, 16, 64), (3.4, 3.8, 4.2, 5.1, 7.3, 9.2, 17.2, 67.2)),
    "xeon512": StepCosts(
        (1, 2, 3, 4, 6, 8, 16, 64), (2.78, 2.84, 3.32, 3.77, 4.59, 5.47, 10.2, 38.2)
    ),
    "zen4": StepCosts(
        (1, 2, 4, 6, 8, 12, 16, 64), (2.73, 2.77, 3.36, 4.32, 5.30, 7.12, 9.07, 32.0)
    ),
    "many": StepCosts((1, 4, 8, 16, 32, 64, 128), (2.9, 3.4, 5.8, 11.5, 22.0, 44.0, 88.0)),
    "flat": StepCosts((1, 8, 64, 256), (10.0, 10.5, 12.0, 20.0)),
    "gemma": StepCosts((1, 4, 8, 16, 64), (9.1, 10.5, 11.0, 14.2, 35.8)),
    "steep": StepCosts((1, 2, 4, 8, 16, 64), (10.6, 16.1, 28.8, 54.8, 86.6, 312.0)),
}
LOOK_MS, ROW_LOOK_MS = 0.1, 0.01
"""Of the drafter and of choosing, in a step that asks it, and of every row of it (80
to 180 us a step of few rows, 1 ms of 64)."""
TREE_MS = {"many": 0.7}
"""What a step with draft tokens takes longer whatever their number, where the table does not say
it (1.2 of 80 ms beside 64 rows)."""
ROW_MS = {"many": 0.05}
"""What every row adds that start-up does not see: its news, and its own context. Assumed: the host
alone takes 2 ms of 64 rows, their contexts more."""
TUNED = sys.modules[__name__], account, adaptive, host_drafts, costs
"""Where constants are read that --set changes."""
NOISE = 0.05
"""Relative spread of a step's time. One step in fifty takes three times as long, and one in 300
begins a spell of fifty steps that take 1.4 times as long: neighbours."""


class Answer(NamedTuple):
    """One that the target gave."""

    prompt: Ints
    sampling: Sampling
    output: list[int]


@dataclass
class Stream:
    """One slot: the answer it plays and how far it is."""

    prompt: list[int]
    output: list[int]
    done: int
    text: TokenText

    @property
    def left(self) -> list[int]:
        """What is still to come."""
        return self.output[self.done :]


class Machine:
    """What steps take, by a table and by what it does not say, with neighbours that come and go."""

    def __init__(self, table: str, seed: int) -> None:
        self.costs, self.random = COSTS[table], np.random.default_rng(seed)
        self._row_ms, self._tree_ms = ROW_MS.get(table, 0.0), TREE_MS.get(table, 0.0)
        self._spell = 0

    def ms(self, rows: int, nodes: int) -> float:
        """Of a step when nothing disturbs it."""
        more = self._row_ms * rows + self._tree_ms * (nodes > rows)
        return float(self.costs.verify(np.array(nodes))) + more

    def noise(self) -> float:
        """What the next step takes of that."""
        noise = float(self.random.normal(1.0, NOISE)) * (3.0 if self.random.random() < 0.02 else 1)
        self._spell = 50 if self.random.random() < 1 / 300 else max(self._spell - 1, 0)
        return noise * (1.4 if self._spell else 1.0)

    def start_up(self) -> StepCosts:
        """What start-up measures here."""
        times: dict[int, list[float]] = {nodes: [] for nodes in sorted(NODES)}
        for _ in range(REPEATS):
            for nodes, taken in times.items():
                if len(taken) < MIN_REPEATS or sum(taken) < SECONDS / len(times):
                    ms = self.noise() * float(self.costs.verify(np.array(nodes)))
                    taken.append(ms / 1000.0)
        return StepCosts(tuple(times), estimated_ms(times))


@dataclass
class Replay:
    """Plays answers over `rows` slots; counts steps, tokens and virtual milliseconds."""

    machine: Machine
    drafter: Drafter
    wrong: bool = False
    oracle: bool = False
    answers: Iterator[Answer] = field(default_factory=lambda: iter(()))
    policy: Policy = None  # type: ignore[assignment]
    ms: float = 0.0
    plain_ms: float = 0.0
    look_ms: float = 0.0
    tokens: int = 0
    rows: int = 0
    verified: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)

    def fill(self, rows: int) -> bool:
        """Give free slots new answers; False when there is none left for anyone."""
        for slot in range(rows):
            if slot not in self.streams and (answer := next(self.answers, None)):
                prompt, sampling, output = answer
                text = TokenText(np.append(prompt, output[0]))
                self.streams[slot] = Stream(prompt.tolist(), output, 1, text)
                self.drafter.begin(SlotInit(slot, text, len(prompt), sampling))
        return bool(self.streams)

    def step(self) -> None:
        """Advance every stream once."""
        slots = np.array(sorted(self.streams), np.int32)
        streams = [self.streams[slot] for slot in slots.tolist()]
        kv_len = np.array([len(s.prompt) + s.done - 1 for s in streams], np.int32)
        decision = self.policy.decide(slots, kv_len)
        budgets = decision.rows
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
            min_prob=budgets[0].min_prob,
            node_costs=decision.node_costs,
        )
        drafts, proposed = [Draft()] * len(slots), list[Draft]()
        if bool(plan.max_nodes.any()):
            proposed = self.drafter.propose(plan)
            if self.wrong:
                proposed = [bad(min(int(d), 4)) for d in depth]
            drafts = decision.select(proposed) if decision.select else proposed
            if self.oracle:
                pairs = zip(drafts, streams, strict=True)
                drafts = [chain(s.left[: accepted(draft, s.left)]) for draft, s in pairs]
        self._settle(plan, streams, drafts, proposed, decision.reason)

    def _settle(
        self,
        plan: Plan,
        streams: list[Stream],
        drafts: list[Draft],
        proposed: list[Draft],
        reason: str,
    ) -> None:
        out = [s.left[: accepted(d, s.left) + 1] for s, d in zip(streams, drafts, strict=True)]
        counts = np.array(list(map(len, out)), np.int32)
        tokens = np.full((len(out), counts.max()), -1, np.int32)
        for row, (said, stream) in enumerate(zip(out, streams, strict=True)):
            tokens[row, : len(said)] = said
            stream.text.append(said)
        sizes = np.array(list(map(len, drafts)), np.int32)
        outcome = Outcome(counts, tokens, sizes, np.ones(len(out), np.bool_))
        self.drafter.observe(plan, None, outcome)  # type: ignore[arg-type]
        nodes = len(out) + int(sizes.sum())
        noise, step = self.machine.noise(), self.machine.ms(len(out), nodes)
        look = bool(proposed) * (LOOK_MS + ROW_LOOK_MS * len(out))
        stages = {"draft": look, "verify": step * noise, "mask": 0.0}
        report = step_report(plan, outcome, stages, step * noise + look)
        self.policy.observe(replace(report, reason=reason, proposed=proposed))
        self.ms += step + look
        self.look_ms += look
        self.plain_ms += self.machine.ms(len(out), len(out)) * int(counts.sum()) / len(out)
        self.tokens += int(counts.sum())
        self.rows += len(out)
        self.verified += int(sizes.sum())
        for slot, stream, said in zip(plan.slots.tolist(), streams, out, strict=True):
            stream.done += len(said)
            if not stream.left:
                self.drafter.end(slot)
                del self.streams[slot]


def chain(tokens: list[int]) -> Draft:
    """A path of these tokens, called likely."""
    parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
    return Draft(np.array(tokens, np.int32), parents, np.full(len(tokens), 0.9, np.float32))


def bad(count: int) -> Draft:
    """Tokens that no text continues with."""
    return chain([3] * count)


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


def answers_to(
    prompts: Path | None,
    temperatures: Sequence[float],
    count: int,
    tokens: int,
    ignore_eos: bool = False,
    model: str = EngineConfig().model,
    raw: bool = False,
) -> list[Answer]:
    """Return a model's answers without a draft to the first `count` chats of a file (None: built
    in), `tokens` long at most; the temperatures in turns.

    raw  the last message is the prompt as it is, for models without a chat template
    """
    target = open_target(EngineConfig(model=model, speculative_algorithm="NONE", context=2048))

    def encoded(messages: Sequence[dict[str, Any]]) -> Ints:
        if raw:
            return np.array(target.tokenizer.encode(messages[-1]["content"], bos=True), np.int32)
        return encode_chat(target, messages)

    engine = make_engine(target, target.config)
    engine.start()
    requests = [
        make_request(
            encoded(prompt.messages),
            target.tokenizer.eos_ids,
            max_tokens=tokens,
            ignore_eos=ignore_eos,
            temperature=temperatures[index % len(temperatures)],
            seed=index,
        )
        for index, prompt in enumerate(islice(read_prompts(prompts), count))
    ]
    done = complete(engine, requests, 64)
    engine.shutdown()
    target.close()
    return [
        Answer(request.prompt, request.sampling, list(choice.tokens))
        for request, (choice,) in zip(requests, done, strict=True)
    ]


def record(options: argparse.Namespace) -> None:
    """Answers of the default model, half of them greedy."""
    length = options.tokens or 160
    given = answers_to(
        options.prompts,
        (0.0, 0.8),
        options.count,
        length,
        options.ignore_eos,
        options.model,
        options.raw,
    )
    answers = [
        {
            "prompt": one.prompt.tolist(),
            "output": one.output,
            "temperature": one.sampling.temperature,
            "seed": one.sampling.seed,
        }
        for one in given
    ]
    options.answers.write_text(json.dumps(answers))


def run(options: argparse.Namespace) -> None:
    """Print one line per cost table and number of rows."""
    for change in options.set:
        name, value = change.split("=")
        places = [module for module in TUNED if hasattr(module, name)]
        if not places:
            raise SystemExit(f"--set {change}: there is no constant {name}")
        for module in places:
            setattr(module, name, type(getattr(module, name))(float(value)))
    answers = recorded(options.answers, options.tokens, options.temperature)
    table = None
    if options.table != "none":
        path = options.table or Path(shipped_draft("smollm2-135m") or "", FILE)
        table = read_ngram_table(Path(path), options.vocab)
    for name in options.tables:
        for rows in options.rows:
            played = [replayed(name, rows, answers, table, seed, options) for seed in options.seeds]
            speeds = [one.plain_ms / one.ms for one in played]
            rounds = [speed for one in played for speed in one.rounds]
            plain, steps = sum(one.plain_ms for one in played), sum(one.rows for one in played)
            look = sum(one.look_ms for one in played) / plain
            lost = sum(one.ms for one in played) / plain - 1.0
            sys.stdout.write(
                f"{name:6} {rows:3} rows: {fmean(speeds):.3f} of plain "
                f"({min(speeds):.3f} to {max(speeds):.3f}; "
                f"rounds {min(rounds):.3f} to {max(rounds):.3f}), "
                f"lost {lost - look:.4f} verifying {look:.4f} looking, "
                f"{sum(one.tokens for one in played) / steps:.3f} tokens per step, "
                f"{sum(one.verified for one in played) / steps:.3f} draft tokens\n"
            )
            sys.stdout.flush()


def recorded(path: Path, tokens: int | None, temperature: float | None) -> list[Answer]:
    """Read the answers of `record`, without those of one token. tokens: cut to so many, without
    shorter ones; temperature: only those sampled at it.
    """
    records = []
    for one in json.loads(path.read_text()):
        sampling = Sampling(temperature=one["temperature"], seed=one["seed"])
        output = one["output"][:tokens]
        if len(output) > 1 and (not tokens or len(output) == tokens):
            records.append(Answer(np.array(one["prompt"], np.int32), sampling, output))
    return [one for one in records if temperature in (None, one.sampling.temperature)]


def replayed(
    name: str,
    rows: int,
    answers: list[Answer],
    table: NgramTable | None,
    seed: int,
    options: argparse.Namespace,
) -> Replay:
    """Every answer, on a machine with this table, with a policy as the options say."""
    machine = Machine(name, seed)
    drafter = ngram_drafter(rows, table, options.capacity)
    replay = Replay(machine, drafter, options.wrong, options.oracle)
    played = islice(cycle(answers), max(len(answers), 8 * rows))
    while head := list(islice(played, options.fresh * rows or None)):
        costs = machine.start_up() if options.startup else COSTS[options.believed or name]
        traits = DrafterTraits("ngram", 8, no_draft_model=True, selects_by_cost=not options.wrong)
        most = options.draft_tokens
        fixed = options.oracle or options.always
        replay.policy = (
            FixedPolicy(most, most) if fixed else AdaptivePolicy(costs, most, most, traits)
        )
        if options.warm:
            # What a prompt waited for, its answer is shorter when all are decoded together.
            short = [
                answer._replace(output=answer.output[: 2 + index % options.warm])
                for index, answer in enumerate(head[:rows])
            ]
            warm = Replay(machine, replay.drafter, options.wrong, options.oracle, iter(short))
            warm.policy = replay.policy
            while warm.fill(rows):
                warm.step()
        replay.answers, plain, took = iter(head), replay.plain_ms, replay.ms
        while replay.fill(rows):
            replay.step()
        replay.rounds.append((replay.plain_ms - plain) / (replay.ms - took))
    return replay


def main() -> None:
    """Record or run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "run"))
    parser.add_argument("answers", type=Path)
    parser.add_argument("--prompts", type=Path, help="jsonl of chats (default: built in)")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument(
        "--tokens", type=int, help="record: at most; run: of answers that have them"
    )
    parser.add_argument("--model", default=EngineConfig().model, help="record: whose answers")
    parser.add_argument("--raw", action="store_true", help="record: prompts without a template")
    parser.add_argument("--table", help="run: an n-gram table's file, or none (default: shipped)")
    parser.add_argument("--vocab", type=int, default=49152, help="run: of the table's target")
    parser.add_argument("--capacity", type=int, default=0, help="run: contexts of the n-gram cache")
    parser.add_argument("--temperature", type=float, help="run: only answers sampled at this")
    parser.add_argument("--draft-tokens", type=int, default=8, help="run: at most, of a row")
    parser.add_argument("--always", action="store_true", help="run: as many in every step")
    parser.add_argument("--ignore-eos", action="store_true", help="record: answers go on after it")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tables", nargs="+", default=list(COSTS))
    parser.add_argument("--set", nargs="*", default=[], help="constants of control/constants.py")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--fresh", type=int, default=0, help="a new policy after so many answers")
    parser.add_argument("--startup", action="store_true", help="costs are measured at start-up")
    parser.add_argument("--warm", type=int, default=0, help="tokens of short answers before")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the machine's noise")
    parser.add_argument("--believed", choices=COSTS, help="start-up measures, if not the truth")
    options = parser.parse_args()
    if options.what == "record":
        record(options)
    else:
        run(options)


if __name__ == "__main__":
    ended(main)
