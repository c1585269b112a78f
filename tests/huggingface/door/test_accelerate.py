"""Trainer, SFTTrainer and loops of Accelerate on several ranks give the weights of one process, packed rows too."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.huggingface.door.accelerate import shard_sequences
from megacp.huggingface.door.loop import shift_labels
from tests.ranks import run_ranks

for library in ("accelerate", "peft", "transformers.trainer", "trl"):  # ranks then find them imported
    pytest.importorskip(library, reason=f"{library} is not installed (extra: test)")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TOKENS = 61  # no multiple of the ranks: rows are filled up
STEPS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": [],
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "seed": 1,
    "disable_tqdm": True,
}


@contextlib.contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """The environment of torchrun, and none of what Accelerate remembers of the processes of an earlier world."""
    from accelerate.state import AcceleratorState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()} if world_size > 1 else {}):
        AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        yield
        AcceleratorState._reset_state(True)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=1)).double()


def rows(count: int) -> list[dict[str, Any]]:
    """Packed documents of unequal lengths, some rows with padding."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 20, (count, 3), generator=generator).tolist()
    return [{"documents": n, "ids": torch.randint(2, 64, (sum(n),), generator=generator)} for n in lengths]


def collate(batch: list[dict[str, Any]], packed: bool = True) -> dict[str, Tensor]:
    """Rows filled up to TOKENS: of documents, by position ids that restart; or each one document, by a mask."""
    found: dict[str, list[Tensor]] = {"input_ids": [], "labels": []}
    found |= {"position_ids": []} if packed else {"attention_mask": []}
    for row in batch:
        padding = TOKENS - len(row["ids"])
        positions = torch.cat([torch.arange(n) for n in row["documents"]])
        labels = row["ids"].masked_fill(positions == 0, -100) if packed else row["ids"]
        filled = ((row["ids"], 0), (labels, -100), (positions if packed else torch.ones_like(labels), 0))
        for values, (x, pad) in zip(found.values(), filled, strict=True):
            values.append(F.pad(x, (0, padding), value=pad))
    return {name: torch.stack(values) for name, values in found.items()}


Found = tuple[dict[str, Tensor], list[float], float]
"""Weights, the norm of the gradients of each step, the loss of evaluation."""


def of_trainer(trainer: Any) -> Found:
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    weights = {name.removeprefix("module."): p.detach().clone() for name, p in trainer.model.named_parameters()}
    return weights, norms, loss


