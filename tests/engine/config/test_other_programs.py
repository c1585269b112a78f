"""Flags of other programs are accepted, or refused with the right flag; none gets a wrong hint."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from megacp.engine.config.cli import accepted_note, given_names, parse
from megacp.engine.config.other_programs import ACCEPTED, INSTEAD, NOT_OFFERED, advice, nearest
from megacp.engine.config.run import fields, flag
from megacp.finetuning.flags import divided
from megacp.plan import command as plan_command
from megacp.prepare.command import preprocess_parser

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "coming_from.md"
LLAMA = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid
--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
--split 99,1,0 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
--profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb"""
"""Arguments of examples/llama/train_llama3_8b_h100_fp8.sh of Megatron-LM, with mock data."""
QWEN = """--init-method-std 0.014 --disable-bias-linear --use-rope-scaling --swiglu --qk-layernorm
--rotary-percent 1.0 --rotary-base 1000000 --use-rotary-position-embeddings --num-layers 36
--hidden-size 2560 --num-attention-heads 32 --ffn-hidden-size 9728 --kv-channels 128
--group-query-attention --position-embedding-type rope --attention-backend fused
--num-query-groups 8 --normalization RMSNorm --attention-dropout 0.0 --hidden-dropout 0.0
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --seq-length 4096
--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 4 --train-iters 10
--mock-data --tokenizer-type NullTokenizer --vocab-size 151936 --save-interval 5
--eval-interval 5 --eval-iters 4 --load a --save b --ckpt-format torch_dist --log-progress --bf16
--lr 4.5e-4 --min-lr 4.5e-5 --num-workers 2 --tensorboard-dir tb --log-interval 1
--log-throughput --no-load-optim --no-load-rng"""
"""Arguments of tests/functional_tests/ckpts/qwen3_4b/test_qwen3_4b_mcore.sh, Megatron-Bridge."""
PAI = """--save a --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.01
--adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
--attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 9 --lr-warmup-iters 1
--train-iters 10 --micro-batch-size 1 --global-batch-size 8 --num-layers 36 --hidden-size 4096
--num-attention-heads 32 --ffn-hidden-size 12288 --seq-length 2048
--max-position-embeddings 40960 --max-padding-length 2048 --log-interval 1 --log-throughput
--eval-interval 10000 --eval-iters 10 --save-interval 100 --tensorboard-queue-size 1
--tensorboard-dir tb --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --context-parallel-size 1
--no-load-optim --no-load-rng --num-workers 32 --extra-vocab-size 293
--patch-tokenizer-type Qwen3Tokenizer --swiglu --normalization RMSNorm --norm-epsilon 1e-6
--use-rotary-position-embeddings --position-embedding-type rope --disable-bias-linear
--rotary-base 1000000 --no-save-optim --ckpt-format torch_dist
--transformer-impl transformer_engine --cross-entropy-loss-fusion --qk-layernorm
--kv-channels 128 --te-rng-tracker --external-cuda-graph --cuda-graph-scope attn
--recompute-granularity selective --recompute-modules moe --train-data-path d
--valid-data-path v --dataloader-type cyclic --dataset JSON-SFT --bf16 --load x
--use-distributed-optimizer --sequence-parallel --eod-mask-loss --calculate-per-token-loss
--train-mode finetune --reset-position-ids --no-create-attention-mask-in-dataloader
--attention-backend flash --untie-embeddings-and-output-weights --group-query-attention
--num-query-groups 8"""
"""Arguments of examples/qwen3/run_mcore_qwen3.sh of Pai-Megatron-Patch, for fine-tuning 8B."""
OF_OTHERS = """--tp --pp --cp --ep --dp --cp-size --tensor_parallel_degree --context_parallel_degree
--data_parallel_shard_degree --sequence_parallel_degree --dp_shard_size finetuning_type template
stage load_in_4bit load_in_8bit per_device_train_batch_size gradient_accumulation_steps
learning_rate num_train_epochs num_epochs cutoff_len max_length sequence_len packing
sample_packing neat_packing deepspeed fsdp fsdp_config --liger enable_liger_kernel flash_attn
flash_attention attn_implementation model_name_or_path base_model adapter adapter_name_or_path
lora_r lora_target lora_target_linear lora_target_modules dataset datasets dataset_dir
eval_dataset val_size val_set_size output_dir save_steps save_total_limit saves_per_epoch
logging_steps report_to run_name warmup_steps warmup_ratio lr_scheduler_type lr_scheduler
max_grad_norm max_steps optim gradient_checkpointing torch_dtype quantization_bit
resume_from_checkpoint overwrite_output_dir plot_loss preprocessing_num_workers
dataloader_num_workers max_samples train_on_inputs assistant_only_loss special_tokens
pad_to_sequence_len tf32 torch_compile push_to_hub hub_model_id trust_remote_code use_dora
neftune_noise_alpha --nproc-per-node --tokenizer-model --tokenizer-type --split --train-samples
--recompute-activations --num-layers-per-virtual-pipeline-stage --exit-duration-in-mins
--training.steps --training.seq_len --training.local_batch_size --optimizer.name
--parallelism.tensor_parallel_degree --checkpoint.interval --checkpoint.folder
step_scheduler.global_batch_size step_scheduler.ckpt_every_steps distributed.tp_size
model.pretrained_model_name_or_path peft.dim packed_sequence.packed_sequence_size
--device_batch_size --save_folder --cp_degree --parallelism.context_parallel_config.degree
--wandb.name --wandb.entity --ft_llm"""
"""Names from the documentation of Megatron-LM, LLaMA-Factory, TRL, transformers, Axolotl,
torchtitan, NeMo Automodel and Molmo2's training code.
"""


