"""Files as they lie on disks: edited on Windows, cloned without LFS, empty, linked to nothing."""

import json
import shutil

import pytest

from forerun.build.chat_template import template_source
from forerun.checkpoints.folder import FolderCheckpoint, chat_template, config_of, eos_ids
from forerun.cli.command_line import build_parser
from forerun.cli.constraint import grammar_of
from forerun.cli.serve import read_keys
from forerun.cli.yaml_file import mapping
from forerun.drafts.token_map import read_token_map
from forerun.errors import ModelError
from forerun.hub.catalog import open_model
from forerun.options.config import EngineConfig
from tests.models import tiny

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
MARK = b"\xef\xbb\xbf"


@pytest.fixture
def folder(tmp_path):
    return tiny.save_folder(tiny.model("llama"), tmp_path / "tiny")


def marked(path):
    path.write_bytes(MARK + path.read_bytes())
    return path


def test_a_byte_order_mark_changes_no_model(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    plain = open_model(str(folder))
    expected = eos_ids(folder, config_of(folder), 320), chat_template(folder)
    for path in (*folder.glob("*.json"), folder / "chat_template.jinja"):
        marked(path)
    assert (eos_ids(folder, config_of(folder), 320), chat_template(folder)) == expected
    ids = open_model(str(folder)).tokenizer.encode("a b")
    assert ids.tolist() == plain.tokenizer.encode("a b").tolist()


def test_a_byte_order_mark_is_no_part_of_what_options_name(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    named = EngineConfig(model="toy", chat_template=str(template))
    keys, map_, options = (tmp_path / name for name in ("keys", "map.json", "serve.yaml"))
    keys.write_text("sesame\nother\n")
    map_.write_text("[1, 2, 3]")
    options.write_text("port: 8001\n")
    read = (
        lambda: template_source(named, None),
        lambda: read_keys(keys),
        lambda: read_token_map(map_, 9).tolist(),
        lambda: mapping(options),
    )
    expected = [one() for one in read]
    for path in (template, keys, map_, options):
        marked(path)
    assert [one() for one in read] == expected


def test_a_schema_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}', encoding="utf-8-sig")
    arguments = build_parser().parse_args(["run", "x", "--schema", str(path)])
    assert json.loads(grammar_of(arguments).source) == {"type": "integer"}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_said_to_be_one(folder, name):
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(POINTER)
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        open_model(str(folder))


def test_a_gguf_may_be_a_pointer_or_empty(tmp_path):
    path = tmp_path / "x.gguf"
    for text, said in ((POINTER, "is a Git LFS pointer"), ("", "is empty: fetch it again")):
        path.write_text(text)
        with pytest.raises(ModelError, match=said):
            open_model(str(path))


def test_a_part_that_is_a_link_to_nothing_is_named(tmp_path):
    folder = tiny.save_folder(tiny.model("llama"), tmp_path / "parts", shards=3)
    part = sorted(folder.glob("model-*.safetensors"))[1]
    part.unlink()
    with pytest.raises(ModelError, match=rf"{part.name} cannot be read: No such file"):
        FolderCheckpoint(folder)
    part.symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=rf"{part.name} is a link to a file that is gone"):
        FolderCheckpoint(folder)


def test_a_model_that_is_a_link_to_nothing_is_no_misspelling(tmp_path):
    for name in ("x.gguf", "folder"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
        with pytest.raises(ModelError, match=rf"{name} is a link to .*gone, which is gone$"):
            open_model(str(tmp_path / name))


def test_a_link_to_nothing_is_named(folder, tmp_path):
    """As in a hub cache of which somebody deleted the blobs."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.move(folder / name, blobs / name)
        (folder / name).symlink_to(blobs / name)
    FolderCheckpoint(folder)
    for name in ("model.safetensors", "config.json"):
        (blobs / name).unlink()
        with pytest.raises(ModelError, match=rf"{name} is a link to a file that is gone: fetch"):
            FolderCheckpoint(folder)
        (folder / name).unlink()
        shutil.copy(tiny.save_folder(tiny.model("llama"), tmp_path / "again") / name, folder)
