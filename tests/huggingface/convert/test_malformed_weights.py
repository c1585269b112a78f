"""Damaged weights of any kind: one message and status 2, never a traceback or a different model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.huggingface.convert import hf_files
from megacp.huggingface.convert.gpt_oss import unpacked
from megacp.huggingface.convert.tensors import STACKS
from megacp.huggingface.convert_command import main
from megacp.train import main as train
from tests.huggingface.convert.models import packed, save

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed (extra: hf)"
)

Tensors = dict[str, torch.Tensor]
UP, DOWN = (f"model.layers.1.mlp{end}" for end in STACKS)
WEIGHTS = hf_files.SINGLE


def write(folder: Path, tensors: Tensors) -> None:
    safetensors.save_file(
        {name: x.contiguous() for name, x in tensors.items()}, folder / WEIGHTS, {"format": "pt"}
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "a"
    save("llama 2", folder)
    return folder


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "a"
    save("gpt_oss of 32", folder, torch.bfloat16)
    tensors: Tensors = safetensors.load_file(folder / WEIGHTS)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        count, inner, outer = tensors.pop(name).shape
        tensors |= {
            name + end: x for end, x in packed(outer, inner, seed=outer, count=count).items()
        }
    write(folder, tensors)
    config = folder / "config.json"
    config.write_text(
        json.dumps(
            {**json.loads(config.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
        )
    )
    return folder


def converted(folder: Path, output: Path, *flags: str) -> int:
    return main(
        ["--from", "hf", "--to", "megacp", "--input", str(folder), "--output", str(output), *flags]
    )


def refusal(folder: Path, output: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the error message of a refused conversion."""
    assert converted(folder, output, *flags) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and len(told) < 4000
    assert not output.exists()
    return told


