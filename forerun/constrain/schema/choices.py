"""Rewrites `oneOf`, `not` and `if`, choices that exclude each other, in keywords without
exclusion.
"""

from typing import Any

from forerun.constrain.schema.logic import (
    NOTES,
    TYPES,
    Resolve,
    beside,
    disjoint,
    exact_values,
    joined,
    narrowed,
    other_values,
    types,
    values_of,
    without_types,
)

MAX_PAIRS = 2_000
"""Most pairs of branches that are compared."""

Schema = dict[str, Any]


def exclusive_choice(raw: Schema, branches: list[Any], resolve: Resolve) -> list[Any] | None:
    """Return the branches of a `oneOf` as branches of an `anyOf`, each without the values that
    another one also allows; None if that cannot be expressed.

    raw       the schema as the client sent it, with its `oneOf`
    branches  the rewritten branches
    resolve   returns a schema, or the target of its reference
    """
    sent = [beside(raw, resolve(branch)) for branch in raw["oneOf"]]
    if len(sent) ** 2 > MAX_PAIRS:
        return None
    found = []
    for index, branch in enumerate(branches):
        extra: list[Schema] = []
        left = sent[index]
        for other, rival in enumerate(sent):
            if other == index:
                continue
            if any(disjoint(joined(left, part), rival, resolve) for part in extra):
                continue
            more = narrowed(left, rival, resolve)
            if more is None:
                return None
            extra += [more] if more and more not in extra else []
        found.append({"allOf": [branch, *extra]} if extra else branch)
    return found


def negated(schema: Any, raw: Schema, resolve: Resolve) -> Any:  # noqa: PLR0911
    """Return a schema of values that are not valid under `schema`, possibly not of all of them;
    False if there are none, None if it cannot be expressed.

    raw      the keywords next to the `not`
    resolve  returns a schema, or the target of its reference
    """
    if isinstance(schema, bool):
        return False if schema else {}
    if not isinstance(schema, dict):
        return None
    rules = {name: value for name, value in schema.items() if name not in NOTES}
    if not rules:
        return False
    if "anyOf" in rules and len(rules) == 1:
        parts = [negated(resolve(part), raw, resolve) for part in rules["anyOf"]]
        return None if any(part is None for part in parts) else {"allOf": parts}
    if rules.keys() <= {"const", "enum", "type"} and ("const" in rules or "enum" in rules):
        return other_values(values_of(rules) or [], raw)
    if rules.keys() == {"type"}:
        allowed, gone = types(raw) or frozenset(TYPES), types(rules) or frozenset()
        left = without_types(types(raw), gone)
        if not left and not allowed <= gone | ({"integer"} if "number" in gone else set()):
            return None
        return {"type": left} if left else False
    objects = raw.get("type") == "object" or rules.get("type") == "object"
    if rules.keys() <= {"required", "type"} and objects:
        absent = [{"properties": {name: False}} for name in rules["required"]]
        return absent[0] if len(absent) == 1 else {"anyOf": absent}
    if rules.keys() == {"required"}:
        return {"type": "object", "anyOf": [{"properties": {n: False}} for n in rules["required"]]}
    return None


def conditional(  # noqa: PLR0911
    condition: Any, then: Any, otherwise: Any, raw: Schema, resolve: Resolve
) -> Any:
    """Rewrite an `if` over constants and required keys as a choice of two schemas, and a third one
    for values that are no objects; None if the condition has anything else.

    condition        as the client sent it
    then, otherwise  rewritten
    raw              the keywords next to the `if`
    """
    if isinstance(condition, bool):
        return then if condition else otherwise
    if not isinstance(condition, dict):
        return None
    rules = {name: value for name, value in condition.items() if name not in NOTES}
    if not rules.keys() <= {"properties", "required", "type"}:
        return None
    if rules.get("type", "object") != "object":
        return None
    constants: dict[str, list[Any]] = {}
    for name, inner in (rules.get("properties") or {}).items():
        values = exact_values(resolve(inner))
        if values is None:
            return None
        constants[name] = values
    required = list(rules.get("required") or [])
    known = raw.get("properties") or {}
    yes: Schema = {"properties": {name: {"enum": values} for name, values in constants.items()}}
    branches = [{"allOf": [{**yes, "required": required}, then]}]
    for name, values in constants.items():
        other = other_values(values, resolve(known.get(name, True)))
        if other is None:
            return None
        if other is not False:
            no = {"properties": {name: other}, "required": [name]}
            branches.append({"allOf": [no, otherwise]})
    for name in required:
        branches.append({"allOf": [{"properties": {name: False}}, otherwise]})
    if raw.get("type") == "object":
        return {"anyOf": branches}
    choices: list[Schema] = [{"type": "object", "anyOf": branches}]
    if others := without_types(types(raw), frozenset({"object"})):
        choices.append({"type": others, "allOf": [otherwise if "type" in rules else then]})
    return {"anyOf": choices}
