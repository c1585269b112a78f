"""Runs that start from a Hugging Face folder: the same bits as from a converted checkpoint on any
grid, and refusals.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.optimization import get_scheduler

from megacp.distributed.grid import build_grid
from megacp.distributed.shape import GridShape
from megacp.engine.config.cli import parse
from megacp.engine.config.training import TrainingConfig
from megacp.engine.data_parallel.boxes import TensorBox
from megacp.engine.models import init
from megacp.engine.optim.lr_schedule import learning_rate
from megacp.huggingface.convert.source import CheckpointSource, read_hf
from megacp.huggingface.convert.start import FolderStart, open_start
from megacp.huggingface.convert.tensors import whole
from megacp.huggingface.convert.tokenizer import write_tokenizer
from megacp.huggingface.convert_command import main as convert
from megacp.prepare.command import main as preprocess
from megacp.train import main, plan_of, trainer_of
from megacp.training.checkpoint import weights as reading
from megacp.training.checkpoint.commit import load_checkpoint
from megacp.training.start import launch
from megacp.training.start.launch import run_store
from tests.huggingface.convert.models import BYTES, EXPERTS, given, made, qwen3, save
from tests.ranks import grid, run_ranks
from tests.training.runs import grid_flags, losses

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")

STEPS = ["--train-iters", "2", "--lr", "0.01", "--global-batch-size", "4"]
TURN = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
CHAT = [{"messages": TURN * (1 + i % 2)} for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "tiny"
    torch.manual_seed(0)
    qwen3(vocab_size=BYTES + 3, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(path)
    write_tokenizer(given("byte"), path, 256, ())
    return path


@pytest.fixture(scope="module")
def experts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like `folder`, with a dense layer between two layers with experts."""
    path = tmp_path_factory.mktemp("experts") / "tiny"
    shutil.copytree(folder, path)
    torch.manual_seed(0)
    more = {"vocab_size": BYTES + 3, "mlp_only_layers": [1], "norm_topk_prob": True}
    made("Qwen3Moe", **more, **EXPERTS).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    (place / "chat.jsonl").write_text("\n".join(map(json.dumps, CHAT)))
    return build(place / "chat.jsonl", place / "packs", str(folder / "tokenizer.json"))


def build(records: Path, output: Path, tokenizer: str) -> Path:
    flags = [
        "--input",
        str(records),
        "--output",
        str(output),
        "--tokenizer",
        tokenizer,
        "--seq-length",
        "128",
    ]
    assert preprocess(["build", *flags]) == 0
    return output


def run_on_rank(rank: int, world_size: int, flags: list[str]) -> int:
    run_store().delete_key(f"megacp_failure/{rank}")
    plan = plan_of(flags, launch.World(rank=rank, size=world_size, local_rank=rank))
    assert plan is not None
    s = plan.shape
    return trainer_of(plan, grid(tp=s.tp, cp=s.cp, dp=s.dp, pp=s.pp, ep=s.ep)).run()


def trained(flags: list[str], ranks: int) -> None:
    assert (run_ranks(run_on_rank, ranks, flags) if ranks > 1 else [main(flags)]) == [0] * ranks


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    source = CheckpointSource(load_checkpoint(path, build_grid(GridShape(), 0).world))
    return {name: whole(source, name) for name in source.infos}


GRIDS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "dp x tp, all sharded": (
        4,
        [*grid_flags(tp=2), "--data-parallel-sharding-strategy", "optim_grads_params"],
    ),
    "dp x ep, experts": (2, grid_flags(ep=2)),
    "cp x pp, all sharded": (
        4,
        [*grid_flags(cp=2, pp=2), "--data-parallel-sharding-strategy", "optim_grads_params"],
    ),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.slow
def test_a_run_from_a_folder_has_the_bits_of_one_from_the_converted_checkpoint(
    name: str, folder: Path, experts: Path, data: Path, tmp_path: Path
) -> None:
    ranks, flags = GRIDS[name]
    folder = experts if "experts" in name else folder
    flags = [*STEPS, *flags, "--data-path", str(data)]
    assert (
        convert(
            [
                "--from",
                "hf",
                "--to",
                "megacp",
                "--input",
                str(folder),
                "--output",
                str(tmp_path / "start"),
            ]
        )
        == 0
    )
    trained(
        [*flags, "--load", str(tmp_path / "start"), "--finetune", "--save", str(tmp_path / "a")],
        ranks,
    )
    trained([*flags, "--load-hf", str(folder), "--save", str(tmp_path / "b")], ranks)
    first, second = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    assert first.keys() == second.keys() and all(
        torch.equal(first[key], second[key]) for key in first
    )
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert next(iter(first.values())).dtype is torch.bfloat16
    start = weights_of(tmp_path / "start")
    assert any(not torch.equal(start[key], first[key]) for key in first), (
        "the run moved the weights"
    )


