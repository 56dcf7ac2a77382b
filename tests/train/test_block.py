"""Training a block drafter: packed blocks are blocks one at a time; what it learnt is served."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.block_folder import open_block
from forerun.executors import cpu
from forerun.executors.torch.decoder.elementwise import rotation
from forerun.executors.torch.drafts.block import BlockDrafter
from forerun.measure.acceptance import CHAIN, Question, alone, measure_shapes
from forerun.options.config import EngineConfig
from forerun.train.init import start_block
from forerun.train.loss import (
    Anchors,
    BlockPlan,
    DraftVocabulary,
    LikeliestTargets,
    TrainingBatch,
    block_loss,
    summed_loss,
)
from forerun.train.pairs import PairedDrafter
from forerun.train.presets import resolve
from forerun.train.student import block_for
from tests.models import tiny
from tests.parity.blocks import PAIRED, VARIANTS, dense_block, random_block, streams
from tests.train.test_prediction import served

ANCHORS = 6


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama", num_hidden_layers=4)


def loaded(draft):
    drafter = PairedDrafter(draft.head) if draft.head.pair else BlockDrafter(draft.head)
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
    return TrainingBatch(tokens, wanted, features, choice, LikeliestTargets(likely, chance)), hidden


@pytest.mark.parametrize("variant", [*VARIANTS, "DSpark"])
def test_packed_blocks_are_blocks_one_at_a_time(hf, tmp_path, variant):
    """Loss and hits of several blocks of several texts, against each block on its own, whose tokens
    may depend on the text's own ones above.
    """
    save = tmp_path / "target"
    arch = FolderCheckpoint(tiny.save_folder(hf, save)).architecture
    draft = random_block(arch, tmp_path / "draft", **(VARIANTS | PAIRED)[variant])
    texts = np.random.default_rng(0).integers(3, tiny.VOCAB, (3, 24)).tolist()
    batch, hidden = batch_of(hf, draft, texts)
    head = hf.get_output_embeddings().weight.detach()
    vocabulary = DraftVocabulary.of(torch.from_numpy(draft.target_ids).long(), head)
    plan = BlockPlan(ANCHORS, 0.5)
    embed = hf.get_input_embeddings().weight.detach()
    total, scores = block_loss(loaded(draft), batch, embed, vocabulary, plan, seed=7)
    chosen, depth = Anchors.drawn(batch.loss_mask, ANCHORS, 7), draft.head.depth
    assert chosen.valid.sum() == 3 * ANCHORS
    losses, hits, rows = [[] for _ in range(depth)], [0] * depth, [0] * depth
    for text, states, places in zip(texts, hidden, chosen.places.tolist(), strict=True):
        for place in places:
            assert 11 <= place < 23
            actual, alive = dense_block(draft, hf, text[: place + 1], states), True
            if draft.head.pair:
                tables = (draft.tensor(f"markov_head.markov_w{n}.weight") for n in (1, 2))
                before, after = map(torch.from_numpy, tables)
                above = torch.tensor(text[place : place + depth] + [0] * depth)[:depth]
                actual = (actual + before[above] @ after.T).log_softmax(-1)
            for step in range(min(depth, len(text) - 1 - place)):
                wanted = int(vocabulary.draft_ids[text[place + step + 1]])
                rows[step] += alive
                alive = alive and int(actual[step].argmax()) == wanted
                hits[step] += alive
                if wanted >= 0:
                    losses[step].append(-float(actual[step, wanted]))
    expected = [np.mean(each) for each in losses]
    assert np.allclose([float(score.loss) for score in scores], expected, rtol=1e-3)
    assert [(int(score.hits), score.rows) for score in scores] == list(zip(hits, rows, strict=True))
    if draft.head.pair:  # The confidence's loss comes on top.
        return
    assert np.isclose(
        float(total), sum(0.5**k * each for k, each in enumerate(expected)), rtol=1e-3
    )


def test_tables_and_confidence_have_the_gradients_of_autograd():
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 12), (40, 8), (40, 4))
    read, weight, after = (torch.randn(shape, generator=generator) for shape in shapes)
    choice = torch.tensor([3, -1, 0, 39, 5, 5, 12])
    teacher = LikeliestTargets(choice.clamp_min(0)[:, None], torch.ones(7, 1))
    actual, expected = [read.clone(), after.clone()], [read.clone(), after.clone()]
    for each in (*actual, *expected):
        each.requires_grad_()
    loss, right = summed_loss(actual[0], weight, teacher, torch.arange(7), choice, actual[1])
    (3 * loss).backward()
    logits = expected[0] @ torch.cat([weight, expected[1]], 1).T
    plain = torch.nn.functional.cross_entropy(logits, choice, reduction="sum", ignore_index=-1)
    (3 * plain).backward()
    assert torch.equal(right, logits.argmax(-1) == choice) and float(loss) > 0
    torch.testing.assert_close(loss, plain)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@torch.no_grad()
def test_attention_begins_at_the_root_and_the_newest_features(tmp_path):
    """Not at the block's own masks, where no feature would ever be read."""
    hf = tiny.model("llama", num_hidden_layers=4)
    embed = hf.get_input_embeddings().weight.detach()
    common = torch.randn(embed.shape[1], generator=torch.Generator().manual_seed(0))
    embed += embed.std() * common  # As tokens of trained models have it.
    checkpoint = FolderCheckpoint(tiny.save_folder(hf, tmp_path / "target"))
    config = resolve("smoke", {"method": "block", "steps": 3})
    about = block_for(checkpoint.architecture, tiny.VOCAB, config)
    drafter = BlockDrafter(about)
    rows = hf.get_output_embeddings().weight.detach()
    texts = np.random.default_rng(0).integers(3, tiny.VOCAB, (4, 64)).tolist()
    features = torch.stack([
        torch.cat([states[index] for index in about.features], -1)
        for states in (streams(hf, text) for text in texts)
    ])  # fmt: skip
    tokens = torch.tensor(texts)
    wanted = torch.ones_like(tokens, dtype=torch.bool)
    batch = TrainingBatch(tokens, wanted, features, tokens, LikeliestTargets(tokens, tokens))
    start_block(drafter, checkpoint, embed, rows, batch, 0)
    finders, seen = (about.kv_heads + 1) // 3, first_attention(drafter, batch, embed)
    count = tokens.shape[1] - 1  # Features, the root, two masks behind it.
    assert 0 < finders < about.kv_heads
    at_root = seen[:, :finders, 1:, count].mean()
    newest = seen[:, finders:, :, count - 2 : count].sum(-1).mean()
    masks = seen[:, :, 1:, count + 1 :].sum(-1).mean()
    print(float(at_root), float(newest), float(masks))
    assert at_root > 0.5 and newest > 0.3 and masks < 0.1, (at_root, newest, masks)
    logits = drafter.norm(torch.randn(64, about.hidden)) @ rows.T
    assert 1.5 < logits.std() < 2.5, "neither flat nor confidently wrong"


