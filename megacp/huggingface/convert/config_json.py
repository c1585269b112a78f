"""Reads a config.json: fields by dotted path, with a list of all faults.

A field that the model's family does not read is refused by name; otherwise, a sliding window or a
scaled rotary embedding could be lost silently. If the library's code does not mention the field
either, it has no effect: it is reported and ignored.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

# Flags by field name, flat; or fields of a config.json by dotted path.
Values = dict[str, Any]
# The value of a field that is not in the config.
ABSENT = object()
# Fields of any config that control generation.
GENERATION_FIELDS = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
# Fields of any config that do not affect the model's computation.
GENERAL = GENERATION_FIELDS | {
    # files and classes
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "auto_map",
    "model_type",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    # implementations and outputs
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_flash_attn_2_enabled",
    "attn_implementation",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pretraining_tp",
    "return_dict",
    "return_dict_in_generate",
    "torch_dtype",
    "use_cache",
    # tasks and training
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "model_max_length",
    "prefix",
    "problem_type",
    "task_specific_params",
}
# Names of fields that describe multi-token-prediction layers.
FURTHER_TOKENS = re.compile(r"(^|_)(mtp|nextn)(_|$)|multi_token_prediction")
# Names of fields that contain the number of such layers.
FURTHER_LAYERS = re.compile(r"^(?=.*(mtp|nextn)).*_layers$")
# Names of known fields that are ignored, grouped by purpose, and what takes their place.
ROLES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"(aux|z|balanc\w*)_loss|loss_(coef|alpha|weight)|router_logits"),
        "--moe-aux-loss-coeff sets the auxiliary training loss",
    ),
    (FURTHER_TOKENS, "multi-token-prediction layers are skipped, as in transformers"),
    (
        re.compile("|".join(f"^{name}$" for name in sorted(GENERATION_FIELDS))),
        "set generation options with the flags of tools/generate.py",
    ),
    (re.compile("^initializer_range$"), "--init-method-std sets the range of new weights"),
    (re.compile("dtype$|^float32_"), "--dtype sets the number format"),
    (
        re.compile("^language_model_only$|^use_frame_special_tokens$"),
        "the model in transformers does not use it either",
    ),
)
# The usual `initializer_range`, also the default of --init-method-std.
_OF_DRAWS = 0.02
# Values of these fields that need no message, because they have no effect.
_USUAL: Mapping[str, Any] = {
    "initializer_range": _OF_DRAWS,
    "mamba_ssm_dtype": "float32",
    "use_frame_special_tokens": True,
    "float32_attention": True,
}
# Values accepted for unknown fields: a model without the field behaves in the same way.
SILENT: Mapping[str, Any] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "torchscript": False,
    "use_bfloat16": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "use_parallel_residual": False,
    "attention_bias": False,
    "mlp_bias": False,
    "tf_legacy_loss": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "hidden_dropout": 0.0,
    "classifier_dropout": 0.0,
    "neftune_noise_alpha": 0.0,
    "pruned_heads": {},
}
# The largest accepted size.
_MOST = 2**31 - 1


def shown(value: Any) -> str:
    """Return a config value for a message, with null as in JSON and long values truncated."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; unlike in Python, true is not equal to 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


# Values of the field `layer_types`: with a sliding window, and without.
LAYER_TYPES = ("sliding_attention", "full_attention")


