"""Training a prediction layer: it computes what serving does, and what it learnt is served."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.cli.main import main
from forerun.client.completion import make_request
from forerun.drafts.prediction_folder import open_prediction
from forerun.errors import ModelError
from forerun.executors import cpu
from forerun.options.config import EngineConfig
from forerun.train.loss import LikeliestTargets, TrainingBatch
from forerun.train.prediction import PredictionLayer, PredictionSpec
from forerun.train.unroll import Unrolling, turns, unrolled
from tests.drafters.prediction import dense, random_layer
from tests.drafters.served import answered
from tests.models import tiny
from tests.worlds.answers import drafting

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))


@torch.no_grad()
def filled(hf, arch, made):
    """Our layer with the weights of one from transformers."""
    block, embedding_norm, hidden_norm, final_norm, fuse = made
    layer = PredictionLayer(PredictionSpec(arch, arch.vocab))
    weights = dict(block.named_parameters()) | {
        "enorm.weight": embedding_norm,
        "hnorm.weight": hidden_norm,
        "shared_head.norm.weight": final_norm,
        "eh_proj.weight": fuse,
        "target_norm.weight": hf.model.norm.weight,
        "lm_head.weight": hf.lm_head.weight,
    }
    layer.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    return layer


@torch.no_grad()
def test_unrolled_it_is_the_published_layer(tmp_path):
    """Against transformers' own layer and the paper's recursion, for rows of a text, three deep."""
    hf = tiny.model("llama")
    arch = FolderCheckpoint(tiny.save_folder(hf, tmp_path)).architecture
    made = random_layer(hf, 3)
    layer = filled(hf, arch, made)
    text = torch.randint(3, 250, (1, 12), generator=torch.Generator().manual_seed(1))
    stream = []
    hook = hf.model.norm.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
    hf.model(text)
    hook.remove()
    wanted = torch.ones_like(text, dtype=torch.bool)
    nothing = torch.zeros(12, 1)
    batch = TrainingBatch(text, wanted, stream[0], text, LikeliestTargets(nothing.long(), nothing))
    steps = turns(batch.loss_mask, Unrolling(3))
    embed = hf.get_input_embeddings().weight
    reads = unrolled(layer, batch.tokens, layer.fuse(batch.features[0]), embed, steps)
    rows = [turn.rows.tolist() for turn in steps]
    for row in (0, 3, 6):
        tokens = text[0].tolist()
        expected = dense(hf, [made], False, tokens[: row + 2], tokens[row + 2 : row + 4])
        for step, logits in enumerate(expected):
            actual = layer.lm_head(reads[step][rows[step].index(row)])
            assert torch.allclose(actual, logits, atol=1e-3), (row, step)


def test_what_cannot_be_trained_is_refused_before_the_work(untrained, tmp_path, capsys):
    gemma = tiny.save_folder(tiny.model("gemma2"), tmp_path / "gemma")
    with pytest.raises(ModelError, match="norms after attention"):
        PredictionSpec(FolderCheckpoint(gemma).architecture, 64)
    out = tmp_path / "out"
    line = ["train", "--model", str(gemma), "--method", "mtp", "--out", str(out)]
    assert main(line) == 3
    assert "use --method eagle3" in capsys.readouterr().err and not out.exists()
    assert main([*line, "--start-from", str(out)]) == 2
    assert "--start-from belongs to --method eagle3 or eagle, not to mtp" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("executor", [pytest.param("cpu", marks=NATIVE), "torch"])
def test_a_prediction_layer_is_trained_and_served(untrained, tmp_path, executor):
    """By heart, on texts that the executor wrote that serves them: nearly all is accepted, in
    chains and trees, and the texts are the target's.
    """
    learning = "--method mtp --epochs 200 --rate 1e-2 --draft-vocab 300 --ema 0.98"
    learning += f" --check-every 90 --executor {executor}"
    metrics = untrained.train(tmp_path, *learning.split())
    assert metrics["best_simulated_length"] > 3.7, metrics["history"][-1]
    layers = open_prediction(tmp_path / "draft", FolderCheckpoint(untrained.model))
    assert (layers.count, layers.vocab, layers.hidden_first) == (1, 300, False)
    config = EngineConfig(
        model=str(untrained.model), policy="fixed", max_sequences=4, chunked_prefill_size=64,
        speculative_draft_model_path=str(tmp_path), kv_tokens=2048, executor=executor,
        draft_on_error="stop",
    )  # fmt: skip
    with closing(open_target(config)) as target:
        assert target.config.speculative_algorithm == "NEXTN+NGRAM"
        one, chain, tree = served(target, untrained, (1, 1, 1), speculative_algorithm="NEXTN")
    share = sum(i.stats.accepted for i in one) / sum(i.stats.draft_tokens for i in one)
    lengths = [1 + sum(i.stats.accepted for i in run) / sum(i.stats.steps for i in run)
               for run in (chain, tree)]  # fmt: skip
    print(share, lengths)
    assert share > 0.97 and lengths[0] > 3.5 and lengths[1] >= lengths[0] - 0.05


def served(target, small, *more, **changes):
    """Answers to the prompts of training, up to their ends, behind which nothing was learnt: by
    chains of 3, by trees of 12, and first by `more`. Texts are those without drafts.
    """
    texts = dict.fromkeys(prompt.text for prompt in small.questions)
    prompts = [target.chat.encode([{"role": "user", "content": text}]) for text in texts]
    requests = [make_request(each, target.tokenizer.eos_ids, max_tokens=73) for each in prompts]
    config, runs = replace(target.config, **changes), []
    for shape in (*more, (3, 3, 1), (12, 3, 4)):
        runs.append(answered(target, replace(config, **drafting(*shape)), requests)[0])
    off = replace(config, speculative_algorithm="OFF")
    plain = [item.tokens for item in answered(target, off, requests)[0]]
    assert all([item.tokens for item in each] == plain for each in runs)
    return runs
