"""Requests that a fresh engine on a target answers step by step, and what was drafted for them.

deltas, stats = answered(target, requests, overlap=True, **drafting(3, 3, 1))
tokens(deltas), counts(deltas), reports(deltas)
"""

from dataclasses import replace

import numpy as np

from forerun.build.engine import make_engine
from forerun.client.completion import make_request
from forerun.drafters.model_drafter import ModelDrafter
from forerun.executors.state_slots import StateSlots
from forerun.executors.torch import TorchBlockModel
from forerun.executors.torch.drafts.level_model import LevelModel

OFF = {"speculative_algorithm": "OFF"}


def drafting(nodes, depth, width, algorithm=None):
    """Changes of EngineConfig: draft tokens a step, their depth and the children of a node."""
    named = {"speculative_algorithm": algorithm} if algorithm else {}
    return named | {
        "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": depth,
        "speculative_eagle_topk": width,
    }


def wanted(prompts, lengths, temperatures=0.0, **options):
    """Requests of exactly so many tokens each, seeded by their place. lengths, temperatures: one
    for all, or one each.
    """
    each = (np.broadcast_to(values, len(prompts)).tolist() for values in (lengths, temperatures))
    return [
        make_request(
            np.asarray(prompt, np.int32), max_tokens=length, ignore_eos=True,
            temperature=temperature, seed=n, **options,
        )
        for n, (prompt, length, temperature) in enumerate(zip(prompts, *each, strict=True))
    ]  # fmt: skip


def answered(target, requests, pause=0, **changes):
    """Answer the requests, one more of which comes every `pause` steps (0: all come at once).
    Return the deltas of each, and the engine's statistics.
    """
    engine = make_engine(target, replace(target.config, **changes))
    deltas, waiting, steps, busy = [[] for _ in requests], list(requests), 0, True
    while busy or waiting:
        while waiting and steps % max(pause, 1) == 0:
            engine.submit(waiting.pop(0), deltas[-1 - len(waiting)].append)
            if pause:
                break
        busy = engine.step_once()
        steps += 1
    engine.check()
    engine.shutdown()
    return deltas, engine.stats()


def plain(target, requests):
    """The tokens of each request without speculation."""
    return tokens(answered(target, requests, **OFF)[0])


def tokens(deltas):
    """All tokens of each request."""
    return [[token for news in mine for token in news.tokens] for mine in deltas]


def counts(deltas):
    """Draft tokens verified and accepted, by request."""
    return [(mine[-1].stats.draft_tokens, mine[-1].stats.accepted) for mine in deltas]


def reports(deltas):
    """All log-probability entries of each request."""
    return [[entry for news in mine for entry in news.logprobs] for mine in deltas]


class RecordedDrafts:
    """What draft models propose while `patch` holds (a MonkeyPatch), and how many passes are run
    of those on torch.

    drafts  by text and cached tokens: slots are given again
    """

    def __init__(self, patch):
        self.drafts, self.passes = {}, 0
        propose = ModelDrafter.propose

        def proposed(drafter, plan):
            drafts = propose(drafter, plan)
            states = drafter._states_of(plan)
            for state, length, draft in zip(states, plan.kv_len.tolist(), drafts, strict=True):
                if len(draft):
                    key = state.text.tokens.tobytes(), length
                    self.drafts.setdefault(key, []).append(draft)
            return drafts

        patch.setattr(ModelDrafter, "propose", proposed)
        for owner in (LevelModel, TorchBlockModel):
            for name in ("extend", "expand", "block"):
                patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call):
        def counted(model, *work):
            self.passes += 1
            return call(model, *work)

        return counted

    def during(self, run, *given, **named):
        """Return what `run` returns, the drafts proposed meanwhile and the passes run."""
        self.drafts, self.passes = {}, 0
        return run(*given, **named), self.drafts, self.passes


def same_drafts(one, other, rtol=1e-3):
    """Assert that the same drafts were proposed behind the same texts, but for the last bits of
    their scores and the order of their nodes: which requests share a step is the engine's affair.
    """
    assert one.keys() == other.keys() and one
    for where, mine in one.items():
        for actual, expected in zip(
            *(map(paths, each) for each in (mine, other[where])), strict=True
        ):
            assert actual.keys() == expected.keys()
            scores = [[each[path] for path in expected] for each in (actual, expected)]
            np.testing.assert_allclose(*scores, rtol=rtol, atol=1e-6)


def paths(draft):
    """Scores by the tokens from the root on."""
    above = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        above.append((*(above[parent] if parent >= 0 else ()), token))
    return dict(zip(above, draft.score.tolist(), strict=True))


def resumed(patch):
    """Return a list that gets, while `patch` holds, the tokens behind which each recurrent state
    went on from a checkpoint: 0 where it began anew.
    """
    lengths, open_ = [], StateSlots.open

    def opened(self, slot_init):
        lengths.append(slot_init.cached)
        return open_(self, slot_init)

    patch.setattr(StateSlots, "open", opened)
    return lengths
