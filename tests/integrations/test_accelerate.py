"""Trainer, SFTTrainer and Accelerate loops on several ranks compute the weights of one process.

Rows are packed, and some have images.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.integrations.accelerate import shard_sequences
from megacp.integrations.loop import shift_labels
from tests.integrations import test_matrix
from tests.integrations.test_context import rollouts
from tests.integrations.test_multimodal import IMAGE, MODELS
from tests.integrations.test_multimodal import build as build_with_images
from tests.integrations.test_transformers_models import VOCAB, build
from tests.ranks import run_ranks
from tests.reference.precision import float32_is_float64

# import them here, so that the ranks find them already imported
for library in (
    "accelerate",
    "peft",
    "transformers.trainer",
    "trl",
):
    pytest.importorskip(library, reason=f"{library} is not installed (extra: test)")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENS = 61  # not a multiple of the number of ranks, so rows are padded
STEPS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": [],
    "learning_rate": 0.01,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "seed": 1,
    "disable_tqdm": True,
}


@contextlib.contextmanager
def launched(rank: int, world_size: int, exact: bool = True) -> Iterator[None]:
    """Set torchrun's environment variables and reset Accelerate's state from earlier worlds.

    With `exact`, models compute in float64.
    """
    from accelerate.state import AcceleratorState

    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    with mock.patch.dict(
        os.environ, {name: str(value) for name, value in names.items()} if world_size > 1 else {}
    ):
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        with (
            pytest.MonkeyPatch.context() as patch,
            float32_is_float64(patch) if exact else contextlib.nullcontext(),
        ):
            yield
        AcceleratorState._reset_state(True)


llama = functools.partial(build, "Llama", "sdpa")
WINDOWED = {
    row.name: row._replace(changes={**row.changes, "sliding_window": 4, "attention_chunk_size": 4})
    for row in test_matrix.MODELS
    if row.name in "gemma4_text gpt_oss llama4_text mistral".split()
    and row.found == test_matrix.WINDOW
}
STATEFUL = {
    row.name: row
    for row in test_matrix.MODELS
    if row.found == test_matrix.STATES and "moe" not in row.name
}
"""Models whose states and convolutions continue across packed documents in the library.