def first_attention(drafter, batch, embed):
    """What the first layer's heads see from the last token of each text: [B,A,places,keys]."""
    about, layer = drafter.head, drafter.layer(0)
    length = batch.tokens.shape[1]
    position = torch.arange(length - 1 + about.places)
    rotary = rotation(position, torch.from_numpy(about.rope.frequencies(about.head_size)), 1.0)
    block = drafter.embedded(batch.tokens[:, -1:].repeat(1, about.places), embed)
    states = layer.input_layernorm(block)
    context = drafter.read_features(batch.features[:, :-1])
    keys = layer.heads(torch.cat([context, states], 1), rotary).keys
    queries = layer.heads(states, tuple(part[length - 1 :] for part in rotary)).queries
    scores = torch.einsum("bqae,bkae->baqk", queries, keys) / about.head_size**0.5
    ahead = torch.ones(about.places, len(position), dtype=torch.bool).triu(length)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1)


@pytest.mark.parametrize(
    "kind, least",
    [
        ("--block-causal --no-train-bfloat16 --block-rank 8", 1.4),
        pytest.param("--no-block-causal --train-bfloat16", 2.0, marks=pytest.mark.slow),
    ],
)
def test_a_block_drafter_is_trained_and_served(untrained, tmp_path, kind, least):
    """By heart; then its chains are accepted, its trees more, and the texts are the target's."""
    learning = "--method block --epochs 30 --rate 1e-2 --check-every 40 --draft-vocab 300"
    learning += f" --block-anchors 16 {kind}"
    metrics = untrained.train(tmp_path, *learning.split())
    first, best = metrics["history"][0]["length"], metrics["best_simulated_length"]
    assert best > first + 0.5 and best > 1.6, (first, best)
    draft = open_block(tmp_path / "draft", FolderCheckpoint(untrained.model).architecture)
    assert (draft.head.depth, draft.head.layers, draft.head.vocab) == (3, 1, 300)
    assert draft.head.algorithm == ("dspark" if "rank" in kind else "dflash")
    config = EngineConfig(
        model=str(untrained.model), executor="torch", dtype="float32", policy="fixed",
        max_sequences=4, chunked_prefill_size=64,
        speculative_draft_model_path=str(tmp_path), kv_tokens=2048,
        speculative_algorithm="DFLASH",
    )  # fmt: skip
    with closing(open_target(config)) as target:
        chain, tree = served(target, untrained)
        lengths = [sum(len(item.tokens) for item in run) / sum(i.stats.steps for i in run)
                   for run in (chain, tree)]  # fmt: skip
        print(lengths)
        assert lengths[0] > least and lengths[1] >= lengths[0], lengths
        question = Question("seen", tuple(untrained.questions), 0.0, 40, at_once=4)
        (judged,) = measure_shapes(target, alone(target.config), question, [CHAIN], lambda *_: None)
        assert judged.same == judged.answers == 8 and judged.length > least
    if cpu.available() is None:  # In 8 bits as much is accepted, but for a little.
        config = replace(config, executor="cpu", dtype="auto", threads=1)
        with closing(open_target(config)) as target:
            chain, _ = served(target, untrained)
        steps = sum(item.stats.steps for item in chain)
        assert sum(len(item.tokens) for item in chain) / steps > least - 0.1
