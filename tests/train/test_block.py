"""Training a block drafter: packed blocks are blocks one at a time; what it learnt is served."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.engine import make_engine, open_target
from forerun.client.completion import complete, make_request
from forerun.config import EngineConfig
from forerun.executors.torch.block import BlockDrafter
from forerun.models.block_folder import open_block
from forerun.models.folder import FolderCheckpoint
from forerun.train.block_loss import Anchors, BlockPlan, block_loss
from forerun.train.loss import Batch, Likely, Vocabulary
from tests.models import tiny
from tests.parity.blocks import VARIANTS, dense_block, random_block, streams

ANCHORS = 6


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama", num_hidden_layers=4)


def loaded(draft):
    drafter = BlockDrafter(draft.head)
    weights = {name: torch.from_numpy(np.array(draft.tensor(name)))
               for name, _ in drafter.named_parameters()}  # fmt: skip
    drafter.load_state_dict(weights)
    return drafter


def batch_of(hf, draft, texts):
    """Texts of one length, of which the second half is an answer, and the streams of each."""
    hidden = [streams(hf, text) for text in texts]
    tokens = torch.tensor(texts)
    wanted = torch.zeros_like(tokens, dtype=torch.bool)
    wanted[:, tokens.shape[1] // 2 :] = True
    features = torch.stack([
        torch.cat([states[index] for index in draft.head.features], -1) for states in hidden
    ])  # fmt: skip
    choice = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    chance = torch.ones(choice.numel(), 1)
    inside = torch.bucketize(choice, torch.from_numpy(draft.target_ids).long())
    likely = inside.clamp(max=draft.head.vocab - 1).flatten()[:, None]
    return Batch(tokens, wanted, features, choice, Likely(likely, chance)), hidden


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_blocks_are_blocks_one_at_a_time(hf, tmp_path, variant):
    """Loss and hits of several blocks of several texts, against each block on its own."""
    save = tmp_path / "target"
    arch = FolderCheckpoint(tiny.save_folder(hf, save)).architecture
    draft = random_block(arch, tmp_path / "draft", **VARIANTS[variant])
    texts = np.random.default_rng(0).integers(3, tiny.VOCAB, (3, 24)).tolist()
    batch, hidden = batch_of(hf, draft, texts)
    head = hf.get_output_embeddings().weight.detach()
    vocabulary = Vocabulary.of(torch.from_numpy(draft.target_ids).long(), head)
    plan = BlockPlan(ANCHORS, 0.5, judging=True)
    embed = hf.get_input_embeddings().weight.detach()
    total, scores = block_loss(loaded(draft), batch, embed, vocabulary, plan, seed=7)
    chosen, depth = Anchors.drawn(batch.wanted, ANCHORS, 7), draft.head.depth
    assert chosen.kept.sum() == 3 * ANCHORS
    losses, hits, rows = [[] for _ in range(depth)], [0] * depth, [0] * depth
    for text, states, places in zip(texts, hidden, chosen.places.tolist(), strict=True):
        for place in places:
            assert 11 <= place < 23
            found, alive = dense_block(draft, hf, text[: place + 1], states), True
            for step in range(min(depth, len(text) - 1 - place)):
                wanted = int(vocabulary.draft_ids[text[place + step + 1]])
                rows[step] += alive
                alive = alive and int(found[step].argmax()) == wanted
                hits[step] += alive
                if wanted >= 0:
                    losses[step].append(-float(found[step, wanted]))
    expected = [np.mean(each) for each in losses]
    assert np.allclose([float(score.loss) for score in scores], expected, rtol=1e-3)
    assert [(int(score.hits), score.rows) for score in scores] == list(zip(hits, rows, strict=True))
    assert np.isclose(
        float(total), sum(0.5**k * each for k, each in enumerate(expected)), rtol=1e-3
    )


def test_a_block_drafter_is_trained_and_served(untrained, tmp_path):
    """By heart; then its chains are accepted, its trees more, and the texts are the target's."""
    learning = "--method block --epochs 30 --rate 1e-2 --check-every 40 --draft-vocab 300"
    learning += " --block-anchors 16"
    metrics = untrained.train(tmp_path, *learning.split())
    first, best = metrics["history"][0]["length"], metrics["best_simulated_length"]
    assert best > first + 0.5 and best > 1.6, (first, best)
    draft = open_block(tmp_path / "draft", FolderCheckpoint(untrained.model).architecture)
    assert (draft.head.depth, draft.head.layers, draft.head.vocab) == (3, 1, 300)
    config = EngineConfig(
        model=str(untrained.model), policy="fixed", max_sequences=4, max_step_nodes=64,
        speculative_draft_model_path=str(tmp_path), kv_tokens=2048,
    )  # fmt: skip
    target = open_target(config)
    try:
        assert target.config.speculative_algorithm == "DFLASH"
        prompts = [
            target.chat.encode([{"role": "user", "content": text}])
            for text in dict.fromkeys(prompt.text for prompt in untrained.questions)
        ]
        plain = served(target, prompts, speculative_algorithm="OFF")
        chain = served(target, prompts)
        tree = served(target, prompts, speculative_eagle_topk=4, speculative_num_draft_tokens=13)
        for found in (chain, tree):
            assert [item.tokens for item in found] == [item.tokens for item in plain]
        lengths = [sum(len(item.tokens) for item in found) / sum(i.stats.steps for i in found)
                   for found in (chain, tree)]  # fmt: skip
        print(lengths)
        assert lengths[0] > 1.5 and lengths[1] >= lengths[0], lengths
    finally:
        target.close()


def served(target, prompts, **changes):
    """Answers up to their ends: behind these nothing was learnt."""
    engine = make_engine(target, replace(target.config, **changes))
    engine.start()
    try:
        eos = target.tokenizer.eos_ids
        requests = [make_request(p, eos, max_tokens=40, temperature=0.0) for p in prompts]
        return [choices[0] for choices in complete(engine, requests)]
    finally:
        engine.shutdown()