The reference therefore passes them one document at a time.
"""


def model_of(kind: str) -> Any:
    """Build the model of a kind; `trees` uses Mistral, whose window follows each path of a tree."""
    if kind in MODELS:
        return build_with_images(kind, "sdpa")
    row = {**WINDOWED, **STATEFUL}.get("mistral" if kind == "trees" else kind)
    model = test_matrix.build(row, "sdpa") if row else llama()
    if kind == "gpt_oss":
        model.model.register_forward_pre_hook(masks_of_documents, with_kwargs=True)
    return model


def masks_of_documents(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add the masks that the stock gpt-oss lacks.

    The library builds its masks without positions, so packed documents would see each other.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    if module.config._attn_implementation == "megacp":  # megacp reads the positions itself
        return None
    given = {"config": module.config, "inputs_embeds": module.embed_tokens(kwargs["input_ids"])}
    given |= {
        name: kwargs.get(name) for name in ("attention_mask", "past_key_values", "position_ids")
    }
    masks = create_causal_mask(**given), create_sliding_window_causal_mask(**given)
    return args, {
        **kwargs,
        "attention_mask": dict(zip(("full_attention", "sliding_attention"), masks, strict=True)),
    }


def rows(kind: str, count: int) -> list[dict[str, Tensor]]:
    """Return `count` rows of token ids and labels.

    `packed` rows and rows for models with windows or states have three documents, `trees` have
    three rollouts, and other rows have one document. Models with images also get images.
    """
    generator = torch.Generator().manual_seed(1)
    found, packed = [], kind in ("packed", "trees", *WINDOWED, *STATEFUL)
    for number in range(count):
        lengths = torch.randint(5, 20, (3,), generator=generator).tolist()
        if not packed:
            lengths = [sum(lengths)]
        ids = torch.randint(3, VOCAB, (sum(lengths),), generator=generator)
        row = {"input_ids": ids, "labels": ids}
        firsts = [
            0,
            *torch.randint(5 if kind == "trees" else 1, (2,), generator=generator).tolist(),
        ]
        positions = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(firsts, lengths, strict=False)]
        )
        if packed:
            begins = positions.diff(prepend=torch.tensor([-2])) != 1
            row |= {"position_ids": positions, "labels": ids.masked_fill(begins, -100)}
        else:
            row["attention_mask"] = torch.ones_like(ids)
        if kind in MODELS:
            sizes = [(1, 4, 4)] * (number % 3)
            image = (positions < 6 * len(sizes)) & (positions % 6 < 4)  # four tokens per image
            shape = {"Gemma3": (len(sizes), 3, 16, 16), "Gemma4": (len(sizes), 16, 48)}.get(
                kind, (16 * len(sizes), 96)
            )
            row |= {
                "input_ids": ids.masked_fill(image, IMAGE),
                "labels": ids.masked_fill(image, -100),
            }
            row["token_type_ids" if kind == "Gemma3" else "mm_token_type_ids"] = image.long()
            row["pixel_values"] = torch.randn(shape, generator=generator).double()
            if kind == "Gemma4":
                row["image_position_ids"] = torch.cartesian_prod(*[torch.arange(4)] * 2).repeat(
                    len(sizes), 1, 1
                )
            elif kind != "Gemma3":
                row["image_grid_thw"] = torch.tensor(sizes, dtype=torch.long).view(-1, 3)
        found.append(row)
    return found


def apart(batch: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return each rollout of the trees as a separate row.

    The label of a shared token counts only in the first rollout that contains it.
    """
    found = []
    for row in batch:
        paths = rollouts(row["position_ids"].tolist())
        for path, before in zip(paths, [-1, *(path[-1] for path in paths)], strict=False):
            one = {name: x[path] for name, x in row.items()}
            found.append(
                {**one, "labels": one["labels"].masked_fill(torch.tensor(path) <= before, -100)}
            )
    return found


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad text to TOKENS and concatenate images; leave images out if there are none."""
    found = {}
    for name in batch[0]:
        values = [row[name] for row in batch]
        if name in ("pixel_values", "image_grid_thw", "image_position_ids"):
            if sum(len(x) for x in values):
                found[name] = torch.cat(values)
        else:
            pad = -100 if name == "labels" else 0
            found[name] = torch.stack([F.pad(x, (0, TOKENS - len(x)), value=pad) for x in values])
    return found


Found = tuple[dict[str, Tensor], list[float], float]
"""Weights, gradient norm of each step, and evaluation loss."""


def of_trainer(trainer: Any) -> Found:
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    weights = {
        name.removeprefix("module."): p.detach().clone()
        for name, p in trainer.model.named_parameters()
    }
    return weights, norms, loss


def stock_trainer(kind: str, folder: str, backend: str | None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {
        "args": TrainingArguments(
            folder, remove_unused_columns=False, ddp_backend=backend, **STEPS | options
        )
    }
    given |= {"train_dataset": rows(kind, 13), "eval_dataset": rows(kind, 7)}
    alone = backend is None and kind in ("trees", *STATEFUL)
    given["data_collator"] = (lambda batch: collate(apart(batch))) if alone else collate
    return Trainer(model_of(kind), **given)


def with_trainer(
    rank: int, world_size: int, kind: str, folder: str, cp_size: int | None, options: dict[str, Any]
) -> Found:
    with launched(rank, world_size):
        trainer = stock_trainer(kind, folder, "gloo" if world_size > 1 else None, **options)
        if cp_size:
            shard_sequences(trainer, cp_size, trees=kind == "trees")
        return of_trainer(trainer)


def same(found: Found, want: Found, evaluated: bool = True) -> None:
    weights, norms, loss = found
    assert weights.keys() == want[0].keys() and len(norms) == 3
    for name, value in weights.items():
        # a bias of keys starts at 0, and its gradient is only rounding
        assert (value - want[0][name]).abs().max() <= 1e-12 * want[0][name].abs().max() + 1e-15, (
            name
        )
    assert norms == pytest.approx(want[1], rel=1e-10)
    assert not evaluated or loss == pytest.approx(want[2], rel=1e-12)


RECOMPUTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("packed", "padded", "trees", *MODELS, *WINDOWED, *STATEFUL)),
        *((kind, RECOMPUTED) for kind in ("packed", "qwen3_5_text")),
    ],
)
def test_the_stock_trainer_on_two_ranks_trains_as_one_process_does(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Two of the vision-language models divide their loss by the number of tokens in a batch."""
    options = {**options, "gradient_accumulation_steps": 2}
    (want,) = run_ranks(with_trainer, 1, kind, str(tmp_path), None, options, timeout=120)
    for found in run_ranks(with_trainer, 2, kind, str(tmp_path), 2, options, timeout=120):
        same(found, want)


@pytest.mark.parametrize(("kind", "alone", "batch"), [("packed", 1, 4), ("Qwen2_5_VL", 2, 2)])
def test_rows_are_shared_by_neighbours_and_batches_are_not(
    tmp_path: Path, kind: str, alone: int, batch: int
) -> None:
    """A dp 2 x cp 2 run equals one process with both batches, or two processes that average the
    results of their batches.
    """
    options = {"per_device_train_batch_size": batch}
    want = run_ranks(with_trainer, alone, kind, str(tmp_path), None, options, timeout=120)[0]
    for found in run_ranks(with_trainer, 4, kind, str(tmp_path), 2, {}, timeout=120):
        same(found, want, evaluated=False)


