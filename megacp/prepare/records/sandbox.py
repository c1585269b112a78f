"""Run chat templates in Jinja, configured like the transformers library, with limits.

A chat template is a downloaded program. It may loop forever, request more memory than the machine
has, or write text that differs in every process. Each of these faults is reported as an error.
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

BLOCK_BEGIN = "\ufdd0"
"""Character before a generation block in a rendering."""
BLOCK_END = "\ufdd1"
"""Character after a generation block."""
LONGEST = 10.0
"""Seconds of CPU time for one rendering; a long conversation takes a few milliseconds."""
MOST_MEMORY = 1 << 30
"""Bytes that one rendering may add to the process; a record of 64 MiB needs about a quarter."""
MOST_CHARACTERS = 1 << 27
"""Characters that a template may write, or produce by repeating a text with `*`."""
MOST_BITS = 1 << 16
"""Bits of an integer that a template may compute. A timer cannot interrupt the multiplication of
larger integers.
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
"""Name of the function that a template compiled with `turns` calls at the beginning of each loop
iteration.
"""
_STATM = Path("/proc/self/statm")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}", re.IGNORECASE)
"""Address in Python's default text for an object."""


class TemplateLimitError(ValueError):
    """A template exceeded a limit. This is not a RecordError, because the next record would exceed
    it too.
    """


def _unwritten() -> str:
    """Raise RecordError for an object whose text is its address."""
    raise RecordError(
        "it writes a function or an iterator, whose text is a memory address that differs in every "
        "process"
    )


class _Function:
    """A function that a template may call but not write."""

    __slots__ = ("_called",)

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._called(*values, **named)

    def __repr__(self) -> str:
        return _unwritten()


class _Lazy:
    """The results of a filter, which a template may iterate over but not write."""

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
    """Wrap a function or method, whose text contains its address; return other values unchanged."""
    return _Function(value) if type(value).__name__ in _FUNCTIONS else value


def _unwrapped(value: Any) -> Any:
    """Return the original function, because the sandbox checks the attributes of its type."""
    return value._called if isinstance(value, _Function) else value


_FUNCTIONS = ("function", "method", "builtin_function_or_method", "method-wrapper")
"""Names of the types whose text contains an address."""


