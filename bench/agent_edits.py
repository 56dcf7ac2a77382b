"""What drafts an agent's edits: conversations that send a file again and again with small edits.

    python bench/agent_edits.py [--files 12] [--edits 2] [--draft-tokens 15] [--json out.json]

The conversations are made of this package's own source: an agent's long instructions and tools, a
request to edit a file, the file as a tool's result, and the answer: the edited file whole, or the
changed places as SEARCH/REPLACE blocks. The next turn sends all of that again and asks for another
edit. `whole` keeps the conversation, `compacted` begins anew with the file as it is now. Names are
replaced, lines put in, removed and changed, in places that a seed draws.

Answers are played back through the n-gram drafter with the default model's tokenizer: neither a
clock nor a model has a part in it. Printed, in tokens a step: by the answer itself alone; by what a
prefix hit leaves of the prompt to be computed (it is not in whole pages of earlier turns); by the
whole prompt, which is what the drafter sees; by that and counted answers of the turns before; and
of a server that was started again on its --kv-store before every turn. And how many tokens a prompt
has, and how many of them are computed before the first token, by pages in memory or on disk.
"""

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from bench.ngram_cache import play
from bench.records import ended, keep
from bench.replay import Answer
from forerun.build.target import open_text
from forerun.build.with_cpu import ngram_drafter
from forerun.cache.folder import StoreFolder
from forerun.cache.journal import Journal
from forerun.engine.learning import Learning, Learnt
from forerun.interface.drafter import TableDrafter
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints

PACKAGE = Path(__file__).parents[1] / "forerun"
PAGE = 16
GREEDY = Sampling(temperature=0.0)


def edited(text: str, chance: np.random.Generator) -> str:
    """The file after a request: a name replaced everywhere, and lines put in, removed, changed."""
    lines = text.split("\n")
    names = sorted({word for line in lines for word in line.split() if word.isidentifier()})
    long = [name for name in names if len(name) > 4] or names
    name = str(chance.choice(long))
    lines = [line.replace(name, f"{name}_{chance.integers(10)}") for line in lines]
    for _ in range(3):
        at = int(chance.integers(len(lines)))
        indent = " " * (len(lines[at]) - len(lines[at].lstrip()))
        kind = chance.choice(["put in", "removed", "changed"])
        if kind == "put in":
            lines.insert(at, f"{indent}log.info('step %d of {name}', {chance.integers(100)})")
        elif kind == "removed":
            del lines[at]
        else:
            lines[at] = f"{indent}# {lines[at].strip() or name}: see issue {chance.integers(999)}"
    return "\n".join(lines)


def blocks(before: str, after: str) -> str:
    """The edit as SEARCH/REPLACE blocks, with two lines around each."""
    old, new = before.split("\n"), after.split("\n")
    said = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(2):
        first, last = group[0], group[-1]
        removed, put = old[first[1] : last[2]], new[first[3] : last[4]]
        said.append("\n".join(["<<<<<<< SEARCH", *removed, "=======", *put, ">>>>>>> REPLACE"]))
    return "\n\n".join(said)


@dataclass(frozen=True)
class Turn:
    """What is sent, and the answer; number: of the edit, from 0."""

    number: int
    prompt: str
    answer: str


def conversation(path: Path, edits: int, patch: bool, compacted: bool, seed: int) -> Iterator[Turn]:
    """The turns of an agent that edits a file."""
    chance = np.random.default_rng(seed)
    name, text = f"forerun/{path.relative_to(PACKAGE)}", path.read_text()
    head = f"<|im_start|>system\n{INSTRUCTIONS}<|im_end|>\n"
    sent = head
    for number in range(edits):
        after = edited(text, chance)
        if compacted or not number:
            said = f"Edit {number + 1} of {name}: make the change we spoke of."
            sent = f"{head}<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
            sent += f'{{"tool": "read_file", "path": "{name}"}}<|im_end|>\n'
            sent += f"<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"
        answer = blocks(text, after) if patch else after
        call = "apply_blocks" if patch else "write_file"
        answer = f'{{"tool": "{call}", "path": "{name}"}}\n{answer}<|im_end|>\n'
        yield Turn(number, sent, answer)
        text = after
        sent += answer + f"<|im_start|>tool\n{name} was written, 3 tests failed: see lines "
        sent += f"{chance.integers(90)} and {chance.integers(90)}.<|im_end|>\n<|im_start|>user\n"
        sent += f"Now the next change, number {number + 2}.<|im_end|>\n<|im_start|>assistant\n"


