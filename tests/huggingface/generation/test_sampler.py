"""Answers from a checkpoint: those of the model that was trained, with images, branches, several prompts in a row."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp import train
from megacp.core.config.run import RunConfig, Value, flag, flatten, with_values
from megacp.core.data.collate import collate
from megacp.core.data.decoding import RulesDecoder
from megacp.core.data.images import ImageLoading
from megacp.core.data.reader import PackedDataset
from megacp.core.training.state import RunState, first_token, last_token
from megacp.core.training.stored import stored_config
from megacp.huggingface import convert_command as convert
from megacp.huggingface import generate_command as generate
from megacp.huggingface.generation.prompt import Prompt, PromptMaker, prompt_pixels
from megacp.huggingface.generation.sampler import Generator, Sampling
from megacp.prepare import command as preprocess
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.train import main
from megacp.verify.parity_config import MODELS
from tests.prepare.build.builds import run as build
from tests.prepare.media.pictures import TINY
from tests.training.test_vision_dataset import image_part

LENGTH = 6
RECORDS: list[dict[str, Any]] = [
    {
        "content": [image_part(16, 12, 1), {"type": "text", "text": "between"}, image_part(30, 16, 2)],
        "branches": [
            {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "abcdef"}]},
            {
                "messages": [
                    {"role": "user", "content": [image_part(16, 16, 3), {"type": "text", "text": "and this one?"}]},
                    {"role": "assistant", "content": "ghijkl"},
                ]
            },
        ],
    },
    {
        "messages": [
            {"role": "user", "content": [image_part(20, 44, 4), {"type": "text", "text": "again?"}]},
            {"role": "assistant", "content": "mnopqr"},
        ]
    },
    {"messages": [{"role": "user", "content": "no image"}, {"role": "assistant", "content": "stuvwx"}]},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `packed`, built from RECORDS, and `run`, a checkpoint after one step on it."""
    folder = tmp_path_factory.mktemp("generate")
    source = folder / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    build([source], folder / "packed", image_rules=TINY, seq_length=512, cp_degrees=(1,), unit_bytes=1 << 20)
    values = {"data_path": str(folder / "packed"), "seq_length": 512, "dtype": "float64", "global_batch_size": 1}
    values |= {"train_iters": 1, "save": str(folder / "run"), "lr": 0.01}
    config = with_values(RunConfig(), {**MODELS["tiny_vlm"], "vocab_size": 0, **values})
    defaults, words = flatten(RunConfig()), []
    for name, value in flatten(config).items():
        if value != defaults[name]:
            words += [flag(name)] if value is True else [flag(name), *map(str, value if _many(value) else [value])]
    assert main(words) == 0
    return folder


def _many(value: object) -> bool:
    return isinstance(value, tuple)


@pytest.fixture(scope="module")
def generator(trained: Path) -> Generator:
    made = Generator(trained / "run")
    made.image_rules(None)
    return made


def prompts_of(generator: Generator) -> list[Prompt]:
    maker = PromptMaker(load_tokenizer("byte"), generator.image_rules(None))
    return [maker.of_record(record) for record in RECORDS]


