"""`forerun train`: trains a draft for a model in one command."""

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path

from forerun.build import text_table
from forerun.build.chat_template import template_source, template_variables
from forerun.build.engine import load
from forerun.build.registry import choose_executor
from forerun.build.token_map import token_map
from forerun.cli.console import bars, emit, emit_json, err, plain_warnings, say
from forerun.drafts.ngram_counts import write_ngrams
from forerun.drafts.token_map import write_token_map
from forerun.errors import ConfigError, ForerunError, ModelError
from forerun.hub.catalog import Model, open_model
from forerun.options.config import EngineConfig
from forerun.options.flags import configured
from forerun.text.chat import ChatTemplate
from forerun.train.answers import ChatEncoder, PlainText
from forerun.train.chats import Report, TrainingTarget, write_corpus
from forerun.train.corpus import Corpus, open_corpus, write_whole
from forerun.train.ngrams import make_table
from forerun.train.presets import TrainConfig, resolve
from forerun.train.progress import Progress
from forerun.train.prompts import Problems, read_prompts
from forerun.train.served import EngineGenerator

MAP_FILE, TARGET_FILE = "token_map.json", "target.json"


def main(arguments: argparse.Namespace) -> int:
    """Run the command. A second run with the same --out continues where the first stopped."""
    changes = {item.name: arguments.values[item.name] for item in fields(TrainConfig)}
    config = resolve(arguments.preset, changes)
    out = Path(arguments.out)
    _check_folder(out)
    prompts = Path(arguments.prompts) if arguments.prompts else None
    if prompts:
        _check_prompts(prompts)
    engine = replace(
        configured(EngineConfig, arguments),
        model=arguments.model,
        executor=arguments.executor,
        max_sequences=config.width,
    )
    if config.start_from and changes["draft_vocab"]:
        raise ConfigError("--start-from brings its own vocabulary; leave --draft-vocab out")
    if arguments.raw and engine.chat_template:
        raise ConfigError("--raw uses no chat template; leave --chat-template out")
    if engine.toy:
        raise ConfigError("the toy has no weights to make a draft for; give --model another target")
    if _needs_torch(arguments, config):  # Fail before a model is downloaded.
        from forerun.cli import train_network
    with plain_warnings(), bars() as report, _writing(out):
        model = open_model(engine.model, report)
        if arguments.token_map:
            vocab, size = model.architecture.vocab, config.draft_vocab
            ids = token_map(Path(arguments.token_map), model.tokenizer, vocab, size)
            write_token_map(ids, out / MAP_FILE)
            say(f"{len(ids)} token ids are in {out / MAP_FILE}: --speculative-token-map takes it")
            return 0
        if arguments.text:
            return _count_text(model, arguments.text, out)
        chat = _template(engine, model, arguments.raw)
        core = choose_executor(engine, model.architecture).executor == "cpu"
        source = TrainingTarget(
            model.checkpoint, model.tokenizer, chat, model.name, core, engine.threads
        )
        trainer = None if config.method == "table" else train_network.Trainer(source, config)
        try:
            corpus = _corpus(engine, source, config, prompts, out, report)
            known = make_table(corpus, model.architecture.vocab, out / "draft")
            if trainer is None:
                return _report_table(arguments, out, known)
            progress = trainer.make_draft(corpus, out, report)
        except (ConfigError, ModelError):
            raise  # A retry would fail too.
        except (ForerunError, KeyboardInterrupt):
            say(f"progress is saved in {out}; the same command continues it")
            raise
    return _report_draft(arguments, out, known, progress, config.steps)