def message(arguments: list[str]) -> str:
    """Return the error message of a command line; "" if it is accepted."""
    try:
        parse(arguments)
    except ValueError as error:
        return str(error)
    return ""


def flags_of_ours() -> set[str]:
    """Return the flags of a run, of the build of datasets, and of `--nproc`."""
    found = {flag(name) for name in fields()} | {"--nproc"}
    for action in preprocess_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for parser in action.choices.values():
                found |= set(parser._option_string_actions)
    return found


@pytest.mark.parametrize("script", [LLAMA, QWEN, PAI], ids=["llama3", "qwen3", "pai"])
def test_a_megatron_script_is_accepted_or_told_the_right_flags(script: str) -> None:
    flags = re.findall(r"--[a-z][a-z0-9-]+", script)
    # each flag by itself, with its value
    groups = [words.split() for words in re.split(r"\s(?=--)", script)]
    refused = {}
    for words in groups:
        said = message(words) if words != ["--profile"] else ""
        if said:
            refused[words[0]] = said
    assert len(groups) == len(flags)
    # of 52 arguments at least 45 are accepted or have a flag here
    without_counterpart = [name for name, said in refused.items() if ": not offered" in said]
    assert len(without_counterpart) / len(flags) <= 7 / 52
    assert [said for said in refused.values() if "did you mean" in said] == []
    hints = [name for name in refused if not re.search(": use --|: not offered", refused[name])]
    assert hints == []
    assert len(refused) <= len(flags) / 4


@pytest.mark.parametrize("name", OF_OTHERS.split())
def test_the_name_of_another_program_leads_to_a_flag_or_a_reason(name: str) -> None:
    said = message([f"--{name.removeprefix('--')}", "1"])
    assert re.fullmatch(r"unknown flag \S+: (use --|not offered)[^\n]+", said)


def test_every_flag_that_the_tables_name_exists() -> None:
    texts = [f"{row.use} {row.note}" for row in INSTEAD.values()]
    texts += [row.otherwise for row in ACCEPTED.values()]
    named = set(re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", " ".join([*texts, *NOT_OFFERED.values()])))
    assert named - flags_of_ours() == set()
    for row in INSTEAD.values():
        assert row.use.startswith("--")


def test_every_flag_of_the_page_exists_here_or_is_in_a_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    known = {flag(name) for name in (*ACCEPTED, *INSTEAD, *NOT_OFFERED)}
    # of `megacp finetune`, of the training command, and of `hf download`
    known |= {"--output", "--config", "--local-dir"}
    named = {name.replace("_", "-") for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)}
    assert named - known - flags_of_ours() == set()
    # the first column of the table of flags has our names, the other columns do not
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) > 15
    for first, *_ in rows:
        ours = set(re.findall(r"--[a-z][a-z0-9_-]+", first))
        assert ours <= flags_of_ours() or "seq_len" in first


def test_the_page_shows_the_messages_of_its_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    shown, line = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    (tmp_path / "old.yaml").write_text(example)
    monkeypatch.chdir(tmp_path)
    assert f"error: {message(['--config', 'old.yaml'])}" == shown
    flags = ["--swiglu", "--normalization", "RMSNorm", "--bf16", "--mock-data"]
    assert accepted_note(flags) == line


def test_no_name_is_in_two_tables_or_is_a_flag_here() -> None:
    tables = [set(ACCEPTED), set(INSTEAD), set(NOT_OFFERED), set(fields())]
    assert len(set().union(*tables)) == sum(map(len, tables))


def test_only_a_similar_name_is_suggested() -> None:
    for typed, meant in {
        "seq_lenght": "seq_length",
        "sequence_lenth": "seq_length",
        "num_layer": "num_layers",
        "tensor_model_parallel": "tensor_model_parallel_size",
        "global_batchsize": "global_batch_size",
        "lora_ranks": "lora_rank",
    }.items():
        assert nearest(typed, fields()) == f", did you mean {meant}?"
    for name in (
        *("template", "stage", "liger", "finetuning_type", "load_in_4bit", "disable_bias_linear"),
        *("dp", "cp_size", "tp", "pp", "cp", "ep", "packing", "optim", "xyzzy"),
    ):
        assert nearest(name, fields()) == ""


