"""Models of well-known shapes with random numbers in llama.cpp's Q4_K_M mix.

    python bench/peers/random_gguf.py model.gguf words.gguf
    python bench/peers/random_gguf.py model.gguf words.gguf --shape lfm2.5-1.2b

tinyllama (the default): 1.1 billion weights, 667 MB of Q4_K, and Q6_K for the output head and for
half of the value and down projections. lfm2.5-1.2b: 1.2 billion, short convolutions in ten of
sixteen layers, a tied head. qwen3.5-0.8b: gated delta nets in 18 of 24, a tied head over 248,320
tokens; with -mtp a prediction layer more. Tokenizer and chat template are those of words.gguf (the
default model), its vocabulary cut short or filled up, so that prompts have as many tokens as usual.
Its text means nothing; the time it takes is a real model's.
"""

import argparse
from dataclasses import dataclass, replace
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

    attends  the layers that attend; () = all do. Others are lfm2's short convolutions over WINDOW
             tokens, or qwen35's delta nets of NET_HEADS heads of NET_SIZE numbers
    rotated  numbers of a head that are rotated; 0 = all
    tied     the output head is the embedding
    predicts how many of the layers are prediction layers, behind the others
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
    rotated: int = 0
    tied: bool = False
    predicts: int = 0

    def recurrent(self, layer: int) -> bool:
        """Whether a convolution or a delta net stands in attention's place."""
        return bool(self.attends) and layer not in self.attends


WINDOW = 3
NET_HEADS, NET_SIZE, NET_WINDOW = 16, 128, 4
QWEN = Shape(
    *("qwen35", 24, 1024, 8, 2, 256, 3584, 248320, 262144, 1e7),
    attends=(3, 7, 11, 15, 19, 23),
    rotated=64,
    tied=True,
)
SHAPES = {
    "tinyllama": Shape("llama", 22, 2048, 32, 4, 64, 5632, 32000, 16384, 1e4),
    "attention": Shape("llama", 3, 1024, 16, 4, 64, 2816, 32000, 65536, 1e4),
    "lfm2.5-1.2b": Shape(
        *("lfm2", 16, 2048, 32, 8, 64, 8192, 65536, 128000, 1e6),
        attends=(2, 5, 8, 10, 12, 14),
        tied=True,
    ),
    "qwen3.5-0.8b": QWEN,
    "qwen3.5-0.8b-mtp": replace(QWEN, layers=25, attends=(*QWEN.attends, 24), predicts=1),
}