def with_trl(
    rank: int, world_size: int, kind: str, folder: str, cp_size: int | None
) -> tuple[Found, int]:
    """Train with SFTTrainer on packed rows, with recomputed layers and, for `packed`, LoRA.

    Return the results and the number of tokens that the trainer counted.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    with launched(rank, world_size):
        words = models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), eos_token="w1", pad_token="w0"
        )
        data = Dataset.from_list(
            [{"input_ids": row["input_ids"].tolist()} for row in rows("padded", 24)]
        )
        arguments = SFTConfig(
            folder,
            packing=True,
            max_length=64,
            ddp_backend="gloo" if world_size > 1 else None,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            router_aux_loss_coef=0.0,
            **{**STEPS, "save_strategy": "steps", "save_steps": 3},
        )
        lora = LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        options = {"peft_config": lora} if kind == "packed" else {}
        trainer = SFTTrainer(
            model_of(kind),
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
            **options,
        )
        trainer.model.double()
        if cp_size:
            shard_sequences(trainer, cp_size)
        return of_trainer(trainer), trainer._total_train_tokens


@pytest.mark.parametrize("kind", ["packed", "gemma4_text", "gpt_oss"])
def test_packing_of_trl_on_two_ranks_trains_and_evaluates_as_one_process_does(
    tmp_path: Path, kind: str
) -> None:
    """TRL refuses packing with its own context parallelism, and it fails for Llama 4.

    PEFT can load the saved adapters.
    """
    from peft import PeftModel

    ((want, tokens),) = run_ranks(with_trl, 1, kind, str(tmp_path / "one"), None, timeout=120)
    for found, counted in run_ranks(with_trl, 2, kind, str(tmp_path / "two"), 2, timeout=120):
        assert counted == tokens  # a layout's padding is not counted
        same(found, want)
    if kind != "packed":
        return
    torch.manual_seed(0)
    read = PeftModel.from_pretrained(llama(), str(tmp_path / "two" / "checkpoint-3"))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
    assert torch.equal(dict(read.named_parameters())[name].float(), found[0][name].float())


@pytest.mark.long
def test_states_cross_four_ranks_in_the_stock_trainer_and_in_trl(tmp_path: Path) -> None:
    """TRL packs the rows itself, so four ranks are compared with two ranks."""
    (want,) = run_ranks(with_trainer, 1, "qwen3_5_text", str(tmp_path), None, {}, timeout=120)
    for found in run_ranks(with_trainer, 4, "qwen3_5_text", str(tmp_path), 4, {}, timeout=120):
        same(found, want)
    (two, _), _ = run_ranks(with_trl, 2, "qwen3_5_text", str(tmp_path / "two"), 2, timeout=120)
    for found, _ in run_ranks(with_trl, 4, "qwen3_5_text", str(tmp_path / "four"), 4, timeout=120):
        same(found, two)


def with_accelerate(
    rank: int, world_size: int, kind: str, sharded: bool
) -> tuple[dict[str, Tensor], float]:
    """Train in a custom loop.

    With `sharded`, FSDP2 shards the weights. Accelerate itself supports this only on GPUs.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    with launched(rank, world_size):
        accelerator = Accelerator(cpu=True)
        if sharded:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            )
            accelerator.state.fsdp_plugin, accelerator.state.distributed_type = (
                plugin,
                DistributedType.FSDP,
            )
        if world_size > 1:
            shard_sequences(accelerator, 2, layout="zigzag", transport="p2p", trees=kind == "trees")
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(3):
            # rows without padding, because a custom loop has no padding values
            batch = rows(kind, 8)[2 * step : 2 * step + 2]
            batch = collate(apart(batch) if (kind, world_size) == ("trees", 1) else batch)
            ids, labels, positions = (x[:, :60].clone() for x in batch.values())
            labels = shift_labels(labels)
            counted = (labels != -100).sum()
            buffers = [ids, positions, labels]
            block = accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers))
            with block if world_size > 1 else contextlib.nullcontext():
                logits = model(ids, position_ids=positions, use_cache=False).logits
                summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                accelerator.backward(summed / counted * accelerator.num_processes)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        whole = {
            name: p.full_tensor() if sharded and world_size > 1 else p
            for name, p in weights.items()
        }
        return {name: p.detach().clone() for name, p in whole.items()}, float(norm)


