"""Damaged files, guided by coverage: `make fuzz-loaders`, or one reader by itself:

    python -m tests.chaos.coverage_fuzz gguf --minutes 10

Each reader gets a process of its own, in which atheris (libFuzzer) keeps what reaches new code.
Files begin as whole ones; half of the changes keep their structure. A reader may refuse a file in
words (ForerunError) and nothing else. The first other exception, crash or hang ends that process
and leaves the bytes behind; `--replay FILE` reads them once more, without atheris.
"""

import argparse
import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.errors import ForerunError
from tests.chaos.mutations import damaged, mutated, safetensors_parts, safetensors_whole

OUT = Path(__file__).parents[2] / "build" / "fuzz"
SECONDS_PER_FILE = 20
MEGABYTES = 2048
READING = [
    f"forerun.{room}" for room in ("networks", "checkpoints", "drafts", "hub", "text", "constrain")
]


@dataclass(frozen=True)
class Reader:
    """seed: a whole file, its bytes. read: opens a path. structured: a change that keeps the form.
    refusal: what `read` may raise.
    """

    seed: Callable[[Path], bytes]
    read: Callable[[Path], object]
    structured: Callable[[bytes, random.Random], bytes]
    name: str = "file"
    refusal: type[Exception] = ForerunError


def json_change(content: bytes, source: random.Random) -> bytes:
    return json.dumps(mutated(json.loads(content), source)).encode()


def header_change(content: bytes, source: random.Random) -> bytes:
    header, data = safetensors_parts(content)
    return safetensors_whole(mutated(header, source), data)


def tiny_folder(folder: Path) -> Path:
    from tests.models import tiny

    hf = tiny.model("llama", hidden_size=16, head_dim=8, intermediate_size=16)
    return tiny.save_folder(hf, folder)


def gguf_seed(folder: Path) -> bytes:
    from tests.models import tiny

    hf = tiny.model("llama", hidden_size=32, head_dim=8, intermediate_size=32)
    return tiny.write_gguf(hf, folder / "seed.gguf", "Q8_0").read_bytes()


def read_gguf(path: Path) -> None:
    from forerun.checkpoints.gguf.file import GgufCheckpoint
    from forerun.hub.catalog import open_model

    checkpoint = GgufCheckpoint(path)
    for name in checkpoint.names():
        checkpoint.packed(name)
        checkpoint.tensor(name)
    open_model(str(path)).tokenizer.encode("Hi")


def read_safetensors(path: Path) -> None:
    from forerun.checkpoints.shard import read_shard

    file = read_shard(path)
    for name in file.tensors:
        file.floats(name)


def beside(name: str) -> Callable[[Path], None]:
    """Opens the folder in which the path stands for the file of this name."""

    def read(path: Path) -> None:
        from forerun.hub.catalog import open_model

        folder = path.parent
        if not (folder / "config.json").exists():
            tiny_folder(folder)
        (folder / name).write_bytes(path.read_bytes())
        open_model(str(folder)).tokenizer.encode("Hi")

    return read


def file_of_folder(name: str) -> Callable[[Path], bytes]:
    def seed(folder: Path) -> bytes:
        content = (tiny_folder(folder / "seed") / name).read_bytes()
        if name == "tokenizer.json":
            value = json.loads(content)
            value["model"]["vocab"] = dict(list(value["model"]["vocab"].items())[:40])
            content = json.dumps(value).encode()
        return content

    return seed


def draft_folder(folder: Path) -> Path:
    from tests.train.exports import export_like
    from tests.train.test_export import IDS, trained

    export_like(trained(), IDS, folder, full=True)
    return folder


def draft_file(name: str) -> Reader:
    def read(path: Path) -> None:
        from forerun.drafts.eagle_folder import open_draft
        from tests.train.test_export import TARGET

        folder = path.parent / "draft"
        if not folder.exists():
            draft_folder(folder)
        (folder / name).write_bytes(path.read_bytes())
        open_draft(folder, TARGET)

    change = json_change if name.endswith(".json") else header_change
    return Reader(lambda folder: (draft_folder(folder / "s") / name).read_bytes(), read, change)


def table_seed(folder: Path) -> bytes:
    from forerun.drafts.ngram_counts import write_ngrams
    from forerun.drafts.ngram_table import FILE
    from tests.models.test_ngram_table import VOCAB, counted

    chats = [np.random.default_rng(n).integers(0, VOCAB, 40).tolist() for n in range(5)]
    write_ngrams(counted(chats), folder)
    return (folder / FILE).read_bytes()


