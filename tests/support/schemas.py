"""Checks data against docs/schemas, by the keywords of JSON Schema that they use; other keywords are an error."""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
ABOUT = {"$schema", "$defs", "title", "description"}


def schema(name):
    """A published schema."""
    return json.loads((FOLDER / f"{name}.schema.json").read_text())


def problems(data, schema, root=None, place="it"):
    """The errors in the data; empty if it is valid."""
    root = schema if root is None else root
    found = []
    for key, rule in schema.items():
        if key not in ABOUT:
            found += _rule(key, rule, data, schema, root, place)
    return found


def _rule(key, rule, data, schema, root, place):
    if key == "$ref":
        name, _, pointer = rule.partition("#")
        root = json.loads((FOLDER / name).read_text()) if name else root
        target = root
        for part in filter(None, pointer.split("/")):
            target = target[part]
        return problems(data, target, root, place)
    if key == "type":
        kinds = [rule] if isinstance(rule, str) else rule
        return [] if any(_is(data, kind) for kind in kinds) else [f"{data!r:.60} is no {rule}"]
    if key == "const":
        return [] if data == rule else [f"{data!r:.60} is not {rule!r}"]
    if key == "enum":
        return [] if data in rule else [f"{data!r:.60} is none of {rule}"]
    if key == "oneOf":
        whys = [problems(data, each, root, place) for each in rule]
        return [] if sum(not why for why in whys) == 1 else [f"matches {sum(not why for why in whys)}: {whys}"]
    if key in ("minimum", "exclusiveMinimum"):
        number = _is(data, "number")
        return [f"{data} is too small"] if number and (data < rule or (data == rule and key != "minimum")) else []
    if key in ("minItems", "maxItems"):
        wrong = isinstance(data, list) and (len(data) < rule if key == "minItems" else len(data) > rule)
        return [f"{len(data)} items"] if wrong else []
    if key == "pattern":
        return [] if not isinstance(data, str) or re.search(rule, data) else [f"{data!r:.60} does not match {rule}"]
    if key == "items":
        each = enumerate(data) if isinstance(data, list) else ()
        return [why for number, item in each for why in problems(item, rule, root, f"{place}[{number}]")]
    assert key in ("properties", "required", "additionalProperties", "propertyNames"), f"unknown keyword {key}"
    if not isinstance(data, dict):
        return []
    if key == "required":
        return [f"lacks {name!r}" for name in rule if name not in data]
    if key == "propertyNames":
        return [why for name in data for why in problems(name, rule, root, f"{place}.{name}")]
    if key == "properties":
        return [why for name in rule.keys() & data for why in problems(data[name], rule[name], root, f"{place}.{name}")]
    others = data.keys() - schema.get("properties", {}).keys()
    if rule is False:
        return [f"has {name!r} beside what it may have" for name in sorted(others)]
    return [why for name in others for why in problems(data[name], rule, root, f"{place}.{name}")]


def _is(data, kind):
    if kind in ("number", "integer"):
        return not isinstance(data, bool) and isinstance(data, int if kind == "integer" else (int, float))
    return isinstance(data, TYPES[kind])