def library_source(model_type: str) -> str:
    """Return the library's code that may read such a config; empty if it is not installed.

    The fields of the config class are not enough: modules also read other fields, for example
    with `getattr(config, "head_dim", None)`.
    """
    root = Path("transformers")
    spec = importlib.util.find_spec("transformers")
    if spec is not None:
        root = Path(spec.origin or "").parent
    # Text models of vision-language models have no folder of their own.
    own = [*root.glob(f"models/{model_type.removesuffix('_text')}/*.py")]
    if not own:
        return ""
    # Masks and attention read fields of any config.
    shared = [*root.glob("*.py"), *root.glob("integrations/*attention*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in (*own, *shared))


class ConfigJson:
    """The fields of a config, and the problems found while reading them."""

    def __init__(self, content: Mapping[str, Any], sections: Sequence[str] = ()) -> None:
        """Read `content` and the nested objects named in `sections`.

        Raise ValueError if one of them is not an object.
        """
        self._content = content
        self._sections = sections
        self._seen: set[str] = set()
        self.faults: list[str] = []
        """A message for each invalid field."""
        self.left_out: list[str] = []
        """Fields without effect in the library."""
        self.unused: dict[str, list[str]] = {}
        """Explanation from `ROLES` -> ignored fields with their values."""
        for name in sections:
            found = content.get(name)
            if not isinstance(found or {}, Mapping):
                raise ValueError(f"config.json: {name} is {shown(found)}, expected an object")

    @property
    def names(self) -> set[str]:
        """Fields that have been read, except fields inside sections."""
        return {path for path in self._seen if "." not in path}

    def _last(self, path: str) -> str:
        """Return a path without its section."""
        section, _, key = path.partition(".")
        return key if section in self._sections else path

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if the config does not have it."""
        # Remember the field: `refuse_unknown` accepts only fields that were read.
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
        """Return a numeric field, or `default` if it is missing or invalid.

        An invalid value adds a fault. `null`: the value that null stands for in the library; None
        if null is invalid.
        """
        found = self.get(path, default)
        value = null if found is None else found
        return self.checked(path, value, default, kind, low, high)

    def checked(
        self, path: str, value: Any, default: Any, kind: Any, low: float, high: float
    ) -> Any:
        """Return a field's `value` as a number; if invalid, add a fault and return `default`."""
        number: Any = value
        if type(value) is int and kind is float and abs(value) <= _MOST:
            number = float(value)
        is_number = isinstance(number, kind) and not isinstance(number, bool)
        if is_number and low <= number <= high:  # false for NaN
            return number
        expected = "a whole number" if kind is int else "a number"
        self.faults.append(
            f"{path} is {shown(value)}, expected {expected} of at least {low:g} and at most "
            f"{high:.10g}"
        )
        return default

    def switch(self, path: str, default: bool = False) -> bool:
        """Return a boolean field; any other value adds a fault."""
        found = self.get(path, default)
        if not isinstance(found, bool):
            self.faults.append(f"{path} is {shown(found)}, expected true or false")
        return bool(found)

    def only(self, section: str = "", **fixed: Any) -> None:
        """Add a fault for each field that differs from its only supported value, the default."""
        for name, value in fixed.items():
            found = self.get(section + name, value)
            if not same(found, value):
                self.faults.append(
                    f"{section}{name} is {shown(found)}, but megacp can only express {value!r}"
                )

    def full_attention(self, count: int, section: str = "") -> None:
        """Add a fault if `layer_types` has a layer without full attention."""
        path = f"{section}layer_types"
        found = self.get(path)
        if found is not None and found != [LAYER_TYPES[1]] * count:
            self.faults.append(
                f"{path} is {shown(found)}, but megacp can only express full_attention for all "
                f"{count} layers"
            )

    def unused_lines(self) -> list[str]:
        """Return a message for each group of ignored fields."""
        return [
            f"config.json: ignoring {', '.join(fields)}: {instead}"
            for instead, fields in self.unused.items()
        ]

    def refuse_unknown(self, harmless: Collection[str], model_type: str) -> None:
        """Add a fault for each field that was not read and may change the library's model."""
        library = ""  # read only if there is an unknown field
        paths = list(self._content.items())
        for section in self._sections:
            inside = self._content.get(section) or {}
            paths += [(f"{section}.{key}", value) for key, value in inside.items()]
        for path, value in paths:
            if path in self._seen or path in self._sections:
                continue
            key = self._last(path)
            if key in harmless or key in GENERAL:
                self._note_unused(path, key, value)
                continue
            has_usual_value = key in SILENT and same(value, SILENT[key])
            if value is None or key.endswith("_id") or has_usual_value:
                continue
            # With auto_map the folder has its own code, which may read any field.
            if key not in SILENT and "auto_map" not in self._content:
                library = library or library_source(model_type)
            if library and key not in SILENT and not re.search(rf"\b{re.escape(key)}\b", library):
                self.left_out.append(path)
            else:
                self.faults.append(
                    f"{path} is unknown and may change the model; if it does not, remove the field"
                )

    def _note_unused(self, path: str, key: str, value: Any) -> None:
        """Record a known field that is ignored although its value would have an effect."""
        # The dtype has its own message, see `Loaded.notes`.
        if not value or same(value, _USUAL.get(key)) or key in ("dtype", "torch_dtype"):
            return
        for names, instead in ROLES:
            if names.search(key):
                self.unused.setdefault(instead, []).append(f"{path} {shown(value)}")
                return