def test_a_checkpoint_of_a_run_on_gpus_answers_on_a_cpu(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch layers and kernels that the run chose and this machine has not."""
    gpu: dict[str, Value] = {"transformer_impl": "transformer_engine", "fp8": "delayed", "attention_kernel": "flex"}
    monkeypatch.setattr(
        "megacp.huggingface.generation.sampler.stored_config", lambda loaded: with_values(stored_config(loaded), gpu)
    )
    assert Generator(str(trained / "run")).config.training.transformer_impl == "native"


@pytest.mark.slow
def test_answers_are_the_likeliest_tokens_of_the_stored_pack_with_these_answers_in_it(
    trained: Path, generator: Generator
) -> None:
    """Would catch prompts, positions, spans, branches or images that are not those of training."""
    answers = [a for given in generator.answer(prompts_of(generator), Sampling(LENGTH)) for a in given]
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
    monkeypatch.setattr(vision, "forward", lambda *given: calls.append(len(given[0])) or forward(*given))
    list(generator.answer(prompts_of(generator), Sampling(5)))
    patches, _ = prompt_pixels(prompts_of(generator), TINY)
    assert calls == [len(patches)]


def test_pixels_matter(generator: Generator) -> None:
    maker = PromptMaker(load_tokenizer("byte"), TINY)
    record = json.loads(json.dumps(RECORDS[1]))
    record["messages"][0]["content"][0] = image_part(20, 44, 5)
    rows = []
    for prompt in (prompts_of(generator)[1], maker.of_record(record)):
        features = generator.features([prompt])
        assert features is not None
        rows.append(features)
    assert (rows[0] - rows[1]).abs().max() > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_does_not_depend_on_what_shares_its_row(generator: Generator, temperature: float) -> None:
    prompts = prompts_of(generator)
    together = list(generator.answer(prompts, Sampling(4, temperature, seed=3)))
    first = 0
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = generator.answer([prompt], Sampling(4, temperature, seed=3 + first))
        assert [a.tolist() for a in alone] == [a.tolist() for a in expected]
        first += prompt.num_answers


def test_an_answer_ends_with_the_end_token_and_long_text_slides(generator: Generator) -> None:
    maker = PromptMaker(load_tokenizer("byte"))
    (free,) = generator.answer([maker.of_texts(["ab"])], Sampling(8))
    (ended,) = generator.answer([maker.of_texts(["ab"])], Sampling(8, ends=(-1, int(free[0][2]))))
    assert ended[0].tolist() == free[0].tolist()[: free[0].tolist().index(free[0][2]) + 1]
    text = "0123456789" * 60
    (long,) = generator.answer([maker.of_texts([text])], Sampling(2))
    (end,) = generator.answer([maker.of_texts([text[-512:]])], Sampling(1))
    assert long[0][0] == end[0][0] and len(long[0]) == 2


def test_a_prompt_with_images_that_leaves_no_room_is_refused(generator: Generator) -> None:
    maker = PromptMaker(load_tokenizer("byte"), TINY)
    record = {"content": [image_part(16, 16, 1), {"type": "text", "text": "x" * 600}], "branches": ["a", "b"]}
    with pytest.raises(ValueError, match=r"prompt 0: 6\d\d tokens, --seq-length of the run is 512"):
        list(generator.answer([maker.of_record(record)], Sampling(1)))


@pytest.mark.slow
def test_an_image_token_is_never_an_answer(trained: Path) -> None:
    """Would catch a patch without an image, which ends all answers of a file, where the tokenizer has these tokens."""
    generator = Generator(trained / "run")
    ids = dict(zip(TINY.token_ids, range(40, 250), strict=False))
    generator._rules = dataclasses.replace(TINY, token_ids=ids)
    prompt = PromptMaker(load_tokenizer("byte")).of_texts(["a"])
    (tokens,) = next(iter(generator.answer([prompt], Sampling(100, temperature=1e6))))
    assert len(tokens) == 100 and len(set(tokens.tolist())) > 40 and not {*tokens.tolist()} & {*ids.values()}


def test_image_rules_come_from_the_checkpoint_or_from_the_dataset_of_the_flag(trained: Path, tmp_path: Path) -> None:
    generator = Generator(trained / "run")
    assert generator.image_rules(None) == generator.image_rules(str(trained / "packed")) == TINY
    with pytest.raises(ValueError, match="no such file"):
        generator.image_rules(str(tmp_path / "nowhere"))
    source = tmp_path / "records.jsonl"
    source.write_text(json.dumps(RECORDS[1]) + "\n")
    other = dataclasses.replace(TINY, image_size=32)
    build([source], tmp_path / "other", image_rules=other, seq_length=512, cp_degrees=(1,), unit_bytes=1 << 20)
    with pytest.raises(ValueError, match="crops of 32 pixels with patches of 4, the model's have 16 and 4"):
        generator.image_rules(str(tmp_path / "other"))
    ids = {name: 264 - i for i, name in enumerate(TINY.token_ids)}
    build([source], tmp_path / "ids", image_rules=dataclasses.replace(TINY, token_ids=ids), seq_length=512)
    with pytest.raises(ValueError, match=r"ids has the image tokens .*, .* was trained with "):
        generator.image_rules(str(tmp_path / "ids"))
    source.write_text('{"text": "a text"}\n')
    build([source], tmp_path / "text", seq_length=512)
    with pytest.raises(ValueError, match="text holds no image rules: give --data-path"):
        generator.image_rules(str(tmp_path / "text"))


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.slow
def test_prompts_begin_as_the_documents_of_training_did(
    begins: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a model trained without a first token that is asked with one, as its tokenizer says."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["a b"], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<s>", "</s>"])
    token = ("<s>", made.token_to_id("<s>"))
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [token])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a b a b a b"}\n' * 4)
    names = {"input": tmp_path / "a.jsonl", "output": tmp_path / "d", "tokenizer": tmp_path / "tokenizer.json"}
    flags = [text for name, value in names.items() for text in (f"--{name}", str(value))]
    choice = [] if begins else ["--no-prepend-bos"]
    flags += ["--eod-token", "</s>", "--seq-length", "16", "--workers", "1"]
    assert preprocess.main(["build", *flags, *choice]) == 0
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--ffn-hidden-size", "16"]
    run = ["--data-path", str(tmp_path / "d"), "--seq-length", "16", "--global-batch-size", "1", "--train-iters", "1"]
    assert train.main([*sizes, *run, "--save", str(tmp_path / "out")]) == 0
    arguments = argparse.Namespace(tokenizer=str(tmp_path / "tokenizer.json"), checkpoint=str(tmp_path / "out"))
    _, tokenizer = generate.load(arguments)
    assert tokenizer.begins_with == (token[1] if begins else None)
    capsys.readouterr()
    flags = ["--from", "megacp", "--to", "hf", "--input", str(tmp_path / "out"), "--output", str(tmp_path / "hf")]
    assert convert.main([*flags, "--tokenizer", str(tmp_path / "tokenizer.json"), "--eod-token", "</s>"]) == 0
    told = "first token: documents of training began with none, the library's tokenizer begins texts with token"
    assert (told in capsys.readouterr().out) == (not begins)
    flags = ["--from", "hf", "--to", "megacp", "--input", str(tmp_path / "hf"), "--output", str(tmp_path / "again")]
    assert convert.main(flags) == 0  # weights of somebody else, whose tokenizer says how texts begin
    assert Generator(tmp_path / "again").first_token(token[1]) == token[1]


def test_what_is_known_of_the_first_token_decides() -> None:
    trained = RunState(tokenizer_sha256="a", data_fingerprint="b")
    for imported in (RunState(), RunState(tokenizer_sha256="a")):  # weights of somebody else: as the files say
        assert first_token(imported, 7) == 7
    assert first_token(trained, 7) is None  # before a dataset could have one
    assert first_token(dataclasses.replace(trained, document_start={"token": 3}), 7) == 3


def test_what_is_known_of_the_last_token_decides() -> None:
    assert last_token(RunState(tokenizer_sha256="a", data_fingerprint="b"), 7) == 7  # before a dataset said it
    assert last_token(RunState(document_end={"token": 3}), 7) == 3
    assert last_token(RunState(document_end={"token": None}), 7) is None
