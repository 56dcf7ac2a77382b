"""Run every suite whole, one after the other: `make everything`, or with SUITES="chaos docs".

Each suite is a verb of the Makefile. Its output goes to build/everything/VERB.log; here it is one
line: how it ended, its minutes and what its summaries say. A table of all suites' last runs
follows, those that take hours or a GPU among them: when each ran, at which commit, how it ended and
how long it took, or that it was not run. The exit code is the number of suites that failed.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "everything"
SUITES = (
    "test", "test-slow", "stand-ins", "vocabularies", "reachability", "test-browser", "test-ray",
    "chaos", "test-clients", "sanitize", "docs",
)  # fmt: skip
"""In the order in which they run: what fails most often first."""
NAMED_ONLY = (
    "test-slower",
    "test-arm",
    "chaos-nightly",
    "fuzz-loaders",
    "mutants",
    "soak",
    "gpu-test",
)
"""Run if named in SUITES: each takes an hour or more, an emulator of ARM or a GPU."""
SUMMARY = re.compile(r"^=*\s*(\d+ (?:passed|failed|skipped|deselected|error).* in [\d.:hms ()]+)")


def run(verb: str) -> dict[str, object]:
    """Run `make VERB` and return what the table shows of it."""
    began = time.time()
    log = KEPT / f"{verb}.log"
    with log.open("w") as output:
        code = subprocess.run(
            ["make", "--no-print-directory", verb],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    ).stdout.strip()  # fmt: skip
    return {
        "ended": "passed" if code == 0 else f"failed ({code})",
        "minutes": round((time.time() - began) / 60, 1),
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        "commit": commit,
        "said": "; ".join(summary[1] for line in lines if (summary := SUMMARY.match(line))),
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", default=SUITES, metavar="VERB")
    wanted = parser.parse_args().suites
    KEPT.mkdir(parents=True, exist_ok=True)
    table = KEPT / "last.json"
    last = json.loads(table.read_text()) if table.exists() else {}
    for verb in wanted:
        last[verb] = run(verb)
        table.write_text(json.dumps(last, indent=1) + "\n")
        row = last[verb]
        print(f"{verb}: {row['ended']}, {row['minutes']} min. {row['said']}", flush=True)
    print("\nLast runs by `make everything`:")
    for verb in dict.fromkeys((*SUITES, *NAMED_ONLY, *last)):
        row = last.get(verb)
        line = (
            "not run" if row is None else "{ended}, {when}, {commit}, {minutes} min".format(**row)
        )
        print(f"  {verb:14} {line}")
    return sum(last[verb]["ended"] != "passed" for verb in wanted)


if __name__ == "__main__":
    sys.exit(main())
