"""Verbs from elsewhere, and commands that talk to a running server."""

import json
import socket
import threading
import tomllib

import pytest

from forerun.cli import launch
from forerun.cli.command_line import build_parser, parsed
from forerun.cli.main import main
from forerun.cli.verbs import expanded
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig
from forerun.options.flags import configured
from tests.cli.test_width import in_terminal
from tests.worlds.servers import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("verbs")) as server:
        yield server


def run(capsys, *line):
    code = main([*line])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_verbs_of_others():
    assert expanded(["pull", "a/b"]) == ["models", "pull", "a/b"]
    assert expanded(["ls"]) == expanded(["list"]) == ["models", "list"]
    assert expanded(["help"]) == ["--help"] and expanded(["help", "serve"]) == ["serve", "--help"]
    assert expanded(["help", "ls"]) == ["models", "list", "--help"]
    assert expanded(["run", "list"]) == ["run", "list"] and expanded([]) == []


@pytest.mark.parametrize(
    "line",
    [
        ["run", "org/model", "hi"],
        ["chat", "org/model"],
        ["serve", "org/model"],
        ["plan", "org/model"],
        ["eval", "org/model"],
        ["tune", "org/model"],
        ["prove", "org/model"],
        ["bench", "org/model", "--launch"],
        ["train", "org/model", "--out", "folder"],
    ],
    ids=lambda line: line[0],
)
def test_the_model_is_the_first_word_of_every_command(line):
    options = parsed(line)
    own = options.model if line[0] == "train" else configured(EngineConfig, options).model
    assert own == "org/model"


def test_models_alone_lists(capsys):
    assert run(capsys, "models", "--json") == run(capsys, "ls", "--json")
    code, _, err = run(capsys, "rm")
    assert code == 2 and "needs the name of a model" in err


def test_a_tokenizer_is_written_by_show_alone(capsys, tmp_path):
    assert main(["models", "rm", "toy", "--tokenizer", str(tmp_path)]) == 2
    assert "--tokenizer is for `forerun models show`" in capsys.readouterr().err


def test_what_is_served(server, capsys):
    code, out, _ = run(capsys, "ps", "--url", server.url)
    assert code == 0 and "toy" in out and "4,096" in out
    code, _, err = run(capsys, "stop", "--url", server.url)
    assert code == 2 and "Ctrl+C" in err
    code, _, err = run(capsys, "ps", "--url", "http://127.0.0.1:9")
    assert code == 2 and "No server answers at http://127.0.0.1:9" in err
    assert run(capsys, "ps", "--url", "here")[0] == 2


def test_what_is_no_server_is_said_in_a_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")
            connection.recv(9999)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        for address in (f"127.0.0.1:{other.getsockname()[1]}", "127.0.0.1:abc", "a b"):
            assert main(["ps", "--url", f"http://{address}"]) == 2
            assert f"No server answers at http://{address}" in capsys.readouterr().err
        thread.join()


