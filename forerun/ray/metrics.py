"""One page of metrics for all replicas, in Prometheus' text format."""

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (.+)")
_ENGINE = re.compile(r'engine="\d+"')


def merged(pages: Mapping[str, str]) -> str:
    """Return one page with the metrics of all replicas: each metric family once, with the samples
    of every replica. pages: the text of each replica's page, by name of the replica. A sample gets
    the label `replica`; its label `engine` becomes the replica's number in the order of names, as
    vLLM numbers the engines on one page.
    """
    families: dict[str, list[str]] = {}
    for number, name in enumerate(sorted(pages)):
        family: list[str] = []
        for line in pages[name].splitlines():
            if line.startswith("# HELP"):
                family = families.setdefault(line, [line])
            elif line.startswith("# TYPE"):
                family.extend(() if line in family else (line,))
            elif found := _SAMPLE.fullmatch(line):
                family.append(_labelled(found, number, name))
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _labelled(sample: re.Match[str], engine: int, replica: str) -> str:
    family, labels, value = sample.groups()
    named = f'replica="{replica}"'
    if labels:
        named = _ENGINE.sub(f'engine="{engine}"', labels) + f",{named}"
    return f"{family}{{{named}}} {value}"
