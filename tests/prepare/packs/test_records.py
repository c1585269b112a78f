"""Builds report lost fields and learned tokens, and handle templates and first tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacp.huggingface.generation.prompt import PromptMaker
from megacp.prepare.describe import statistics, statistics_text
from megacp.prepare.records.documents import DocumentMaker
from megacp.prepare.records.record import SamplePart
from megacp.prepare.tokenize.tokenizer import Tokenizer, load_tokenizer
from megacp.prepare.verify import verify
from megacp.training.data.collate import collate
from megacp.training.data.reader import PackedDataset
from tests.prepare.packs.builds import documents, run

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TALK = {"messages": [USER, ASSISTANT]}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


UNLEARNED: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [USER, {**ASSISTANT, "weight": 0}]},
    {"text": "words", "weight": 0},
    {"messages": [{"role": "user", "content": "long " * 60}, ASSISTANT]},
]
REFUSED: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (
        [{"text": "one", "url": "u"}, {"text": "see <image>", "images": ["x.jpg"]}],
        {},
        ":2: `images`",
    ),
    ([{"messages": [{"role": "bot", "content": "x"}, ASSISTANT]}], {}, ":1: `messages.0..role`"),
    ([{"text": "some code", "messages": [ASSISTANT]}], {}, ":1: .*--ignore-keys"),
    ([{"text": "x" * 300}], {}, ":1: .* --seq-length 128.*--oversize"),
    ([{"text": "Q", "branches": ["one", "second"]}], {}, ":1: "),
    ([{"text": "a"}], {"append_eod": False}, "1 document without a learned token"),
    (UNLEARNED[::2], {}, "2 documents without a learned token"),
    ([TALK], {"ignore_keys": ("text", "weight", "x")}, "--ignore-keys text,weight"),
    ([TALK], {"context_roles": ("assistant",)}, "--context-roles assistant"),
    ([TALK], {"prepend_bos": True}, "--prepend-bos: --tokenizer byte"),
]


@pytest.mark.parametrize(("records", "changes", "named"), REFUSED)
def test_what_would_be_lost_or_teach_nothing_ends_the_build_by_its_place_or_flag(
    tmp_path: Path, records: list[dict[str, Any]], changes: dict[str, Any], named: str
) -> None:
    a = write(tmp_path / "a.jsonl", *records)
    with pytest.raises(ValueError, match=f"{a}{named}" if named.startswith(":") else named):
        run([a], tmp_path / "d", **changes)
    assert not (tmp_path / "d/manifest.json").exists()


def test_a_flag_lets_through_what_it_names(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"text": "see <image>", "images": ["x.jpg"]}, {"text": "one"})
    assert run([a], tmp_path / "a", ignore_keys=("images",)).documents == 2
    with pytest.raises(ValueError, match="ignore_keys: .*images.* before, .* now"):
        run([a], tmp_path / "a")
    b = write(tmp_path / "b.jsonl", {"messages": [{"role": "gpt", "content": "x"}, ASSISTANT]})
    assert run([b], tmp_path / "b", context_roles=("gpt",)).documents == 1
    c = write(tmp_path / "c.jsonl", TALK, *UNLEARNED)
    summary = run([c], tmp_path / "c", oversize="truncate")
    assert (summary.documents, summary.unlearned) == (5, 4)


# ---- learned tokens


def test_the_build_and_its_statistics_count_what_training_learns(tmp_path: Path) -> None:
    """Compare with the loss weights of batches: branches, cut documents and weights."""
    records = [
        TALK,
        {"text": "plain text"},
        {"text": "to be cut " * 30},
        {"text": "What? ", "branches": ["same", "same too"], "weight": 0.5},
        {"text": "What? ", "branches": ["A", "Bc", {"messages": [USER, ASSISTANT]}]},
        {
            "text": "What? ",
            "branches": [
                "b",
                {"text": "A", "branches": ["same", {"text": "same", "weight": 0}]},
                "A",
            ],
        },
        {
            "messages": [USER],
            "branches": [{"messages": [ASSISTANT]}, {"messages": [{**ASSISTANT, "weight": 0}]}],
        },
    ]
    a = write(tmp_path / "a.jsonl", *records)
    for oversize in ("split", "truncate"):
        summary = run([a], tmp_path / oversize, oversize=oversize)
        dataset = PackedDataset(tmp_path / oversize)
        counted = sum(
            int((collate([dataset.pack(i)]).loss_weights > 0).sum()) for i in range(len(dataset))
        )
        values = statistics(tmp_path / oversize)
        assert summary.learned_tokens == values["learned_tokens"] == counted > 0
        assert f"learned tokens          {counted:,}" in statistics_text(values)
    again = run([a], tmp_path / "split", oversize="split")
    assert again.already_complete and again.learned_tokens > summary.learned_tokens


# ---- the tokenizer's template and first token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json whose post-processor starts every text with <s>."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a b c"], vocab_size=300, show_progress=False)
    bpe.add_special_tokens(["<s>", "</s>", "<sep>"])
    bpe.save(str(folder / "plain.json"))
    content = json.loads((folder / "plain.json").read_text())
    content["post_processor"] = template(content, ["<s>", "A"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def template(content: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """Return a post-processor that puts special tokens around a text, A."""
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    parts = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if name == "A"
        else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in order
    ]
    special = {
        name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in order if name != "A"
    }
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


def tokenizer_in(place: Path, folder: Path, order: list[str] | None, **config: Any) -> Path:
    """Write a folder with this post-processor and tokenizer_config.json."""
    place.mkdir()
    content = json.loads((folder / "plain.json").read_text())
    content["post_processor"] = None if order is None else template(content, order)
    (place / "tokenizer.json").write_text(json.dumps(content))
    if config:
        (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place / "tokenizer.json"


def test_documents_begin_as_the_post_processor_begins_a_text(folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    a = write(
        tmp_path / "a.jsonl",
        {"text": "a b"},
        TALK,
        {"text": "c" * 40, "branches": ["a", "b"]},
        {"text": "<s>a"},
    )
    run([a], tmp_path / "d", tokenizer=str(folder / "tokenizer.json"), oversize="split")
    stored = documents(tmp_path / "d")
    first, end = library.token_to_id("<s>"), library.token_to_id("</s>")
    assert stored[0] == [*library.encode("a b").ids, end]
    assert [tokens.count(first) for tokens in stored] == [1, 1, 1, 1] and {
        tokens[0] for tokens in stored
    } == {first}
    dataset = PackedDataset(tmp_path / "d")
    assert dataset.manifest.tokenizer.begins_with == first and verify(tmp_path / "d") == []
    learned = sum(
        int((collate([dataset.pack(i)]).loss_weights > 0).sum()) for i in range(len(dataset))
    )
    assert statistics(tmp_path / "d")["learned_tokens"] == learned
    run([a], tmp_path / "none", tokenizer=str(folder / "tokenizer.json"), prepend_bos=False)
    assert documents(tmp_path / "none")[0] == [
        *library.encode("a b", add_special_tokens=False).ids,
        end,
    ]
    assert "begins_with" not in (tmp_path / "none/manifest.json").read_text()


@pytest.mark.parametrize("eod", ["</s>", "<sep>", None])
def test_a_dataset_keeps_what_ends_its_documents(
    folder: Path, tmp_path: Path, eod: str | None
) -> None:
    a = write(tmp_path / "a.jsonl", {"text": "a b"})
    path = str(folder / "tokenizer.json")
    run([a], tmp_path / "d", tokenizer=path, eod_token=eod, append_eod=eod is not None)
    assert PackedDataset(tmp_path / "d").pack(0).weights is None  # weights of 1 are not stored
    expected = None if eod is None else load_tokenizer(path).token_id(eod)
    assert PackedDataset(tmp_path / "d").manifest.document_end == {"token": expected}
    assert eod is None or documents(tmp_path / "d")[0][-1] == expected


def test_a_prompt_begins_as_documents_do(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    prompt = PromptMaker(tokenizer).of_text("a b")
    document = next(DocumentMaker(tokenizer, True, {}).encode([[[SamplePart("a b", 1.0)]]]))
    assert prompt.tokens.tolist() == document.tokens.tolist()
    assert prompt.tokens[0] == tokenizer.token_id("<s>")


def test_a_text_that_ends_as_documents_do_is_clear_and_other_surroundings_ask_for_a_choice(
    folder: Path, tmp_path: Path
) -> None:
    a = write(tmp_path / "a.jsonl", {"text": "a b"})
    both = tokenizer_in(tmp_path / "both", folder, ["<s>", "A", "</s>"])
    run([a], tmp_path / "d", tokenizer=str(both))
    for name, order in (("after", ["<s>", "A", "<sep>"]), ("before", ["<s>", "<sep>", "A"])):
        path = tokenizer_in(tmp_path / name, folder, order)
        with pytest.raises(
            ValueError, match=r"puts the tokens \[.*choose --prepend-bos or --no-prepend-bos"
        ):
            run([a], tmp_path / f"{name}.d", tokenizer=str(path))
        run([a], tmp_path / f"{name}.d", tokenizer=str(path), prepend_bos=True)
        assert documents(tmp_path / f"{name}.d") == documents(tmp_path / "d")


@pytest.mark.parametrize(("order", "says"), [(["<s>", "A"], False), (None, True)])
def test_a_config_that_contradicts_the_post_processor_asks_for_a_choice(
    folder: Path, tmp_path: Path, order: list[str] | None, says: bool
) -> None:
    a = write(tmp_path / "a.jsonl", {"text": "a b"})
    path = tokenizer_in(
        tmp_path / "t", folder, order, add_bos_token=says, bos_token="<s>", eos_token="</s>"
    )
    with pytest.raises(
        ValueError,
        match=f"sets add_bos_token to {says}, but the post-processor of tokenizer.json puts",
    ):
        run([a], tmp_path / "d", tokenizer=str(path))
    run([a], tmp_path / "d", tokenizer=str(path), prepend_bos=True)
    run([a], tmp_path / "e", tokenizer=str(path), prepend_bos=False)
    assert [len(documents(tmp_path / name)[0]) for name in "de"] == [5, 4]


def test_a_config_beside_vocab_and_merges_says_how_texts_begin(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["a b c"], vocab_size=300, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    bpe.save_model(str(tmp_path))
    specification = f"{tmp_path}/vocab.json,{tmp_path}/merges.txt"
    assert load_tokenizer(specification).begins_with is None
    config = {"add_bos_token": True, "bos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer: Tokenizer = load_tokenizer(specification)
    assert tokenizer.begins_with == tokenizer.eos_id is not None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        load_tokenizer(specification)


def test_a_vocabulary_without_letters_still_says_how_texts_begin(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {name: i for i, name in enumerate(["<s>", "</s>", "A", "C", "G", "T"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("[ACGT]"), "removed", invert=True
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", "<s> $A <s> $B", [("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).begins_with == 0
