"""Hub models as people write them."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from forerun.cli import models
from forerun.cli.main import main
from forerun.client.llm import LLM
from forerun.errors import ModelError
from forerun.hub import huggingface
from forerun.hub.catalog import is_reference, open_model
from forerun.hub.reference import HubReference, choose_gguf, hub_reference, layers_for
from tests.drafters.prediction import alone, in_gguf, random_layer
from tests.models import tiny

HOST = constants.ENDPOINT.split("//")[1]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("org/repo", HubReference("org/repo")),
        ("org/repo:Q4_K_M", HubReference("org/repo", "Q4_K_M")),
        ("org/repo:tiny-q8_0.gguf", HubReference("org/repo", "tiny-q8_0.gguf")),
        (f"{HOST}/org/repo", HubReference("org/repo")),
        (f"https://{HOST}/org/repo/", HubReference("org/repo")),
        ("hf" + ".co/org/repo:Q8_0", HubReference("org/repo", "Q8_0")),
        ("elsewhere.example/org/repo", None),
        ("https://elsewhere.example/repo", None),
        ("models/absent.gguf", None),
        ("just-a-name", None),
        ("/org/repo", None),
        ("two words/here", None),
    ],
)
def test_what_is_meant(text, meant):
    assert hub_reference(text) == meant


NAMES = ["README.md", "a-Q8_0.gguf", "sub/a.Q4_K_M.gguf", "a-f16.gguf", "mmproj-a-F16.gguf",
         "sub/mtp-A-Q6_K.gguf", "mtp-A-Q4_K_M.gguf", "mtp-A-Q6_K.gguf", "mtp-A-Q8_0.gguf",
         "mtp-c.gguf",
         "b-Q2_K-00003-of-00003.gguf", "b-Q2_K-00001-of-00003.gguf"]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        (None, "sub/a.Q4_K_M.gguf"),
        ("q8_0", "a-Q8_0.gguf"),
        ("Q4_K_M", "sub/a.Q4_K_M.gguf"),
        ("a-f16.gguf", "a-f16.gguf"),
        ("a-F16", "a-f16.gguf"),
        ("q2_k", "b-Q2_K-00001-of-00003.gguf"),
        ("b-Q2_K", "b-Q2_K-00001-of-00003.gguf"),
        ("b-Q2_K-00001-of-00003.gguf", "b-Q2_K-00001-of-00003.gguf"),
    ],
)
def test_the_file_among_many(file, chosen):
    assert choose_gguf(NAMES, HubReference("org/repo", file)) == chosen


def test_no_such_file_lists_what_there_is():
    with pytest.raises(ModelError, match=r"no GGUF file 'Q3_K'; it has a-Q8_0.gguf"):
        choose_gguf(NAMES, HubReference("org/repo", "Q3_K"))
    with pytest.raises(ModelError, match="org/repo has no GGUF file"):
        choose_gguf(["a.bin"], HubReference("org/repo"))


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("a-Q8_0.gguf", "mtp-A-Q8_0.gguf"),
        ("sub/a.Q4_K_M.gguf", "sub/mtp-A-Q6_K.gguf"),
        ("a-UD-Q5_K_XL-00001-of-00002.gguf", "mtp-A-Q4_K_M.gguf"),
        ("c-Q8_0.gguf", "mtp-c.gguf"),
        ("b-Q2_K-00001-of-00003.gguf", None),
    ],
)
def test_prediction_layers_beside_a_file(model, layers):
    assert layers_for(NAMES, model) == layers


def test_prediction_layers_of_a_hub_model_draft(hub, monkeypatch):
    """Fetched with the file, though the model is named by its hub id."""
    folder = hub / "hub/models--org--tiny-GGUF/snapshots" / ("0" * 40)
    hf = tiny.model("llama")
    beside = alone(
        in_gguf(hf, [random_layer(hf, 5)], hub / "whole.gguf"), folder / "mtp-tiny-Q4_0.gguf"
    )
    names = [SimpleNamespace(rfilename=path.name) for path in folder.iterdir()]
    calls = []

    def fetched(repository, wanted, *_):
        calls.extend(wanted)
        return folder

    monkeypatch.setattr(huggingface, "_snapshot", fetched)
    monkeypatch.setattr(
        huggingface_hub, "HfApi",
        lambda: SimpleNamespace(model_info=lambda *_, **__: SimpleNamespace(siblings=names)),
    )  # fmt: skip
    with LLM("org/tiny-GGUF:Q8_0", context=64, max_sequences=1) as llm:
        assert f"AUTO: {beside} holds prediction layers" in llm.loaded.info["drafting"]
    assert {*calls} == {"tiny-Q8_0.gguf", "mtp-tiny-Q4_0.gguf"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A machine without network, on which one GGUF repository was fetched before."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--org--tiny-GGUF"
    place = repository / "snapshots" / commit
    place.mkdir(parents=True)
    tiny.write_gguf(tiny.model("llama"), place / "tiny-Q8_0.gguf")
    (place / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return tmp_path


def test_a_repository_with_gguf_inside_opens(hub):
    for reference in ("org/tiny-GGUF", "org/tiny-GGUF:Q8_0", f"{HOST}/org/tiny-GGUF:Q8_0"):
        model = open_model(reference, cache_dir=hub)
        assert model.path.name == "tiny-Q8_0.gguf" and model.architecture.layers == 2
        assert model.name == reference.removeprefix(f"{HOST}/")
    with pytest.raises(ModelError, match=r"no GGUF file 'Q4_0'; it has tiny-Q8_0\.gguf"):
        open_model("org/tiny-GGUF:Q4_0", cache_dir=hub)


def test_models_are_listed_described_and_removed(hub, capsys, monkeypatch):
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(hub / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(hub))
    monkeypatch.setattr(
        huggingface,
        "_snapshot",
        lambda *args: hub / "hub/models--org--tiny-GGUF/snapshots" / ("0" * 40),
    )
    assert main(["models", "list", "--json"]) == 0
    rows = {row["name"]: row["path"] for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2-135m"] is None and "models--org--tiny-GGUF" in rows["org/tiny-GGUF"]
    assert main(["models", "list"]) == 0
    assert "not here yet" in capsys.readouterr().out
    assert main(["models", "show", "org/tiny-GGUF:Q8_0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "llama"
    assert main(["models", "pull", "org/tiny-GGUF:Q8_0"]) == 0
    assert "is ready" in capsys.readouterr().err
    assert main(["models", "rm", "org/tiny-GGUF:Q8_0"]) == 3
    assert "cannot be removed" in capsys.readouterr().err
    assert models.remove("org/tiny-GGUF") > 0
    assert not (hub / "hub" / "models--org--tiny-GGUF" / "snapshots").exists()
    for line in (["rm", "org/tiny-GGUF"], ["rm", "smollm2-135m"], ["rm", str(hub)]):
        assert main(["models", *line]) == 3
        assert "nothing to remove" in capsys.readouterr().err.replace("\n", " ")
    assert main(["models", "show"]) == 2 and main(["models", "list", "x"]) == 2


def test_a_word_that_can_only_be_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save_folder(tiny.model("llama"), tmp_path / "folder")
    (tmp_path / "empty").mkdir()
    assert all(map(is_reference, ("smollm2-135m", "toy", "x.gguf", "folder", "org/repo:Q8_0")))
    assert not any(
        map(is_reference, ("Hello", "Why?", "either/or what", "empty", "a b.gguf", "\0"))
    )


def test_run_takes_a_model_before_the_prompt(capsys, monkeypatch):
    how = ["--kv-tokens", "1024", "--max-tokens", "6", "--raw"]
    assert main(["run", "Hi", "--model", "toy", *how]) == 0
    expected = capsys.readouterr().out
    assert main(["run", "toy", "Hi", *how]) == 0
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", open_pipe("Hi"))
    assert main(["run", "toy", *how]) == 0
    assert capsys.readouterr().out == expected
    assert main(["run", "toy", "--model", "toy", *how]) == 0  # Here it is a prompt.
    assert capsys.readouterr().out != expected
    assert main(["run", "toy", "Hi", "there", *how]) == 2
    assert "put the prompt between quotes" in capsys.readouterr().err


def open_pipe(text):
    import io

    return io.TextIOWrapper(io.BytesIO(text.encode()))


def test_the_tokenizer_of_a_gguf_file_for_other_libraries(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    path = tiny.write_gguf(tiny.model("llama"), tmp_path / "tiny.gguf")
    folder = tmp_path / "tokenizer"
    assert main(["models", "show", str(path), "--tokenizer", str(folder)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_model(str(path)).tokenizer
    text = "the quick brown fox"
    assert theirs.encode(text) == ours.encode(text, specials=True, bos=True).tolist()
    assert theirs.eos_token_id == ours.eos_ids[0] and theirs.chat_template == tiny.CHAT_TEMPLATE