@pytest.mark.slow
def test_three_commands_are_a_fine_tune_and_its_export_and_the_folder_is_read_once(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, run = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(folder, copy)
    flags = [
        "--load-hf",
        str(copy),
        "--data-path",
        str(data),
        "--save",
        str(run),
        "--auto-resume",
        *STEPS,
    ]
    flags += ["--lr-decay-style", "constant"]
    assert main(flags) == 0
    told = capsys.readouterr().out
    assert (
        f"model flags from {copy}: --num-layers 3" in told
        and "--seq-length 128, from the manifest of --data-path" in told
    )
    assert f"weights from {copy}; this run starts at step 0" in told
    shutil.rmtree(copy)
    assert main([*flags, "--train-iters", "3"]) == 0
    told = capsys.readouterr().out
    assert f"--load-hf {copy} is not read" in told and "after step 2" in told
    assert (
        main(
            [
                *STEPS,
                "--data-path",
                str(data),
                "--load",
                str(run),
                "--save",
                str(run),
                "--train-iters",
                "4",
            ]
        )
        == 0
    )
    assert f"resumed from {run / 'step_0000003'}" in capsys.readouterr().out
    out = tmp_path / "out"
    assert (
        convert(
            [
                "--from",
                "megacp",
                "--to",
                "hf",
                "--input",
                str(run),
                "--output",
                str(out),
                "--verify",
            ]
        )
        == 0
    )
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, out))
    assert all(
        after[key] == before[key]
        for key in ("model_type", "max_position_embeddings", "vocab_size", "dtype")
    )


def refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(flags) == 2
    return capsys.readouterr().err


def test_a_folder_whose_router_cannot_learn_takes_only_low_rank_pairs(
    experts: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "top_1"
    shutil.copytree(experts, copy)
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**content, "num_experts_per_tok": 1, "norm_topk_prob": True})
    )
    flags = ["--load-hf", str(copy), "--data-path", str(data), "--dry-run"]
    told = refused(flags, capsys)
    assert "--moe-router-topk 1" in told and "; freeze the router (--lora-rank" in told
    assert main([*flags, "--lora-rank", "2"]) == 0
    out = [
        "--from",
        "hf",
        "--to",
        "megacp",
        "--input",
        str(copy),
        "--output",
        str(tmp_path / "out"),
    ]
    assert convert(out) == 0


def test_flags_that_contradict_the_folder_are_refused_with_both_numbers(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--load-hf", str(folder), "--data-path", str(data)]
    told = refused([*start, "--hidden-size", "64", "--qk-layernorm", "off"], capsys)
    assert f"{folder} has --hidden-size 48, but this run has 64" in told
    assert "has --qk-layernorm head, but this run has off" in told
    assert "start from only one of them" in refused([*start, "--load", str(data)], capsys)
    assert f"--load-hf {data}: " in refused(["--load-hf", str(data)], capsys)
    assert "a Hugging Face folder and not a checkpoint: use --load-hf" in refused(
        ["--load", str(folder)], capsys
    )
    assert "was packed for rows of 128 tokens" in refused([*start, "--seq-length", "64"], capsys)


def test_a_dataset_of_another_tokenizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "words " * 10}))
    other = build(tmp_path / "text.jsonl", tmp_path / "packs", "byte")
    told = refused(["--load-hf", str(folder), "--data-path", str(other)], capsys)
    assert f"--data-path {other} was built with the tokenizer" in told
    assert "with the --tokenizer of that folder" in told


