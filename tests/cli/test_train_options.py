"""`forerun train` refuses what another method would do with an option."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from forerun.cli.main import main
from forerun.cli.train import _check_target, _template
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig
from forerun.text.tokenizer import Tokenizer
from forerun.train.presets import METHODS, TrainConfig, resolve

OPTIONS = {item.name: item for item in fields(TrainConfig)}
KINDS = OPTIONS["method"].metadata["choices"]


def said(name):
    """(flag, value as text, value) of an option that is said: never its default where it matters
    how it is spelt.
    """
    item, flag = OPTIONS[name], f"--{name.replace('_', '-')}"
    if item.type is bool:
        value = not item.default
        return flag if value else f"--no-{flag[2:]}", (), value
    value = "folder" if item.default is None else item.default
    return flag, (str(value),), value


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_an_option_of_other_methods_is_refused(method, name, tmp_path, capsys):
    flag, text, value = said(name)
    if method in METHODS[name]:
        config = resolve("cpu", {"method": method, name: value})
        assert getattr(config, name) == value
        return
    out = tmp_path / "out"
    assert main(["train", "--out", str(out), "--method", method, flag, *text]) == 2
    owners = " or ".join(METHODS[name])
    assert f"{flag} belongs to --method {owners}, not to {method}" in capsys.readouterr().err
    assert not out.exists()


def test_values_of_presets_are_never_refused():
    assert resolve("cpu", {"method": "block"}).thin == 0.5
    assert resolve("table", {}).method == "table"


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in METHODS])
@pytest.mark.parametrize("method", KINDS)
def test_all_other_options_are_for_every_method(method, name):
    value = method if name == "method" else OPTIONS[name].default
    assert getattr(resolve("cpu", {"method": method, name: value}), name) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read: No such file"),
        ("\n", "holds no chat that can be used."),
        ("{", "holds no chat that can be used: "),
        ('{"text": "a"}', ":1: no messages, turns or prompt."),
    ],
)
def test_prompts_without_a_chat_are_refused_before_a_model_is_loaded(
    text, problem, tmp_path, capsys
):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    if text is not None:
        prompts.write_text(text)
    line = ["train", "--preset", "table", "--out", str(out), "--prompts", str(prompts)]
    assert main([*line, "--model", "nosuchmodel"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert f"--prompts {prompts}" in printed and problem in printed and not out.exists()


def test_another_models_chats_are_not_learnt_from(tmp_path):
    out = tmp_path / "out"
    for name in ("one", "one"):
        _check_target(name, out)
    with pytest.raises(ConfigError, match=r"out holds chats of one, not of other: choose another"):
        _check_target("other", out)


def test_plain_text_has_no_template(tmp_path, capsys):
    line = ["train", "--out", str(tmp_path / "out"), "--raw", "--chat-template", "chatml"]
    assert main(line) == 2
    assert "--raw uses no chat template" in capsys.readouterr().err


def test_a_template_is_that_of_the_options_before_the_models():
    model = SimpleNamespace(tokenizer=Tokenizer.byte_level(), chat_template=None, name="base")
    with pytest.raises(ConfigError, match="base has no chat template; --raw trains on plain text"):
        _template(EngineConfig(), model, raw=False)
    chat = [{"role": "user", "content": "Hi"}]
    template = _template(EngineConfig(chat_template="chatml"), model, raw=False)
    assert model.tokenizer.decode(template.encode(chat)) == "user\nHi\nassistant\n"
    plain = _template(EngineConfig(), model, raw=True).encode(chat)
    assert model.tokenizer.decode(plain) == "Hi"
