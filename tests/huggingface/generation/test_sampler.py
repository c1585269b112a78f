"""Answers from a checkpoint equal the trained model's answers.

The tests cover images, branches and several prompts per row.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacp.engine.config.run import RunConfig, Value, with_values
from megacp.huggingface import convert_command as convert
from megacp.huggingface import generate_command as generate
from megacp.huggingface.generation.prompt import Prompt, PromptMaker, prompt_pixels
from megacp.huggingface.generation.sampler import Generator, Sampling
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.train import main
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading
from megacp.training.data.reader import PackedDataset
from megacp.training.data.vision.decoding import RulesDecoder
from megacp.training.loop.state import RunState, first_token, last_token
from megacp.training.loop.stored import stored_config
from megacp.verify.cases import MODELS
from tests.huggingface.convert.models import save
from tests.prepare.media.pictures import TINY
from tests.prepare.packs.builds import run as build
from tests.training.test_vision_dataset import flags_of, image_part

LENGTH = 6


def talk(text: str, answer: str, *pictures: dict[str, Any]) -> dict[str, Any]:
    user = {"role": "user", "content": [*pictures, {"type": "text", "text": text}]}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


RECORDS: list[dict[str, Any]] = [
    {
        "content": [
            image_part(16, 12, 1),
            {"type": "text", "text": "between"},
            image_part(30, 16, 2),
        ],
        "branches": [
            talk("what?", "abcdef"),
            talk("and this one?", "ghijkl", image_part(16, 16, 3)),
        ],
    },
    talk("again?", "mnopqr", image_part(20, 44, 4)),
    talk("no image", "stuvwx"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `packed`, built from RECORDS, and `run`, a checkpoint after one step on
    it.
    """
    folder = tmp_path_factory.mktemp("generate")
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    build(
        [source],
        folder / "packed",
        image_rules=TINY,
        seq_length=512,
        cp_degrees=(1,),
        unit_bytes=1 << 20,
    )
    values = {
        "data_path": str(folder / "packed"),
        "seq_length": 512,
        "dtype": "float64",
        "global_batch_size": 1,
    }
    values |= {"train_iters": 1, "save": str(folder / "run"), "lr": 0.01}
    config = with_values(RunConfig(), {**MODELS["tiny_vlm"], "vocab_size": 0, **values})
    assert main(flags_of(config, folder / "log")) == 0
    return folder


@pytest.fixture(scope="module")
def generator(trained: Path) -> Generator:
    return Generator(trained / "run")


def prompts_of(generator: Generator) -> list[Prompt]:
    assert generator.rules == TINY
    maker = PromptMaker(load_tokenizer("byte"), generator.rules)
    return [prompt for record in RECORDS for prompt in maker.of_record(record)]


