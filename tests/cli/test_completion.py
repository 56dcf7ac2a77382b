"""What a shell completes: commands, options, and the values of options."""

import subprocess

import pytest
import shtab

from forerun.cli.command_line import build_parser
from forerun.cli.main import main


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_commands_options_and_values(shell, capsys):
    written = script(shell, capsys)
    assert shell in shtab.SUPPORTED_SHELLS
    for word in ("serve", "speculative-algorithm", "EAGLE+NGRAM", "adaptive"):
        assert word in written
    assert "one of AUTO, EAGLE" not in written, "the values say that by themselves"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["forerun", "serve", "--policy", ""], "auto adaptive fixed"),
        (["forerun", "run", "--executor", "to"], "torch toy"),
        (["forerun", "serve", "--speculative-draft-model-r"], "--speculative-draft-model-revision"),
        (["forerun", "ev"], "eval"),
    ],
)
def test_bash_completes(words, wanted, capsys, tmp_path):
    (tmp_path / "complete").write_text(script("bash", capsys))
    listed = " ".join(f"'{word}'" for word in words)
    line = (
        f"source {tmp_path}/complete; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; "
        "f=$(complete -p forerun | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $f; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True)
    assert sorted(done.stdout.split()) == sorted(wanted.split())


def test_the_parser_of_one_command_is_that_of_the_whole_command_line():
    whole = build_parser()._subparsers._group_actions[0].choices
    for name, command in whole.items():
        alone = build_parser([name])._subparsers._group_actions[0].choices
        assert alone.keys() == whole.keys()
        assert alone[name]._option_string_actions.keys() == command._option_string_actions.keys()
        assert alone[name].format_usage() == command.format_usage()