INSTRUCTIONS = "\n".join(
    (Path(__file__).parents[1] / "docs" / "use" / name).read_text()
    for name in ("agents.md", "requests.md")
)
"""As long as those of an agent."""

SOURCES = ("answer alone", "behind the hit", "whole prompt", "and answers", "after a restart")


def restarted(folder: Path, capacity: int) -> tuple[TableDrafter, Learning]:
    """A drafter that counted again what is kept in the folder, and keeps what it counts."""
    drafter, store = ngram_drafter(1, None, capacity), StoreFolder(folder)
    answers, estimates = (Journal(store, "agents", kind, 4 << 20) for kind in ("ngrams", "prices"))
    learnt = Learnt(answers, estimates, b"", drafter.counts, {})
    learnt.restore()
    return drafter, Learning(learnt, lambda order: None)


def common(one: Ints, other: Ints) -> int:
    """How many tokens two texts have in common at their beginnings, in whole pages."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0] if len(differ) else size) // PAGE * PAGE


def measured(
    tokenizer: Tokenizer, turns: list[Turn], options: argparse.Namespace
) -> list[dict[str, float]]:
    """Tokens and steps of every turn by SOURCES, and what of its prompt is computed."""
    results: list[dict[str, float]] = []
    counting = ngram_drafter(1, None, options.capacity)
    sent: list[Ints] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in turns:
            prompt = tokenizer.encode(turn.prompt)
            output = tokenizer.encode(turn.answer).tolist()
            hit = min(max((common(prompt, each) for each in sent), default=0), len(prompt) - 1)
            again, keeping = restarted(Path(folder), options.capacity)
            ways = {
                SOURCES[0]: (ngram_drafter(1), prompt[-1:]),
                SOURCES[1]: (ngram_drafter(1), prompt[hit:]),
                SOURCES[2]: (ngram_drafter(1), prompt),
                SOURCES[3]: (counting, prompt),
                SOURCES[4]: (again, prompt),
            }
            row: dict[str, float] = {
                name: play(drafter, Answer(text, GREEDY, output), options.draft_tokens)
                for name, (drafter, text) in ways.items()
            }
            keeping.close(flush=True)
            sent.append(np.append(prompt, np.array(output, np.int32)))
            facts = {"number": turn.number, "tokens": len(output) - 1}
            results.append(row | facts | {"prompt": len(prompt), "found": hit})
    return results


def main() -> None:
    """Make conversations, play them, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--edits", type=int, default=2, help="of a file")
    parser.add_argument("--lines", type=int, nargs=2, default=(60, 200), help="of a file")
    parser.add_argument("--draft-tokens", type=int, default=15)
    parser.add_argument("--capacity", type=int, default=EngineConfig().speculative_ngram_capacity)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer, _ = open_text(EngineConfig())
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if options.lines[0] <= path.read_text().count("\n") <= options.lines[1]
    ]
    order = np.random.default_rng(options.seed).permutation(len(files))
    chosen = [files[place] for place in order[: options.files].tolist()]
    sys.stdout.write(f"{'':28}{''.join(f'{name:>17}' for name in SOURCES)}   prompt computed\n")
    table: list[dict[str, object]] = []
    for patch in (False, True):
        for compacted in (False, True):
            turns = [
                turn
                for number, path in enumerate(chosen)
                for turn in conversation(path, options.edits, patch, compacted, number)
            ]
            rows = measured(tokenizer, turns, options)
            for number in range(options.edits):
                own = [row for row in rows if row["number"] == number]
                total = sum(row["tokens"] for row in own)
                shares = {name: total / sum(row[name] for row in own) for name in SOURCES}
                prompt = fmean(row["prompt"] for row in own)
                computed = fmean(row["prompt"] - row["found"] for row in own)
                name = f"{'blocks' if patch else 'file'}, {'compacted' if compacted else 'whole'}"
                name += f", edit {number + 1}"
                figures = "".join(f"{shares[each]:17.2f}" for each in SOURCES)
                sys.stdout.write(f"{name:28}{figures} {prompt:8.0f} {computed:8.0f}\n")
                sys.stdout.flush()
                facts = {"name": name, "prompt": prompt, "computed": computed, "tokens": total}
                table.append(facts | dict(shares))
    if options.json:
        keep(options.json, {"settings": vars(options), "table": table})


if __name__ == "__main__":
    ended(main)
