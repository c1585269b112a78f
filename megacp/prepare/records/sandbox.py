"""Jinja as the transformers library sets it up, within bounds of time and memory.

A chat template is a program that came with a download. It may loop for ever, ask for more memory
than the machine has, or write text that is different in the next process. All three end with one
message.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from megacp.prepare.records.record import RecordError

BLOCK_BEGIN, BLOCK_END = "\ufdd0", "\ufdd1"
"""Characters that mark a generation block in a rendering."""
LONGEST = 10.0
"""Seconds that one rendering may compute; a long conversation takes some thousandths."""
MOST_MEMORY = 1 << 30
"""Bytes that one rendering may add to the process; a record of 64 MiB takes about a quarter of
them.
"""
MOST_CHARACTERS = 1 << 27
"""Characters that a template may write, or make of a text by `*`."""
MOST_BITS = 1 << 16
"""Size of a whole number that a template may compute. No timer can interrupt the product of two
longer ones.
"""
TOKEN_VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
TURN = "_begins_turn"
"""Name of the function that a template compiled with turns calls at the beginning of each turn of
each loop.
"""
_STATM = Path("/proc/self/statm")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}", re.IGNORECASE)
"""What Python writes of an object that has no text of its own."""


class TemplateLimitError(ValueError):
    """A template went beyond a bound. This is not a RecordError: the next record would meet the
    same bound.
    """


def _unwritten() -> str:
    raise RecordError(
        "it writes a function or an iterator, whose text is an address in memory and never the same"
    )


class _Function:
    """A function that a template may call and cannot write."""

    __slots__ = ("_called",)

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._called(*values, **named)

    def __repr__(self) -> str:
        return _unwritten()


class _Lazy:
    """The results of a filter, which a template may iterate over and cannot write."""

    __slots__ = ("_values",)

    def __init__(self, values: Iterator[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return self._values

    def __next__(self) -> Any:
        return next(self._values)

    def __repr__(self) -> str:
        return _unwritten()


def _as_function(value: Any) -> Any:
    """Wrap a function or method, which Python writes with its address."""
    return _Function(value) if type(value).__name__ in _FUNCTIONS else value


def _unwrapped(value: Any) -> Any:
    """The function itself, about whose attributes the sandbox knows what is safe."""
    return value._called if isinstance(value, _Function) else value


_FUNCTIONS = ("function", "method", "builtin_function_or_method", "method-wrapper")
"""Types that Python writes with an address, by name."""


def _as_lazy(filtering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of Jinja, so that a generator it returns cannot be written."""

    @functools.wraps(filtering)  # also copies the marks by which Jinja hands it a context
    def filtered(*values: Any, **named: Any) -> Any:
        found = filtering(*values, **named)
        return _Lazy(found) if hasattr(found, "__next__") else found

    return filtered


def _by_chance(*values: Any, **named: Any) -> Any:
    raise RecordError(
        "it writes something random (`random` or `lipsum`), so no build could be repeated"
    )


def _raise(message: str) -> None:
    raise RecordError(message)


# ---- bounds


def _end(number: int, frame: Any) -> None:
    raise TimeoutError