def _check_folder(path: Path) -> None:
    """Raise ConfigError if `path` cannot be created as a folder because it, or one of its parents,
    is a file. Called before the run; creates nothing.
    """
    for one in (path, *path.parents):
        if one.exists() or one.is_symlink():
            if one.is_dir():
                return
            raise ConfigError(f"--out {path} is to be a folder, but {one} is none.")


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Return a context manager that turns errors of writing the results into ForerunError."""
    try:
        yield
    except OSError as error:
        raise ForerunError(
            f"{out} cannot be written ({error}); earlier results are kept. Free some space "
            "there or check its permissions, and start the same command again"
        ) from error


def _needs_torch(arguments: argparse.Namespace, config: TrainConfig) -> bool:
    """Return whether a network is trained; an n-gram table needs no torch."""
    return not (arguments.token_map or arguments.text or config.method == "table")


def _count_text(model: Model, files: list[str], out: Path) -> int:
    """Write the n-gram table of text files as a draft. Returns the exit code. Raises ConfigError if
    a file cannot be read, or no n-gram occurs twice in them.
    """
    vocab = model.architecture.vocab
    table = text_table.count(model.tokenizer, vocab, text_table.pieces_of(map(Path, files)))
    if not write_ngrams(table, out / "draft"):
        raise ConfigError(
            f"{', '.join(files)}: no pair of tokens occurs twice, so there are no n-grams to "
            "count; give longer texts"
        )
    draft = out / "draft"
    say(f"{table.contexts:,} n-grams are in {draft}: --speculative-draft-model-path takes it")
    return 0


def _template(engine: EngineConfig, model: Model, raw: bool) -> ChatEncoder:
    """Return the encoder of chats for the model. Raises ConfigError if it has no template."""
    if raw:
        return PlainText(model.tokenizer)
    source = template_source(engine, model.chat_template)
    if source is None:
        raise ConfigError(
            f"{model.name} has no chat template; --raw trains on plain text, as base models need "
            "it, --chat-template gives one"
        )
    return ChatTemplate(source, model.tokenizer, template_variables(engine))


def _report_table(arguments: argparse.Namespace, out: Path, known: float) -> int:
    """Print the result of a run that only counts n-grams. Returns the exit code."""
    done = (
        f"The n-gram table is in {out / 'draft'}: its best draft token is right for {known:.0%} of "
        "held-out tokens."
    )
    facts = {"draft": str(out / "draft"), "table_agreement": known}
    emit(arguments, facts, lambda: err.print(done, markup=False))
    return 0


def _report_draft(
    arguments: argparse.Namespace, out: Path, known: float, progress: Progress, steps: int
) -> int:
    if arguments.json:
        facts = {
            "draft": str(out / "draft"),
            "table_agreement": known,
            "simulated_length": progress.best,
            "last": progress.history[-1],
        }
        emit_json(facts)
    else:
        err.print(
            f"The draft is in {out / 'draft'}: simulated {progress.best:.3f} tokens per step "
            f"on held-out answers (chain of {steps}).",
            markup=False,
        )
    return 0


def _check_prompts(path: Path) -> None:
    """Raise ConfigError, before anything is loaded, for a file without chats."""
    problems = Problems()
    try:
        if next(read_prompts(path, problems), None):
            return
    except OSError as error:
        raise ConfigError(
            f"--prompts {path} cannot be read: {error.strerror}; it takes a jsonl file of chats."
        ) from error
    first = f": {problems.bad_lines[0]}" if problems.bad_lines else ""
    raise ConfigError(f"--prompts {path} holds no chat that can be used{first}.")


def _corpus(
    engine: EngineConfig,
    source: TrainingTarget,
    config: TrainConfig,
    prompts: Path | None,
    out: Path,
    report: Report,
) -> Corpus:
    """Return the chats of an earlier run, or have the target generate new ones. Raises ConfigError
    if another model generated them.
    """
    _check_target(source.name, out)
    if (out / "corpus" / "corpus.json").exists():
        say(f"using the chats in {out / 'corpus'}")
        return open_corpus(out / "corpus")
    with closing(load(engine, report)) as loaded:
        backend = EngineGenerator(loaded)
        corpus, problems = write_corpus(backend, source, config, prompts, out, report)
    for line in problems.bad_lines[:5]:
        say(f"left out: {line}")
    if len(problems.bad_lines) > 5:
        say(f"... and {len(problems.bad_lines) - 5} more lines left out")
    return corpus


def _check_target(name: str, out: Path) -> None:
    """Record which model generated the chats in a folder. Raises ConfigError if another model did:
    the draft must be trained on the target's own tokens.
    """
    file = out / TARGET_FILE
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(name))
        return
    if before != name:
        raise ConfigError(
            f"--out {out} holds chats of {before}, not of {name}: choose another folder, or remove "
            "it"
        )
