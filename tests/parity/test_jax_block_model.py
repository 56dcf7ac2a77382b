"""A block drafter on XLA, beside the target's rounds on the same arrays: against its slow twin in
NumPy, against torch's, and counts that are known beforehand.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import forerun.executors.jax as on_jax
from forerun.build import with_jax
from forerun.build.engine import open_target
from forerun.errors import EngineError
from forerun.executors.jax import JaxBlockModel, JaxExecutor, JaxOptions
from forerun.executors.torch import TorchBlockModel
from tests.drafters.draft_models import Told
from tests.models import tiny
from tests.parity.blocks import VARIANTS, random_block
from tests.parity.driver import first_is_fast
from tests.parity.test_block_model import (
    PROMPTS,
    Beside,
    Partly,
    checkpoint_of,
    configured,
    served,
)
from tests.parity.test_jax_eagle_model import stepped
from tests.twins.host_block import BorrowedRows, HostBlockModel

TOKENS = 16
SMALL = {"max_sequences": 2, "kv_tokens": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = tiny.model("llama", num_hidden_layers=4)
    return tiny.save_folder(hf, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def opened(folder, compiled, quickly):
    """Opens the target on XLA, its layers in a scan, which compiles sooner."""
    made = []

    def build(**changes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(with_jax, "cache_dir", lambda: Path(compiled))
            patch.setattr(on_jax, "JaxOptions", partial(JaxOptions, stacked=True))
            patch.setattr(JaxExecutor, "warm_up", lambda *_: None)
            made.append(open_target(configured(folder, executor="jax", **SMALL | changes)))
        return made[-1]

    yield build
    for target in made:
        target.close()


@pytest.fixture(scope="module")
def target(opened):
    return opened()


@pytest.fixture(scope="module")
def plain(target):
    found = {t: served(target, None, t, prompts=PROMPTS[:3])[0] for t in (0.0, 0.8)}
    return {t: [item.tokens for item in done] for t, done in found.items()}


def texts_of(plain, temperature):
    pairs = zip(PROMPTS, plain[temperature], strict=False)
    return [[*map(int, prompt), *map(int, tokens)] for prompt, tokens in pairs]


def drafter(target, path, **changes):
    draft = random_block(target.executor.decoder.arch, path, **changes)
    return draft, JaxBlockModel(target.executor, checkpoint_of(target), draft)


@pytest.mark.parametrize("variant", first_is_fast(VARIANTS))
def test_a_block_is_what_its_twin_says(target, plain, tmp_path, variant):
    """After none, some and all of the block before were accepted, in a batch."""
    draft, model = drafter(target, tmp_path, **VARIANTS[variant])
    rows = BorrowedRows.of(checkpoint_of(target))
    twin = HostBlockModel(
        target.executor.limits,
        draft,
        rows,
        lambda features: features.programs.rows("features", features.place),
    )
    both, depth = Beside(model, twin), draft.head.depth
    whole = draft.head.vocab == tiny.VOCAB
    asked = Partly(both, texts_of(plain, 0.0), 0) if whole else both
    shape = {"speculative_num_steps": depth, "speculative_num_draft_tokens": depth + 1}
    done, _ = served(target, asked, prompts=PROMPTS[:3], **shape)
    assert [item.tokens for item in done] == plain[0.0]
    if whole:
        assert max(len(item.stats.histogram) for item in done) == depth + 1
    compared = 0
    for _, (mine, theirs) in both.asked:
        order = np.argsort(mine.ids, -1), np.argsort(theirs.ids, -1)
        found = [
            np.take_along_axis(answer.log_probs, which, -1)
            for answer, which in zip((mine, theirs), order, strict=True)
        ]
        assert np.abs(found[0] - found[1]).max() < 1e-4
        compared += len(mine.ids)
    assert compared > 8


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("off", [0, 1])
def test_right_tokens_are_all_accepted_and_wrong_ones_never(
    target, plain, tmp_path, temperature, off
):
    draft, own = drafter(target, tmp_path)
    depth = draft.head.depth
    model = Told(own, texts_of(plain, temperature), off)
    shape = {"speculative_num_steps": depth, "speculative_num_draft_tokens": depth + 1}
    done, _ = served(target, model, temperature, prompts=PROMPTS[:3], **shape)
    assert [item.tokens for item in done] == plain[temperature]
    accepted = sum(item.stats.accepted for item in done)
    steps = [item.stats.steps for item in done]
    if off:
        assert (accepted, steps) == (0, [TOKENS] * len(done))
    else:
        assert steps == [1 + -(-(TOKENS - 1) // (depth + 1))] * len(done)
        assert accepted == sum(item.stats.draft_tokens for item in done)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("shape", [(4, 5, 1), (4, 17, 3)])
def test_texts_and_acceptance_are_torchs(opened, folder, tmp_path, shape, temperature):
    steps, tokens, topk = shape
    judge = open_target(configured(folder, **SMALL))
    try:
        draft = random_block(judge.executor.decoder.arch, tmp_path)
        found = []
        for one, make in ((opened(), JaxBlockModel), (judge, TorchBlockModel)):
            model = make(one.executor, checkpoint_of(one), draft)
            done, _ = served(
                one, model, temperature, PROMPTS[:3], speculative_num_steps=steps,
                speculative_num_draft_tokens=tokens, speculative_eagle_topk=topk,
            )  # fmt: skip
            found.append([(item.tokens, item.stats.histogram) for item in done])
    finally:
        judge.close()
    assert found[0] == found[1]
    # Without the noise that it shares with its target a random drafter is never right.
    assert temperature == 0 or sum(sum(histogram[1:]) for _, histogram in found[0]) > 0


@pytest.mark.slow
def test_a_drafting_step_is_three_dispatches_and_two_copies(opened, tmp_path, monkeypatch):
    """Served by its folder: the round, what was accepted into the drafter's pages, the block."""
    bare = opened()
    draft = random_block(bare.executor.decoder.arch, tmp_path)
    target = opened(
        speculative_draft_model_path=str(draft.path), speculative_algorithm="DFLASH",
        speculative_num_steps=4, speculative_num_draft_tokens=5,
    )  # fmt: skip
    steps = stepped(target, monkeypatch, [{"temperature": 0.0}])
    assert all((count, len(sizes)) == (3, 2) for count, sizes in steps[2:-1]), steps


def test_what_is_not_sound_is_refused(target, tmp_path):
    _, model = drafter(target, tmp_path)
    with pytest.raises(EngineError, match="a block, not level by level"):
        model.expand(None)
    with pytest.raises(EngineError, match=r"does not fit into a step of 40 nodes"):
        drafter(target, tmp_path / "large", places=41)
