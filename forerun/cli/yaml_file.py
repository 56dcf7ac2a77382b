"""YAML files of option names and values, with each value kept as written.

YAML would turn `off` into false, `007` into 7, `1.10` into 1.1 and `12:30:00` into 45000. An option
parses its own value, as on the command line, so values stay text here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import ConfigError, reason_of

_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"


def mapping(path: Path, levels: int = 1) -> Mapping[str, Any]:
    """Return the names and values of a YAML file.

    A value is its text as written, None if it is null or left out, or a list of texts; down to
    `levels` it may be a mapping of names and values too. A deeper mapping, and list items that are
    not scalars, are parsed as YAML. Raises ConfigError naming the file, and the line of a duplicate
    name.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        return {} if node is None or node.tag == _NULL else _names(loader, node, levels, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The configuration {path} cannot be read: {reason_of(error)}."
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"The configuration {path} is not YAML: {reason}.") from error
    except RecursionError:
        raise ConfigError(f"The configuration {path} is nested too deeply.") from None


def _names(loader: yaml.SafeLoader, node: yaml.Node, levels: int, path: str) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"The configuration {path} must hold lines such as `port: 8000`.")
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}, line {line}: a name is one word.")
        if key.value in lines and key.tag != _MERGE:
            first = lines[key.value]
            raise ConfigError(f"{path}: {key.value} appears twice, in lines {first} and {line}.")
        lines[key.value] = line
    loader.flatten_mapping(node)
    return {key.value: _value(loader, value, levels - 1, path) for key, value in node.value}


def _value(loader: yaml.SafeLoader, node: yaml.Node, levels: int, path: str) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == _NULL else node.value
    if isinstance(node, yaml.MappingNode) and levels > 0:
        return _names(loader, node, levels, path)
    if isinstance(node, yaml.SequenceNode) and levels >= 0:
        return [_value(loader, one, -1, path) for one in node.value]
    return loader.construct_object(node, deep=True)
