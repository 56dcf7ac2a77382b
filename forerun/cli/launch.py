"""`forerun launch`: starts a coding agent on a running server, with the configuration that it
needs. In the user's own configuration file, our part is between two marker lines and only that part
is replaced.
"""

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.cache_dir import home
from forerun.cli.console import emit_json, say
from forerun.cli.running import get_json
from forerun.errors import ConfigError

BEGIN, END = "# >>> forerun launch >>>", "# <<< forerun launch <<<"
FIT_HEADER = "x-forerun-fit-max-tokens"
"""Header with which a request has max_tokens reduced to the room that is left, instead of being
refused.
"""
PATIENCE_MS = "3600000"
"""Milliseconds that Claude Code waits for text. It does not count pings; with its default it gave
up on a first prompt of 18,816 tokens after 300 s and sent it again (a 1.5B model on two busy
cores).
"""
NO_KEY = "none"
"""The key for programs that require one if the server does not."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server, as a program needs to know it.

    url      without /v1
    context  tokens that the model takes; None if the server does not report it
    """

    url: str
    model: str
    key: str
    context: int | None

    @property
    def output(self) -> int | None:
        """The most tokens to request for one answer: programs always request that many, and the
        prompt needs the rest. None if the context is unknown.
        """
        return None if self.context is None else max(min(8192, self.context // 4), 1)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that connect a program to a server.

    environment  variables to start it with
    command      starts it; empty for a plug-in of an editor
    file, text   the program's configuration file, and the text to write to it
    steps        what the user has to enter, if there is no such file
    """

    environment: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    file: Path | None = None
    text: str = ""
    steps: tuple[str, ...] = ()


def main(arguments: argparse.Namespace) -> int:
    """Run the command: replaces this process with a coding agent on a running server. Raises
    ConfigError if the server has no model, or not the named one.
    """
    url = arguments.url.rstrip("/").removesuffix("/v1")
    found = get_json(url, "/v1/models", arguments.api_key).get("data", [])
    models = {one["id"]: one.get("max_model_len") for one in found}
    if not models:
        raise ConfigError(f"The server at {url} has no model.")
    if arguments.model is not None and arguments.model not in models:
        raise ConfigError(f"The server at {url} has no model {arguments.model!r}; it has "
                          f"{', '.join(models)}.")  # fmt: skip
    name = arguments.model or next(iter(models))
    setup = SETUPS[arguments.agent](Server(url, name, arguments.api_key or NO_KEY, models[name]))
    if setup.file is not None:
        written(setup.file, setup.text)
        say(f"{setup.file}: written between {BEGIN!r} and {END!r}")
    for line in setup.steps:
        say(line)
    if arguments.json:
        emit_json({"environment": setup.environment, "command": setup.command,
                   "file": None if setup.file is None else str(setup.file)})  # fmt: skip
    if setup.command:
        _start(setup, arguments.passed_on, arguments.config_only, arguments.json)
    return 0


def _start(setup: Setup, words: list[str], only_shown: bool, as_json: bool) -> None:
    """Replace this process with the program, or print the command that starts it as one line for a
    shell.
    """
    program = shutil.which(setup.command[0])
    if not only_shown and program is not None:
        os.execve(program, [*setup.command, *words], os.environ | setup.environment)  # noqa: S606
    missing = "" if program else f"{setup.command[0]} is not installed here. "
    say(f"{missing}It is started with:")
    if not as_json:
        shown = [f"{name}={shlex.quote(value)}" for name, value in setup.environment.items()]
        print(" ".join((*shown, shlex.join([*setup.command, *words]))))


def written(file: Path, text: str) -> None:
    """Write our part to a file, replacing an earlier one. Raises ConfigError if it cannot be
    written, or an earlier part has no end.
    """
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        head, mark, rest = before.partition(BEGIN)
        tail = rest.partition(END)[2].removeprefix("\n") if mark else ""
        if mark and END not in rest:
            raise ConfigError(f"{file} has {BEGIN!r} without its end; mend it by hand.")
        gap = "" if not head or head.endswith("\n") else "\n"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{head}{gap}{BEGIN}\n{text}\n{END}\n{tail}", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be written: {error}.") from error


def _claude(at: Server) -> Setup:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    environment = {"ANTHROPIC_BASE_URL": at.url, "ANTHROPIC_AUTH_TOKEN": at.key}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    patience = {"CLAUDE_STREAM_IDLE_TIMEOUT_MS": PATIENCE_MS}
    limits = {
        "ANTHROPIC_CUSTOM_HEADERS": f"{FIT_HEADER}: true",
        **_limits(at, "CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_MAX_OUTPUT_TOKENS"),
    }
    return Setup(
        environment | dict.fromkeys(models, at.model) | quiet | patience | limits, ("claude",)
    )


def _limits(at: Server, context: str, output: str) -> dict[str, str]:
    """Return the variables that set a program's context and longest answer, if they are known."""
    limits = {context: at.context, output: at.output}
    return {name: str(value) for name, value in limits.items() if name and value is not None}


def _codex(at: Server) -> Setup:
    place = Path(os.environ.get("CODEX_HOME") or home() / ".codex")
    window = "" if at.context is None else f"model_context_window = {at.context}\n"
    text = f"""model_provider = "forerun"
model = {json.dumps(at.model)}
{window}
[model_providers.forerun]
name = "Forerun"
base_url = {json.dumps(f"{at.url}/v1")}
env_key = "FORERUN_KEY"
wire_api = "responses"
http_headers = {{ {json.dumps(FIT_HEADER)} = "true" }}"""
    command = ("codex", "--profile", "forerun")
    return Setup({"FORERUN_KEY": at.key}, command, place / "forerun.config.toml", text)


def _open_webui(at: Server) -> Setup:
    environment = {"OPENAI_API_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": at.key}
    return Setup({**environment, "ENABLE_OLLAMA_API": "false"}, ("open-webui", "serve"))


def _cline(at: Server) -> Setup:
    steps = (
        "In an editor, enter for Cline:",
        "  API provider   OpenAI Compatible",
        f"  base URL       {at.url}/v1",
        f"  API key        {at.key}",
        f"  model ID       {at.model}",
        "For its command line run what follows; then: cline",
    )
    where = ("--provider", "openai", "--baseurl", f"{at.url}/v1")
    whom = ("--apikey", at.key, "--modelid", at.model)
    return Setup(command=("cline", "auth", *where, *whom), steps=steps)


def _continue(at: Server) -> Setup:
    steps = (
        "Continue reads ~/.continue/config.yaml. Put this under `models:` there:",
        f"  - name: {at.model}",
        "    provider: openai",
        f"    model: {at.model}",
        f"    apiBase: {at.url}/v1",
        f"    apiKey: {at.key}",
        "    roles: [chat, edit, apply]",
    )
    return Setup(steps=steps)


def _opencode(at: Server) -> Setup:
    model: dict[str, Any] = {"name": at.model}
    if at.context is not None:
        model["limit"] = {"context": at.context, "output": at.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Forerun",
        "options": {
            "baseURL": f"{at.url}/v1",
            "apiKey": at.key,
            "headers": {FIT_HEADER: "true"},
        },
        "models": {at.model: model},
    }
    settings = {"model": f"forerun/{at.model}", "provider": {"forerun": provider}}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}, ("opencode",))


def _qwen(at: Server) -> Setup:
    environment = {"OPENAI_BASE_URL": f"{at.url}/v1", "OPENAI_API_KEY": at.key}
    environment |= _limits(at, "", "QWEN_CODE_MAX_OUTPUT_TOKENS")
    return Setup({**environment, "OPENAI_MODEL": at.model}, ("qwen", "--auth-type", "openai"))


def _aider(at: Server) -> Setup:
    environment = {"OPENAI_API_BASE": f"{at.url}/v1", "OPENAI_API_KEY": at.key}
    return Setup(environment, ("aider", "--model", f"openai/{at.model}"))


SETUPS: dict[str, Callable[[Server], Setup]] = {
    "claude": _claude,
    "codex": _codex,
    "cline": _cline,
    "continue": _continue,
    "opencode": _opencode,
    "qwen": _qwen,
    "aider": _aider,
    "open-webui": _open_webui,
}
