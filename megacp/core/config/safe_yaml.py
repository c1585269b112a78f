"""YAML from any source: every YAML file of the project is read here.

A text becomes plain values as small as itself, or one ValueError with file and line. Aliases stand for scalars alone,
depth and size have limits, and a key stands once. Under `yaml.safe_load`, ten lines of aliases become a value that
takes for ever to show, and deep nesting is a RecursionError.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from megacp.core.storage.files import StrPath, read_regular

MOST_BYTES = 1 << 20
_MOST_DEPTH = 16
FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
"""`3e-4` and `1.5e8`, which YAML 1.1 would read as strings."""
FLOAT_TAG = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `3e-4` as a number and refuses double keys, depth, and aliases of more than a scalar."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            node = super().compose_node(parent, index)
            if not isinstance(node, yaml.ScalarNode):
                raise yaml.composer.ComposerError(
                    None, None, f"the alias *{event.anchor} is of more than one value", event.start_mark
                )
            return node
        if self._depth == _MOST_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"nested more than {_MOST_DEPTH} levels deep", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            known: set[str] = set()
            for key, _ in node.value:
                name = str(self.construct_object(key, deep=True)).replace("-", "_")
                if name in known:
                    problem = f"the key {name} stands more than once"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                known.add(name)
        return super().construct_mapping(node, deep)


_SIXTIES_OR_EIGHTS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)\Z")
"""`010` and `1:30`, which YAML 1.1 would read as 8 and 90; here they are strings, which no number takes."""


_Loader.add_implicit_resolver(FLOAT_TAG, FLOAT, list("-+.0123456789"))
# it goes first: the first form that fits decides
for _first in "-+0123456789":
    _Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _SIXTIES_OR_EIGHTS))


def load_yaml(text: str | bytes, source: str) -> Any:
    """The value of a YAML text, None for an empty one. Raises ValueError that names `source` and the line."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{source}: has more than {MOST_BYTES:,} bytes, the most that is read of a YAML file")
    loader = None
    try:
        loader = _Loader(text if isinstance(text, str) else text.decode())
        return loader.get_single_data()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not valid YAML: it is no text in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{source}: not valid YAML{line}: {error.problem or error.context}") from error
    except Exception as error:  # PyYAML's constructors raise anything for a date or a tag that is none
        where = f" before line {loader.line + 1}" if loader is not None else ""
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{source}: not valid YAML{where}: {reason}") from error


def read_yaml_file(path: StrPath, source: str) -> Any:
    """`load_yaml` of a regular file; ValueError that names `source` also when it cannot be read."""
    try:
        text = read_regular(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{source}: cannot be read: {reason}") from error
    return load_yaml(text, source)
