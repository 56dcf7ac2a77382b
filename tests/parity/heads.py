"""A draft head on any executor against one token at a time, and what every such model refuses:
the contract of draft models that read features (forerun/interface/draft_model.py).
"""

from collections import deque
from dataclasses import replace
from functools import partial
from itertools import takewhile
from operator import itemgetter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import complete, make_request
from forerun.drafts.eagle_config import head_for
from forerun.drafts.eagle_folder import open_draft
from forerun.errors import EngineError
from forerun.executors.torch.decoder.elementwise import rotation
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.interface.draft_model import DraftBlock, DraftExtension, DraftLevel
from forerun.speculative.accept import choose
from forerun.speculative.sampling import History, Sampling, process
from forerun.train.export import export_head
from tests.models import tiny
from tests.parity.driver import Driver, Row
from tests.worlds.configs import small

SWITCHES = [
    {},
    {"normed_residual": True},
    {"normed_feedback": True},
    {"feature_norm": "joint"},
    {"feature_norm": "each", "normed_residual": True, "normed_feedback": True},
    {"algorithm": "eagle1", "fc_bias": True},
    {"hidden": 48, "trained_head": True},
]


GREEDY = Sampling(temperature=0.0)
SAMPLED = range(4)
"""Prompts whose sampled answers a trained head has read, by row and seed."""


class Target:
    """The target in transformers."""

    def __init__(self, checkpoint):
        self.checkpoint, self.arch = checkpoint, checkpoint.architecture
        self._model = tiny.reference(checkpoint)
        self.embed = self._model.get_input_embeddings().weight.detach()
        self.head = self._model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def run(self, tokens, layers):
        """Hidden states [B,T,F*H] (L = after the final norm), and the choices int64[B,T]."""
        output = self._model(tokens, output_hidden_states=True)
        states = [output.hidden_states[layer] for layer in layers] or [tokens]
        return torch.cat(states, -1), output.logits.argmax(-1)

    @torch.no_grad()
    def continued(self, tokens, count, samplings=(GREEDY,)):
        """Append `count` tokens to texts int64[B,T], chosen as the engine chooses them; samplings:
        of all of them, or of each.
        """
        prompt_len = tokens.shape[1]
        samplings = samplings if len(samplings) > 1 else [*samplings] * len(tokens)
        for n in range(count):
            logits = self._model(tokens).logits[:, -1].float().numpy()
            chosen = [
                choose(process(row, sampling, History(text, prompt_len)), sampling, n)
                for row, text, sampling in zip(
                    logits, tokens.numpy().astype(np.int32), samplings, strict=True
                )
            ]
            tokens = torch.cat([tokens, torch.tensor(chosen)[:, None]], 1)
        return tokens


class RandomHead:
    """A random head with the given switches, on disk and run one token at a time."""

    def __init__(self, dense, folder, changes, ids=range(0, tiny.VOCAB, 2)):
        arch, self.dense = dense.arch, dense
        self.ids = np.array(ids, np.int32)
        if changes.get("algorithm") == "eagle1":
            changes = {**changes, "features": (arch.layers,)}
            self.ids = np.arange(arch.vocab, dtype=np.int32)
        torch.manual_seed(0)
        changes = {"algorithm": "eagle3", "features": (2, 3, 3), **changes}
        about = head_for(arch, len(self.ids), "eagle1")  # No target has too few layers for it.
        self.head = EagleHead(replace(about, **changes))
        for parameter in self.head.parameters():
            noise = torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.data.copy_((noise + (parameter.dim() == 1)).bfloat16())
        self.embed = dense.embed
        if self.head.head.hidden == arch.hidden:
            self.head.lm_head.weight.data.copy_(dense.head[torch.from_numpy(self.ids).long()])
        else:
            self.embed = torch.randn(arch.vocab, self.head.head.hidden).bfloat16().float()
        self.frequencies = torch.from_numpy(arch.rope.frequencies(arch.head_size))
        self.folder = folder
        self.export()

    def export(self):
        export_head(self.head, self.ids, self.folder)
        if self.embed is not self.dense.embed:
            file = self.folder / "model.safetensors"
            save_file(load_file(file) | {"embed_tokens.weight": self.embed.bfloat16()}, file)
        self.draft = open_draft(self.folder, self.dense.arch)
        self._read = deque([((), ([], []))], 16)

    @torch.no_grad()
    def log_probs(self, text, steps, only=None):
        """float32[steps,T,Vd]: from true features up to q, what the draft says follows
        text[q+s+1] after it has drafted text[q+2..q+s+1] itself; for q `only`, where given. What is
        read before that q is kept for the next texts that begin as this one does.
        """
        known = torch.from_numpy(np.array([text], np.int64))
        hidden = self.head.fuse(self.dense.run(known, self.head.head.features)[0][0])
        reads = torch.zeros(steps, len(text), self.head.head.hidden)
        begin, history = 0, ([], [])
        if only is not None:  # A row has read the token after it, too.
            same, kept = max(
                ((alike(text, read), history) for read, history in self._read), key=itemgetter(0)
            )
            begin = min(max(same - 1, 0), only)
            history = tuple(each[:begin] for each in kept)
        for row in range(begin, len(text) if only is None else only + 1):
            if row == only:
                self._read.append((text[: only + 1], tuple(map(list, history))))
            past, state = history, hidden[row]
            for step in range(steps if only in (None, row) else 1):
                if step == 1:
                    past = tuple(map(list, history))  # Draft tokens are not kept.
                place = min(row + step + 1, len(text) - 1)
                turn = rotation(torch.tensor(row + step), self.frequencies, 1.0)
                attend = partial(_attend, past)
                token = torch.tensor(int(text[place]))
                reads[step, row], state = self.head(token, self.embed, state, turn, attend)
        return self.head.logits(reads).log_softmax(-1)