def test_a_finetuning_has_a_rate_of_its_own_and_a_run_that_goes_on_that_of_its_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, run, adapter = ["--load-hf", str(folder)], str(tmp_path / "run"), tmp_path / "adapter"
    q_adapter(folder, adapter)
    assert main([*start, "--seq-length", "32", *STEPS, "--save", run]) == 0
    assert "--lr" not in capsys.readouterr().out
    whole = [(start, 1e-5), (["--load", run, "--finetune"], 1e-5)]
    pairs = [([*start, "--lora-rank", "2"], 1e-4), ([*start, "--load-adapter", str(adapter)], 1e-4)]
    goes_on = [(["--load", run], 0.01), ([*start, "--auto-resume", "--save", run], 0.01)]
    for flags, rate in [*whole, *pairs, *goes_on]:
        plan = plan_of([*flags, "--log-file", "/dev/null"], launch.World())
        assert plan is not None and plan.config.training.lr == rate
        assert f"--lr {rate:g} (" in capsys.readouterr().out


def test_a_run_draws_no_weight_that_it_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, draw = set[str](), init._drawn
    monkeypatch.setattr(
        init, "_drawn", lambda box, name, *rest: (names.add(name), draw(box, name, *rest))[1]
    )
    start, run = ["--load-hf", str(folder)], ["--save", str(tmp_path / "run")]
    for flags in (
        [*start, *run],
        ["--load", *run[1:], "--finetune"],
        [*start, "--auto-resume", *run],
    ):
        assert main([*flags, *STEPS, "--seq-length", "32"]) == 0 and not names
    assert (
        main([*start, "--lora-rank", "2", *STEPS, "--seq-length", "32", "--log-file", "/dev/null"])
        == 0
    )
    assert names and all(name.endswith(".lora_A.weight") for name in names)


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup", "updates"), [(0, 1), (0, 2), (0, 7), (3, 10)])
def test_the_decay_is_that_of_the_library_and_no_update_has_rate_0(
    name: str, warmup: int, updates: int
) -> None:
    """The library's warmup has one more update, whose rate is 0."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.25)
    (theirs,) = get_scheduler(name, optimizer, warmup, updates).lr_lambdas
    style: Any = name
    settings = TrainingConfig(
        lr=0.25, lr_decay_style=style, train_iters=updates, lr_warmup_iters=warmup + 1
    )
    ours = [learning_rate(update, settings) for update in range(1, updates + 1)]
    assert ours[warmup:] == pytest.approx(
        [0.25 * theirs(step) for step in range(warmup, updates)], rel=1e-12
    )
    assert min(ours) > 0


def _refusal(rank: int, world_size: int, flags: list[list[str]]) -> str:
    try:
        run_on_rank(rank, world_size, flags[rank])
    except ValueError as error:
        return str(error)
    return "trained"


def q_adapter(base: Path, path: Path) -> None:
    """Write an adapter with pairs of rank 1 on the queries of every layer."""
    path.mkdir()
    content = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(content))
    infos, tensors = read_hf(base).source.infos, {}
    for layer in range(3):
        rows, columns = infos[f"layers.{layer}.attention.q.weight"].shape
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors |= {
            f"{name}A.weight": torch.ones(1, columns),
            f"{name}B.weight": torch.ones(rows, 1),
        }
    save_file(tensors, path / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("flag", "file", "axes"),
    [
        ("--load-hf", "model", []),
        ("--load-hf", "model", grid_flags(tp=2)),
        ("--load-hf", "model", grid_flags(pp=2)),
        ("--load-adapter", "adapter_model", []),
    ],
)
def test_a_folder_of_other_values_on_one_rank_is_refused_by_name(
    folder: Path, tmp_path: Path, flag: str, file: str, axes: list[str]
) -> None:
    q_adapter(folder, tmp_path / "adapter")
    places = {"--load-hf": folder, "--load-adapter": tmp_path / "adapter"}
    other = shutil.copytree(places[flag], tmp_path / "other") / f"{file}.safetensors"
    content = bytearray(other.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    flags = [*STEPS, "--seq-length", "64", "--log-file", "/dev/null", *axes]
    flags += [text for name, place in places.items() for text in (name, str(place))]
    told = run_ranks(_refusal, 2, [flags, [*flags, flag, str(tmp_path / "other")]])
    assert told[0] == told[1] and f"{flag} {file}.safetensors is not the same" in told[0]
    assert f"{other} on rank 1" in told[0]


def test_links_that_stand_in_save_are_replaced(folder: Path, tmp_path: Path) -> None:
    start, outside, save = (
        shutil.copytree(folder, tmp_path / "start"),
        tmp_path / "outside",
        tmp_path / "save",
    )
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "a.jinja").write_text("{{ x }}")
    shutil.copytree(start, outside)
    save.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "additional_chat_templates",
    ):
        (save / name).symlink_to(outside / name)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    FolderStart(read_hf(start), start, read_hf(start).source).keep(save)
    assert before == {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    assert (
        not [path for path in save.rglob("*") if path.is_symlink()]
        and (save / "tokenizer.json").is_file()
    )


def test_rows_are_read_some_at_a_time_and_columns_taken_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, read = torch.arange(100 * 8.0).view(100, 8), list[int]()

    class Table:
        def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
            assert name == "a"
            read.append(stop - start)
            return table[start:stop]

    monkeypatch.setattr(reading, "BYTES_AT_ONCE", 8 * 8 * 10)
    box = TensorBox("model.a", (100, 8), (30, 4), torch.zeros(45, 3))
    reading.fill(box, Table(), None)
    assert torch.equal(box.tensor, table[30:75, 4:7]) and read == [10, 10, 10, 10, 5]
    part: Any = TensorBox("model.a", (120, 8), (90, 0), torch.full((20, 8), -1.0))
    reading.fill(part, Table(), 100)
    assert torch.equal(part.tensor[:10], table[90:]) and bool((part.tensor[10:] == -1).all())


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Molmo2 in the library's layout, whose text model is narrower than the Qwen3."""
    path = tmp_path_factory.mktemp("tower") / "molmo2"
    save("molmo2 native", path)
    return path


