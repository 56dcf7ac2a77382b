"""A model that the hub does not have is said before anything is loaded."""

import socket
import time

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from forerun.build.drafting import with_shipped
from forerun.cli.main import main
from forerun.errors import ConfigError, DownloadError
from forerun.hub import huggingface
from forerun.hub.known_drafts import known_draft, table
from forerun.hub.reference import hub_reference
from forerun.options.algorithms import algorithm
from forerun.options.config import EngineConfig


def answering(monkeypatch, error):
    calls = []

    def model_info(self, repository, revision=None, timeout=None):
        calls.append((repository, revision, timeout))
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface, "cached", list)
    return calls


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
    calls = answering(monkeypatch, refused(kind))
    assert main(["serve", "some/thing", "--revision", "old", "--port", "0"]) != 0
    printed = capsys.readouterr()
    assert words in printed.err and "listening" not in printed.out + printed.err
    assert calls == [("some/thing", "old", huggingface.ASKING)]


@pytest.mark.parametrize("error", [None, httpx.ConnectError("down"), OSError("off")])
def test_a_hub_without_an_answer_does_not_stop_loading(monkeypatch, error):
    answering(monkeypatch, error)
    huggingface.check("some/thing")


def test_what_is_here_is_not_fetched(monkeypatch, tmp_path):
    calls = answering(monkeypatch, refused(RepositoryNotFoundError))
    here = huggingface.CachedModel("some/thing", 1, tmp_path)
    monkeypatch.setattr(huggingface, "cached", lambda: [here])
    huggingface.check("some/thing")
    assert not calls
    with pytest.raises(DownloadError, match="the hub has no model other/thing"):
        huggingface.check("other/thing")


def test_a_silent_hub_is_not_queried_for_minutes(monkeypatch, tmp_path):
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


def test_the_table_is_valid():
    rows = table()
    assert {row.method.name for row in rows} >= {"EAGLE3", "DFLASH", "FROZEN_KV_MTP"}
    assert len({(row.model, row.method.kind, row.method.block) for row in rows}) == len(rows)
    for row in rows:
        assert known_draft(row.model, row.method) == row.draft, "its name means itself"
        assert hub_reference(row.draft) is not None and row.method.model and not row.method.lookup


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
    assert known_draft("Some-1B", HEAD) is None


def test_what_the_hub_has_is_named_in_errors():
    with pytest.raises(ConfigError, match=r"FOLDER, such as AngelSlim/Qwen3-4B_eagle3\."):
        with_shipped(EngineConfig(model="Qwen/Qwen3-4B", speculative_algorithm="EAGLE3"))