def _as_lazy(filtering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Jinja filter: a template may iterate over a returned generator, but not write it."""

    # `wraps` also copies the marks that make Jinja pass a context to the filter
    @functools.wraps(filtering)
    def filtered(*values: Any, **named: Any) -> Any:
        found = filtering(*values, **named)
        return _Lazy(found) if hasattr(found, "__next__") else found

    return filtered


def _by_chance(*values: Any, **named: Any) -> Any:
    """Replace Jinja's random functions; raise RecordError."""
    raise RecordError(
        "it writes random text (`random` or `lipsum`), so the build would not be reproducible"
    )


def _raise(message: str) -> None:
    """Raise the error that a template requests with `raise_exception`."""
    raise RecordError(message)


# ---- bounds


def _end(number: int, frame: Any) -> None:
    """Interrupt the computation of a template; the handler of SIGVTALRM."""
    raise TimeoutError


@lru_cache(maxsize=1)
def _heed_time() -> None:
    """Install the signal handler through which the CPU-time timer interrupts a template."""
    signal.signal(signal.SIGVTALRM, _end)


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Run a template within the limits. Raise TemplateLimitError, naming `what`, if it exceeds one.

    Only the main thread may set timers and the memory limit of the process. Other threads enforce
    only the size limits that the sandbox and `rendered` check.
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
        problem = f"has not finished after {LONGEST:g} s of CPU time"
    except MemoryError:
        problem = (
            f"needs more than {MOST_MEMORY >> 20:,} MiB of memory or {MOST_CHARACTERS:,} characters"
        )
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
    # raise only here, after the template's frames have released their memory
    if problem:
        raise TemplateLimitError(f"--chat-template: {what} {problem}")


def _limit_memory(limits: tuple[int, int]) -> None:
    """Limit the memory that the process may map from now on; without /proc, keep the existing
    limit.
    """
    soft, hard = limits
    if not _STATM.exists():
        return
    # the limit is on address space, and the process already uses some of it
    pages = int(_STATM.read_text().split()[0])
    bound = pages * resource.getpagesize() + MOST_MEMORY
    if soft == resource.RLIM_INFINITY or bound < soft:
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


def rendered(template: Any, variables: dict[str, Any]) -> str:
    """Render a compiled template. Raise MemoryError if it writes more than MOST_CHARACTERS."""
    pieces = []
    written = 0
    # piece by piece, so an endless template stops before it has used all memory
    for piece in template.root_render_func(template.new_context(variables)):
        pieces.append(piece)
        written += len(piece)
        if written > MOST_CHARACTERS:
            raise MemoryError
    return "".join(pieces)


def refuse_addresses(text: str, template: str, given: Any) -> None:
    """Raise RecordError if a rendering contains an object's address that is not in its inputs."""
    found = {match[0] for match in _ADDRESS.finditer(text)}
    # a record may quote an address in its text
    if found:
        there = f"{template}{given!r}"
        if not all(address in there for address in found):
            _unwritten()


def _product(operator: str, left: Any, right: Any) -> None:
    """Raise MemoryError if `left * right`, or a power, is too large to compute."""
    if isinstance(left, int) and isinstance(right, int):
        # an upper bound of the result's size
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(right, 0)
        if bits > MOST_BITS:
            raise MemoryError
    # a repeated text or list, with the number on either side
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            if len(sequence) * times > MOST_CHARACTERS:
                raise MemoryError


# ---- the environment


@lru_cache(maxsize=64)
def compiled_template(text: str, today: str | None, turns: bool = False) -> Any:
    """Compile a template in Jinja's sandbox, configured like the library except for the clock.

    `turns`: the template calls TURN with each loop value and writes the result. Raise ValueError if
    `today` is not a date, and jinja2.TemplateError or another error if the text is not a template.
    """
    import jinja2.ext
    import jinja2.sandbox
    import jinja2.utils
    from jinja2 import nodes

    # {% generation %} blocks: write their contents between two marks
    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BLOCK_BEGIN}{caller()}{BLOCK_END}"

    class Unnamed(jinja2.Undefined):
        """An undefined value; an error for a missing token, where the library writes nothing."""

        def __str__(self) -> str:
            if self._undefined_name in TOKEN_VARIABLES:
                raise RecordError(
                    f"it writes {self._undefined_name}, but the tokenizer's files do not define it"
                )
            return super().__str__()

    class Cycler(jinja2.utils.Cycler):
        def __repr__(self) -> str:
            return _unwritten()

    class Joiner(jinja2.utils.Joiner):
        def __repr__(self) -> str:
            return _unwritten()

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        # Jinja calls `call_binop` for these operators, and does not compute them while compiling
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _product(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def getattr(self, obj: Any, attribute: str) -> Any:
            return _as_function(super().getattr(_unwrapped(obj), attribute))

        def getitem(self, obj: Any, argument: Any) -> Any:
            return _as_function(super().getitem(_unwrapped(obj), argument))

    # trim_blocks and lstrip_blocks are set as in the library, because they affect white space
    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        undefined=Unnamed,
    )
    # the library's functions, but no text that would differ in another process
    for name, filtering in made.filters.items():
        made.filters[name] = _as_lazy(filtering)
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    made.filters["random"] = _by_chance
    made.globals["raise_exception"] = _raise
    made.globals["lipsum"] = _by_chance
    made.globals["cycler"] = Cycler
    made.globals["joiner"] = Joiner
    # the date of --chat-template-date instead of the clock
    if today is not None:
        made.globals["strftime_now"] = datetime.datetime.strptime(today, "%Y-%m-%d").strftime
    for name, value in made.globals.items():
        made.globals[name] = _as_function(value)
    tree = made.parse(text)
    # Insert a call of TURN at the beginning of each loop body. A loop over messages looks like any
    # other loop here; the function returns "" for values that are not messages.
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