def test_a_checkpoint_of_a_run_on_gpus_answers_on_a_cpu(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: dict[str, Value] = {
        "transformer_impl": "transformer_engine",
        "fp8": "delayed",
        "attention_kernel": "flex",
    }
    monkeypatch.setattr(
        "megacp.huggingface.generation.sampler.stored_config",
        lambda loaded: with_values(stored_config(loaded), gpu),
    )
    assert Generator(str(trained / "run")).config.training.transformer_impl == "native"


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_5_moe_text", "gpt_oss"])
def test_experts_that_ranks_shared_answer_on_one_process_as_the_library_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
    model, shared = save(name, tmp_path / "a"), {"expert_model_parallel_size": 2}
    folders = ["--input", str(tmp_path / "a"), "--output", str(tmp_path / "b")]
    assert convert.main(["--from", "hf", "--to", "megacp", *folders]) == 0
    monkeypatch.setattr(
        "megacp.huggingface.generation.sampler.stored_config",
        lambda loaded: with_values(stored_config(loaded), shared),
    )
    prompts = [Prompt(np.arange(5 + i)) for i in range(2)]
    for prompt, answer in zip(
        prompts, Generator(tmp_path / "b").answer(prompts, Sampling(LENGTH)), strict=True
    ):
        expected = model.generate(
            torch.from_numpy(prompt.tokens)[None], max_new_tokens=LENGTH, do_sample=False
        )
        assert answer.tolist() == expected[0, len(prompt.tokens) :].tolist()


@pytest.mark.slow
def test_answers_are_the_likeliest_tokens_of_the_stored_pack_with_these_answers_in_it(
    trained: Path, generator: Generator
) -> None:
    answers = list(generator.answer(prompts_of(generator), Sampling(LENGTH)))
    assert [len(answer) for answer in answers] == [LENGTH] * 4
    dataset = PackedDataset(trained / "packed")
    assert len(dataset) == 1
    batch = collate([dataset.pack(0)], loading=ImageLoading(RulesDecoder(TINY)))
    text = bytes(np.where(batch.tokens < 256, batch.tokens, 0).astype(np.uint8))
    tokens = batch.tokens.copy()
    begins = [text.index(expected) for expected in (b"abcdef", b"ghijkl", b"mnopqr", b"stuvwx")]
    for begin, answer in zip(begins, answers, strict=True):
        tokens[begin : begin + LENGTH] = answer
    forced = dataclasses.replace(batch, tokens=tokens)
    likeliest = generator.logits(forced).argmax(-1).numpy()
    for begin, answer in zip(begins, answers, strict=True):
        assert likeliest[begin - 1 : begin - 1 + LENGTH].tolist() == answer.tolist()


def test_images_are_encoded_once_a_row_however_many_tokens_are_made(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    vision = generator.model.vision
    assert vision is not None
    forward = vision.forward
    monkeypatch.setattr(
        vision, "forward", lambda *given: calls.append(len(given[0])) or forward(*given)
    )
    list(generator.answer(prompts_of(generator), Sampling(5)))
    assert calls == [len(prompt_pixels(prompts_of(generator), TINY)[0])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_depend_on_what_shares_its_row(
    generator: Generator, temperature: float
) -> None:
    prompts = prompts_of(generator)
    together = list(generator.answer(prompts, Sampling(4, temperature, seed=3)))
    for number, (prompt, expected) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = generator.answer([prompt], Sampling(4, temperature, seed=3 + number))
        assert alone.tolist() == expected.tolist()


def test_an_answer_ends_with_the_end_token_or_where_the_row_is_full(generator: Generator) -> None:
    maker = PromptMaker(load_tokenizer("byte"))
    (free,) = generator.answer([maker.of_text("ab")], Sampling(8))
    (ended,) = generator.answer([maker.of_text("ab")], Sampling(8, ends=(-1, int(free[2]))))
    assert ended.tolist() == free.tolist()[: free.tolist().index(free[2]) + 1]
    (full,) = generator.answer([maker.of_text("0123456789" * 51)], Sampling(4))
    assert len(full) == 2  # 510 tokens in a row of 512


@pytest.mark.slow
def test_an_image_token_is_never_an_answer(trained: Path) -> None:
    """This also holds if the tokenizer has these tokens: a patch without an image would end all
    answers of a file.
    """
    generator = Generator(trained / "run")
    ids = dict(zip(TINY.token_ids, range(40, 250), strict=False))
    generator.rules = dataclasses.replace(TINY, token_ids=ids)
    prompt = PromptMaker(load_tokenizer("byte")).of_text("a")
    (tokens,) = generator.answer([prompt], Sampling(100, temperature=1e6))
    assert (
        len(tokens) == 100
        and len(set(tokens.tolist())) > 40
        and not {*tokens.tolist()} & {*ids.values()}
    )


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.slow
def test_prompts_begin_as_the_documents_of_training_did(
    begins: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["a b"], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(["<s>", "</s>"])
    first = made.token_to_id("<s>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", [("<s>", first)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a b a b a b"}\n' * 4)
    choice = {} if begins else {"prepend_bos": False}
    build(
        [tmp_path / "a.jsonl"],
        tmp_path / "d",
        tokenizer=str(tmp_path / "tokenizer.json"),
        seq_length=16,
        **choice,
    )
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16 --seq-length 16".split()
    run = ["--data-path", str(tmp_path / "d"), "--global-batch-size", "1", "--train-iters", "1"]
    assert main([*sizes, *run, "--save", str(tmp_path / "out")]) == 0
    arguments = generate.parsed(["--checkpoint", str(tmp_path / "out"), "--prompt", "a"])
    assert generate.Session(arguments).tokenizer.begins_with == (first if begins else None)
    flags = [
        "--from",
        "megacp",
        "--to",
        "hf",
        "--input",
        str(tmp_path / "out"),
        "--output",
        str(tmp_path / "hf"),
    ]
    assert convert.main([*flags, "--tokenizer", str(tmp_path / "tokenizer.json")]) == 0
    assert (
        "first token: training documents began without a first token" in capsys.readouterr().out
    ) == (not begins)


def test_what_is_known_of_the_first_and_the_last_token_decides() -> None:
    trained = RunState(tokenizer_sha256="a", data_fingerprint="b")
    for imported in (
        RunState(),
        RunState(tokenizer_sha256="a"),
    ):  # weights from elsewhere: as in the files
        assert first_token(imported, 7) == 7
    assert (
        first_token(trained, 7) is None and last_token(trained, 7) == 7
    )  # before datasets stored it
    assert first_token(dataclasses.replace(trained, document_start={"token": 3}), 7) == 3
    assert last_token(RunState(document_end={"token": 3}), 7) == 3
    assert last_token(RunState(document_end={"token": None}), 7) is None
