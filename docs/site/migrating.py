"""Writes docs/use/migrating.md from the tables in forerun/options (algorithms.py, aliases.py).

python docs/site/migrating.py            writes it
python docs/site/migrating.py --check    only says whether it is fresh: exit code 1 where it is not
"""

import argparse
from pathlib import Path

from forerun.options.algorithms import ALGORITHMS
from forerun.options.alias import FIELDS, LLAMA, SGLANG, VLLM, Alias, Verdict
from forerun.options.aliases import ALIASES, SAME_NAMES
from forerun.options.flags import own_option

PATH = Path(__file__).resolve().parents[1] / "use" / "migrating.md"

HEAD = """# Coming from another server

<!-- Made by `python docs/site/migrating.py`; change forerun/options/aliases.py instead. -->

Move the command line over. Each name below works on `forerun serve`, `run` and `chat` (and where
else the option exists), as `FORERUN_*` in the environment, and in a `--config` file; it is
honoured, or taken with a line in the log where it changes no text ([all of
these](../../forerun/options/without_effect.json)), or refused with what to do instead.

    python -m forerun.launch_server --model-path org/target --speculative-algorithm EAGLE3 \\
        --speculative-draft-model-path org/draft --speculative-num-steps 3 \\
        --speculative-eagle-topk 4 --speculative-num-draft-tokens 16

    forerun serve org/target --speculative-config '{"method": "eagle3", "model": "org/draft",
        "num_speculative_tokens": 3}' --max-model-len 8192

## Where options come from

The first of these that sets an option wins:

1. flags
2. `FORERUN_*` in the environment: `FORERUN_MAX_MODEL_LEN=4096` is `--max-model-len 4096`
3. `LLAMA_ARG_*` of llama.cpp, `LLAMA_API_KEY` and `VLLM_API_KEY`
4. the file of `--config` (or `FORERUN_CONFIG`): YAML, `max-model-len: 4096`, a list only for
   an option that may be repeated; values are read as written: `api-key: 007` is the key 007
5. the profile of `forerun tune` for this model and machine, where none of its options was
   set above
6. the defaults

Two names of one option that disagree in one place are an error. A name that no command has is an
error, but in 3; the environment may hold options of other commands, a file may not.

## Methods

`--speculative-algorithm`, in any case. Steps, top-k and draft tokens are the most that a step may
have; `--policy fixed` always takes as many, the default as many as pay. As in SGLang,
draft tokens count the last accepted token: a chain of 3 steps has 4. A tree of S steps and top-k K
has at most 1 + K + (S - 1) x K x K.
"""


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    fresh = PATH.is_file() and PATH.read_text(encoding="utf-8") == page()
    if not check:
        PATH.write_text(page(), encoding="utf-8")
    return int(check and not fresh)


def page() -> str:
    """The whole document."""
    parts = [HEAD, methods()]
    for title, source in (("SGLang", SGLANG), ("vLLM", VLLM), ("llama.cpp", LLAMA)):
        alike = [own_option(FIELDS[n]).flag for n, who in SAME_NAMES.items() if source in who]
        shown = ", ".join(f"`{flag}`" for flag in alike)
        parts += [f"## {title}\n", f"The same name and meaning: {shown}.\n"]
        parts += [names([one for one in ALIASES if source in one.sources])]
    return "\n".join(parts)


def methods() -> str:
    """One row per algorithm."""
    rows = ["| name | also | what drafts |", "| --- | --- | --- |"]
    for one in ALGORITHMS:
        also = ", ".join(name.lower() for name in one.aliases)
        rows.append(f"| {one.name} | {also} | {one.meaning} |")
    return "\n".join(rows) + "\n"


def names(aliases: list[Alias]) -> str:
    """One row per meaning, names of one meaning together, but those that change nothing."""
    found: dict[tuple[str, bool], list[str]] = {}
    for one in aliases:
        if one.verdict is Verdict.IGNORED:
            continue
        key = one.meaning, one.verdict is Verdict.REFUSED
        found.setdefault(key, []).extend(f"`{flag}`" for flag in one.flags.split())
    rows = ["| there | here |", "| --- | --- |"]
    for (meaning, refused), flags in found.items():
        said = meaning.replace("|", "\\|")
        rows.append(f"| {', '.join(flags)} | {'**refused**: ' if refused else ''}{said} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
