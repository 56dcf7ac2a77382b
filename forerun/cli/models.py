"""`forerun models`: lists, describes, downloads and removes models."""

import argparse
import json
from pathlib import Path
from typing import Any

from forerun.build.memory import human
from forerun.cache_dir import cache_dir, home, seen
from forerun.cli.console import bars, emit, emit_json, say
from forerun.errors import ConfigError, ModelError
from forerun.hub import huggingface
from forerun.hub.catalog import BUILT_IN, open_model, shipped_draft
from forerun.hub.reference import hub_reference


def main(arguments: argparse.Namespace) -> int:
    """Run the command: lists, downloads or removes models. Raises ConfigError for a missing or
    superfluous name.
    """
    action, name = arguments.action, arguments.model
    if (name is None) != (action == "list"):
        wrong = f"takes no model name, but got {name}" if name else "needs the name of a model"
        raise ConfigError(
            f"forerun models {action} {wrong}; `forerun models list` shows all models."
        )
    if arguments.tokenizer and action != "show":
        raise ConfigError(f"--tokenizer is for `forerun models show`; {action} writes none.")
    if action == "pull":
        facts = pulled(name)
        done = f"{facts['name']} is ready: {human(facts['bytes'])} in {facts['path']}"
        emit(arguments, facts, lambda: say(done))
        return 0
    if action == "rm":
        freed = remove(name)
        emit(arguments, {"freed": freed}, lambda: say(f"{name}: {human(freed)} freed"))
        return 0
    if action == "show" and arguments.tokenizer:
        return _write_tokenizer(name, Path(arguments.tokenizer))
    rows = listed() if action == "list" else [described(name)]
    if arguments.json:
        emit_json(rows if action == "list" else rows[0])
    elif action == "list":
        _show_list(rows)
    else:
        width = max(map(len, rows[0])) + 2
        for key, value in rows[0].items():
            print(f"{key.replace('_', ' '):<{width}}{_as_text(value)}")
    return 0


def _as_text(value: Any) -> str:
    """Return a value as text for users."""
    if value is None or isinstance(value, bool):
        return "yes" if value else "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items()) or "none"
    if isinstance(value, str):
        return _short(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def listed() -> list[dict[str, Any]]:
    """Return the built-in models, downloaded or not, and those in huggingface_hub's cache."""
    rows: list[dict[str, Any]] = []
    for name, model in BUILT_IN.items():
        path = cache_dir() / "models" / model.file_name
        here = (about := seen(path)) is not None and about.st_size == model.size
        rows.append(_row(name, model.size, path if here else None))
    return rows + [_row(*model) for model in huggingface.cached()]


def _row(name: str, size: int, path: Path | None) -> dict[str, Any]:
    return {"name": name, "bytes": size, "path": None if path is None else str(path)}


def described(name: str) -> dict[str, Any]:
    """Return facts about one model; downloads it if it is not on this machine. Raises ModelError if
    it cannot be opened.
    """
    with bars() as report:
        model = open_model(name, report)
    arch, draft = model.architecture, shipped_draft(name)
    return {
        "name": model.name,
        "path": str(model.path),
        "family": arch.family,
        "parameters": arch.parameters,
        "layers": arch.layers,
        "context": arch.context,
        "vocabulary": arch.vocab,
        "chat_template": model.chat_template is not None,
        "recommended_sampling": dict(model.sampling),
        "draft": None if draft is None else str(draft),
    }


def pulled(name: str) -> dict[str, Any]:
    """Download a model if needed, and verify it. Returns facts about it. Raises ModelError if it
    cannot be opened.
    """
    with bars() as report:
        model = open_model(name, report)
    size = sum(f.stat().st_size for f in model.path.rglob("*") if f.is_file()) or (
        model.path.stat().st_size
    )
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": size,
        "family": model.architecture.family,
        "parameters": model.architecture.parameters,
        "context": model.architecture.context,
    }


def remove(name: str) -> int:
    """Delete the files downloaded under this name. Returns the bytes freed. Raises ModelError if
    there are none. Never deletes files that Forerun did not download.
    """
    freed = 0
    if name in BUILT_IN:
        path = cache_dir() / "models" / BUILT_IN[name].file_name
        if (about := seen(path)) is not None:
            freed = about.st_size
            path.unlink(missing_ok=True)
    elif not Path(name).exists() and (hub := hub_reference(name)):
        if hub.file:
            raise ModelError(
                f"one file of {hub.repository} cannot be removed; remove all of it: forerun models "
                f"rm {hub.repository}"
            )
        freed = huggingface.remove(hub.repository)
    if not freed:
        raise ModelError(
            f"{name} was not fetched to this machine, so there is nothing to remove; "
            "forerun models list shows what was"
        )
    return freed


def _write_tokenizer(name: str, folder: Path) -> int:
    """Write the tokenizer to a folder in the format of Hugging Face libraries. Raises ModelError,
    ConfigError.
    """
    with bars() as report:
        model = open_model(name, report)
    tokenizer = model.tokenizer
    settings: dict[str, Any] = tokenizer.names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.architecture.context,
    }
    if model.chat_template:
        settings["chat_template"] = model.chat_template
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer.json")
        text = json.dumps(settings, indent=1, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}.") from error
    say(f"the tokenizer of {model.name} is in {folder}")
    return 0


def _show_list(rows: list[dict[str, Any]]) -> None:
    """Print a line per model. Long lines are not wrapped, so that a path can be copied from
    them.
    """
    names = max(len("model"), *(len(row["name"]) for row in rows))
    sizes = [human(row["bytes"]) for row in rows]
    wide = max(map(len, ("size", *sizes)))
    print(f"{'model':<{names}}  {'size':<{wide}}  where")
    for row, size in zip(rows, sizes, strict=True):
        away = f"not here yet: forerun models pull {row['name']}"
        print(f"{row['name']:<{names}}  {size:<{wide}}  {_short(row['path']) or away}")


def _short(path: str | None) -> str:
    """Return a path with ~ for the home folder; "" for None."""
    begin = f"{home()}/"
    return f"~/{path.removeprefix(begin)}" if path and path.startswith(begin) else path or ""