VLM_GRIDS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "tp x pp": (4, grid_flags(tp=2, pp=2)),
    "cp, all sharded": (
        2,
        [*grid_flags(cp=2), "--data-parallel-sharding-strategy", "optim_grads_params"],
    ),
}


@pytest.mark.parametrize("name", VLM_GRIDS)
@pytest.mark.slow
def test_a_text_model_takes_the_tower_of_a_molmo2(
    name: str, folder: Path, tower: Path, tmp_path: Path
) -> None:
    """A step with learning rate 0 leaves each weight as read, or as its seed initialises it.

    This holds on any grid.
    """
    ranks, flags = VLM_GRIDS[name]
    flags = [
        *flags,
        "--vision-from-hf",
        str(tower),
        "--seq-length",
        "64",
        "--lr",
        "0",
        "--train-iters",
        "1",
    ]
    trained(
        [
            *flags,
            "--load-hf",
            str(folder),
            "--save",
            str(tmp_path / "run"),
            "--global-batch-size",
            "2",
        ],
        ranks,
    )
    found, text, molmo = weights_of(tmp_path / "run"), read_hf(folder).source, read_hf(tower).source
    rows = BYTES + 3
    assert torch.equal(found["embedding.weight"][:rows], whole(text, "embedding.weight"))
    assert torch.equal(found["head.weight"], whole(text, "embedding.weight")), (
        "the tied head became its own"
    )
    assert found["embedding.weight"].shape[0] == rows + 128
    assert 0.01 < found["embedding.weight"][rows:].float().std() < 0.03, (
        "new rows have their initial values"
    )
    new = {"connector.mlp.down.weight"}
    for key in found.keys() - text.infos.keys() - {"head.weight"} - new:
        assert torch.equal(found[key], whole(molmo, key).bfloat16()), key
    for key in text.infos.keys() - {"embedding.weight"}:
        assert torch.equal(found[key], whole(text, key)), key
    one = flat_digest(found, new | {"embedding.weight"})
    assert SEEN.setdefault("digest", one) == one, "what is new has the same bits on any grid"


SEEN: dict[str, list[float]] = {}


def flat_digest(found: dict[str, torch.Tensor], names: set[str]) -> list[float]:
    return [x for key in sorted(names) for x in found[key].double().flatten().tolist()]