def read_table(path: Path) -> None:
    from forerun.drafts.ngram_table import read_ngram_table
    from tests.models.test_ngram_table import VOCAB

    table = read_ngram_table(path, VOCAB)
    for token in range(VOCAB):
        table.follow(np.array([token], np.int32))


def ids_seed(folder: Path) -> bytes:
    import torch

    torch.save([1, 2, 300, 70_000, *range(50)], folder / "freq_5.pt")
    return (folder / "freq_5.pt").read_bytes()


def pickle_change(content: bytes, source: random.Random) -> bytes:
    """Damage behind the archive's checksums."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, damaged(part, source) if name.endswith(".pkl") else part)
    return whole.getvalue()


def read_ids(path: Path) -> None:
    from forerun.checkpoints.pickled import read_pickled_ids

    assert all(type(item) is int for item in read_pickled_ids(path))


def read_gbnf(path: Path) -> None:
    from forerun.constrain.grammar.gbnf import lark

    lark(path.read_bytes().decode(errors="replace"))


GBNF = rb"""root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)* | "a"{2,5} | [^\x00-\x1f"\\]
term ::= ident | num | "(" ws expr ")" ws # remark
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]?
"""

READERS = {
    "gguf": Reader(gguf_seed, read_gguf, damaged, "model.gguf"),
    "safetensors": Reader(
        file_of_folder("model.safetensors"), read_safetensors, header_change, "model.safetensors"
    ),
    "config": Reader(file_of_folder("config.json"), beside("config.json"), json_change),
    "tokenizer": Reader(file_of_folder("tokenizer.json"), beside("tokenizer.json"), json_change),
    "draft config": draft_file("config.json"),
    "draft tensors": draft_file("model.safetensors"),
    "n-gram table": Reader(table_seed, read_table, header_change, "table.safetensors"),
    "pickled ids": Reader(ids_seed, read_ids, pickle_change, "freq.pt"),
    "gbnf": Reader(lambda folder: GBNF, read_gbnf, damaged, refusal=ValueError),
}


def attempt(reader: Reader, folder: Path, content: bytes) -> None:
    """Read the content once. Raises what is no refusal in words."""
    path = folder / reader.name
    path.write_bytes(content)
    try:
        reader.read(path)
    except reader.refusal as error:
        assert 0 < len(str(error)) < 5000, "a refusal of no or of too many words"


def fuzz(name: str, seconds: int, runs: int) -> None:
    """In this process; it ends with an exit status: 0 = nothing was found."""
    import atheris

    reader, home = READERS[name], OUT / name.replace(" ", "-")
    corpus = home / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="forerun-fuzz-"))
    seed = folder / "seed"
    seed.mkdir()
    with atheris.instrument_imports(include=READING):
        content = reader.seed(seed)
        attempt(reader, folder, content)
    (corpus / "seed").write_bytes(content)

    def change(content: bytes, most: int, number: int) -> bytes:
        source = random.Random(number)
        if number % 2:
            with contextlib.suppress(Exception):
                return reader.structured(content, source)[:most]
        return atheris.Mutate(content, most)

    def one(content: bytes) -> None:
        try:
            attempt(reader, folder, content)
        except BaseException:
            (home / "finding").write_bytes(content)
            raise

    options = [
        f"-artifact_prefix={home}/", f"-timeout={SECONDS_PER_FILE}", f"-rss_limit_mb={MEGABYTES}",
        f"-max_total_time={seconds}", "-max_len=200000", "-len_control=0", "-print_final_stats=1",
        *([f"-runs={runs}"] if runs else []),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=change)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", nargs="?", choices=READERS, help="default: all, in turns")
    parser.add_argument("--minutes", type=float, default=2.0, help="of each reader")
    parser.add_argument("--runs", type=int, default=0, help="files of each reader, 0 = no limit")
    parser.add_argument("--replay", type=Path, help="read this file once")
    args = parser.parse_args()
    if args.replay and not args.reader:
        parser.error(f"--replay needs the reader that {args.replay} is for")
    if args.replay:
        with tempfile.TemporaryDirectory() as folder:
            attempt(READERS[args.reader], Path(folder), args.replay.read_bytes())
        return 0
    if args.reader:
        fuzz(args.reader, round(60 * args.minutes), args.runs)
    faults = []
    for name in READERS:
        command = [sys.executable, "-m", "tests.chaos.coverage_fuzz", name]
        options = ["--minutes", str(args.minutes), "--runs", str(args.runs)]
        if subprocess.run([*command, *options], check=False).returncode:
            faults.append(name)
    print(f"readers with findings: {', '.join(faults) or 'none'} (inputs in {OUT})")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
