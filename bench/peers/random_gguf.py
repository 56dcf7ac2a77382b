"""A Llama of TinyLlama's shape (1.1 billion weights) with random numbers in llama.cpp's Q4_K_M mix.

    python bench/peers/random_gguf.py model.gguf words.gguf

667 MB of Q4_K, and Q6_K for the output head and for half of the value and down projections.
Tokenizer and chat template are those of words.gguf (the default model), its vocabulary cut short,
so that prompts have as many tokens as usual. Its text means nothing; the time it takes is a real
model's.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, FFN, VOCAB = 22, 2048, 32, 4, 64, 5632, 32000
KINDS = gguf.GGMLQuantizationType
HALVES = {KINDS.Q4_K: (144, (0, 2)), KINDS.Q6_K: (210, (208,))}
"""Kind -> bytes of a block of 256 weights, where its scales are."""


def blocks(random: np.random.Generator, kind: Any, rows: int, columns: int) -> np.ndarray:
    """uint8[rows,bytes]: random bits with scales that make numbers of about .02."""
    size, halves = HALVES[kind]
    found = random.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    scale = 2.5e-5 if kind == KINDS.Q6_K else 8e-5
    for at in halves:
        value = scale * (7.5 if at else 1) * random.uniform(0.5, 1.5, found.shape[:2])
        found[..., at : at + 2] = value.astype("<f2")[..., None].view(np.uint8)
    return found.reshape(rows, -1)


def matrices() -> dict[str, tuple[Any, int, int]]:
    """Name in the file -> kind, rows, columns."""
    few, more, keys = KINDS.Q4_K, KINDS.Q6_K, KV_HEADS * HEAD_SIZE
    found = {"token_embd": (few, VOCAB, HIDDEN), "output": (more, VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        fine = layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2
        kind = more if fine else few
        found |= {
            f"blk.{layer}.attn_q": (few, HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (few, keys, HIDDEN),
            f"blk.{layer}.attn_v": (kind, keys, HIDDEN),
            f"blk.{layer}.attn_output": (few, HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (few, FFN, HIDDEN),
            f"blk.{layer}.ffn_up": (few, FFN, HIDDEN),
            f"blk.{layer}.ffn_down": (kind, HIDDEN, FFN),
        }
    return found


def add_tokenizer(writer: gguf.GGUFWriter, words: gguf.GGUFReader) -> None:
    """The first VOCAB byte-level tokens of `words`, and the merges that make them."""

    def value(name: str) -> Any:
        return words.fields[f"tokenizer.{name}"].contents()

    tokens = value("ggml.tokens")[:VOCAB]
    known = set(tokens)
    writer.add_tokenizer_model(value("ggml.model"))
    writer.add_tokenizer_pre(value("ggml.pre"))
    writer.add_token_list(tokens)
    writer.add_token_types(value("ggml.token_type")[:VOCAB])
    writer.add_token_merges(
        [merge for merge in value("ggml.merges") if merge.replace(" ", "") in known]
    )
    writer.add_bos_token_id(value("ggml.bos_token_id"))
    writer.add_eos_token_id(value("ggml.eos_token_id"))
    writer.add_unk_token_id(value("ggml.unknown_token_id"))
    writer.add_pad_token_id(value("ggml.padding_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(value("chat_template"))


def write(path: Path, words: Path) -> None:
    """Make the file."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(16384)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, gguf.GGUFReader(words))
    for name, (kind, rows, columns) in matrices().items():
        writer.add_tensor(f"{name}.weight", blocks(random, kind, rows, columns), raw_dtype=kind)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Llama of 1.1 billion random weights.")
    parser.add_argument("model", type=Path, help="the file to write")
    parser.add_argument("words", type=Path, help="a GGUF with the tokenizer")
    asked = parser.parse_args()
    write(asked.model, asked.words)