@lru_cache(maxsize=1)
def _heed_time() -> None:
    """Let a process's own timer end what it computes."""
    signal.signal(signal.SIGVTALRM, _end)


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Run a template within the bounds. TemplateLimitError: `what` is beyond one.

    Timers and the limit of a process's memory belong to the main thread; elsewhere only the sizes
    that the sandbox and `rendered` count are bounded.
    """
    problem = ""
    is_main = threading.current_thread() is threading.main_thread()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if is_main:
            _heed_time()
            _limit_memory(limits)
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
        yield
    except TimeoutError:
        problem = f"is not done after {LONGEST:g} s of computing"
    except MemoryError:
        problem = (
            f"needs more than {MOST_MEMORY >> 20:,} MiB of memory or {MOST_CHARACTERS:,} characters"
        )
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
    if problem:  # raised here, where the frames of the template and all that they hold are gone
        raise TemplateLimitError(f"--chat-template: {what} {problem}")


def _limit_memory(limits: tuple[int, int]) -> None:
    """Bound what the process may map from now on; systems without /proc keep the limit that they
    have.
    """
    soft, hard = limits
    if not _STATM.exists():
        return
    pages = int(_STATM.read_text().split()[0])
    bound = pages * resource.getpagesize() + MOST_MEMORY
    if soft == resource.RLIM_INFINITY or bound < soft:
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


def rendered(template: Any, variables: dict[str, Any]) -> str:
    """Write a compiled template. MemoryError: more than MOST_CHARACTERS."""
    pieces = []
    written = 0
    for piece in template.root_render_func(template.new_context(variables)):
        pieces.append(piece)
        written += len(piece)
        if written > MOST_CHARACTERS:
            raise MemoryError
    return "".join(pieces)


def refuse_addresses(text: str, template: str, given: Any) -> None:
    """RecordError for the address of an object in a rendering that neither the template nor what it
    was given holds.
    """
    found = {match[0] for match in _ADDRESS.finditer(text)}
    if found:
        there = f"{template}{given!r}"
        if not all(address in there for address in found):
            _unwritten()


def _product(operator: str, left: Any, right: Any) -> None:
    """MemoryError where `left * right`, or a power, is too large to be computed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 0)
        if bits > MOST_BITS:
            raise MemoryError
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            if len(sequence) * times > MOST_CHARACTERS:
                raise MemoryError


# ---- the environment


@lru_cache(maxsize=64)
def compiled_template(text: str, today: str | None, turns: bool = False) -> Any:
    """Compile a template in Jinja's sandbox as the library sets it up, but for the clock.

    `turns`: it calls TURN with the value of each turn of its loops and writes what that returns.
    ValueError: `today` is not a date. jinja2.TemplateError and others: the text is not a template.
    """
    import jinja2.ext
    import jinja2.sandbox
    import jinja2.utils
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BLOCK_BEGIN}{caller()}{BLOCK_END}"

    class Unnamed(jinja2.Undefined):
        """Undefined, and refused where the library would write nothing in place of a token that
        ends an answer.
        """

        def __str__(self) -> str:
            if self._undefined_name in TOKEN_VARIABLES:
                raise RecordError(
                    f"it writes {self._undefined_name}, which the tokenizer's files do not name"
                )
            return super().__str__()

    class Cycler(jinja2.utils.Cycler):
        def __repr__(self) -> str:
            return _unwritten()

    class Joiner(jinja2.utils.Joiner):
        def __repr__(self) -> str:
            return _unwritten()

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        # these operators are also not computed while the template is compiled
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _product(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            return _as_function(super().getattr(_unwrapped(obj), attribute))

        def getitem(self, obj: Any, argument: Any) -> Any:
            return _as_function(super().getitem(_unwrapped(obj), argument))

    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        undefined=Unnamed,
    )
    for name, filtering in made.filters.items():
        made.filters[name] = _as_lazy(filtering)
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    made.filters["random"] = _by_chance
    made.globals["raise_exception"] = _raise
    made.globals["lipsum"] = _by_chance
    made.globals["cycler"] = Cycler
    made.globals["joiner"] = Joiner
    if today is not None:
        made.globals["strftime_now"] = datetime.datetime.strptime(today, "%Y-%m-%d").strftime
    for name, value in made.globals.items():
        made.globals[name] = _as_function(value)
    tree = made.parse(text)
    if turns:
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name):
                each = nodes.Name(loop.target.name, "load")
                call = nodes.Call(nodes.Name(TURN, "load"), [each], [], None, None)
                begin = nodes.Output([call])
                begin.set_lineno(loop.lineno)
                begin.set_environment(made)
                loop.body.insert(0, begin)
    return made.from_string(tree)
