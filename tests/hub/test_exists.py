"""A model that the hub does not have is said before anything is loaded."""

import re
import socket
import time

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from forerun.build.drafting import drafting_sentence, resolved_drafting, with_shipped
from forerun.build.target import open_target
from forerun.cli.main import main
from forerun.errors import ConfigError, DownloadError
from forerun.hub import huggingface
from forerun.hub.known_drafts import SHIPPED, known_draft, known_drafts, read_known_drafts
from forerun.options.algorithms import algorithm
from forerun.options.config import EngineConfig


def answering(monkeypatch, error):
    asked = []

    def model_info(self, repository, revision=None, timeout=None):
        asked.append((repository, revision, timeout))
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface, "cached", list)
    return asked


def refused(kind):
    request = httpx.Request("GET", "http://hub/api/models/some/thing")
    return kind("no", response=httpx.Response(404, request=request))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RepositoryNotFoundError, "the hub has no model some/thing"),
        (GatedRepoError, "some/thing is gated"),
        (RevisionNotFoundError, "has no revision 'old'"),
    ],
)
def test_what_the_hub_says_ends_serve_before_it_listens(monkeypatch, capsys, kind, words):
    asked = answering(monkeypatch, refused(kind))
    assert main(["serve", "some/thing", "--revision", "old", "--port", "0"]) != 0
    told = capsys.readouterr()
    assert words in told.err and "listening" not in told.out + told.err
    assert asked == [("some/thing", "old", huggingface.ASKING)]


@pytest.mark.parametrize("error", [None, httpx.ConnectError("down"), OSError("off")])
def test_who_does_not_say_no_is_asked_while_loading(monkeypatch, error):
    answering(monkeypatch, error)
    huggingface.check("some/thing")


def test_what_is_here_is_not_asked_for(monkeypatch, tmp_path):
    asked = answering(monkeypatch, refused(RepositoryNotFoundError))
    here = huggingface.CachedModel("some/thing", 1, tmp_path)
    monkeypatch.setattr(huggingface, "cached", lambda: [here])
    huggingface.check("some/thing")
    assert not asked
    with pytest.raises(DownloadError, match="the hub has no model other/thing"):
        huggingface.check("other/thing")


def test_a_hub_that_says_nothing_is_not_asked_for_minutes(monkeypatch, tmp_path):
    """It takes connections. Another attempt or two would take longer than the test may."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{host}:{port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface, "ASKING", 0.2)
        began = time.monotonic()
        with pytest.raises(DownloadError, match="the hub cannot be reached"):
            huggingface.fetched("org/name", tmp_path)
        assert time.monotonic() - began < 20


# --- known drafts --------------------------------------------------------------------------------


HEAD, BLOCK = algorithm("EAGLE3"), algorithm("DSPARK")
ROW = '[[draft]]\nmodel = "org/Some-1B"\nalgorithm = "EAGLE"\ndraft = "org/head"\n'


@pytest.fixture
def own(tmp_path):
    """Write a table of one's own."""

    def write(text):
        path = tmp_path / "own.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_table_that_ships_is_valid():
    rows = read_known_drafts(SHIPPED)
    assert {row.method.name for row in rows} >= {"EAGLE3", "DFLASH", "FROZEN_KV_MTP"}
    for row in rows:
        assert known_draft(row.model, row.method) == row.draft, "its name means itself"


@pytest.mark.parametrize(
    "reference",
    [
        "Qwen/Qwen3-4B",
        "unsloth/Qwen3-4B-GGUF:Q4_K_M",
        "models/Qwen3-4B/",
        "/m/Qwen3-4B-Q4_K_M.gguf",
    ],
)
def test_a_model_is_known_in_any_form(reference):
    assert known_draft(reference, HEAD) == "AngelSlim/Qwen3-4B_eagle3"
    assert known_draft(reference, BLOCK) == "deepseek-ai/dspark_qwen3_4b_block7"
    assert known_draft(reference, algorithm("NEXTN")) is None


def test_rows_of_ones_own_go_before(own):
    table = own(ROW + ROW.replace("org/Some-1B", "unsloth/Qwen3-4B-GGUF"))
    assert [row.draft for row in known_drafts("Qwen/Qwen3-4B", table)] == [
        "org/head", "deepseek-ai/dspark_qwen3_4b_block7",
    ]  # fmt: skip
    assert known_draft("Some-1B-Q8_0.gguf", HEAD, table) == "org/head"
    assert known_draft("Some-1B", HEAD) is None
    asked = EngineConfig(model="org/Some-1B", speculative_known_drafts=table)
    told = drafting_sentence(asked, resolved_drafting(asked, False, None), False, None)
    assert "; the hub has org/head (EAGLE): --speculative-draft-model-path takes one)" in told
    wanted = EngineConfig(
        model="org/Some-1B", speculative_algorithm="EAGLE3", speculative_known_drafts=table
    )
    with pytest.raises(ConfigError, match=r"FOLDER, such as org/head\."):
        with_shipped(wanted)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[draft]\n", r"own.toml cannot be read: .*line 1"),
        ("other = 1\n" + ROW, r"own.toml has the key 'other'"),
        ("draft = 1\n", r"own.toml has a key 'draft' that is no list of tables"),
        (ROW + ROW.replace("draft =", "drafts ="), r"own.toml, .* 2: unknown key 'drafts'"),
        (ROW.replace('algorithm = "EAGLE"\n', ""), r" 1: no 'algorithm'; a row has model"),
        (ROW.replace('"org/Some-1B"', "7"), r" 1: model is 7, but must be a text"),
        (ROW.replace("org/Some-1B", "org/:Q8_0"), r" 1: model is 'org/:Q8_0', which names none"),
        (ROW.replace('"EAGLE"', '"EGALE"'), r" 1: speculative-algorithm is 'EGALE'"),
        (ROW.replace('"EAGLE"', '"NGRAM"'), r" 1: algorithm is 'NGRAM', which runs no"),
        (ROW.replace('"EAGLE"', '"AUTO"'), r" 1: algorithm is 'AUTO', which runs no"),
        (ROW.replace("org/head", "head"), r" 1: draft is 'head', which is no hub id"),
        (ROW + ROW.replace("org/Some-1B", "Some-1B-GGUF"), r" 2: .* 1 has a draft of that kind"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_before_anything_is_loaded(text, named, own):
    with pytest.raises(ConfigError, match=named):
        open_target(EngineConfig(model="org/absent", speculative_known_drafts=own(text)))


def test_a_table_that_is_not_there_is_named(tmp_path):
    path = str(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=re.escape(f"{path} cannot be read: No such file")):
        open_target(EngineConfig(model="toy", speculative_known_drafts=path))
