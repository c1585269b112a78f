"""Mistakes that the tests of this folder detect; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/training/loop/state.py", "tests/huggingface/convert/test_start.py"): [
        (
            "else lambda name: False",
            "else lambda name: True",
            "weights are initialised before a checkpoint is read",
        ),
        (
            "lambda name: weights is None or",
            "lambda name: True or",
            "weights are initialised before --load-hf is read",
        ),
    ],
    ("megacp/engine/models/vision.py", "tests/huggingface/convert/test_exact.py"): [
        ("np.full(len(place), number)", "np.full(len(place), 0)", "images attend to each other"),
        (".swapaxes(1, 2).reshape(-1)", ".reshape(-1)", "patches are in row order"),
    ],
    ("megacp/attention/ops/rotary.py", "tests/huggingface/convert/test_exact.py"): [
        (
            "            axes[angle] = axis",
            "            axes[angle] = 0",
            "image tokens are rotated only by time",
        ),
    ],
    ("megacp/training/loop/stored.py", "tests/huggingface/convert/test_start.py"): [
        (
            "FINETUNING_RATE_OF_PAIRS if config.model.lora_rank else ",
            "",
            "pairs are trained with the learning rate of full weights",
        ),
        (
            "rate = stored.training.lr",
            "rate = config.training.lr",
            "a resumed run uses the default learning rate",
        ),
    ],
    ("megacp/huggingface/convert/card.py", "tests/huggingface/convert/test_card.py"): [
        ('value.rstrip("/").rpartition("/")[2]', "value", "a model card has paths of the machine"),
        ("hub = re.fullmatch(", "hub = re.match(", "a path is taken for a model's name on a hub"),
    ],
    ("megacp/huggingface/convert/config_json.py", "tests/huggingface/convert/test_families.py"): [
        ('*root.glob("*.py"), ', "", "fields that only the code of masks reads are unknown"),
    ],
    ("megacp/huggingface/convert/family.py", "tests/huggingface/convert/test_families.py"): [
        (
            'values["num_experts"],\n        )',
            'values["num_experts"] - 1,\n        )',
            "the converter drops an expert",
        ),
    ],
    ("megacp/huggingface/convert/moe.py", "tests/huggingface/convert/test_families.py"): [
        (
            '"moe_shared_expert_intermediate_size": width,\n            "moe_shared_expert_gate": True,',
            '"moe_shared_expert_intermediate_size": width,\n            "moe_shared_expert_gate": False,',
            "the gate of a shared expert is lost",
        ),
        ('_BLOCK, "mlp")', '_BLOCK, "moe")', "stacked experts have Mixtral's block name"),
        ("range(every - 1, v", "range(0, v", "the first of N layers has experts"),
        (
            "c.only(router_jitter_noise=0.0, clip_qkv=None)",
            "pass",
            "clipping of queries is ignored silently",
        ),
        (
            'resolved(v)["ffn_hidden_size"]',
            'v["ffn_hidden_size"]',
            "the width of experts is unresolved",
        ),
    ],
    ("megacp/huggingface/convert/gpt_oss.py", "tests/huggingface/convert/test_families.py"): [
        ("(blocks & 15)", "(blocks >> 4)", "the high bits of a byte are read twice"),
        (
            "scales.float() - 127",
            "scales.float() - 128",
            "blocks of four bits have half their size",
        ),
        (
            "torch.stack(found.chunk(2, 1), 2).flatten(1, 2)",
            "found",
            "all rows of gate are written before up",
        ),
        (
            '"truncate": False,',
            '"truncate": True,',
            "the default of YaRN rounds the ends of its ramp",
        ),
    ],
    (
        "megacp/huggingface/convert/gpt_oss.py",
        "tests/huggingface/convert/test_malformed_weights.py",
    ): [
        (
            "elif scales != blocks[:3]:",
            "elif len(scales) != 3:",
            "scales with one column are broadcast",
        ),
        (
            "if infos[name].dtype != torch.uint8:",
            "if False:",
            "scales in bfloat16 are read as exponents",
        ),
        ("if stack in infos:", "if False:", "a packed tensor hides a plain one"),
        ("if (scales == _NAN).any():", "if False:", "a scale that is NaN is called too large"),
        ("if not is_finite(found):", "if False:", "an expert is infinite"),
    ],
    (
        "megacp/huggingface/convert/tensors.py",
        "tests/huggingface/convert/test_malformed_weights.py",
    ): [
        (
            "if experts and count != experts:",
            "if False:",
            "a stack with twice the experts of half the rows is accepted",
        ),
        ("if not is_finite(cast):", "if False:", "a cast makes infinite weights"),
        ("math.isfinite(largest.item())", "True", "inf is finite"),
    ],
    (
        "megacp/huggingface/convert/hf_files.py",
        "tests/huggingface/convert/test_malformed_weights.py",
    ): [
        ("if not is_finite(found):", "if False:", "weights with NaN are trained"),
        ("if size < expected:", "if False:", "an incomplete download is accepted"),
    ],
    ("megacp/huggingface/convert/source.py", "tests/huggingface/convert/test_tied_heads.py"): [
        (
            "if same_values(weights, name_of_embedding, name_of_head):",
            "if True:",
            "a head that differs from the embedding is dropped",
        ),
        (
            "return _LinksOfFile(apart, infos, True, note)",
            "return _LinksOfFile(apart, infos)",
            "the config ties a separate head",
        ),
        (
            "if name_of_embedding not in infos:",
            "if False:",
            "the head is not used as the missing embedding",
        ),
    ],
    ("megacp/huggingface/convert/text_part.py", "tests/huggingface/convert/test_tied_heads.py"): [
        ("or not part.asks_text", "or True", "a tie that only text_config sets is lost"),
        (
            '"gemma3_text", tied=True',
            '"gemma3_text", tied=False',
            "a Gemma 3 without the field has a separate head",
        ),
    ],
    ("megacp/huggingface/convert/text_part.py", "tests/huggingface/convert/test_text_part.py"): [
        ("if name not in _SECTIONS}", "if True}", "sections of rotary axes are refused"),
        (
            "{**part.defaults, **outside, **inside}",
            "{**outside, **inside, **part.defaults}",
            "defaults have priority over a config",
        ),
        (
            'NOT_TEXT = _PARTS + tuple(f"model.{part}" for part in _PARTS)',
            "NOT_TEXT = _PARTS",
            "tensors of a tower with newer names are unexpected",
        ),
    ],
    ("megacp/huggingface/convert/moe.py", "tests/huggingface/convert/test_exact.py"): [
        (
            "i >= first for i",
            "i > first for i",
            "one dense layer more than first_k_dense_replace",
        ),
        (
            "width * c.number(",
            "1 * c.number(",
            "shared experts of a GLM have the width of one column each",
        ),
        (
            'not c.switch("norm_topk_prob", True)',
            'c.switch("norm_topk_prob", True)',
            "the normalisation of sigmoids is inverted",
        ),
        ("and not c.switch", "and c.switch", "the normalisation over chosen experts is inverted"),
        (
            'for e in range(experts):\n                ours += [f"layers.{{i}}.mlp.experts.{e}.{name}.{kind}" for name in names]',
            'for name in names:\n                ours += [f"layers.{{i}}.mlp.experts.{e}.{name}.{kind}" for e in range(experts)]',
            "the gates of all experts are stacked before all ups",
        ),
    ],
    ("megacp/huggingface/convert/tensors.py", "tests/huggingface/convert/test_exact.py"): [
        (
            "found[start - first * rows : stop",
            "found[0 : stop",
            "an expert's rows begin at the start of its stack",
        ),
    ],
    (
        "megacp/huggingface/generate_command.py",
        "tests/huggingface/convert/test_template_of_training.py",
    ): [
        (
            'kept is None and not generator.step and tokenizer.kind == "huggingface"',
            'kept is None and generator.step and tokenizer.kind == "huggingface"',
            "a folder's template is not read",
        ),
    ],
    ("megacp/prepare/command.py", "tests/huggingface/convert/test_folder_rules.py"): [
        (
            "**told.values, **of_folder",
            "**of_folder",
            "a build does not follow the folder's processor files",
        ),
        (
            "    if overridden:\n",
            "    if False:\n",
            "a flag overrides the folder's files silently",
        ),
    ],
    ("megacp/train.py", "tests/huggingface/convert/test_folder_rules.py"): [
        (
            "misfits = weights.image_misfits(data_path, sources.image_rules)",
            "misfits = list[str]()",
            "packs by other image rules than the folder's are trained on",
        ),
    ],
    ("megacp/training/loop/state.py", "tests/huggingface/convert/test_folder_rules.py"): [
        (
            "if image_rules is None and weights is not None and weights.image_rules is not None:",
            "if image_rules is None and weights is not None and False:",
            "the export of a run on text has no processor files",
        ),
        (
            "image_rules = state.image_rules or was.image_rules",
            "image_rules = state.image_rules",
            "a finetuning on text forgets the image rules",
        ),
    ],
    ("megacp/huggingface/convert/source.py", "tests/huggingface/convert/test_folder_rules.py"): [
        (
            "        refuse_embedded_adapter(path, adapter)\n",
            "",
            "an adapter in a model's folder is ignored",
        ),
        (
            "layers <= int(numbered[1]) < layers + further",
            "layers <= int(numbered[1])",
            "any further layer is dropped",
        ),
    ],
    (
        "megacp/huggingface/convert/config_json.py",
        "tests/huggingface/convert/test_folder_rules.py",
    ): [
        (
            "if not value or same(value, _USUAL.get(key))",
            "if True",
            "unused fields are not reported",
        ),
    ],
    ("megacp/huggingface/convert/start.py", "tests/huggingface/convert/test_start.py"): [
        (
            '{f"--load-hf {name}": folder / name for name in loaded.files}',
            "dict[str, Path]()",
            "a model is not compared",
        ),
        (
            'f"--load-adapter {name}": Path(applied) / name for name in ADAPTER_FILES',
            'f"--load-adapter {name}": Path(applied) / name for name in ()',
            "the files of an adapter are not compared",
        ),
    ],
    ("megacp/huggingface/convert/lora.py", "tests/huggingface/convert/test_lora.py"): [
        (
            "for pair in of_experts], 2)",
            "for pair in of_experts], 1)",
            "B of experts is ordered by expert",
        ),
        (
            "if both and parameter.endswith(STACKS[0]):",
            "if False and parameter.endswith(STACKS[0]):",
            "the pair of gate and up overwrites that of down",
        ),
        (
            "if family.in_turns and name",
            "if False and name",
            "rows of gate and up do not alternate in a written pair",
        ),
        (
            "name if beside_experts and",
            "name if False and",
            "peft treats an MLP next to experts as an expert",
        ),
    ],
    ("megacp/huggingface/convert/lora.py", "tests/huggingface/convert/test_adapters.py"): [
        (
            "is_exact = math.frexp(rank / size.rank)[0] == 0.5",
            "is_exact = False",
            "cutting the zeros of a rank changes alpha",
        ),
        (
            "ranks[place] = max(ranks[place], _rank(a[place], up))",
            "ranks[place] = len(a[place])",
            "padding zeros are exported",
        ),
    ],
    ("megacp/huggingface/convert/adapter.py", "tests/huggingface/convert/test_lora.py"): [
        (
            "up.unflatten(1, (rank, count)).permute(2, 0, 1)",
            "up.unflatten(1, (count, rank)).transpose(0, 1)",
            "B is read as ordered by expert",
        ),
        (
            "if self._in_turns and place",
            "if False and place",
            "alternating rows of gate and up are not separated",
        ),
    ],
    ("megacp/huggingface/convert/adapter.py", "tests/huggingface/convert/test_adapters.py"): [
        (
            "sorted(used[kinds]) or range(len(kinds))",
            "range(len(kinds))",
            "a joined linear without a pair gets one",
        ),
        (
            "        if missing:\n",
            "        if False:\n",
            "pairs in some layers are accepted",
        ),
        (
            "            if in_blocks:\n",
            "            if False:\n",
            "joined pairs are not split",
        ),
        (
            "known[0] if known else table)",
            "table)",
            "an adapter of only the text model is refused for a vision model",
        ),
    ],
    (
        "megacp/huggingface/convert/adapter.py",
        "tests/huggingface/convert/test_malformed_adapters.py",
    ): [
        (
            "        if strange:\n",
            "        if False:\n",
            "an unknown target parameter is accepted",
        ),
        ("if not tensor.isfinite().all():", "if False:", "pairs with inf or NaN are trained"),
    ],
    (
        "megacp/huggingface/convert/adapter_config.py",
        "tests/huggingface/convert/test_malformed_adapters.py",
    ): [
        (
            "is not None and not is_sound(value)",
            "is not None and False",
            "the types of fields are not checked",
        ),
        ("        if strange:\n", "        if False:\n", "DoRA is read as plain LoRA"),
    ],
    (
        "megacp/huggingface/convert/adapter_config.py",
        "tests/huggingface/convert/test_adapters.py",
    ): [
        (
            "_first_match(self._alphas, name,",
            "_first_match((), name,",
            "alpha_pattern is ignored",
        ),
        (
            "alpha * rank**0.5 if self._is_root else alpha",
            "alpha",
            "alpha is divided by the rank, not by its square root",
        ),
    ],
    ("megacp/prepare/tokenize/tokenizer.py", "tests/huggingface/convert/test_tokenizer.py"): [
        (
            "tokens = tokens_beside(folder) - tokenizer.own",
            "tokens = set()",
            "tokens beside a model are ignored",
        ),
    ],
}