def blocks(random: np.random.Generator, kind: Any, rows: int, columns: int) -> np.ndarray:
    """uint8[rows,bytes]: random bits with scales that make numbers of about .02."""
    size, halves = HALVES[kind]
    raw = random.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    scale = 2.5e-5 if kind == KINDS.Q6_K else 8e-5
    for at in halves:
        value = scale * (7.5 if at else 1) * random.uniform(0.5, 1.5, raw.shape[:2])
        raw[..., at : at + 2] = value.astype("<f2")[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def matrices(shape: Shape) -> dict[str, tuple[Any, int, int]]:
    """Name in the file -> kind, rows, columns."""
    few, more = KINDS.Q4_K, KINDS.Q6_K
    hidden, layers = shape.hidden, shape.layers
    shapes = {"token_embd": (more if shape.tied else few, shape.vocab, hidden)}
    if not shape.tied:
        shapes["output"] = more, shape.vocab, hidden
    for layer in range(layers):
        fine = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        kind = more if fine else few
        mixer = _recurrent(shape) if shape.recurrent(layer) else _attention(shape, kind)
        shapes |= {f"blk.{layer}.{name}": what for name, what in mixer.items()}
        shapes |= {
            f"blk.{layer}.ffn_gate": (few, shape.ffn, hidden),
            f"blk.{layer}.ffn_up": (few, shape.ffn, hidden),
            f"blk.{layer}.ffn_down": (kind, hidden, shape.ffn),
        }
        if layer >= layers - shape.predicts:
            shapes[f"blk.{layer}.nextn.eh_proj"] = few, hidden, 2 * hidden
    return shapes


def _attention(shape: Shape, value: Any) -> dict[str, tuple[Any, int, int]]:
    few, hidden = KINDS.Q4_K, shape.hidden
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    gated = 2 if shape.arch == "qwen35" else 1
    return {
        "attn_q": (few, gated * queries, hidden),
        "attn_k": (few, keys, hidden),
        "attn_v": (value, keys, hidden),
        "attn_output": (few, hidden, queries),
    }


def _recurrent(shape: Shape) -> dict[str, tuple[Any, int, int]]:
    few, hidden, inner = KINDS.Q4_K, shape.hidden, NET_HEADS * NET_SIZE
    if shape.arch == "lfm2":
        return {
            "shortconv.in_proj": (few, 3 * hidden, hidden),
            "shortconv.out_proj": (few, hidden, hidden),
        }
    return {
        "attn_qkv": (few, 3 * inner, hidden),
        "attn_gate": (few, inner, hidden),
        "ssm_alpha": (few, NET_HEADS, hidden),
        "ssm_beta": (few, NET_HEADS, hidden),
        "ssm_out": (few, hidden, inner),
    }


def vectors(shape: Shape, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Name in the file -> norms of ones, convolutions, and a delta net's decays."""
    ones, lfm = np.ones(shape.hidden, np.float32), shape.arch == "lfm2"
    arrays = {"token_embd_norm.weight" if lfm else "output_norm.weight": ones}
    second = "post_attention_norm" if shape.arch == "qwen35" else "ffn_norm"
    for layer in range(shape.layers):
        own = {f"{name}.weight": ones for name in ("attn_norm", second)}
        if layer >= shape.layers - shape.predicts:
            own |= {f"nextn.{part}.weight": ones for part in ("enorm", "hnorm", "shared_head_norm")}
        if not shape.recurrent(layer) and shape.attends:
            own |= {f"attn_{part}_norm.weight": ones[: shape.head_size] for part in "qk"}
        elif lfm and shape.recurrent(layer):
            kernel = random.normal(0, 0.5, (shape.hidden, WINDOW))
            own["shortconv.conv.weight"] = kernel.astype(np.float32)
        elif shape.recurrent(layer):
            kernel = random.normal(0, 0.5, (3 * NET_HEADS * NET_SIZE, NET_WINDOW))
            own |= {
                "ssm_conv1d.weight": kernel.astype(np.float32),
                "ssm_norm.weight": ones[:NET_SIZE],
                "ssm_a": -random.uniform(1, 16, NET_HEADS).astype(np.float32),
                "ssm_dt.bias": random.uniform(-6, -2, NET_HEADS).astype(np.float32),
            }
        arrays |= {f"blk.{layer}.{name}": array for name, array in own.items()}
    return arrays


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
    if shape.predicts:
        writer.add_uint32(f"{shape.arch}.nextn_predict_layers", shape.predicts)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    if shape.arch == "lfm2":
        writer.add_shortconv_l_cache(WINDOW)
        each = [0 if shape.recurrent(layer) else shape.kv_heads for layer in range(shape.layers)]
        writer.add_head_count_kv(each)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    if shape.arch == "qwen35":
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
        writer.add_ssm_conv_kernel(NET_WINDOW)
        writer.add_ssm_inner_size(NET_HEADS * NET_SIZE)
        writer.add_ssm_state_size(NET_SIZE)
        writer.add_ssm_time_step_rank(NET_HEADS)
        writer.add_ssm_group_count(NET_HEADS)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_rope_dimension_count(shape.rotated or shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, gguf.GGUFReader(words), shape.vocab)
    for name, (kind, rows, columns) in matrices(shape).items():
        writer.add_tensor(f"{name}.weight", blocks(random, kind, rows, columns), raw_dtype=kind)
    for name, array in vectors(shape, random).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A model of about a billion random weights.")
    parser.add_argument("model", type=Path, help="the file to write")
    parser.add_argument("words", type=Path, help="a GGUF with the tokenizer")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama", help="the sizes")
    args = parser.parse_args()
    write(args.model, args.words, SHAPES[args.shape])