def changed(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {**tensors, name: change(tensors[name])}


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def with_scale(tensors: Tensors, value: int) -> Tensors:
    scales = tensors[f"{UP}_scales"].clone()
    scales[2, 3, 1] = value
    blocks = tensors[f"{UP}_blocks"].clone()
    blocks[2, 3, 1] = 0x77  # 6.0, the largest number
    return {**tensors, f"{UP}_scales": scales, f"{UP}_blocks": blocks}


BLOCKS, SCALES = f"{UP}_blocks", f"{UP}_scales"
# the model has 4 experts, gate and up of [192, 64] and down of [64, 96]
DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "scales of one column": (
        lambda t: changed(t, SCALES, lambda x: x[..., :1]),
        f"{SCALES} has shape (4, 192, 1)",
    ),
    "scales of one expert": (
        lambda t: changed(t, SCALES, lambda x: x[:1]),
        f"{SCALES} has shape (1, 192, 2)",
    ),
    "scales of one row": (
        lambda t: changed(t, SCALES, lambda x: x[:, :1]),
        f"{SCALES} has shape (4, 1, 2)",
    ),
    "scales without columns": (
        lambda t: changed(t, SCALES, lambda x: x[..., 0]),
        f"{SCALES} has shape (4, 192)",
    ),
    "scales as a vector": (
        lambda t: changed(t, SCALES, lambda x: x.flatten()),
        f"{SCALES} has shape (1536,)",
    ),
    "one scale": (lambda t: changed(t, SCALES, lambda x: x[0, 0, 0]), f"{SCALES} has shape ()"),
    "more scales": (
        lambda t: changed(t, SCALES, lambda x: x.repeat(1, 1, 2)),
        f"{SCALES} has shape (4, 192, 4)",
    ),
    "scales in bfloat16": (
        lambda t: changed(t, SCALES, lambda x: x.bfloat16()),
        f"{SCALES} has dtype bfloat16",
    ),
    "scales in float32": (
        lambda t: changed(t, SCALES, lambda x: x.float()),
        f"{SCALES} has dtype float32",
    ),
    "scales in int64": (
        lambda t: changed(t, SCALES, lambda x: x.long()),
        f"{SCALES} has dtype I64",
    ),
    "blocks in float32": (
        lambda t: changed(t, BLOCKS, lambda x: x.float()),
        f"{BLOCKS} has dtype float32",
    ),
    "blocks in int8": (
        lambda t: changed(t, BLOCKS, lambda x: x.view(torch.int8)),
        f"{BLOCKS} has dtype I8",
    ),
    "no scales": (lambda t: without(t, SCALES), f"{SCALES} is missing"),
    "no blocks": (lambda t: without(t, BLOCKS), f"{BLOCKS} is missing"),
    "neither": (lambda t: without(t, BLOCKS, SCALES), f"{UP} is missing"),
    "blocks joined": (
        lambda t: changed(t, BLOCKS, lambda x: x.flatten(2)),
        f"{BLOCKS} has shape (4, 192, 32)",
    ),
    "blocks of 8 bytes": (
        lambda t: changed(t, BLOCKS, lambda x: x.reshape(4, 192, 4, 8)),
        f"{BLOCKS} has shape (4, 192, 4, 8)",
    ),
    "blocks of no column": (
        lambda t: changed(t, BLOCKS, lambda x: x[:, :, :0]),
        f"{BLOCKS} has shape (4, 192, 0, 16)",
    ),
    "an odd count of columns": (
        lambda t: changed(changed(t, BLOCKS, lambda x: x[:, :, :1]), SCALES, lambda x: x[..., :1]),
        "has shape (768, 32), but the config requires (768, 64)",
    ),
    "an odd count of rows": (
        lambda t: changed(changed(t, BLOCKS, lambda x: x[:, :191]), SCALES, lambda x: x[:, :191]),
        "has shape (764, 64), but the config requires (768, 64)",
    ),
    "three experts": (
        lambda t: changed(changed(t, BLOCKS, lambda x: x[:3]), SCALES, lambda x: x[:3]),
        f"{UP} has 3 experts, but the config requires 4",
    ),
    "twice as many experts of half the rows": (
        lambda t: changed(
            changed(t, BLOCKS, lambda x: x.reshape(8, 96, 2, 16)),
            SCALES,
            lambda x: x.reshape(8, 96, 2),
        ),
        f"{UP} has 8 experts, but the config requires 4",
    ),
    "numbers next to the packed ones": (
        lambda t: {**t, UP: torch.zeros(4, 64, 192)},
        f"{UP} is stored twice",
    ),
    "a packed matrix of attention": (
        lambda t: {**t, "a.o_proj_blocks": t[BLOCKS].clone(), "a.o_proj_scales": t[SCALES].clone()},
        "a.o_proj_blocks is packed",
    ),
    "a NaN of a scale": (
        lambda t: with_scale(t, 255),
        f"{SCALES}: 1 of 1,536 scales are 255, which means NaN",
    ),
    "a scale above bfloat16": (
        lambda t: with_scale(t, 254),
        f"{SCALES}: 1 of 1,536 scales are 253 or more",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_experts_in_four_bits_are_one_message(
    name: str, four_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(four_bits, tmp_path / "a")
    change, expected = DAMAGES[name]
    write(folder, change(safetensors.load_file(folder / WEIGHTS)))
    assert expected in refusal(folder, tmp_path / "b", capsys)


def test_the_largest_scale_that_bfloat16_holds_is_read(four_bits: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(four_bits, tmp_path / "a")
    write(folder, with_scale(safetensors.load_file(folder / WEIGHTS), 252))
    assert converted(folder, tmp_path / "b") == 0


def test_every_scale_but_nan_gives_the_numbers_of_the_library() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = (
        torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    )
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    assert torch.equal(
        unpacked(blocks, scales), convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    )


def test_random_damage_to_experts_in_four_bits_is_never_a_traceback(
    four_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = random.Random(0)
    given: Tensors = safetensors.load_file(four_bits / WEIGHTS)
    names = [name for name in given if name.endswith(("_blocks", "_scales"))]
    dtypes = (
        torch.uint8,
        torch.bfloat16,
        torch.float32,
        torch.int32,
        torch.bool,
        torch.float8_e4m3fn,
    )
    for turn in range(40):
        folder = shutil.copytree(four_bits, tmp_path / f"a{turn}")
        name = drawn.choice(names)
        kind = drawn.choice(("shape", "dtype", "name", "drop"))
        tensors = without(given, name)
        if kind == "shape":
            shape = tuple(drawn.choice((0, 1, 2, 3, 4, 16, 32)) for _ in range(drawn.randrange(6)))
            tensors[name] = torch.ones(shape).to(given[name].dtype)
        elif kind == "dtype":
            tensors[name] = given[name].to(
                drawn.choice([dtype for dtype in dtypes if dtype != given[name].dtype])
            )
        elif kind == "name":
            tensors[name + drawn.choice(("_blocks", "_scales", ".x", "_"))] = given[name]
        write(folder, tensors)
        refusal(folder, tmp_path / "b", capsys)


@pytest.mark.parametrize("part", [0, 5, 8, 100, 0.5, -1])
def test_half_a_download_is_refused_with_both_sizes(
    part: float, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(dense, tmp_path / "a")
    content = (folder / WEIGHTS).read_bytes()
    kept = content[: int(part * len(content))] if isinstance(part, float) else content[:part]
    (folder / WEIGHTS).write_bytes(kept)
    told = refusal(folder, tmp_path / "b", capsys)
    assert f"{WEIGHTS}: the file is incomplete ({len(kept):,} bytes found" in told
    if len(kept) > len(content) // 3:
        assert f"{len(content):,} expected" in told


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_git_lfs_pointer_is_named_as_such(
    name: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(dense, tmp_path / "a")
    (folder / name).write_text(POINTER)
    told = refusal(folder, tmp_path / "b", capsys)
    assert f"{name} is a Git LFS pointer, not the file itself" in told


def test_random_headers_and_indexes_are_never_a_traceback(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = random.Random(1)
    content = (dense / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    values: list[Any] = [
        None,
        True,
        -1,
        1 << 70,
        0.5,
        "x",
        [],
        [0],
        [5, 1],
        [0, 1 << 62],
        {},
        {"dtype": "F32"},
    ]
    for turn in range(60):
        folder = shutil.copytree(dense, tmp_path / f"a{turn}")
        fields = json.loads(json.dumps(header))
        if turn % 3 == 0:
            place = drawn.randrange(8 + length)
            damaged = bytearray(content)
            damaged[place] ^= 1 << drawn.randrange(8)
            (folder / WEIGHTS).write_bytes(damaged)
        elif turn % 3 == 1:
            name = drawn.choice([name for name in fields if name != "__metadata__"])
            field = drawn.choice(("dtype", "shape", "data_offsets", ""))
            if field:
                fields[name][field] = drawn.choice(values)
            else:
                fields[name] = drawn.choice(values)
            text = json.dumps(fields).encode()
            (folder / WEIGHTS).write_bytes(
                len(text).to_bytes(8, "little") + text + content[8 + length :]
            )
        else:
            (folder / WEIGHTS).rename(folder / "model-1.safetensors")
            listed = {name: "model-1.safetensors" for name in fields if name != "__metadata__"}
            listed[drawn.choice([*listed, "more"])] = drawn.choice(
                [*values, "../model-1.safetensors", "a\0.safetensors"]
            )
            index = drawn.choice(
                [{"weight_map": listed}, {"weight_map": drawn.choice(values)}, listed]
            )
            (folder / hf_files.INDEX).write_text(json.dumps(index))
        status = converted(folder, tmp_path / f"b{turn}")
        told = capsys.readouterr().err
        if status == 0:
            # a flipped bit in a number gives another number; in the metadata's text it changes
            # nothing
            assert turn % 3 == 0
            continue
        assert status == 2 and told.startswith("error: ") and told.count("\n") == 1, (turn, told)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_refused_by_name_with_their_number(
    dtype: torch.dtype,
    value: float,
    dense: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(dense, tmp_path / "a")
    tensors = {name: x.to(dtype) for name, x in safetensors.load_file(folder / WEIGHTS).items()}
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    tensors[norm][-1] = value
    tensors[table][5, ::2] = value
    write(folder, tensors)
    told = refusal(folder, tmp_path / "b", capsys, "--dtype", "float32")
    assert f"{WEIGHTS} has inf or NaN weights" in told
    assert f"{norm} (1 of 48)" in told and f"{table} (24 of 4,656)" in told


def test_numbers_that_the_wanted_dtype_cannot_hold_are_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(dense, tmp_path / "a")
    tensors = {name: x.double() for name, x in safetensors.load_file(folder / WEIGHTS).items()}
    tensors["model.norm.weight"][:2] = 1e39
    write(folder, tensors)
    told = refusal(folder, tmp_path / "b", capsys, "--dtype", "float32")
    assert "final_norm.weight (2 of 48) has numbers too large for float32" in told


def test_a_run_does_not_start_with_weights_that_are_not_finite(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(dense, tmp_path / "a")
    tensors = safetensors.load_file(folder / WEIGHTS)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = torch.nan
    write(folder, tensors)
    flags = [
        "--load-hf",
        str(folder),
        "--seq-length",
        "32",
        "--train-iters",
        "1",
        "--log-file",
        "/dev/null",
    ]
    assert train(flags) == 2
    told = capsys.readouterr().err
    assert "model.layers.2.mlp.up_proj.weight (1 of 3,840)" in told and "Traceback" not in told
