"""Tokens a step of fresh engines' first answers: one unlucky measurement may disable none of them.

    python -m bench.fresh_starts --starts 60 [--tokens 160] [--model MODEL] [--temperature 0.8]

Every start opens the model, measures what steps take and answers one prompt. It counts steps, so a
busy machine is no hindrance but what is tested.
"""

import argparse
import sys
from itertools import cycle, islice
from statistics import fmean, median

from bench.records import ended
from forerun.build.engine import encode_chat, make_engine
from forerun.build.target import open_target
from forerun.client.completion import complete, make_request
from forerun.measure.workload import read_prompts
from forerun.options.config import EngineConfig


def main() -> None:
    """Print a line for each start, and the least and the mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--prompts", type=int, default=1, help="different ones, in turns")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    config = EngineConfig(model=options.model, context=1024)
    reached = []
    for prompt in islice(cycle(list(islice(read_prompts(None), options.prompts))), options.starts):
        target = open_target(config)
        engine = make_engine(target, target.config)
        engine.start()
        request = make_request(
            encode_chat(target, prompt.messages),
            target.tokenizer.eos_ids,
            max_tokens=options.tokens,
            ignore_eos=True,
            temperature=options.temperature,
            seed=0,
        )
        ((choice,),) = complete(engine, [request], 1)
        stats, facts = engine.stats(), engine.describe()["speculation"]
        engine.shutdown()
        target.close()
        reached.append(len(choice.tokens) / stats.steps)
        why = max(facts["reasons"], key=facts["reasons"].get)
        sys.stdout.write(f"{reached[-1]:.2f} {facts['step_ms_by_nodes']} {why}\n")
        sys.stdout.flush()
    every = [reached[place :: options.prompts] for place in range(options.prompts)]
    worst = min((min(one) / median(one) for one in every if one), default=1.0)
    sys.stdout.write(f"least over the median of its prompt: {worst:.2f}\n")
    sys.stdout.write(
        f"{len(reached)} starts: least {min(reached):.2f}, mean {fmean(reached):.2f}\n"
    )


if __name__ == "__main__":
    ended(main)