def with_trainer(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Found:
    """The stock Trainer; `cp_size` is no option of it."""
    from transformers import Trainer, TrainingArguments

    options = {**options}
    cp_size, packed = options.pop("cp_size", None), options.pop("packed", True)
    with launched(rank, world_size):
        backend = "gloo" if world_size > 1 else None
        arguments = TrainingArguments(folder, remove_unused_columns=False, ddp_backend=backend, **{**STEPS, **options})
        data = {
            "train_dataset": rows(13),
            "eval_dataset": rows(7),
            "data_collator": functools.partial(collate, packed=packed),
        }
        trainer = Trainer(llama(), arguments, **data)
        if cp_size:
            shard_sequences(trainer, cp_size)
        return of_trainer(trainer)


def same(found: Found, want: Found, tolerance: float) -> None:
    weights, norms, loss = found
    assert weights.keys() == want[0].keys() and len(norms) == 3
    for name, value in weights.items():
        # a bias of keys begins at 0 and has no gradient but rounding
        assert (value - want[0][name]).abs().max() <= tolerance * want[0][name].abs().max() + 1e-15, name
    assert norms == pytest.approx(want[1], rel=max(tolerance, 1e-6))  # logged in float32
    assert loss == pytest.approx(want[2], rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packed": False},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ],
    ids=["packed", "padded", "recomputed"],
)
def test_the_stock_trainer_on_two_ranks_trains_as_one_process_does(tmp_path: Path, options: dict[str, Any]) -> None:
    """Would catch documents that leak, padding that is learned, means of means, rows evaluated twice."""
    (want,) = run_ranks(with_trainer, 1, str(tmp_path), {**options, "gradient_accumulation_steps": 2})
    ranks = {**options, "gradient_accumulation_steps": 2, "cp_size": 2}
    for found in run_ranks(with_trainer, 2, str(tmp_path), ranks, timeout=120):
        same(found, want, 1e-12)


def test_rows_are_shared_by_neighbours_and_batches_are_not(tmp_path: Path) -> None:
    """dp 2 x cp 2: two rows a pair is four rows a step on one process; would catch ranks that get other batches."""
    (want,) = run_ranks(with_trainer, 1, str(tmp_path), {"per_device_train_batch_size": 4})
    for found in run_ranks(with_trainer, 4, str(tmp_path), {"cp_size": 2}, timeout=120):
        same((found[0], found[1], want[2]), want, 1e-12)


def with_trl(rank: int, world_size: int, folder: str, cp_size: int | None) -> Found:
    """SFTTrainer that packs, with LoRA and recomputed layers; it saves what PEFT loads."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    with launched(rank, world_size):
        words = models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1", pad_token="w0")
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(5, 30, (24,), generator=generator).tolist()
        ids = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in lengths]
        data = Dataset.from_list([{"input_ids": x} for x in ids])
        arguments = SFTConfig(
            folder,
            packing=True,
            max_length=64,
            ddp_backend="gloo" if world_size > 1 else None,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            **{**STEPS, "save_strategy": "steps", "save_steps": 3},
        )
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = SFTTrainer(
            llama(), args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer, peft_config=lora
        )
        trainer.model.double()
        if cp_size:
            shard_sequences(trainer, cp_size)
        return of_trainer(trainer)


def test_packing_of_trl_with_lora_on_two_ranks_trains_as_one_process_does(tmp_path: Path) -> None:
    """TRL refuses packing under context parallelism; would catch that it leaks, and adapters that PEFT cannot read."""
    from peft import PeftModel

    (want,) = run_ranks(with_trl, 1, str(tmp_path / "one"), None, timeout=120)
    for found in run_ranks(with_trl, 2, str(tmp_path / "two"), 2, timeout=120):
        same(found, want, 1e-8)  # TRL takes log-probabilities in float32, of as many tokens at once as a rank has
    torch.manual_seed(0)
    read = PeftModel.from_pretrained(llama(), str(tmp_path / "two" / "checkpoint-3"))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.{}weight"
    adapter = dict(read.named_parameters())[name.format("default.")]
    assert torch.equal(adapter.float(), found[0][name.format("default.")].float())


def with_accelerate(rank: int, world_size: int, sharded: bool) -> tuple[dict[str, Tensor], float]:
    """A loop of one's own; `sharded`: weights over FSDP2, which Accelerate itself has on GPUs alone."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    with launched(rank, world_size):
        accelerator = Accelerator(cpu=True)
        if sharded:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
            accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
        if world_size > 1:
            shard_sequences(accelerator, 2, layout="zigzag", transport="p2p")
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(3):
            # rows without padding: a loop of one's own has no values for it
            batch = collate(rows(8)[2 * step : 2 * step + 2])
            ids, positions = batch["input_ids"][:, :60].clone(), batch["position_ids"][:, :60].clone()
            labels = shift_labels(batch["labels"][:, :60])
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
        whole = {name: p.full_tensor() if sharded and world_size > 1 else p for name, p in weights.items()}
        return {name: p.detach().clone() for name, p in whole.items()}, float(norm)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_a_loop_of_accelerate_on_two_ranks_trains_as_one_process_does(sharded: bool) -> None:
    """Would catch a gradient that is a mean where it must be a sum, and position ids that are not found."""
    ((want, want_norm),) = run_ranks(with_accelerate, 1, False)
    for weights, norm in run_ranks(with_accelerate, 2, sharded, timeout=120):
        assert norm == pytest.approx(want_norm, rel=1e-10)
        for name, value in weights.items():
            assert (value - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    """What is said to a Trainer and to loops that cannot be exact."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    said = []

    def trainer(cp_size: int | None = 2, changes: dict[str, Any] | None = None, **options: Any) -> Any:
        arguments = TrainingArguments(
            folder, remove_unused_columns=False, ddp_backend="gloo", **{**STEPS, **(changes or {})}
        )
        found = Trainer(llama(), arguments, data_collator=collate, **options)
        shard_sequences(found, cp_size)
        return found

    def call(function: Any) -> None:
        try:
            function()
        except ValueError as error:
            said.append(str(error))

    def prepared() -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(llama())
        shard_sequences(accelerator, 2)

    def unlike_positions() -> None:
        accelerator = Accelerator(cpu=True)
        shard_sequences(accelerator, 2)
        accelerator.prepare(llama())
        with accelerator.maybe_context_parallel([torch.full((1, 8), 3)], [1], set()):
            pass

    def other_shapes() -> None:
        accelerator = Accelerator(cpu=True)
        shard_sequences(accelerator, 2)
        accelerator.prepare(llama())
        positions = torch.arange(30).repeat(4).reshape((2, 60) if rank else (4, 30))
        with accelerator.maybe_context_parallel([positions], [1], set()):
            pass

    with launched(rank, world_size):
        call(lambda: trainer(3))
        call(lambda: trainer(None))
        call(lambda: trainer(compute_loss_func=lambda outputs, labels, num_items_in_batch: 0))
        call(lambda: trainer(changes={"label_smoothing_factor": 0.1}))
        call(lambda: trainer().predict(rows(2)))
        images = {**collate(rows(2)), "pixel_values": torch.ones(2)}
        call(lambda: trainer()._prepare_context_parallel_inputs(None, images))
        call(lambda: trainer()._prepare_context_parallel_inputs(None, collate(rows(2 + rank)[-2:])))
        call(prepared)
        call(unlike_positions)
        call(other_shapes)
        call(lambda: shard_sequences(llama(), 2))
    return said


def test_what_would_see_one_ranks_tokens_alone_is_refused(tmp_path: Path) -> None:
    """Would catch each of these trained wrong in silence."""
    patterns = [
        "cp_size is 3, .* divides the 2 processes",
        "cp_size is None",
        "compute_loss_func would shift the labels",
        "label_smoothing_factor would shift the labels",
        "logits of a sharded sequence are of one rank's tokens",
        "nothing is known of pixel_values",
        "the 2 ranks that share a row hold other rows",
        "comes before prepare",
        "0 of the 1 buffers look like position ids",
        "the 2 ranks that share a row hold other rows",
        "wants an Accelerator or a Trainer, got LlamaForCausalLM",
    ]
    import re

    for said in run_ranks(refused, 2, str(tmp_path), timeout=120):
        for pattern, text in zip(patterns, said, strict=True):
            assert re.search(pattern, text), (pattern, text)


def beside(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[list[int]]]:
    """What this rank gets from Accelerators and from a Trainer that have nothing to do with one that is sharded."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    seen: list[Tensor] = []

    class Watched(Trainer):
        def training_step(self, model: Any, inputs: dict[str, Tensor], *rest: Any) -> Tensor:
            seen.append(inputs["input_ids"])
            return super().training_step(model, inputs, *rest)

    def trainer() -> Any:
        arguments = TrainingArguments(folder, remove_unused_columns=False, ddp_backend="gloo", **STEPS)
        return Watched(llama(), arguments, train_dataset=rows(13), data_collator=collate)

    def dealt(accelerator: Any) -> list[list[int]]:
        assert accelerator.parallelism_config is None and accelerator.torch_device_mesh is None
        accelerator.prepare(torch.nn.Linear(2, 2))
        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2)
        return [batch.tolist() for batch in accelerator.prepare(loader)]

    with launched(rank, world_size):
        ours, before = Accelerator(cpu=True), Accelerator(cpu=True)
        shard_sequences(ours, 2)
        found = [dealt(before), dealt(Accelerator(cpu=True))]
        ours, plain = trainer(), trainer()
        shard_sequences(ours, 2)
        plain.train()
        untouched = torch.cat(seen).tolist()
        ours.train()  # nor has the plain one undone it
        assert all(2 * x.shape[1] < TOKENS + 8 for x in seen[3:]), "its rows were cut"
    return found, untouched


def test_other_accelerators_and_trainers_of_the_process_stay_as_they_are(tmp_path: Path) -> None:
    """Would catch Accelerate's state, which they share, told of the ranks of this one: all would get the same rows."""
    (first, rows_of_0), (second, rows_of_1) = run_ranks(beside, 2, str(tmp_path), timeout=120)
    assert first == [[[0, 1], [4, 5]]] * 2 and second == [[[2, 3], [6, 7]]] * 2
    assert len(rows_of_0) == 6 and not any(row in rows_of_1 for row in rows_of_0)


def examples(rank: int, world_size: int, folder: str) -> list[str]:
    """What the examples print on a rank."""
    said = []
    sizes = ["--cp-size", str(world_size), "--steps", "1", "--output", folder]
    for name, arguments in (("hf_trainer", sizes), ("trl_sft_packed", sizes), ("hf_vlm", sizes)):
        with launched(rank, world_size), contextlib.redirect_stdout(io.StringIO()) as words:
            with mock.patch("sys.argv", [name, *arguments]):
                assert runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]() == 0
            said.append(words.getvalue().splitlines()[-1].partition("ranks: ")[2] if rank == 0 else "")
    return said


def test_the_examples_have_the_losses_of_one_process(tmp_path: Path) -> None:
    """Would catch examples that no longer run."""
    (one,) = run_ranks(examples, 1, str(tmp_path), timeout=120)
    assert run_ranks(examples, 2, str(tmp_path), timeout=120)[0] == one and all(one)
