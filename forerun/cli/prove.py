"""`forerun prove`: checks by experiment that speculation changes no token."""

import argparse
from contextlib import closing
from dataclasses import replace

from forerun.cli import fuzz
from forerun.cli.argument_types import refuse_beside
from forerun.cli.console import bars, emit, numbered, open_shown, out, say
from forerun.cli.constraint import grammar_of
from forerun.machine import stamp
from forerun.measure.prove import Divergence, Proof, Trial, as_dict, prove
from forerun.measure.report import columns
from forerun.measure.workload import read_prompts, spread
from forerun.options.config import EngineConfig, exact
from forerun.options.flags import configured

_DRAWN = {"quick": False, "count": None, "tokens": None, "temperatures": (0.0, 0.8)}
_DRAWN |= {"group": None, "mixed": False, "schema": None, "regex": None, "grammar": None}
"""What fuzzing draws by itself, and its defaults."""

QUICK_PROMPTS, QUICK_TOKENS, QUICK_GROUP = 8, 32, 4


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a run diverged, or if no draft token was accepted, which proves
    nothing.
    """
    if arguments.fuzz:
        refuse_beside(arguments, "beside --fuzz, which draws requests of its own", _DRAWN)
        return fuzz.fuzz(arguments)
    search = dict.fromkeys(("minutes", "cases", "case"))
    refuse_beside(arguments, "here", search, ", or add --fuzz")
    config, trial = exact(configured(EngineConfig, arguments)), _trial(arguments)
    target = open_shown(replace(config, max_sequences=max(trial.group, 1)))
    sides = 2 if target.config.speculates else 1
    runs = len(trial.temperatures) * 2 * sides
    with closing(target), bars() as progress:
        proof = prove(target, target.config, trial, numbered(progress, runs))
    facts = as_dict(proof) | {"model": target.name, "machine": stamp()}
    forced = target.config.policy == "fixed" and target.config.speculates
    emit(arguments, facts, lambda: _show(proof, trial, target.name, forced))
    return 0 if proof.holds else 1


def _trial(arguments: argparse.Namespace) -> Trial:
    quick = arguments.quick
    prompts = spread(
        read_prompts(arguments.prompts), arguments.count or (QUICK_PROMPTS if quick else None)
    )
    return Trial(
        prompts=tuple(prompts),
        tokens=arguments.tokens or (QUICK_TOKENS if quick else 128),
        temperatures=arguments.temperatures,
        group=arguments.group or (QUICK_GROUP if quick else 16),
        seed=arguments.seed,
        grammar=grammar_of(arguments),
        mixed=arguments.mixed,
    )


def _show(proof: Proof, trial: Trial, name: str, forced: bool) -> None:
    task = f"{len(trial.prompts)} prompts x {trial.tokens} tokens"
    bound = f", constrained by {trial.grammar.field}" if trial.grammar else ""
    other = ", other parameters for each" if trial.mixed else ""
    names = ("T", "method", "at once", "identical", "tokens per step", "draft tokens", "accepted")
    table = columns(f"{name}: {task}{bound}{other}", names, left=3)
    for index, run in enumerate(proof.runs):
        first = index == 0 or proof.runs[index - 1].temperature != run.temperature
        table.add_row(
            f"{run.temperature:g}",
            run.speculation,
            str(run.at_once),
            "reference" if first else f"{run.identical} of {run.answers}",
            f"{run.tokens_per_step:.2f}",
            f"{run.draft_tokens:,}",
            f"{run.share_accepted:.0%}" if run.draft_tokens else "",
        )
    out.print(table)
    for run in proof.runs:
        if run.divergence:
            say(_describe(run.divergence, run.speculation, run.temperature, run.at_once))
    say(_verdict(proof))
    if forced:
        say(
            "Draft tokens were forced into every step (--policy fixed), also where they do not "
            "pay: this shows that no token changes, not how fast it is; forerun bench measures "
            "that."
        )


def _describe(divergence: Divergence, side: str, temperature: float, at_once: int) -> str:
    gap = "one of the two is not among the top 20"
    if divergence.expected == divergence.found:
        gap = "text, end or log-probabilities differ"
    if divergence.logit_gap is not None and divergence.score_gap is not None:
        gap = (
            f"logit gap {divergence.logit_gap:.6g}, "
            f"after temperature and noise {divergence.score_gap:.6g}"
        )
    return (
        f"First divergence at T={temperature:g}, speculation {side}, {at_once} at once: prompt "
        f"{divergence.prompt}, choice {divergence.choice}, output token {divergence.position}: "
        f"{divergence.expected} in the reference, {divergence.found} here ({gap})."
    )


def _preempted(proof: Proof) -> str:
    """Return a sentence on how often sequences were preempted and resumed."""
    count = sum(run.preemptions for run in proof.runs)
    return f" Sequences were preempted and resumed {count} times." if count else ""


def _verdict(proof: Proof) -> str:
    if not proof.identical:
        return "NOT LOSSLESS: the runs above diverge."
    if proof.speculation == "OFF":
        return "No divergence between batches; speculation was off."
    if not proof.speculated:
        return (
            "NOTHING PROVED: the texts agree, but no draft token was accepted, or none was made "
            "in some run."
        )
    return (
        "No divergence: every run gave the reference's tokens, and draft tokens were accepted."
        f"{_preempted(proof)}"
    )
