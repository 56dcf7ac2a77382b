"""Training a stand-in: a small model by transformers, and prediction layers or an assistant beside
it, on the made chats.
"""

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tests.drafters.prediction import rms
from tests.stand_ins.chats import EOS, split, tokens

ROWS, DEPTHS = 16, 3


def batches(seed, steps):
    """So many batches of chats of about one length: ids int64[B,T], wanted bool[B,T]; filled up
    behind their ends.
    """
    random, texts = np.random.default_rng(seed), [tokens(chat) for chat in split(seed)[0]]
    texts.sort(key=lambda pair: len(pair[0]))
    for _ in range(steps):
        first = int(random.integers(0, len(texts) - ROWS // 4))
        near = texts[max(first - 2 * ROWS, 0) : first + 2 * ROWS]
        rows = [near[n] for n in random.integers(0, len(near), ROWS)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.full((ROWS, width), EOS)
        wanted = torch.zeros(ROWS, width, dtype=torch.bool)
        for n, (row, answer) in enumerate(rows):
            ids[n, : len(row)] = torch.from_numpy(row)
            wanted[n, : len(row)] = torch.from_numpy(answer)
        yield ids, wanted


def loss_ahead(head, states, ids, wanted, ahead):
    """Mean cross-entropy of the wanted tokens `ahead` of rows [B,T,H]."""
    rows = min(states.shape[1], ids.shape[1] - ahead)
    asks, tokens = (each[:, ahead : ahead + rows] for each in (wanted, ids))
    return cross_entropy(head(states[:, :rows][asks]), tokens[asks])


def learn(weights, loss_of, seed, steps, rate=3e-3):
    """Train `weights` on batches by loss_of(ids, wanted), with a warm-up and a cosine."""
    weights = list(weights)
    optimiser = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step, (ids, wanted) in enumerate(batches(seed, steps)):
        done = step / steps
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, step / 30) * (0.05 + 0.95 * math.cos(math.pi / 2 * done))
        loss = loss_of(ids, wanted)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {float(loss.detach()):.2f}", flush=True)


def whole_model(hf, seed, steps):
    """Train a model alone."""
    hf.train()
    learn(
        hf.parameters(),
        lambda ids, wanted: loss_ahead(hf.lm_head, hf.model(ids).last_hidden_state, ids, wanted, 1),
        seed,
        steps,
    )
    return hf.eval()


def with_prediction_layers(hf, count, seed, steps, naming, zeroed):
    """Train a model and prediction layers beside it, each of which counts half. Returns the layers
    as tests/drafters/prediction.py has them: a decoder layer, its norms, its fuse.

    naming  of NAMINGS there: Qwen's norms are stored without their 1, MiMo's layers read the state
            before the token
    zeroed  their first row reads no token
    """
    layers = [_untrained_layer(hf) for _ in range(count)]

    def loss_of(ids, wanted):
        states = hf.model(ids).last_hidden_state
        loss = loss_ahead(hf.lm_head, states, ids, wanted, 1)
        for depth, layer in enumerate(layers, 1):
            read = hf.model.embed_tokens(ids[:, depth:])
            if zeroed:
                read = torch.cat([torch.zeros_like(read[:, :1]), read[:, 1:]], 1)
            states = _rows(hf, layer, states[:, :-1], read, naming == "mimo")
            loss = loss + 0.5 * loss_ahead(hf.lm_head, states, ids, wanted, depth + 1)
        return loss

    hf.train()
    weights = [weight for made, *own in layers for weight in (*made.parameters(), *own)]
    learn([*hf.parameters(), *weights], loss_of, seed, steps)
    hf.eval()
    one = float(naming == "qwen3-next")
    return [
        (made.eval(), *(norm.detach() - one for norm in norms), fuse.detach())
        for made, *norms, fuse in layers
    ]


def _untrained_layer(hf):
    width = hf.config.hidden_size
    made = type(hf.model.layers[-1])(hf.config, hf.config.num_hidden_layers - 1)
    made.load_state_dict(hf.model.layers[-1].state_dict())
    norms = [torch.ones(width, requires_grad=True) for _ in range(3)]
    return made, *norms, (torch.randn(width, 2 * width) / (2 * width) ** 0.5).requires_grad_()


def _rows(hf, layer, states, read, hidden_first):
    """Normed outputs [B,T,H] of a prediction layer's rows, each of which reads a state and a
    token's embedding.
    """
    made, embedding_norm, hidden_norm, final_norm, fuse = layer
    eps = hf.config.rms_norm_eps
    parts = rms(read, embedding_norm, eps), rms(states, hidden_norm, eps)
    x = torch.cat(parts[::-1] if hidden_first else parts, -1) @ fuse.T
    position = torch.arange(x.shape[1])[None]
    mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    rotary = hf.model.rotary_emb(x, position)
    y = made(x, attention_mask=mask, position_ids=position, position_embeddings=rotary)
    return rms(y[0] if isinstance(y, tuple) else y, final_norm, eps)


def assistant(hf, made, seed, steps):
    """Train an assistant beside a Gemma 4 that is not changed, DEPTHS draft tokens deep: a row
    stands at the position P of a token, reads it beside the target's state before it and the keys
    before P, says the token after it, and reads that one beside its own state, still at P.
    """
    window = made.config.text_config.sliding_window

    def loss_of(ids, wanted):
        with torch.no_grad():
            outputs = hf.model(ids, use_cache=False, return_shared_kv_states=True)
            embedded = hf.model.embed_tokens(ids)
        rows = ids.shape[1] - DEPTHS
        row, key = torch.arange(1, 1 + rows)[:, None], torch.arange(ids.shape[1])
        hidden = {
            "full_attention": key >= row,
            "sliding_attention": (key >= row) | (key < row - 1 - window),
        }
        masks = {
            name: torch.zeros(each.shape).masked_fill(each, -torch.inf)[None, None]
            for name, each in hidden.items()
        }
        state, loss = outputs.last_hidden_state[:, :rows], 0.0
        for depth in range(1, DEPTHS + 1):
            read = torch.cat([embedded[:, depth : depth + rows], state], -1)
            y = made.model(
                inputs_embeds=made.pre_projection(read),
                attention_mask=masks,
                position_ids=row.T,
                shared_kv_states=dict(outputs.shared_kv_states),
                use_cache=False,
                output_hidden_states=True,  # Else transformers 5.23 cuts what layers share.
            ).last_hidden_state
            state = made.post_projection(y)
            loss = loss + loss_ahead(made.lm_head, y, ids, wanted, depth + 1)
        return loss

    made.train()
    learn(made.parameters(), loss_of, seed, steps)
    return made.eval()
