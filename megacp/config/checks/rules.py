"""What a rule about a configuration is: a small function over fields, and which fields it reads.

Key property: a rule is registered with the names of its fields, so it is left out when one of them is already out of
range. Rejected: one long function of ifs, in which a reason hides the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megacp.config.run import RunConfig, fields

Finder = Callable[[RunConfig, int], str | None]


@dataclass(frozen=True)
class Rule:
    """One comparison of fields: `find` gives the reason or None; it runs when all fields in `reads` are in range."""

    find: Finder
    reads: tuple[str, ...]


def registrar(rules: list[Rule]) -> Callable[..., Callable[[Finder], Finder]]:
    """A decorator `@rule("field", ...)` that adds functions `(config, world size) -> reason or None` to `rules`."""

    def rule(*reads: str) -> Callable[[Finder], Finder]:
        unknown = [name for name in reads if name not in fields()]
        assert not unknown, f"a rule reads unknown fields {unknown}"

        def add(find: Finder) -> Finder:
            rules.append(Rule(find, reads))
            return find

        return add

    return rule
