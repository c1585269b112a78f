"""The architectures by name: the tables of each, how a config.json or flags choose one, and the two directions.

Adding an architecture is a row here and its tables. A config chooses by `model_type`, the library's own key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megacp.huggingface.convert.tables import llama, molmo2, olmo2, qwen3, smollm3, windowed
from megacp.huggingface.convert.tables.fields import Field, Theirs, Values, is_whole, read_fields, write_fields
from megacp.huggingface.convert.tables.mapping import Info, Link

LAYOUTS = (molmo2.NATIVE, molmo2.RELEASED)
GENERAL = frozenset(
    ("_name_or_path", "architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward")
    + ("dtype", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type")
    + ("output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict")
    + ("torch_dtype", "transformers_version", "use_cache")
)
"""Fields of any config that say nothing about the function of its weights."""
INERT = frozenset(
    ("_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash", "_flash_attn_2_enabled")
    + ("begin_suppress_tokens", "finetuning_task", "gradient_checkpointing", "is_llama_config", "model_max_length")
    + ("output_scores", "prefix", "return_dict_in_generate", "suppress_tokens", "task_specific_params")
    + ("tokenizer_class", "transformers.js_config", "unsloth_fixed", "unsloth_version")
    + ("bad_words_ids", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size")
    + ("exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens", "min_length")
    + ("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values")
    + ("repetition_penalty", "temperature", "top_k", "top_p", "typical_p")
)
"""Fields that tools and older versions leave in a config: of generation, of files, of training. No model reads them."""
IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Ends of names in old files that are not read: they follow from the config."""
_ID_ENDS = ("_token_id", "_patch_id", "_col_id")


def _all(value: Any, kind: type) -> bool:
    """Whether a value is a list of values of exactly one kind."""
    return isinstance(value, list) and all(type(one) is kind for one in value)


@dataclass(frozen=True)
class Architecture:
    """One row."""

    name: str
    """`model_type` of the library, and what --architecture takes."""
    cls: str
    """The library's class with a head."""
    fields: list[Field]
    harmless: frozenset[str] = frozenset()
    sections: tuple[str, ...] = ()
    linears: Callable[[Values], llama.Linears] = llama.decoder_linears
    """Of a block, as the library joins them."""
    norms: tuple[str, str] = llama.NORMS
    """The library's names of the norms of attention and MLP."""

    def values(self, content: Mapping[str, Any], ignored: Collection[str] = ()) -> Values:
        """Our flags from a config.json. ValueError lists every field that cannot be expressed; fields without a row
        that are `ignored` by name change nothing.
        """
        if wrong := self._wrong_kinds(content):
            raise ValueError("config.json: " + "; ".join(wrong))
        if self.sections:
            content = molmo2.native_spelling(content)
        theirs = Theirs(content)
        values, reasons = read_fields(self.fields, theirs)
        unknown = theirs.unknown(self.harmless | GENERAL | INERT, self.sections)
        rest = [path for path in unknown if not {path, path.rpartition(".")[2]} & set(ignored)]
        reasons += [
            f"{path} is not known, so it may change the model (--ignore-field {path} when it does not)" for path in rest
        ]
        for name in ignored:
            if any(name in (path, path.rpartition(".")[2]) for path in theirs.asked):
                reasons.append(f"--ignore-field {name}: this field is known and means something")
            elif not any(name in (path, path.rpartition(".")[2]) for path in unknown):
                reasons.append(f"--ignore-field {name}: there is no unknown field of this name")
        if reasons:
            raise ValueError("config.json: " + "; ".join(reasons))
        return values

    def unknown(self, content: Mapping[str, Any]) -> set[str]:
        """Fields of a config.json without a row, by the names that --ignore-field takes."""
        theirs = Theirs(molmo2.native_spelling(content) if self.sections else content)
        read_fields(self.fields, theirs)
        paths = theirs.unknown(self.harmless | GENERAL | INERT, self.sections)
        return {name for path in paths for name in (path, path.rpartition(".")[2])}

    def _wrong_kinds(self, content: Mapping[str, Any]) -> list[str]:
        """Values that are no object, no list of names or no token id where one is needed."""
        sections = (*self.sections, "vit_config") if self.sections else ()
        wrong = [f"{name} is no object" for name in sections if not isinstance(content.get(name) or {}, Mapping)]
        if not _all(content.get("architectures") or [], str):
            wrong.append("architectures is no list of names")
        insides = {"": content, **{f"{name}.": content.get(name) for name in sections}}
        for prefix, inside in insides.items():
            for key, value in inside.items() if isinstance(inside, Mapping) else ():
                if key.endswith(_ID_ENDS) and not (value is None or is_whole(value) or _all(value, int)):
                    wrong.append(f"{prefix}{key} is {value!r:.80}, expected a token id")
        return wrong

    def config(self, values: Values, layout: str = molmo2.NATIVE) -> dict[str, Any]:
        """A config.json from our flags, without dtype and special tokens. ValueError lists every flag that cannot be
        expressed.
        """
        content, reasons = write_fields(self.fields, values)
        reasons += llama.reasons(values) if self.name == "llama" else []
        if reasons:
            raise ValueError(f"this model is no {self.name}: " + "; ".join(reasons))
        for section in self.sections:
            content[section]["model_type"] = f"molmo2_{section.removesuffix('_config')}"
        if layout == molmo2.RELEASED:
            content = molmo2.released_spelling(content)
        return {"architectures": [self.cls], "model_type": self.name, **content}

    def links(self, values: Values, layout: str, infos: Mapping[str, Info] | None = None) -> list[Link]:
        """All tensors; `infos`: of the file that is read, which says where a released embedding was split."""
        if not self.sections:
            return llama.links(values, self.linears, self.norms)
        cut = molmo2.first_rows(infos, values) if infos is not None and layout == molmo2.RELEASED else None
        return molmo2.links(values, layout, cut)

    def layout_of(self, infos: Mapping[str, Info]) -> str:
        """The layout that a file is in."""
        return molmo2.layout_of(infos) if self.sections else molmo2.NATIVE


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("llama", "LlamaForCausalLM", llama.FIELDS),
        Architecture("mistral", "MistralForCausalLM", windowed.MISTRAL_FIELDS),
        Architecture(
            "phi3",
            "Phi3ForCausalLM",
            windowed.PHI3_FIELDS,
            windowed.PHI3_HARMLESS,
            linears=windowed.phi3_linears,
        ),
        Architecture("olmo2", "Olmo2ForCausalLM", olmo2.FIELDS, norms=olmo2.NORMS),
        Architecture("smollm3", "SmolLM3ForCausalLM", smollm3.FIELDS, smollm3.HARMLESS),
        Architecture("qwen2", "Qwen2ForCausalLM", qwen3.QWEN2_FIELDS, qwen3.HARMLESS),
        Architecture("qwen3", "Qwen3ForCausalLM", qwen3.FIELDS, qwen3.HARMLESS),
        Architecture("molmo2", "Molmo2ForConditionalGeneration", molmo2.FIELDS, molmo2.HARMLESS, molmo2.SECTIONS),
    )
}