@pytest.mark.slow
def test_a_new_tower_has_the_sizes_of_the_flags_and_the_run_is_exported_as_molmo2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--vision-num-layers 2 --vision-hidden-size 24 --vision-ffn-hidden-size 32 --vision-num-attention-heads 4 "
    sizes += "--vision-patch-size 4 --vision-image-size 16 --vision-feature-layers -1 -2 "
    sizes += "--additional-vocab-size 16 --freeze text --seq-length 64"
    flags = ["--load-hf", str(folder), "--vision-from-hf", "none", "--save", str(tmp_path / "run")]
    assert main([*flags, *sizes.split(), *STEPS]) == 0
    assert (
        "newly initialised: tower and connector, 16 rows of the embedding"
        in capsys.readouterr().out
    )
    found, text = weights_of(tmp_path / "run"), read_hf(folder).source
    assert torch.equal(found["layers.0.mlp.up.weight"], whole(text, "layers.0.mlp.up.weight")), (
        "text was frozen"
    )
    assert found["vision.position_embedding.weight"].shape == (16, 24)
    out = ["--output", str(tmp_path / "out"), "--tokenizer", "none"]
    assert (
        convert(
            ["--from", "megacp", "--to", "hf", "--input", str(tmp_path / "run"), *out, "--verify"]
        )
        == 0
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "molmo2"


@pytest.mark.slow
def test_a_tower_that_does_not_fit_is_refused(
    folder: Path, tower: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--load-hf", str(folder), "--vision-from-hf"]
    assert "is a qwen3 model; use a molmo2 model" in refused([*start, str(folder)], capsys)
    save("qwen3_5 with images", other := tower.parent / "other")
    assert "is a qwen3_5 model; use a molmo2 model" in refused([*start, str(other)], capsys)
    new = ["none", "--vision-num-layers", "2"]
    assert "--vision-family is qwen3_5" in refused(
        [*start, *new, "--vision-family", "qwen3_5"], capsys
    )
    assert "none creates a new tower; set --vision-num-layers" in refused([*start, "none"], capsys)
    assert "has --vision-num-layers 3, but this run has 2" in refused(
        [*start, str(tower), "--vision-num-layers", "2"], capsys
    )
    assert "already has one; remove the flag" in refused(
        ["--load-hf", str(tower), "--vision-from-hf", "none"], capsys
    )
    assert "needs --load-hf" in refused(["--vision-from-hf", "none"], capsys)


def test_a_name_on_the_hub_is_refused_with_the_command_that_downloads_it(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(["--load-hf", "Qwen/Qwen3-0.6B", "--data-path", str(data)], capsys)
    assert "--load-hf Qwen/Qwen3-0.6B: the folder does not exist" in told
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in told


@pytest.mark.parametrize(
    ("kind", "is_trained"), [("deepseek_v3", True), ("gpt2", True), ("t5", False)]
)
def test_an_unknown_type_is_sent_to_the_trainer_if_that_trains_it(
    kind: str, is_trained: bool, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "model_type": kind}))
    told = refused(["--load-hf", str(copy)], capsys)
    assert f"model_type '{kind}' is not supported; supported types are " in told
    assert ("shard_sequences(trainer, cp_size=N)" in told) == is_trained


def test_a_folder_without_a_tokenizer_is_trained_with_a_note(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for place, is_noted in ((folder, False), (copy, True)):
        if is_noted:
            (copy / "tokenizer.json").unlink()
        *_, note = open_start(parse(["--load-hf", str(place)]), {"load_hf"})
        line = f"{place} has no tokenizer files, so its token ids could not be compared"
        assert (line in note) == is_noted


def test_an_adapter_folder_that_is_none_is_refused_without_an_error_number(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--load-hf", str(folder), "--data-path", str(data), "--load-adapter"]
    told = refused([*start, str(tmp_path / "none")], capsys)
    assert f"--load-adapter {tmp_path / 'none'}: the folder does not exist" in told
    told = refused([*start, str(tmp_path)], capsys)
    assert f"--load-adapter {tmp_path}: the folder has no adapter_config.json" in told
    assert "hf download org/lora --local-dir lora" in refused([*start, "org/lora"], capsys)


def test_a_checkpoint_given_as_a_model_folder_is_sent_to_load(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step_0000001").mkdir()
    told = refused(["--load-hf", str(tmp_path), "--data-path", str(data)], capsys)
    assert "this is a megacp checkpoint: train it with --load, or convert it" in told


def test_a_damaged_header_is_to_be_downloaded_again(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"\xff" * 3000)
    told = refused(["--load-hf", str(copy), "--data-path", str(data)], capsys)
    assert "it is damaged, or not a safetensors file" in told and "download it again" in told
