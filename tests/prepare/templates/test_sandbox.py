"""Limit the computation, memory and output of templates, which are programs."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest

from megacp.prepare.records import sandbox
from megacp.prepare.records.chat_template import ChatTemplate, load_chat_template, template_of
from megacp.prepare.records.record import RecordError
from tests.prepare.templates.public import tokenizer_at, write_tokenizer
from tests.prepare.templates.test_public import ASK, TELL, TOOLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


def template(folder: Path, text: str) -> ChatTemplate:
    return template_of(text, tokenizer_at(folder / "tokenizer.json"), "2026-03-04")


LARGE = {
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a list times a number": "{{ [1, 2] * 10**9 }}",
    "a number times a message": "{{ 10**9 * messages[0].content }}",
    "a width of a format": "{{ '%1000000000000d' % 1 }}",
    "a width of str.format": "{{ '{:>100000000000}'.format(messages[0].content) }}",
    "a width of a filter": "{{ messages[0].content | center(10**11) }}",
    "a text that doubles": "{% set n = namespace(a=messages[0].content) %}{% for i in range(60) %}"
    "{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
    "a text joined to itself": "{% set n = namespace(a=messages[0].content) %}{% for i in range(60) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "a list that doubles": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set n.a = n.a + n.a %}{% endfor %}",
    "lists in lists": "{% set n = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set n.a = [n.a, [i] * 10**6] %}{% endfor %}",
    "a text written often": "{% set a = 'a' * 10**6 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "a replaced text": "{{ ('a' * 10**7).replace('a', 'a' * 10**5) }}",
    "a joined text": "{{ (['a' * 10**6] * 10**5) | join }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a product of numbers": "{% set n = namespace(a=3) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_needs_much_memory_ends_the_build_by_one_message(
    folder: Path, name: str
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    with pytest.raises(
        ValueError, match="--chat-template: the template needs more than 1,024 MiB"
    ) as error:
        template(folder, LARGE[name]).render([ASK, TELL])
    assert not isinstance(error.value, RecordError)
    assert time.process_time() - began < 8 and resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize("name", ["a text times a number", "a power", "a list times a number"])
def test_no_thread_but_the_main_one_has_limits_and_yet_sizes_are_bounded(
    folder: Path, name: str
) -> None:
    found: list[BaseException] = []

    def render() -> None:
        try:
            template(folder, LARGE[name]).render([ASK, TELL])
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(60)
    assert [type(error) for error in found] == [sandbox.TemplateLimitError]


def test_what_a_long_conversation_needs_is_within_the_bounds(folder: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    said = "word " * 4_000_000
    assert template(folder, text).render([{**ASK, "content": said}]).text == said


NESTED = "{% for a in b %}" * 30 + "{% endfor %}" * 30
"""More nested loops than Python can compile."""


@pytest.mark.parametrize(
    "text", ["{% if %}", "{{ 'a' * 1", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", NESTED]
)
def test_a_text_that_is_no_template_is_refused_before_any_record(
    folder: Path, text: str, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises(ValueError, match="--chat-template .*t.jinja: this is not a Jinja template"):
        load_chat_template(str(tmp_path / "t.jinja"), tokenizer_at(folder / "tokenizer.json"), None)


WITHOUT_TEXT = [
    "{{ messages[0].items }}",
    "{{ messages[0]['items'] }}",
    "{{ messages[0] | attr('keys') }}",
    "{{ messages | map(attribute='content') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') }}",
    "{{ messages | reverse }}",
    "{{ messages[0] | items }}",
    "{{ messages | batch(2) | string | upper }}",
    "{{ (messages | map(attribute='role') | string)[-9:] }}",
    "{{ (messages[0].get | string)[-9:] }}",
    "{{ [messages[0].get] }}",
    "{{ {'a': messages[0].get} }}",
    "{{ '%s' % messages[0].get }}",
    "{{ '{}'.format(messages[0].get) }}",
    "{{ 'a' ~ range }}",
    "{{ [raise_exception, 1] | join(' ') }}",
    "{{ strftime_now | string | length }}",
    "{{ cycler('a', 'b') }}",
    "{{ joiner }}{{ joiner(', ') }}",
    "{{ namespace(a=range) }}",
    "{% for m in messages %}{{ loop.cycle }}{% endfor %}",
    "{{ tools[0].function.items }}",
    "{{ 'x'.join }}",
    "{{ messages | random }}",
    "{{ lipsum() }}",
]


@pytest.mark.parametrize("text", WITHOUT_TEXT)
def test_an_address_or_chance_never_becomes_part_of_a_rendering(folder: Path, text: str) -> None:
    with pytest.raises(
        RecordError,
        match="the chat template refuses these messages: it writes (a function|random text)",
    ):
        template(folder, text + "{{ messages[0].content }}").render([ASK, TELL], TOOLS)


WITH_TEXT = {
    "{{ messages[0].get('role') }}": "user",
    "{{ messages | map(attribute='role') | join(' ') }}": "user assistant",
    "{% for m in messages | reverse %}{{ m.role }} {% endfor %}": "assistant user ",
    "{% for key, value in messages[0] | items %}{{ key }} {% endfor %}": "role content ",
    "{{ (messages | selectattr('role', 'equalto', 'user') | list | length) * 'ab' }}": "ab",
    "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}": "ab",
    "{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}": "user, assistant",
    "{{ namespace(a=1) }}": "<Namespace {'a': 1}>",
    "{{ '{:>5}|{}'.format(1, 'x') }}{{ 7 ** 2 }}{{ 6 * 7 }}{{ '-' * 3 }}": "    1|x4942---",
    "{{ messages[0].items is callable }}{{ messages[0].items() | list | length }}": "True2",
    "{{ strftime_now('%Y-%m-%d') }}": "2026-03-04",
    "{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}": "aba",
    "{% macro m(x) %}<{{ x }}>{{ caller() if caller else '' }}{% endmacro %}{% call m(1) %}in{% endcall %}": "<1>in",
}


@pytest.mark.parametrize("text", WITH_TEXT)
def test_functions_and_filters_work_as_ever(folder: Path, text: str) -> None:
    assert template(folder, text).render([ASK, TELL]).text == WITH_TEXT[text]


def test_an_address_that_somebody_wrote_is_text(folder: Path) -> None:
    said = "<generator object <genexpr> at 0x7f3b2c1d5a40>"
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert template(folder, text).render([{**ASK, "content": said}]).text == said
    with pytest.raises(RecordError, match="whose text is a memory address"):
        sandbox.refuse_addresses(said, "{{ m }}", [{"content": said.replace("0x7f", "0x6f")}])