@pytest.mark.parametrize(
    ("kind", "sharded"), [("packed", False), ("packed", True), ("trees", False)]
)
def test_a_loop_of_accelerate_on_two_ranks_trains_as_one_process_does(
    kind: str, sharded: bool
) -> None:
    ((want, want_norm),) = run_ranks(with_accelerate, 1, kind, False)
    for weights, norm in run_ranks(with_accelerate, 2, kind, sharded, timeout=120):
        assert norm == pytest.approx(want_norm, rel=1e-10)
        for name, value in weights.items():
            assert (value - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name


def refused(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    """Return the expected pattern and the actual message for Trainers and loops that cannot be
    exact.
    """
    from accelerate import Accelerator

    said = []

    def trainer(cp_size: int | None = 2, **options: Any) -> Any:
        found = stock_trainer("packed", folder, "gloo", **options)
        if cp_size != 1:
            shard_sequences(found, cp_size)
        return found

    def call(words: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            function(*arguments, **options)
        said.append((words, str(error.value)))

    def in_a_loop(positions: Tensor) -> None:
        accelerator = Accelerator(cpu=True)
        shard_sequences(accelerator, 2)
        accelerator.prepare(llama())
        with accelerator.maybe_context_parallel([positions], [1], set()):
            pass

    with launched(rank, world_size):
        call("cp_size is 3, .* 2 processes", trainer, 3)
        call("cp_size is None", trainer, None)
        call("label_smoothing_factor would shift", trainer, label_smoothing_factor=0.1)
        own = trainer(1)
        own.compute_loss_func = print
        call("compute_loss_func would shift", shard_sequences, own, 2)
        call("logits of a sharded sequence: evaluate without", trainer().predict, rows("packed", 2))
        prepare, batch = trainer()._prepare_context_parallel_inputs, collate(rows("packed", 2))
        call(
            "unknown: pixel_values",
            prepare,
            None,
            {**batch, "pixel_values": torch.ones(2)},
        )
        call(
            "2 ranks that share a sequence have different rows",
            prepare,
            None,
            collate(rows("packed", 2 + rank)[-2:]),
        )
        call("0 of the 1 buffers look like position ids", in_a_loop, torch.full((1, 8), 3))
        call(
            "2 ranks that share a sequence have different rows",
            in_a_loop,
            torch.arange(30).repeat(2 + rank, 1),
        )
        own, batch = stock_trainer("trees", folder, "gloo"), collate(rows("trees", 2))
        shard_sequences(own, 2, trees=True)
        batch["labels"] = batch["input_ids"]
        call("branches begin with a label", own._prepare_context_parallel_inputs, None, batch)
        call(
            "trees must be text",
            shard_sequences,
            stock_trainer("Qwen3VL", folder, "gloo"),
            2,
            trees=True,
        )
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(llama())
        call("before prepare", shard_sequences, accelerator, 2)
        call("an Accelerator or a Trainer, got LlamaForCausalLM", shard_sequences, llama(), 2)
    return said


def test_what_would_see_one_ranks_tokens_alone_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(refused, 2, str(tmp_path), timeout=120):
        for words, text in said:
            assert re.search(words, text), (words, text)


def beside(rank: int, world_size: int) -> list[list[list[int]]]:
    """Return this rank's batches from two Accelerators that do not shard sequences.

    One was created before another Accelerator shards its sequences, and one after.
    """
    from accelerate import Accelerator

    found = []
    with launched(rank, world_size):
        ours, before = Accelerator(cpu=True), Accelerator(cpu=True)
        shard_sequences(ours, 2)
        for accelerator in (before, Accelerator(cpu=True)):
            assert accelerator.parallelism_config is None and accelerator.torch_device_mesh is None
            accelerator.prepare(torch.nn.Linear(2, 2))
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))
            found.append([batch.tolist() for batch in loader])
    return found


def test_other_accelerators_of_the_process_stay_as_they_are() -> None:
    """Accelerators share their state, so without precautions all ranks would get the same rows."""
    first, second = run_ranks(beside, 2, timeout=120)
    assert first == [[[0, 1], [4, 5]]] * 2 and second == [[[2, 3], [6, 7]]] * 2


def examples(rank: int, world_size: int, folder: str) -> list[str]:
    """Run the examples on a rank and return their output."""
    said = []
    sizes = ["--cp-size", str(world_size), "--steps", "1", "--output", folder]
    for name in ("hf_trainer", "trl_sft_packed", "hf_vlm"):
        with launched(rank, world_size, False), contextlib.redirect_stdout(io.StringIO()) as words:
            with mock.patch("sys.argv", [name, *sizes]):
                assert runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]() == 0
            said.append(
                words.getvalue().splitlines()[-1].partition("ranks: ")[2] if rank == 0 else ""
            )
    return said


def test_the_examples_have_the_losses_of_one_process(tmp_path: Path) -> None:
    (one,) = run_ranks(examples, 1, str(tmp_path), timeout=120)
    assert run_ranks(examples, 2, str(tmp_path), timeout=120)[0] == one and all(one)