def test_agents_are_configured_beside_what_there_is(server, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CODEX_HOME", str(tmp_path))
    file = tmp_path / "forerun.config.toml"
    file.write_text('approval_policy = "never"\n', encoding="utf-8")
    command = ("launch", "codex", "--config-only", "--url", server.url)
    for _ in range(2):
        assert run(capsys, *command)[0] == 0
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    assert (config["approval_policy"], config["model"]) == ("never", "toy")
    assert config["model_providers"]["forerun"]["base_url"] == server.url
    file.write_text("# >>> forerun launch >>>\n", encoding="utf-8")
    code, _, err = run(capsys, *command)
    assert code == 2 and "without its end" in err


def test_a_models_name_is_text_in_a_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("CODEX_HOME", str(tmp_path))
    name = 'a "quoted"\\name'
    setup = launch.SETUPS["codex"](launch.Server("http://here", name, "none", None))
    assert tomllib.loads(setup.text)["model"] == name


def test_what_starts_an_agent_is_one_line_in_a_narrow_terminal(server):
    """Broken into several, a shell would take each for a command."""
    lines = in_terminal("launch", "claude", "--config-only", "--url", server.url, "--", "-p", "a b")
    (line,) = [one for one in lines if one.startswith("ANTHROPIC_BASE_URL=")]
    assert line.endswith(" claude -p 'a b'") and len(line) > 200


def test_bench_takes_an_address_as_other_commands_do(server, capsys, tmp_path):
    options = ["--concurrency", "1", "--requests", "1", "--repeats", "1", "--max-tokens", "4"]
    code, out, err = run(capsys, "bench", *options, "--url", server.root)
    assert code == 0 and f"toy at {server.url}" in out, err
    code, _, err = run(capsys, "bench", *options, "--url", f"{server.root}/v9")
    assert code == 2 and "404" in err and "developer." not in err


def started_with(capsys, server, agent, *more):
    words = ("launch", agent, "--config-only", "--json", "--url", server.url, *more)
    code, out, _ = run(capsys, *words)
    parsed = json.loads(out)
    return code, parsed["environment"], parsed["command"]


def test_opencode_has_a_provider_of_its_own(server, capsys):
    code, environment, command = started_with(capsys, server, "opencode", "--api-key", "k")
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    assert (code, command, config["model"]) == (0, ["opencode"], "forerun/toy")
    provider = config["provider"]["forerun"]
    assert provider["npm"] == "@ai-sdk/openai-compatible" and list(provider["models"]) == ["toy"]
    assert provider["models"]["toy"]["limit"] == {"context": 4096, "output": 1024}
    headers = {"x-forerun-fit-max-tokens": "true"}
    assert provider["options"] == {"baseURL": server.url, "apiKey": "k", "headers": headers}


def test_qwen_code_and_aider_are_configured_by_the_environment(server, capsys):
    code, environment, command = started_with(capsys, server, "qwen")
    assert (code, command) == (0, ["qwen", "--auth-type", "openai"])
    assert environment["OPENAI_BASE_URL"] == server.url and environment["OPENAI_MODEL"] == "toy"
    assert environment["OPENAI_API_KEY"] and environment["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "1024"
    code, environment, command = started_with(capsys, server, "aider")
    assert (code, command) == (0, ["aider", "--model", "openai/toy"])
    assert environment["OPENAI_API_BASE"] == server.url and environment["OPENAI_API_KEY"]


def test_claude_code_gets_the_context(server, capsys):
    _, environment, _ = started_with(capsys, server, "claude")
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "1024"
    assert environment["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == launch.PATIENCE_MS
    assert environment["ANTHROPIC_CUSTOM_HEADERS"] == "x-forerun-fit-max-tokens: true"


@pytest.mark.parametrize("context", [None, 3, 4096, 1 << 20])
def test_what_an_answer_may_have(context):
    output = launch.Server("http://here", "m", "none", context).output
    assert output == {None: None, 3: 1, 4096: 1024, 1 << 20: 8192}[context]


@pytest.mark.parametrize(
    "agent", ["claude", "cline", "continue", "open-webui", "opencode", "qwen", "aider"]
)
def test_agents_get_the_servers_address(server, capsys, agent):
    code, out, err = run(
        capsys, "launch", agent, "--config-only", "--json", "--url", server.url, "--api-key", "k"
    )
    assert code == 0 and server.url.removesuffix("/v1") in err + out
    assert "command" in json.loads(out)
    assert agent in ("open-webui",) or "toy" in err + out
    code, _, err = run(capsys, "launch", agent, "--url", server.url, "--model", "other")
    assert code == 2 and "has no model 'other'" in err


@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_for_results_that_is_a_file_is_refused_first(inside, tmp_path, capsys):
    """Not after minutes of training."""
    line = ["train", "--preset", "smoke", "--model", "nosuchmodel"]
    file = tmp_path / "file"
    file.write_text("kept")
    out = file / "deep" / "er" if inside else file
    assert main([*line, "--out", str(out)]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert f"--out {out} is to be a folder, but {file} is none." in printed
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("run toy Hi --raw", "words", ["toy", "Hi"]),
        ("run toy --raw Hi", "words", ["toy", "Hi"]),
        ("run --raw toy Hi", "words", ["toy", "Hi"]),
        ("run --raw toy --max-tokens 4 Hi", "words", ["toy", "Hi"]),
        ("serve toy --port 80 smollm2-135m", "more_models", ["smollm2-135m"]),
        ("models pull --json smollm2-135m", "model", "smollm2-135m"),
        ("models --json pull smollm2-135m", "model", "smollm2-135m"),
    ],
)
def test_words_of_a_command_stand_on_both_sides_of_its_flags(line, name, words):
    command = line.split()[0]
    arguments = build_parser([command]).parse_args(line.split())
    assert vars(arguments)[name] == words
    with pytest.raises(ConfigError, match="'x' is one word too many; put a text"):
        build_parser(["chat"]).parse_args(["chat", "toy", "--temperature", "0", "x"])
    with pytest.raises(ConfigError, match=r"'toy' is one word .* doctor takes options only"):
        build_parser(["doctor"]).parse_args(["doctor", "toy"])
