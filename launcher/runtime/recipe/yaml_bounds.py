"""Loads untrusted YAML: limits its size before it builds any data, converts scalars, and finds values that no document
may hold.

A few lines of aliases can expand to more data than memory holds. A few thousand brackets nest deeper than Python's
recursion limit. So the stream of YAML events is checked first.
"""

import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from data_service.printable import mask_secrets
from data_service.store import errors as store_errors

_SECRETS_REMEDY = (
    f"write s3://bucket/prefix; {store_errors.AWS_KEYS_REMEDY}, a tracker's in MLFLOW_TRACKING_USERNAME and _PASSWORD"
)
_MAX_NESTED_LEVELS = 40  # levels of nested mappings and lists; a recipe has 6
_MAX_EXPANDED_VALUES = 100_000  # number of values with aliases expanded; a recipe has a few hundred


def bounded_events(text: str, *, is_bundled: bool = False) -> list[yaml.Event]:
    """Return the events of a YAML text.

    `is_bundled`: whether the text comes with Maskfleet. Then libyaml scans it, ten times as fast as PyYAML's own
    scanner. Other texts need PyYAML's scanner: libyaml accepts some that PyYAML refuses, such as a tab after a value.

    Raises yaml.MarkedYAMLError if the text is nested too deep, has too many values, or uses an alias inside the value
    that the alias stands for.
    """
    found: list[yaml.Event] = []
    anchors: dict[str, int] = {}  # number of values in each anchored node
    opened: list[tuple[str | None, int]] = []  # for each open collection: its anchor, and the count at its start
    count = 0
    scanner = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if is_bundled else yaml.SafeLoader
    for event in yaml.parse(text, Loader=scanner):
        found.append(event)
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                anchors[anchor] = count - before
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _bounds_error(event, f"*{event.anchor} is used inside the value that it stands for")
            count += anchors.get(event.anchor or "", 1)
        elif isinstance(event, yaml.NodeEvent):
            count += 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count - 1))
        elif isinstance(event, yaml.ScalarEvent) and event.anchor is not None:
            anchors[event.anchor] = 1
        if len(opened) > _MAX_NESTED_LEVELS:
            raise _bounds_error(event, f"nested deeper than {_MAX_NESTED_LEVELS} levels")
        if count > _MAX_EXPANDED_VALUES:
            raise _bounds_error(event, f"more than {_MAX_EXPANDED_VALUES:,} values, aliases expanded")
    return found


def _bounds_error(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


def find_refused_values(data: object) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """Yield path, problem and remedy of each value that no document may hold.

    A URI that contains a key or a signature would be recorded with the run, sent to trackers and printed. A number that
    is infinite, NaN or too large for a float means nothing in any setting.
    """
    for path, value in _scalars(data, ()):
        if isinstance(value, str) and (shown := mask_secrets(value)) != value:
            yield path, f"{shown!r} holds a key", _SECRETS_REMEDY
        elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            number = str(value) if isinstance(value, float) else f"a number of {value.bit_length():,} bits"
            yield path, f"{number} is not a finite number", f"correct {'.'.join(map(str, path))}"


def _scalars(data: object, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield path and value of each scalar in a document."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _scalars(value, (*path, name))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _scalars(value, (*path, number))
    else:
        yield path, data


class EventLoader(Composer, SafeConstructor, Resolver):
    """A SafeLoader of events that were already scanned, because scanning takes ten times as long as all later work.

    Unlike YAML 1.1, it reads `6e-4` as a number. Keys stay strings as written, so that `no` and `010` are names. Values
    that YAML 1.1 reads as octal numbers (`010`), base-60 numbers (`1:30`) or dates stay strings, which numeric fields
    refuse. A surrogate pair, two escapes by which JSON writes one character, is read as that character. A lone
    surrogate raises UnicodeDecodeError.
    """

    def __init__(self, events: Sequence[yaml.Event]) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._left = deque(events)

    def check_event(self, *choices: type[yaml.Event]) -> bool:
        return bool(self._left) and (not choices or isinstance(self._left[0], choices))

    def peek_event(self) -> yaml.Event:
        return self._left[0]

    def get_event(self) -> yaml.Event:
        return self._left.popleft()

    def compose_scalar_node(self, anchor: dict[Any, yaml.Node]) -> yaml.ScalarNode:
        """Compose a scalar, and join its surrogate pairs into characters."""
        node = super().compose_scalar_node(anchor)
        if not node.value.isascii():
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Compose a mapping, and make its keys strings, except for the merge key."""
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
                key.tag = _TEXT_TAG
        return node


_TEXT_TAG, _MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"  # tags of a string, and of the key `<<`
_NUMBER_PATTERNS = {  # numbers by tag; octal and base-60 numbers are left out
    "tag:yaml.org,2002:int": re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"^[-+]?([0-9][0-9_]*)?\.[0-9_]*([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
}
EventLoader.yaml_implicit_resolvers = {  # tags of unquoted scalars, without dates
    first: [(tag, _NUMBER_PATTERNS.get(tag, pattern)) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in Resolver.yaml_implicit_resolvers.items()
}
_FLOAT_PATTERN = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$")  # a number with an exponent: 6e-4
EventLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT_PATTERN, list("-+0123456789."))
