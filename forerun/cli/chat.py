"""`forerun chat`: a conversation in the terminal."""

import argparse
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

from forerun.cache_dir import cache_dir, home_path
from forerun.cli.console import emit_json, interactive, load_shown, say
from forerun.cli.conversation import Conversation
from forerun.cli.terminal import Wrapped, messages
from forerun.client.adapters import only_adapter
from forerun.errors import ConfigError, ContextError, ModelError, RequestError
from forerun.options.config import EngineConfig, SamplingConfig
from forerun.options.fields import parsed
from forerun.options.flags import configured_both

HELP = '''/regenerate        answer once more, in other words
/reset             forget the conversation
/system TEXT       show or set the system message: /system You answer in rhyme.
/set               show how answers are sampled
/set NAME VALUE    change it: /set temperature 0.8; an empty value is the model's own
/save FILE         write the conversation as JSON messages
/stats             tokens and acceptance of the conversation so far
/help              this list
/bye               leave (also /quit and Ctrl-D)
A paste is one message; Alt-Enter begins a new line, and so does """ at the start, to the next """.
Ctrl-C stops the answer, or clears what is half typed.'''


def main(arguments: argparse.Namespace) -> int:
    """Run the command: reads messages until the input ends. Raises ModelError if the model has no
    chat template.
    """
    sampling, config = configured_both(SamplingConfig, EngineConfig, arguments)
    only_adapter(config)  # Raises before anything is loaded.
    output = Wrapped.for_terminal()
    with closing(load_shown(config)) as loaded:
        if loaded.chat is None:
            raise ModelError(
                f"{loaded.name} has no chat template; it continues text: forerun run --raw"
            )
        talk = Conversation(loaded, sampling, arguments.system, output.write, say)
        if interactive():
            say(f"{loaded.name}. /help lists the commands, /bye leaves.")
        for text in messages(cache_dir() / "chat_history", interactive()):
            if text.strip() in ("/bye", "/quit", "/exit"):
                break
            _turn(talk, text.strip())
        if arguments.json:
            emit_json({"turns": talk.turns, **talk.stats()})
    return 0


def _turn(talk: Conversation, text: str) -> None:
    """Handle one message or /command. Errors are printed and do not end the conversation."""
    command, _, rest = text.partition(" ")
    if not text:
        return
    try:
        if command in COMMANDS:
            COMMANDS[command](talk, rest.strip())
        elif text.startswith("/") and "\n" not in text and " " not in text:
            say(f"no command {command}; /help lists them")
        else:
            talk.say(text)
    except ContextError as error:
        say(f"{error} /reset starts anew.")
    except (RequestError, ConfigError) as error:
        say(str(error))


def _reset(talk: Conversation, _: str) -> None:
    talk.reset()
    say("forgotten")


def _stats(talk: Conversation, _: str) -> None:
    totals = talk.stats()
    say(
        f"answers: {totals['answers']}, {totals['tokens']} tokens, "
        f"{totals['tokens_per_step']:.2f} tokens per step"
    )


def _system(talk: Conversation, text: str) -> None:
    talk.system = text or talk.system
    say(f"system: {talk.system or 'none'}")


def _set(talk: Conversation, text: str) -> None:
    """Set one sampling option, or print all."""
    name, _, value = text.partition(" ")
    known = {item.name: item for item in fields(SamplingConfig)}
    name = name.replace("-", "_")
    if name == "system":
        _system(talk, value.strip())
    elif name in known:
        item = known[name]
        new_value = parsed(item, f"/set {name}", value.strip()) if value.strip() else item.default
        change: dict[str, Any] = {name: new_value}
        talk.sampling = replace(talk.sampling, **change)
        usual = "the model's default"
        say(f"{name}: {usual if new_value is None else new_value}")
    elif name:
        say(f"/set knows {', '.join(known)} and system, not {name}")
    else:
        chosen = talk.sampling.options(talk.loaded.target.sampling)
        say(", ".join(f"{key} {value}" for key, value in chosen.items()))


def _save(talk: Conversation, text: str) -> None:
    if not text:
        say("name a file: /save talk.json")
        return
    try:
        path = home_path(text)
        with path.open("x", encoding="utf-8") as file:
            json.dump(talk.messages(), file, indent=1, ensure_ascii=False)
    except (OSError, ConfigError) as error:
        say(f"not saved: {error}")
        return
    say(f"saved to {path}")


def _regenerate(talk: Conversation, _: str) -> None:
    talk.regenerate()


def _help(_: Conversation, __: str) -> None:
    say(HELP)


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "/reset": _reset,
    "/clear": _reset,
    "/stats": _stats,
    "/system": _system,
    "/set": _set,
    "/save": _save,
    "/regenerate": _regenerate,
    "/help": _help,
    "/?": _help,
}
