"""A config.json being read: each field by its dotted path, every fault gathered, and what nobody
asked for refused.

A field that no family reads is refused by its name. Otherwise a sliding window or a scaled rotary
embedding would be lost in silence. One that the library's own code does not name either has no
effect there: it is reported and left out.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

Values = dict[str, Any]
"""Flags by field name, flat; or fields of a config.json by dotted path."""
ABSENT = object()
GENERATION_FIELDS = frozenset(
    ("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping")
    + (
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
    )
    + ("max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams")
    + (
        "num_return_sequences",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
    )
    + ("top_k", "top_p", "typical_p", "forced_bos_token_id", "forced_eos_token_id")
)
"""Fields of any config that say how the library chooses tokens."""
GENERAL = GENERATION_FIELDS | frozenset(
    ("_name_or_path", "architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward")
    + ("dtype", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type")
    + ("output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict")
    + ("torch_dtype", "transformers_version", "use_cache")
    + (
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_flash_attn_2_enabled",
    )
    + ("finetuning_task", "gradient_checkpointing", "is_llama_config", "model_max_length")
    + ("output_scores", "prefix", "return_dict_in_generate", "task_specific_params")
    + (
        "tokenizer_class",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "cache_implementation",
    )
)
"""Fields of any config that say nothing about the function of its weights: of generation, of files,
of training.
"""
FURTHER_TOKENS = re.compile(r"(^|_)(mtp|nextn)(_|$)|multi_token_prediction")
"""Names of fields about layers that predict further tokens."""
FURTHER_LAYERS = re.compile(r"^(?=.*(mtp|nextn)).*_layers$")
"""Names of fields that count such layers."""
ROLES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(aux|z|balanc\w*)_loss|loss_(coef|alpha|weight)|router_logits"),
        "training adds the loss of --moe-aux-loss-coeff instead",
    ),
    (FURTHER_TOKENS, "layers that predict further tokens are left out, as in the library"),
    (
        re.compile("|".join(f"^{name}$" for name in sorted(GENERATION_FIELDS))),
        "generation takes the flags of its command",
    ),
    (re.compile("^initializer_range$"), "new weights are drawn by --init-method-std"),
    (re.compile("dtype$|^float32_"), "--dtype says how numbers are held"),
    (
        re.compile("^language_model_only$|^use_frame_special_tokens$"),
        "the library's model does not read it either",
    ),
)
"""Names of fields that have an effect elsewhere and are not used here, by their role; and what
counts instead.
"""
_OF_DRAWS = 0.02
"""The usual `initializer_range`, also of --init-method-std."""
_USUAL: Mapping[str, Any] = {
    "initializer_range": _OF_DRAWS,
    "mamba_ssm_dtype": "float32",
    "use_frame_special_tokens": True,
    "float32_attention": True,
}
"""Values of such fields that change nothing."""
SILENT: Mapping[str, Any] = {
    **dict.fromkeys(
        ("is_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript", "use_bfloat16"),
        False,
    ),
    **dict.fromkeys(
        ("rope_interleaved", "use_mrope", "use_sliding_window", "use_parallel_residual"), False
    ),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tf_legacy_loss"), False),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0
    ),
    **dict.fromkeys(
        ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "classifier_dropout"), 0.0
    ),
    "neftune_noise_alpha": 0.0,
    "pruned_heads": {},
}
"""Values that say what every model does without the field."""
_MOST = 2**31 - 1


def shown(value: Any) -> str:
    """A value of theirs in a message: JSON's null, long ones cut."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def same(value: Any, other: Any) -> bool:
    """Whether two values are equal, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


LAYER_TYPES = ("sliding_attention", "full_attention")


def library_source(model_type: str) -> str:
    """The library's code that reads a config of this type; empty where it is not installed.

    More than the fields of its class: modules ask configs for others too, such as `getattr(config,
    "head_dim", None)`.
    """
    spec = importlib.util.find_spec("transformers")
    root = Path(spec.origin or "").parent if spec is not None else Path("transformers")
    own = [*root.glob(f"models/{model_type.removesuffix('_text')}/*.py")]
    shared = [*root.glob("*.py"), *root.glob("integrations/*attention*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in (*own, *shared)) if own else ""


class ConfigJson:
    """The fields of a config.

    `faults` gathers what is wrong with them, `left_out` those that say nothing. `unused` has those
    whose effect is elsewhere: what counts instead -> each field and its value.
    """

    def __init__(self, content: Mapping[str, Any], sections: Sequence[str] = ()) -> None:
        """`sections`: names of the objects inside whose fields are read too. ValueError when one is
        no object.
        """
        self._content, self._sections = content, sections
        self._seen: set[str] = set()
        self.faults: list[str] = []
        self.left_out: list[str] = []
        self.unused: dict[str, list[str]] = {}
        for name in sections:
            if not isinstance(content.get(name) or {}, Mapping):
                raise ValueError(f"config.json: {name} is no object")

    @property
    def names(self) -> set[str]:
        """Fields outside all sections that were asked for."""
        return {path for path in self._seen if "." not in path}

    def _last(self, path: str) -> str:
        """A path without its section."""
        section, _, key = path.partition(".")
        return key if section in self._sections else path

    def get(self, path: str, default: Any = None) -> Any:
        """The value, or `default` where there is none."""
        self._seen.add(path)
        value: Any = self._content
        for key in path.split("."):
            value = value.get(key, ABSENT) if isinstance(value, Mapping) else ABSENT
        return default if value is ABSENT else value

    def number(
        self,
        path: str,
        default: Any,
        kind: type = int,
        low: float = 1,
        high: float = _MOST,
        null: Any = None,
    ) -> Any:
        """A number; `null` is what a null means to the library, if anything. The default where it
        is at fault.
        """
        found = self.get(path, default)
        return self.checked(path, null if found is None else found, default, kind, low, high)

    def checked(
        self, path: str, value: Any, default: Any, kind: Any, low: float, high: float
    ) -> Any:
        """`value` of the field at `path` as a number, or `default` and a fault."""
        number: Any = (
            float(value) if type(value) is int and kind is float and abs(value) <= _MOST else value
        )
        # text, true, null, NaN, out of its range
        if isinstance(number, bool) or not isinstance(number, kind) or not low <= number <= high:
            what = "a whole number" if kind is int else "a number"
            self.faults.append(
                f"{path} is {shown(value)}, expected {what} of at least {low:g} and at most "
                f"{high:.10g}"
            )
            return default
        return number

    def switch(self, path: str, default: bool = False) -> bool:
        """A true or false."""
        found = self.get(path, default)
        if not isinstance(found, bool):
            self.faults.append(f"{path} is {shown(found)}, expected true or false")
        return bool(found)

    def only(self, section: str = "", **fixed: Any) -> None:
        """Fields that can have one value here, which is also what their absence means."""
        for name, value in fixed.items():
            if not same(found := self.get(section + name, value), value):
                self.faults.append(
                    f"{section}{name} is {shown(found)}, megacp can only express {value!r}"
                )

    def full_attention(self, count: int, section: str = "") -> None:
        """`layer_types` may say only what is so without it."""
        found, path = self.get(f"{section}layer_types"), f"{section}layer_types"
        if found is not None and found != [LAYER_TYPES[1]] * count:
            self.faults.append(
                f"{path} is {shown(found)}, megacp can only express {count} times full_attention"
            )

    def unused_lines(self) -> list[str]:
        """List the fields that are not used, a line for each role."""
        return [
            f"config.json: {', '.join(told)} not used: {instead}"
            for instead, told in self.unused.items()
        ]

    def refuse_unknown(self, harmless: Collection[str], model_type: str) -> None:
        """Faults for fields that nobody read and that may change the model of the library."""
        library = ""
        paths = list(self._content.items())
        for section in self._sections:
            paths += [
                (f"{section}.{key}", value)
                for key, value in (self._content.get(section) or {}).items()
            ]
        for path, value in paths:
            key = self._last(path)
            if path not in self._seen and (key in harmless or key in GENERAL):
                self._note_unused(path, key, value)
            seen = path in self._seen or path in self._sections or key in harmless or key in GENERAL
            silent = (
                value is None or key.endswith("_id") or (key in SILENT and same(value, SILENT[key]))
            )
            if seen or silent:
                continue
            # code that comes with the weights may read what the library does not
            if key not in SILENT and "auto_map" not in self._content:
                library = library or library_source(model_type)
            if library and key not in SILENT and not re.search(rf"\b{re.escape(key)}\b", library):
                self.left_out.append(path)
            else:
                self.faults.append(
                    f"{path} is not known, so it may change the model (if it does not, take it out)"
                )

    def _note_unused(self, path: str, key: str, value: Any) -> None:
        """Note a field that is known and not read, if its value has an effect elsewhere."""
        if not value or same(value, _USUAL.get(key)) or key in ("dtype", "torch_dtype"):
            return
        for names, instead in ROLES:
            if names.search(key):
                self.unused.setdefault(instead, []).append(f"{path} {shown(value)}")
                return
