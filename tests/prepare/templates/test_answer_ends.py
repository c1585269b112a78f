"""With which tokens answers end, as the templates of published models have them learned."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacp.prepare.records.chat_template import OURS
from megacp.prepare.records.conversation import answer_ends
from tests.prepare.templates.public import TEMPLATES, tokenizer_at, write_tokenizer

ENDS = {
    "gemma": ["<end_of_turn>"],
    "granite": ["<|end_of_text|>"],
    "llama_3": ["<|eot_id|>"],
    "llama_32": ["<|eot_id|>"],
    "phi_3": ["<|end|>", "</s>"],
}
ENDS |= dict.fromkeys(("chatml", "qwen_25", "qwen_3", "smollm_3", "ours_for_qwen3"), ["<|im_end|>"])
TALK = "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
MARKED = TALK + "{% if m.role == 'user' %}{{ m.content }}{% else %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{{ eos_token }}{% endfor %}"
FIRST_CALLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def ends(folder: Path, **texts: str) -> list[str]:
    tokenizer = tokenizer_at(write_tokenizer(folder))
    return [tokenizer.decode([i]) for i in answer_ends(texts, tokenizer)]


@pytest.mark.parametrize("name", sorted({**TEMPLATES, **OURS}))
def test_a_template_says_with_what_its_answers_end(name: str, tmp_path: Path) -> None:
    """Would catch a model that is never stopped: the end token of its tokenizer is `</s>`."""
    known = {**TEMPLATES, **OURS}
    expected = ENDS["chatml"] if name in OURS else ENDS.get(name, ["</s>"])
    assert ends(tmp_path, default=known[name]) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (f"{MARKED}{{% generation %}}{{{{ m.content }}}}{{% endgeneration %}}<|end|>{{% endif %}}{PROMPT}", []),
        (
            f"{MARKED}{{% generation %}}{{{{ m.content }}}}<|end|>{{% endgeneration %}}{{% endif %}}{PROMPT}",
            ["<|end|>"],
        ),
        (f"{TALK}{{{{ m.content }}}}\n\n{PROMPT}", []),
        (f"{TALK}{{{{ m.content }}}}<|end|> </s>{PROMPT}", ["<|end|>", "</s>"]),
        ("{{ raise_exception('never') }}", []),
    ],
)
def test_what_no_answer_has_learned_ends_none(template: str, expected: list[str], tmp_path: Path) -> None:
    """Would catch a token behind a generation block, which the model never learned to write."""
    assert ends(tmp_path, default=template) == expected


def test_calls_and_a_template_of_their_own_may_end_otherwise(tmp_path: Path) -> None:
    """Would catch a call that ends like no other answer, and one that is stopped between its parts."""
    default, tools = f"{TALK}{{{{ m.content }}}}<|end|>{PROMPT}", f"{FIRST_CALLS}{TALK}{CALLS}<|eot_id|>{PROMPT}"
    assert ends(tmp_path, default=default) == ["<|end|>"]
    assert ends(tmp_path, default=default, tool_use=tools) == ["<|end|>", "<|eot_id|>"]
