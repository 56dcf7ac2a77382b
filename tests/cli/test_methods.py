"""Every method's command line, with small stand-ins: SGLang's page on speculation, and `prove`."""

import json

import huggingface_hub
import pytest

from forerun.cli.main import main
from forerun.executors import cpu
from tests.e2e.drafts import make

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
pytestmark = NATIVE
LINES = {
    "EAGLE": ("eagle1", 5, 8, 64),
    "EAGLE3": ("eagle3", 3, 1, 4),
    "STANDALONE": ("small", 4, 2, 7),
    "NGRAM": (None, None, None, 16),
    "NAIVE": ("eagle3", 1, 1, 2),
    "DFLASH": ("block", 4, None, 5),
    "EAGLE on MiMo": (None, 1, 1, 2),
}
"""A draft, steps, top-k and tokens."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


def flags(made, name):
    """The model's folder, and what asks for the method."""
    draft, *shape = LINES[name]
    line = ["--speculative-algorithm", name.split()[0]]
    if draft:
        line += ["--speculative-draft-model-path", str(made / draft)]
    for flag, value in zip(("num-steps", "eagle-topk", "num-draft-tokens"), shape, strict=True):
        line += [f"--speculative-{flag}", str(value)] if value else []
    model = made / ("layered" if "MiMo" in name else "target")
    return ["--model-path", str(model), "--draft-on-error", "stop", "--policy", "fixed", *line]


@pytest.fixture
def answer(capsys):
    def answered(*line):
        code = main([*line, "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else said.err

    return answered


COMMON = ("--kv-tokens", "512", "--mem-fraction-static", "0.5", "--threads", "1")


PLAIN = {}
"""What is answered without drafting: the same for all of them."""


@pytest.mark.parametrize("name", LINES)
def test_run(made, answer, name):
    line = ["run", "the quick", "--raw", "--max-tokens", "16", "--ignore-eos", *COMMON]
    target = ["--model-path", str(made / "target")]
    if "plain" not in PLAIN:
        PLAIN["plain"] = answer(*line, *target, "--speculative-algorithm", "none")
    plain = PLAIN["plain"]
    found = answer(*line, *flags(made, name))
    assert (plain[0], found[0]) == (0, 0), found
    assert found[1]["text"] == plain[1]["text"] != ""
    method = "NEXTN" if "MiMo" in name else name
    assert found[1]["info"]["config"]["speculative_algorithm"] == method


def test_frequent_words_of_a_hub(made, answer, monkeypatch):
    """FR-Spec's line of that page: the map is a file of a repository."""
    fetched = []

    def snapshot(repository, *, allow_patterns, **_):
        fetched.append((repository, allow_patterns))
        return str(made / "map")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    line = ["run", "the quick", "--raw", "--max-tokens", "16", "--ignore-eos", *COMMON]
    own, given = ("--speculative-token-map", str(made / "map" / "map.json")), "map.json"
    plain = answer(*line, *flags(made, "EAGLE"), *own)
    hub = ("--speculative-token-map", f"thunlp/LLaMA3-Instruct-8B-FR-Spec/{given}")
    found = answer(*line, *flags(made, "EAGLE"), *hub)
    assert (plain[0], found[0]) == (0, 0), found
    assert fetched == [("thunlp/LLaMA3-Instruct-8B-FR-Spec", [given])]
    for part in ("text", "speculation"):  # The draft tokens of that map, and their acceptance.
        assert found[1][part] == plain[1][part]
    nowhere = answer(*line, *flags(made, "EAGLE"), "--speculative-token-map", "org/name/x.json")
    assert nowhere[0] == 3 and "there is no token map" in nowhere[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_prove(made, answer, tmp_path, name):
    """Random drafters are hardly ever right: then prove says that nothing is proved, with 1."""
    lines = [json.dumps({"prompt": f"the quick brown fox {n}"}) for n in range(9)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    asked = ["--quick", "--prompts", str(tmp_path / "p.jsonl"), "--count", "9", "--mixed", *COMMON]
    code, proof = answer("prove", *asked, *flags(made, name))
    assert code == (0 if proof["holds"] else 1)
    assert proof["identical"]
    assert all(run["draft_tokens"] > 0 for run in proof["runs"] if run["speculation"] != "OFF")