def test_what_is_always_on_is_accepted_with_one_line(tmp_path: Path) -> None:
    flags = "--swiglu --normalization RMSNorm --num-layers 2 --mock-data --attention-dropout=0.0"
    config = parse(flags.split())
    assert config == parse(["--num-layers", "2"])
    line = (
        "accepted: always on here: --swiglu, --normalization RMSNorm, --attention-dropout 0.0; "
        "without effect here: --mock-data"
    )
    assert accepted_note(flags.split()) == line
    assert given_names(flags.split()) == {"num_layers"}
    path = tmp_path / "a.yaml"
    path.write_text("swiglu: true\nnormalization: RMSNorm\nattention_dropout: 0.0\nnum_layers: 2\n")
    in_file = ["--config", str(path), "--mock-data"]
    assert parse(in_file) == config and given_names(in_file) == {"num_layers"}
    # flags come before the keys of files
    assert set(accepted_note(in_file)) == set(line)
    assert accepted_note(["--num-layers", "2"]) == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--normalization LayerNorm", "--normalization LayerNorm is not offered: every norm is"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1 is not offered: attention has no"),
        ("--fp16", "--fp16 is not offered: use --dtype bfloat16"),
        ("--swiglu=false", "--swiglu false is not offered: the activation is --mlp-activation"),
        ("--position-embedding-type=alibi", "--position-embedding-type alibi is not offered"),
        ("--optimizer sgd", "--optimizer sgd is not offered: AdamW is the only optimizer"),
        ("--expert-tensor-parallel-size 2", "use --expert-model-parallel-size"),
        ("--attention-backend unfused", "use --attention-kernel"),
    ],
)
def test_a_value_that_contradicts_is_refused_by_name(flags: str, told: str, tmp_path: Path) -> None:
    said = message(flags.split())
    assert told in said and "\n" not in said
    # the same in a file
    name, _, value = flags.removeprefix("--").replace("=", " ").partition(" ")
    path = tmp_path / "a.yaml"
    path.write_text(f"{name}: {value or 'true'}\n")
    key = name.replace("-", "_")
    in_file = message(["--config", str(path)]).lower()
    assert told.removeprefix(f"--{name}").lower() in in_file and f": {key} " in f"{in_file} "


def test_bf16_is_the_dtype_unless_the_dtype_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"

    def dtype(text: str, *flags: str) -> str:
        path.write_text(text)
        return parse([word.replace("FILE", str(path)) for word in flags]).training.dtype

    file = ("--config", "FILE")
    assert dtype("", "--bf16") == dtype("", "--bf16", "True") == "bfloat16"
    assert dtype("", "--bf16", "--dtype", "float64") == "float64"
    assert dtype("", "--dtype=float64", "--bf16") == "float64"
    assert dtype("bf16: true", *file) == dtype("bf16: auto\nfp16: false", *file) == "bfloat16"
    assert dtype("bf16: false", *file) == dtype("bf16: true\ndtype: float32", *file) == "float32"
    # flags and files are read from left to right
    assert dtype("dtype: float64", "--bf16", *file) == "float64"
    assert dtype("dtype: float64", *file, "--bf16") == "bfloat16"
    assert given_names(["--bf16"]) == {"dtype"}
    assert accepted_note(["--bf16"]) == "accepted: always on here: --bf16 (--dtype bfloat16)"
    unused = accepted_note(["--bf16", "--dtype", "float64"])
    assert unused == "accepted: without effect here: --bf16"


def test_a_switch_of_megatron_that_has_a_value_here_gets_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("qk_layernorm: true\ntransformer_impl: local\n")
    for flags in (
        ["--qk-layernorm", "--transformer-impl", "local", "--lr", "1"],
        ["--config", str(tmp_path / "a.yaml"), "--lr", "1"],
    ):
        config = parse(flags)
        assert config.model.qk_layernorm == "head"
        assert config.training.transformer_impl == "native"
    assert parse(["--qk-layernorm", "all_heads"]).model.qk_layernorm == "all_heads"


def test_sections_of_a_file_get_advice_for_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("distributed:\n  tp_size: 2\n  cp_size: 2\nmodel:\n  other: 1\n")
    said = message(["--config", str(path)])
    assert "unknown key 'distributed': keys have no sections here" in said
    assert "'tp_size': use --tensor-model-parallel-size" in said
    assert "'cp_size': use --context-parallel-size" in said
    assert said.endswith("unknown key 'model': keys have no sections here")


def test_the_plan_accepts_them_and_keeps_its_output_clean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "--vocab-size 64 --num-layers 1 --world-size 1 --json --bf16 --swiglu"
    assert plan_command.main(["--gpu", "L4", *sizes.split()]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("[")
    assert said.err == "accepted: always on here: --bf16 (--dtype bfloat16), --swiglu\n"


def test_a_fine_tuning_command_passes_them_to_the_run() -> None:
    assert divided(["--bf16", "--lr", "1"]).train == ["--bf16", "--lr", "1"]
    with pytest.raises(ValueError, match="unknown flag --learning-rate: use --lr"):
        divided(["--learning-rate", "1"])


def test_a_long_or_strange_name_is_looked_up_quickly() -> None:
    assert advice("--" + "a." * 10_000) == ""
    assert nearest("x" * 100_000, fields()) == ""