def of_config(content: Mapping[str, Any], wanted: str = "auto") -> Architecture:
    """The architecture of a config.json. ValueError when it is not known, or not the one that is `wanted`."""
    name = content.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type is {name!r:.80}, known are {', '.join(ARCHITECTURES)}")
    if wanted not in ("auto", name):
        raise ValueError(f"--architecture is {wanted}, but config.json has model_type {name}")
    return ARCHITECTURES[name]


def of_values(values: Values, wanted: str = "auto") -> Architecture:
    """The architecture that is `wanted`, or that our flags name, or the first that can say them. ValueError for a name
    that is not known.
    """
    if wanted != "auto":
        return ARCHITECTURES[wanted]
    named = values["hf_model_type"]
    if named is not None:
        if named not in ARCHITECTURES:
            raise ValueError(f"--hf-model-type {named} is not known, known are {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[named]
    after, biases = values["norm_position"] == "after", (values["add_qkv_bias"], values["add_attention_output_bias"])
    chosen = {
        "molmo2": values["vision_num_layers"] > 0,
        "olmo2": after or values["qk_layernorm_scope"] == "all_heads",
        "smollm3": values["no_rope_freq"] is not None,
        "qwen3": values["qk_layernorm"],
        "qwen2": biases == (True, False),
    }
    return ARCHITECTURES[next((name for name, fits in chosen.items() if fits), "llama")]


def token_ids(values: Values, known: Mapping[str, int] | None) -> dict[str, int]:
    """Ids of the image tokens by name: those that are known, or the first ones behind the vocabulary."""
    return dict(known) if known else {n: values["vocab_size"] + i for i, n in enumerate(molmo2.TOKEN_ORDER)}


def token_fields(ids: Mapping[str, int]) -> dict[str, int]:
    """The ids that stand in a Molmo2's config.json, by its fields."""
    return {field: ids[name] for field, name in molmo2.TOKEN_FIELDS.items()}
