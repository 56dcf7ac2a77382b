"""Writes docs/reference/metrics.md from what a server shows at /metrics.

python docs/site/metrics.py            writes it
python docs/site/metrics.py --check    only says whether it is fresh: exit code 1 where it is not
"""

import argparse
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from forerun.build.engine import load
from forerun.options.config import EngineConfig
from forerun.serve.answers.service import cache_facts
from forerun.serve.observe.metrics import LABELS, Metrics

PATH = Path(__file__).resolve().parents[1] / "reference" / "metrics.md"

HEAD = """# Metrics

<!-- Made by `python docs/site/metrics.py`; change forerun/serve/observe/metrics.py instead. -->

`GET /metrics` answers in Prometheus' text format. Families that vLLM has carry vLLM's names, so
that its dashboards are filled; what only Forerun has begins with `forerun:`. These have
the labels `model_name` and `engine` (always `0`); `process_*` are memory, processor time and files
of the server's process, on Linux. [grafana.json](grafana.json) is a dashboard of them. A counter is
shown with `_total` at the end of its name, a histogram with `_bucket`, `_sum` and `_count`.

    scrape_configs:
      - job_name: forerun
        static_configs: [{targets: ["127.0.0.1:8000"]}]

Where the server needs a key, give Prometheus one (`authorization: {credentials: KEY}`). Families
that begin with `sglang:` are there with `--sglang-metrics`, for dashboards of SGLang's.

| family | kind | more labels | what it counts |
| --- | --- | --- | --- |
"""


def table() -> str:
    """A line per family, in the order in which they are shown."""
    loaded = load(EngineConfig(model="toy"))
    try:
        metrics = Metrics(sglang=True)
        metrics.add("toy", loaded.engine.stats, lambda: None, cache_facts(loaded.config))
        page = metrics.page().decode()
    finally:
        loaded.close()
    rows = []
    for family in text_string_to_metric_families(page):
        names = {name for sample in family.samples for name in sample.labels} - {*LABELS, "le"}
        if family.name.endswith("_created"):
            continue
        more = ", ".join(f"`{name}`" for name in sorted(names))
        rows.append(f"| `{family.name}` | {family.type} | {more} | {family.documentation} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    text = HEAD + table()
    if parser.parse_args().check:
        return int(not PATH.exists() or PATH.read_text(encoding="utf-8") != text)
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
