"""Models of well-known shapes with random numbers in llama.cpp's Q4_K_M mix.

    python bench/peers/random_gguf.py model.gguf words.gguf
    python bench/peers/random_gguf.py model.gguf words.gguf --shape lfm2.5-1.2b

tinyllama (the default): 1.1 billion weights, 667 MB of Q4_K, and Q6_K for the output head and for
half of the value and down projections. lfm2.5-1.2b: 1.2 billion, short convolutions in ten of
sixteen layers, a tied head. Tokenizer and chat template are those of words.gguf (the default
model), its vocabulary cut short or filled up, so that prompts have as many tokens as usual. Its
text means nothing; the time it takes is a real model's.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

KINDS = gguf.GGMLQuantizationType
HALVES = {KINDS.Q4_K: (144, (0, 2)), KINDS.Q6_K: (210, (208,))}
"""Kind -> bytes of a block of 256 weights, where its scales are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes as in the model's published configuration.

    attends  the layers that attend, if others convolve over WINDOW tokens; () = all attend
    tied     the output head is the embedding
    """

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    context: int
    theta: float
    attends: tuple[int, ...] = ()
    tied: bool = False

    def convolves(self, layer: int) -> bool:
        """Whether a convolution stands in attention's place."""
        return bool(self.attends) and layer not in self.attends


WINDOW = 3
SHAPES = {
    "tinyllama": Shape("llama", 22, 2048, 32, 4, 64, 5632, 32000, 16384, 1e4),
    "lfm2.5-1.2b": Shape(
        *("lfm2", 16, 2048, 32, 8, 64, 8192, 65536, 128000, 1e6),
        attends=(2, 5, 8, 10, 12, 14),
        tied=True,
    ),
}


def blocks(random: np.random.Generator, kind: Any, rows: int, columns: int) -> np.ndarray:
    """uint8[rows,bytes]: random bits with scales that make numbers of about .02."""
    size, halves = HALVES[kind]
    found = random.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    scale = 2.5e-5 if kind == KINDS.Q6_K else 8e-5
    for at in halves:
        value = scale * (7.5 if at else 1) * random.uniform(0.5, 1.5, found.shape[:2])
        found[..., at : at + 2] = value.astype("<f2")[..., None].view(np.uint8)
    return found.reshape(rows, -1)


def matrices(shape: Shape) -> dict[str, tuple[Any, int, int]]:
    """Name in the file -> kind, rows, columns."""
    few, more = KINDS.Q4_K, KINDS.Q6_K
    hidden, keys, layers = shape.hidden, shape.kv_heads * shape.head_size, shape.layers
    found = {"token_embd": (more if shape.tied else few, shape.vocab, hidden)}
    if not shape.tied:
        found["output"] = more, shape.vocab, hidden
    for layer in range(layers):
        fine = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        kind = more if fine else few
        if shape.convolves(layer):
            found[f"blk.{layer}.shortconv.in_proj"] = few, 3 * hidden, hidden
            found[f"blk.{layer}.shortconv.out_proj"] = few, hidden, hidden
        else:
            found |= {
                f"blk.{layer}.attn_q": (few, hidden, hidden),
                f"blk.{layer}.attn_k": (few, keys, hidden),
                f"blk.{layer}.attn_v": (kind, keys, hidden),
                f"blk.{layer}.attn_output": (few, hidden, hidden),
            }
        found |= {
            f"blk.{layer}.ffn_gate": (few, shape.ffn, hidden),
            f"blk.{layer}.ffn_up": (few, shape.ffn, hidden),
            f"blk.{layer}.ffn_down": (kind, hidden, shape.ffn),
        }
    return found


def vectors(shape: Shape, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Name in the file -> norms of ones, and convolutions."""
    ones = np.ones(shape.hidden, np.float32)
    found = {"token_embd_norm" if shape.attends else "output_norm": ones}
    for layer in range(shape.layers):
        found |= {f"blk.{layer}.{name}": ones for name in ("attn_norm", "ffn_norm")}
        if shape.convolves(layer):
            kernel = random.normal(0, 0.5, (shape.hidden, WINDOW)).astype(np.float32)
            found[f"blk.{layer}.shortconv.conv"] = kernel
        elif shape.attends:
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{layer}.{name}"] = ones[: shape.head_size]
    return found


def add_tokenizer(writer: gguf.GGUFWriter, words: gguf.GGUFReader, vocab: int) -> None:
    """The first `vocab` byte-level tokens of `words`, and the merges that make them."""

    def value(name: str) -> Any:
        return words.fields[f"tokenizer.{name}"].contents()

    tokens, kinds = value("ggml.tokens")[:vocab], value("ggml.token_type")[:vocab]
    known, unused = set(tokens), range(len(tokens), vocab)
    writer.add_tokenizer_model(value("ggml.model"))
    writer.add_tokenizer_pre(value("ggml.pre"))
    writer.add_token_list([*tokens, *(f"<unused {place}>" for place in unused)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    writer.add_token_merges(
        [merge for merge in value("ggml.merges") if merge.replace(" ", "") in known]
    )
    writer.add_bos_token_id(value("ggml.bos_token_id"))
    writer.add_eos_token_id(value("ggml.eos_token_id"))
    writer.add_unk_token_id(value("ggml.unknown_token_id"))
    writer.add_pad_token_id(value("ggml.padding_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(value("chat_template"))


def write(path: Path, words: Path, shape: Shape) -> None:
    """Make the file."""
    random, writer = np.random.default_rng(0), gguf.GGUFWriter(path, shape.arch)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.attends:
        writer.add_shortconv_l_cache(WINDOW)
        each = [0 if shape.convolves(layer) else shape.kv_heads for layer in range(shape.layers)]
        writer.add_head_count_kv(each)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, gguf.GGUFReader(words), shape.vocab)
    for name, (kind, rows, columns) in matrices(shape).items():
        writer.add_tensor(f"{name}.weight", blocks(random, kind, rows, columns), raw_dtype=kind)
    for name, array in vectors(shape, random).items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model of about a billion random weights.")
    parser.add_argument("model", type=Path, help="the file to write")
    parser.add_argument("words", type=Path, help="a GGUF with the tokenizer")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama", help="the sizes")
    asked = parser.parse_args()
    write(asked.model, asked.words, SHAPES[asked.shape])