def alike(one, other):
    """How many tokens two texts begin with alike."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def _attend(past, _layer, heads):
    """One token's attention [A,E] to all that came before; it joins them."""
    query, key, value = heads.turned()
    for kept, new in zip(past, (key, value), strict=True):
        kept.append(new.repeat_interleave(len(query) // len(key), 0))
    keys, values = (torch.stack(kept) for kept in past)
    scores = torch.einsum("ae,tae->at", query, keys) * query.shape[-1] ** -0.5
    return torch.einsum("at,tae->ae", scores.softmax(-1), values)


def where(rows):
    """What extensions and levels of driver sequences `rows` = [(slot, kv_len, pages)] share."""
    width = max(len(pages) for _, _, pages in rows)
    return {
        "kv_len": ints([kv_len for _, kv_len, _ in rows]),
        "slots": ints([slot for slot, _, _ in rows]),
        "pages": ints([[*pages, *[-1] * (width - len(pages))] for _, _, pages in rows]),
    }


def ints(values):
    return np.array(values, np.int32)


def extension(tokens, next_tokens, start, rows, **changes):
    """An extension; all candidates of all tokens wanted."""
    values = {"scored": np.arange(len(tokens), dtype=np.int32), "candidates": 10**6}
    tokens = ints(tokens), ints(next_tokens), ints(start)
    return DraftExtension(*tokens, **where(rows) | values | changes)


def level(tokens, parents, start, rows, **changes):
    """A level of draft tokens, all candidates wanted."""
    tokens = ints(tokens), ints(parents), ints(start)
    return DraftLevel(*tokens, **where(rows) | {"first": 0, "candidates": 10**6} | changes)


def by_id(children):
    """float32[s,Vd] from what a pass returned, and that it was sorted."""
    assert (np.diff(children.log_probs) <= 0).all()
    out = np.empty_like(children.log_probs)
    np.put_along_axis(out, children.ids.astype(np.int64), children.log_probs, -1)
    return out


def within(error):
    """Log-probabilities that differ by so much of what they are."""

    def close(actual, wanted):
        assert np.linalg.norm(actual - wanted) < error * np.linalg.norm(wanted)

    return close


def compare(dense_head, executor, close, model):
    """Two rows of different length, across blocks and pages, in chunks; then a tree each. `close`
    asserts that log-probabilities [...,Vd] are those of the dense head.
    """
    device = model(executor, dense_head.dense.checkpoint, dense_head.draft)
    random = np.random.default_rng(1)
    texts = {2: random.integers(0, tiny.VOCAB, 150), 0: random.integers(0, tiny.VOCAB, 21)}
    with Driver(executor) as driver:
        actual = {slot: [] for slot in texts}
        for slot, text in texts.items():
            driver.open(slot, text[:-1])
        for chunks in ({2: 100, 0: 5}, {2: 49, 0: 15}):  # Together all tokens but the last.
            before = {slot: driver.sequences[slot].kv_len for slot in texts}
            done = driver.step([Row(slot, known=count) for slot, count in chunks.items()])
            outcome = done.outcome
            ends = np.cumsum([0, *chunks.values()])
            ran = [t[before[s] : before[s] + chunks[s]] for s, t in texts.items()]
            after = [t[before[s] + 1 : before[s] + chunks[s] + 1] for s, t in texts.items()]
            rows = [(s, before[s], driver.sequences[s].pages) for s in texts]
            tokens = np.concatenate(ran), np.concatenate(after)
            logits = by_id(device.extend(extension(*tokens, ends, rows), outcome.features))
            for index, slot in enumerate(texts):
                actual[slot].append(logits[ends[index] : ends[index + 1]])
        # A tree per row: a, b below the root; c below a, d and e below b; f below d.
        a, b, c, d, e, f = [5, 7, 9, 11, 13, 15]
        rows = [(s, len(t) - 1, driver.sequences[s].pages) for s, t in texts.items()]
        first = level([a, b, a, b], [-1] * 4, [0, 2, 4], rows)
        levels = [by_id(device.expand(first))]
        parents = [0, 1, 1, 2, 3, 3]
        second = level([c, d, e] * 2, parents, [0, 3, 6], rows, first=4)
        levels.append(by_id(device.expand(second)))
        third = level([f, f], [5, 8], [0, 1, 2], rows, first=10)
        levels.append(by_id(device.expand(third)))
    for index, (slot, text) in enumerate(texts.items()):
        expected = dense_head.log_probs(text, 1)[0, : len(text) - 1]
        close(np.concatenate(actual[slot]), expected.numpy())
        for which, node, path in [
            (0, 2 * index, [a]), (0, 2 * index + 1, [b]), (1, 3 * index, [a, c]),
            (1, 3 * index + 1, [b, d]), (1, 3 * index + 2, [b, e]), (2, index, [b, d, f]),
        ]:  # fmt: skip
            # The features of a draft token do not exist yet: whatever stands there must not matter.
            wanted = dense_head.log_probs([*text, *path], len(path) + 1, only=len(text) - 2)
            wanted = wanted[len(path), len(text) - 2].numpy()
            close(levels[which][node], wanted)
    executor.shutdown()


def check_few_children(dense_head, executor, model):
    """The best few of a token are the first of all, bit for bit; all, and the dense head's."""
    device, text = model(executor, dense_head.dense.checkpoint, dense_head.draft), random_text(40)
    with Driver(executor) as driver:
        driver.open(1, text[:-1])
        features = driver.step([Row(1)]).outcome.features
        rows = [(1, 0, driver.sequences[1].pages)]
        whole = extension(text[:-1], text[1:], [0, 39], rows, scored=ints([4, 38]))
        every = device.extend(whole, features)
        few = device.extend(replace(whole, candidates=3), features)
    assert few.ids.shape == (2, 3) and few.ids.dtype == np.int32
    assert (few.ids == every.ids[:, :3]).all()
    assert (few.log_probs == every.log_probs[:, :3]).all()
    return by_id(every), dense_head.log_probs(text, 1)[0, [4, 38]].numpy()


def random_text(length):
    return np.random.default_rng(3).integers(0, tiny.VOCAB, length)


def check_refusals(dense_head, executor, model, unread=None):
    """Whatever is out of range, missing, or not for a model that goes level by level; of an
    extension's fields but `unread`.
    """
    device = model(executor, dense_head.dense.checkpoint, dense_head.draft)
    one = np.ones(1, np.int32)
    with Driver(executor) as driver:
        driver.open(0, [1, 2, 3])
        features = driver.step([Row(0)]).outcome.features
        rows = [(0, 2, driver.sequences[0].pages)]
        good = level([5], [-1], [0, 1], rows)
        device.expand(good)
        for name, value in {
            "tokens": one * tiny.VOCAB,
            "parents": one,
            "kv_len": one * 1000,
            "slots": one * 4,
            "first": 384,
        }.items():
            with pytest.raises(EngineError, match="refused"):
                device.expand(replace(good, **{name: value}))
        last = features.select(one)
        good = extension([5], [6], [0, 1], rows)
        device.extend(good, last)
        for name, value in {
            "tokens": -one,
            "next_tokens": one * tiny.VOCAB,
            "kv_len": one * 1000,
            "slots": one * 4,
            "scored": one,
        }.items():
            if name == unread:
                continue
            with pytest.raises(EngineError, match="refused"):
                device.extend(replace(good, **{name: value}), last)
        with pytest.raises(EngineError, match="one row per token"):
            device.extend(good, features)
        with pytest.raises(EngineError, match=r"without (the target's )?features"):
            device.extend(good, None)
        with pytest.raises(EngineError, match=r"no page|does not exist"):
            device.extend(replace(good, pages=-one[None]), last)
        with pytest.raises(EngineError, match="level by level"):
            device.block(DraftBlock(one, one, one, one[None], depth=1, candidates=1))


# --- served ----------------------------------------------------------------------------------


def _unrolled(dense_head, features, texts, steps):
    """Logits [B,T,Vd] of `steps` draft tokens after each token, as training computes them."""
    length, keys, values = texts.shape[1], [], []
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def attend(_layer, result):
        qkv = result.turned()
        heads, size = qkv[0].shape[2:]
        q, k, v = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in qkv)
        keys.append(k)
        values.append(v)
        scores = [(q @ keys[0].mT).masked_fill(future, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
        weights = (torch.cat(scores, -1) * size**-0.5).softmax(-1)
        mixed = weights[..., :length] @ values[0]
        for index, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + index, None] * value
        return mixed.transpose(1, 2)

    hidden = dense_head.head.fuse(features)
    for step in range(steps):
        places = torch.arange(length)
        turn = rotation(places + step, dense_head.frequencies, 1.0)
        tokens = texts[:, (places + step + 1).clamp(max=length - 1)]
        read, hidden = dense_head.head(tokens, dense_head.embed, hidden, turn, attend)
        yield dense_head.head.logits(read)


def learn(dense, folder, begin=None):
    """Train a head on half of the target's greedy texts, and on what it samples behind the first
    SAMPLED of their prompts at a temperature of .8, seeded by row. Returns head and greedy texts.

    Answers to these are known by heart, so that the head is right in them whatever a processor's
    sums are; other texts are what it may be right in or not.

    begin: the prompts, int64[B,T], or twelve random ones
    """
    random = np.random.default_rng(5)
    prompts = torch.from_numpy(random.integers(3, tiny.VOCAB, (12, 12)) if begin is None else begin)
    behind, texts = prompts.shape[1], dense.continued(prompts, 60)
    sampled = [Sampling(0.8, seed=n) for n in SAMPLED]
    answers = dense.continued(prompts[: len(sampled)], 40, sampled)
    ids = torch.cat([texts.flatten(), answers.flatten()]).unique()
    dense_head = RandomHead(dense, folder, {}, ids.tolist())
    # As long as the others; what is behind their ends is not learnt.
    padding = 0, texts.shape[1] - answers.shape[1]
    read = torch.cat([texts[::2], F.pad(answers, padding)])
    features, _ = dense.run(read, dense_head.head.head.features)
    wanted = torch.bucketize(read, ids)
    wanted[-len(answers) :, answers.shape[1] :] = -100
    for parameter in dense_head.head.parameters():
        if parameter.dim() == 2:
            parameter.data *= 0.4
    dense_head.head.lm_head.weight.data.copy_(dense.head[ids])
    dense_head.head.lm_head.weight.requires_grad_(False)
    trained = [p for p in dense_head.head.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=6e-3)
    for _ in range(80):
        loss = sum(
            F.cross_entropy(
                logits[:, behind - step - 2 : -step - 2].flatten(0, 1), wanted[:, behind:].flatten()
            )
            for step, logits in enumerate(_unrolled(dense_head, features, read, 3))
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for parameter in dense_head.head.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    dense_head.export()
    return dense_head, texts.numpy().astype(np.int32)


def opened(folder, dense_head, device="cpu", **changes):
    """The target with the dense head, in float32."""
    return open_target(opened_config(folder, dense_head, device, **changes))


def opened_config(folder, dense_head, device="cpu", **changes):
    room = {"max_sequences": 6, "chunked_prefill_size": 64, "threads": None, "device": device}
    return small(folder, draft=dense_head.folder, **room | changes)


def serve(target, prompts, speculation="EAGLE", tokens=60, temperature=0.0, **changes):
    """Completions of the prompts on one fresh engine, all at once; with at_once=1, in turn."""
    at_once = changes.pop("at_once", None)
    chain = {"speculative_num_draft_tokens": 4, "speculative_num_steps": 3}
    config = replace(target.config, speculative_algorithm=speculation, **chain)
    engine = make_engine(target, replace(config, **changes))
    engine.start()
    try:
        requests = [
            make_request(
                prompt, max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed
            )
            for seed, prompt in enumerate(prompts)
        ]
        return [choices[0] for choices in complete(engine, requests, at_once)]
    finally:
        engine.shutdown()


def simulated(dense_head, text, prompt_len, depth=3):
    """Steps by number of accepted draft tokens of a greedy chain, from the unrolled forward."""
    known = torch.from_numpy(np.array([text], np.int64))
    with torch.no_grad():
        features = dense_head.dense.run(known, dense_head.head.head.features)[0]
        logits = [each[0].argmax(-1) for each in _unrolled(dense_head, features, known, depth)]
    best = dense_head.ids[torch.stack(logits).numpy()]
    counts = [0] * (depth + 1)
    decided = prompt_len + 1
    counts[0] += 1  # The prompt's own step.
    while decided < len(text):
        row = decided - 2
        allowed = min(depth, len(text) - decided - 1)
        accepted = 0
        while accepted < allowed and best[accepted, row] == text[row + accepted + 2]:
            accepted += 1
        counts[accepted] += 1
        decided += accepted + 1
    return counts


def counted(completions, depth=3):
    total = np.zeros(depth + 1, int)
    for item in completions:
        total[: len(item.stats.histogram)] += item.stats.histogram
    return total.tolist()
