"""Chat templates of published models and of TRL, with a small tokenizer that has their special
tokens.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megacp.prepare.records.chat_template import OURS
from megacp.prepare.tokenize.tokenizer import Tokenizer, load_tokenizer

TEMPLATES = {
    path.stem: path.read_bytes().decode() for path in sorted(Path(__file__).parent.glob("*.jinja"))
}
_OF_TRL = (
    "gemma gemma llama_3 llama3 llama_32 llama3_2 phi_3 phi3 qwen_25 qwen2_5 qwen_3 qwen3".split()
)


def of_trl(name: str) -> str:
    """Return a template that TRL ships, without importing TRL, which takes seconds."""
    found = find_spec("trl")
    assert found is not None and found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


TEMPLATES |= {name: of_trl(file) for name, file in zip(_OF_TRL[::2], _OF_TRL[1::2], strict=True)}
TEMPLATES["ours_for_qwen3"] = OURS["qwen3"]
DATED = ("llama_32", "smollm_3")
"""Templates that write the current date."""
WITHOUT_SYSTEM = ("mistral", "gemma")
WITH_TOOLS = ("llama_32", "qwen_25", "qwen_3", "granite", "ours_for_qwen3")
GENERATING = ("smollm_3", "granite", "ours_for_qwen3")
"""Templates with generation blocks."""
SPECIAL = (
    *(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    *(
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|end|>",
        "<|assistant|>",
        "<|user|>",
        "<|system|>",
    ),
    *(
        "<|User|>",
        "<|Assistant|>",
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>",
        "<image>",
    ),
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are not special."""
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
_WORDS = [
    "system user assistant You are a helpful assistant. What is the answer? The answer is 42.\n\n",
    "Today Date: the functions name arguments tools <tools> [INST] [/INST] <<SYS>> User: Assistant: think about it",
]


def write_tokenizer(
    folder: Path, metaspace: bool = False, trim_offsets: bool = False, **config: Any
) -> Path:
    """Write a tokenizer.json and its settings to a folder.

    `metaspace` builds it like Llama 2's, otherwise like GPT-2's. `trim_offsets` excludes white
    space from the offsets of a token, as in Llama 3.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True) if metaspace else models.BPE()
    )
    if metaspace:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        alphabet = [f"<0x{i:02X}>" for i in range(256)]
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *alphabet] if metaspace else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if not metaspace else [],
        show_progress=False,
    )
    made.train_from_iterator(_WORDS * 3, trainer)
    content = json.loads(made.to_str())
    if metaspace:  # byte pieces are in the vocabulary, but no text contains them
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] == "<unk>"
        ]
        made = Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens(
        [AddedToken(text, normalized=False, rstrip=text == "<|end|>") for text in SPECIAL]
    )
    made.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder / "tokenizer.json"


def tokenizer_at(path: Path) -> Tokenizer:
    """Return the tokenizer that a build would load."""
    return load_tokenizer(str(path), engine="reference")
