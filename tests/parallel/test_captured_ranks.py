"""`--tp-size` with captured rounds, rehearsed on the recorder: rank 0 tells what it launches, the
other launches it too, and texts are one process's. Nothing of it needs a device.
"""

import sys
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.executors.torch import executor as of_one
from forerun.executors.torch import model_runner
from forerun.executors.torch.parallel import executor
from forerun.executors.torch.parallel.processes import Ranks
from forerun.options.config import EngineConfig
from tests.covering import every, some_of, values
from tests.e2e.drafts import HintedModel, make
from tests.models import tiny
from tests.parallel.captured_rank import Recorded
from tests.parity.tape import Tape
from tests.references.kernels import REFERENCE_KERNELS
from tests.worlds.answers import OFF, answered, tokens

COMMAND = (sys.executable, "-m", "tests.parallel.captured_rank")
ROUNDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "seed": 11},
    {"temperature": 0.0},
)
"""More than run at once."""
MIXED = (
    {"temperature": 0.7, "top_p": 0.8, "seed": 3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    *ROUNDS,
)
"""No step with one of the first three is a round."""
WISHES = {"rounds": ROUNDS, "mixed": MIXED}


def config(folder, **changes):
    settled = {"executor": "torch", "device": "cpu", "threads": 1, "context": 128, "page_size": 16}
    settled |= {"max_sequences": 3, "kv_tokens": 512, "chunked_prefill_size": 32}
    return EngineConfig(model=str(folder), policy="fixed", **settled | changes)


@pytest.fixture(scope="module")
def messages():
    """How many messages of each kind rank 0 has sent, steps that are rounds by themselves."""
    return Counter()


@contextmanager
def recorded(messages):
    """Ranks that are begun here capture their rounds, rank 0 on this tape; `messages` counts its
    messages.
    """
    tape = Tape()
    send, kind_of = Ranks.send, executor.parallel_executor

    def counted(self, message):
        messages["round" if message.facts.get("size") else message.kind] += 1
        send(self, message)

    def started(limits):
        return partial(kind_of(limits), command=COMMAND)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "kernels_for", lambda device: REFERENCE_KERNELS)
        patch.setattr(of_one, "recorder", lambda device: tape)
        patch.setattr(executor, "Group", Recorded)
        patch.setattr(Ranks, "send", counted)
        patch.setattr(executor, "parallel_executor", started)
        yield tape


@contextmanager
def captured(messages, settings):
    """A target of ranks whose rounds are captured, and rank 0's tape."""
    with recorded(messages) as tape:
        target = open_target(settings)
        yield target, tape
        target.close()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(request, folder, messages):
    """Of four ranks two share a key/value head."""
    with captured(messages, config(folder, tp_size=request.param, overlap=True)) as executor:
        yield executor


@pytest.fixture(scope="module")
def alone(folder):
    """What one process writes without speculation."""
    target = open_target(config(folder, disable_cuda_graph=True))
    yield cache(lambda wishes: texts(target, OFF, WISHES[wishes])[0])
    target.close()


def prompt_of(place):
    """What repeats itself is looked up."""
    return np.tile(np.random.default_rng(place).integers(5, 60, 6), 2 + place).tolist()


def texts(target, settings, samplings, predictions=()):
    """Token ids of every request, all sent at once and their answers predicted, where there are
    predictions; the engine's counters.
    """
    requests = [
        make_request(np.array(prompt_of(place), np.int32), max_tokens=20, ignore_eos=True, **how)
        for place, how in enumerate(samplings)
    ]
    for place, prediction in enumerate(predictions):
        tokens_ahead = np.array(prediction, np.int32)
        requests[place] = replace(requests[place], prediction=tokens_ahead)
    deltas, stats = answered(target, requests, **settings)
    emitted = tokens(deltas)
    assert all(len(mine) == 20 for mine in emitted), emitted
    return emitted, stats


@pytest.mark.parametrize(
    ("wishes", "algorithm", "overlap"),
    some_of(every(WISHES, ["OFF", "NGRAM"], [True, False]), values),
)
def test_ranks_launch_what_rank_0_does(shared, alone, messages, wishes, algorithm, overlap):
    (target, tape), rounds_alone = shared, wishes == "rounds"
    settings = {"speculative_algorithm": algorithm}
    before, replays = Counter(messages), tape.replays
    actual, stats = texts(target, settings | {"overlap": overlap}, WISHES[wishes])
    assert actual == alone(wishes)
    sent = messages - before
    # Prompts are steps; what is a round was captured before.
    assert sent["step"] and sent["round"] >= (10 if rounds_alone else 1)
    assert tape.replays - replays == sent["round"]
    assert stats.carried >= (10 if overlap and rounds_alone and algorithm == "OFF" else 0)
    assert (stats.accepted > 0) == (algorithm == "NGRAM")


@pytest.mark.slow
def test_latent_attention_is_cut_in_rounds_too(tmp_path):
    folder = tiny.save_folder(tiny.model("deepseek_v3"), tmp_path)
    with closing(open_target(config(folder, disable_cuda_graph=True))) as one:
        expected, _ = texts(one, OFF, ROUNDS)
    sent = Counter()
    with captured(sent, config(folder, tp_size=2, overlap=True)) as (target, tape):
        sent.clear()
        replays = tape.replays
        actual, stats = texts(target, {"speculative_algorithm": "NGRAM"}, ROUNDS, expected)
    assert actual == expected
    assert stats.accepted > 10 and tape.replays - replays == sent["round"] > 2


# --- draft models between rounds -----------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("drafts"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "draft", "width", "size"),
    [
        ("EAGLE3", "eagle3", 1, 4),
        ("EAGLE3", "eagle3", 2, 2),
        ("STANDALONE", "small", 1, 4),
        ("DFLASH", "block", 1, 2),
    ],
)
def test_a_draft_model_drafts_between_rounds(made, algorithm, draft, width, size):
    """It runs on rank 0 alone, whole; what it says is verified by a captured round of all ranks."""
    drafts = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(made / draft),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": width,
    }
    if width > 1:
        drafts["speculative_num_draft_tokens"] = 6
    with closing(open_target(config(made / "target", disable_cuda_graph=True))) as one:
        expected, _ = texts(one, OFF, ROUNDS)
    sent = Counter()
    with captured(sent, config(made / "target", tp_size=size, **drafts)) as (target, tape):
        hinted = HintedModel(target.draft_model, (), 0)
        hinted._texts = [prompt_of(place) + actual for place, actual in enumerate(expected)]
        drafting = replace(target, draft_model=hinted)
        sent.clear()
        replays = tape.replays
        actual, stats = texts(drafting, {}, ROUNDS)
    assert actual == expected
    assert stats.accepted > 10
    assert sent["round"] >= 10 and tape.replays - replays == sent["round"]
