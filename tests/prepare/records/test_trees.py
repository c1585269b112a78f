"""Compare nested branches and rollouts with records that contain each path separately."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.prepare.command import main
from megacp.prepare.describe import describe_pack, statistics
from megacp.prepare.records.documents import (
    Document,
    DocumentMaker,
    Placed,
    RecordPart,
    learned_tokens,
)
from megacp.prepare.records.record import FOR_PROMPTS, RecordError, RecordRules, SamplePart
from megacp.prepare.records.sample import parse_record
from megacp.prepare.tokenize.tokenizer import load_tokenizer
from megacp.prepare.verify import verify
from megacp.training.data.collate import collate
from megacp.training.data.images import ImageLoading
from megacp.training.data.reader import Pack, PackedDataset
from megacp.training.data.tables import BRANCH_DTYPE, SEGMENT_DTYPE
from megacp.training.data.vision.decoding import RulesDecoder
from megacp.training.data.vision.rules import ImageLayout
from tests.prepare.media.pictures import TINY, encoded, noise, video
from tests.prepare.packs.builds import run

ASK, TELL = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TREES = RecordRules(prefix_tree=True, media=True)
ENDED, OPEN = (
    DocumentMaker(load_tokenizer("byte"), append_eod, {"image": 300})
    for append_eod in (True, False)
)
Rollout = list[tuple[str, float]]
Learned = Counter[tuple[tuple[int, ...], int]]
"""Loss weight of each (visible tokens in order, predicted token)."""


def learned(packs: Sequence[Pack]) -> Learned:
    """Return the sums of all loss weights in some packs."""
    found: Learned = Counter()
    for pack in packs:
        batch = collate([pack])
        tokens, places = batch.tokens.tolist(), np.arange(len(batch))
        for place in np.flatnonzero(batch.loss_weights).tolist():
            path = np.flatnonzero((places <= place) & (place < batch.leave)).tolist()
            assert batch.position_ids[path].tolist() == [*range(len(path))]
            label = int(batch.labels[place])
            found[tuple(tokens[seen] for seen in path), label] += float(batch.loss_weights[place])
    return found


def pack_of(document: Document) -> Pack:
    """Return a pack with a single document."""
    tokens, weights, starts, leaves, _, _ = document
    segment = np.zeros(1, SEGMENT_DTYPE)
    segment["true_length"] = segment["padded_length"] = len(tokens)
    segment["prefix_length"], segment["num_branches"] = [*starts, len(tokens)][0], len(starts)
    rows = zip(starts, np.diff([*starts, len(tokens)]).tolist(), leaves, strict=True)
    return Pack(0, tokens, weights, segment, np.array([*rows], BRANCH_DTYPE) if starts else None)


def made(
    maker: DocumentMaker, parts: Sequence[Sequence[RecordPart]], parents: Sequence[int] = ()
) -> Document:
    (document,) = maker.encode([parts], [parents])
    return document


# ---- rollouts

TOKEN = st.tuples(st.sampled_from("aab"), st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]))


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    """Generate rollouts with common prefixes."""
    found = [draw(st.lists(TOKEN, min_size=1, max_size=8))]
    for _ in range(draw(st.integers(0, 5))):
        of = draw(st.sampled_from(found))
        shared = [(token, draw(TOKEN)[1]) for token, _ in of[: draw(st.integers(1, len(of)))]]
        found.append(shared + draw(st.lists(TOKEN, max_size=5)))
    return found


@settings(max_examples=300, deadline=None)
@given(rollouts(), st.booleans())
def test_the_tree_of_rollouts_teaches_exactly_what_they_teach_apart(
    all_of: list[Rollout], ended: bool
) -> None:
    maker = ENDED if ended else OPEN
    pieces = [
        [*(SamplePart(text, weight) for text, weight in each), SamplePart(None, each[-1][1])]
        for each in all_of
    ]
    tree = made(maker, pieces, (-1,) * (len(pieces) - 1))
    texts = ["".join(text for text, _ in each) + ended * "." for each in all_of]
    if tree.problem is not None:
        assert (
            "right after a single token" in tree.problem
            and len({text[1] for text in texts if text[1:]}) > 1
        )
        return
    apart = [pack_of(made(maker, [each])) for each in pieces]
    found = learned([pack_of(tree)])
    assert found == learned(apart)
    assert learned_tokens(*tree[:4]) == len(found), "each is learned once"
    prefixes = {begin for text in texts for begin in itertools.accumulate(text)}
    # a token that moves to branches is part of each of them
    assert len(prefixes) <= len(tree.tokens) <= len(prefixes) + len(tree.branch_starts)


def test_rollouts_are_shared_as_far_as_they_agree_and_keep_their_order() -> None:
    texts = ["abcd", "abxy", "abxz", "ab", "abcd"]
    tree = made(OPEN, [[SamplePart(text, 0.0)] for text in texts], (-1,) * 4)
    assert bytes(tree.tokens.tolist()) == b"abcdxyz"
    assert (tree.branch_starts, tree.branch_leaves) == ((2, 4, 5, 6), (4, 7, 6, 7))
    tree = made(OPEN, [[SamplePart(text, 1.0)] for text in texts], (-1,) * 4)
    assert bytes(tree.tokens.tolist()) == b"abcdbxyxz"
    assert tree.weights is not None and tree.weights.tolist() == [5, 5, 2, 2, 0, 2, 1, 0, 1]
    assert (tree.branch_starts, tree.branch_leaves) == ((1, 4, 5, 7), (4, 9, 7, 9))
    whole = made(OPEN, [[SamplePart("same", 1.0)]] * 3, (-1, -1))
    assert (
        whole.branch_starts == ()
        and whole.weights is not None
        and whole.weights.tolist() == [3] * 4
    )


def test_a_part_of_one_token_that_goes_to_its_branches_makes_room_for_them() -> None:
    texts = [("ab", "c"), ("ab", "d"), ("az", "c")]
    tree = made(
        OPEN, [[SamplePart(ask, 0.0), SamplePart(told, 1.0)] for ask, told in texts], (-1, -1)
    )
    assert bytes(tree.tokens.tolist()) == b"abcbdzc" and tree.branch_starts == (1, 3, 5)
    assert tree.branch_leaves == (3, 5, 7) and tree.weights is not None
    assert tree.weights.tolist() == [0, 0, 1, 0, 1, 0, 1]


def test_an_image_is_shared_as_a_whole_and_only_with_itself() -> None:
    layout = ImageLayout(1, np.array([300, 301, 302]), np.zeros((1, 4), np.int64))
    one, other = Placed(layout, 0, -1), Placed(layout, 1, -1)
    text = [SamplePart("x", 0.0)]
    tree = made(
        OPEN,
        [[*text, one, *text], [*text, one, SamplePart("y", 0.0)], [*text, other, *text]],
        (-1, -1),
    )
    assert tree.problem is None and (tree.branch_starts, tree.branch_leaves) == (
        (1, 4, 5, 6),
        (6, 5, 6, 10),
    )
    assert [(unit.item, unit.start) for unit in tree.units] == [(0, 1), (1, 6)]
    learned_after = [[*text, one, SamplePart(word, 1.0)] for word in "yz"]
    assert "right after an image" in str(made(OPEN, learned_after, (-1,)).problem)


# ---- nested branches


@st.composite
def nested(draw: st.DrawFn, depth: int = 3) -> dict[str, Any]:
    """Generate a text with a weight and branches."""
    record = {
        "text": draw(st.text("ab", min_size=1, max_size=3)),
        "weight": draw(st.sampled_from([0.0, 0.5, 1, 2])),
    }
    if depth and (branches := draw(st.lists(nested(depth - 1), max_size=3))):
        record["branches"] = branches
    return record


def taught(record: dict[str, Any], before: tuple[int, ...], weight: float) -> Learned:
    """Return the loss weights of a record and its branches, each after everything it continues."""
    weight, found = weight * record["weight"], Counter()
    for token in [*record["text"].encode(), *([] if "branches" in record else [256])]:
        if before and weight:
            found[before, token] += weight
        before = *before, token
    for branch in record.get("branches", ()):
        found += taught(branch, before, weight)
    return found


@settings(max_examples=300, deadline=None)
@given(nested())
def test_nested_branches_teach_what_each_adds_to_what_it_continues(record: dict[str, Any]) -> None:
    record = {**record, "weight": record["weight"] or 1.0}
    sample = parse_record(record)
    document = made(ENDED, [sample.prefix, *sample.branches], sample.parents)
    if document.problem is not None:
        assert len(record["text"]) == 1 and "right after a single token" in document.problem
        return
    found = learned([pack_of(document)])
    assert found == taught(record, (), 1.0)
    tokens, weights, starts, leaves, _, _ = document
    counted = int((collate([pack_of(document)]).loss_weights > 0).sum())
    assert learned_tokens(tokens, weights, starts, leaves) == counted


def test_branches_of_branches_are_a_conversation_along_each_path() -> None:
    deeper = {"messages": [ASK, TELL], "weight": 0.5}
    record = {
        "messages": [ASK],
        "branches": [{"messages": [TELL], "weight": 0.5, "branches": [deeper, "more"]}, "b"],
    }
    sample = parse_record(record, TREES)
    assert sample.parents == (0, 1, 1, 0)
    flat = parse_record({"messages": [ASK, TELL, ASK, TELL]}).prefix
    assert [p.text for part in (sample.prefix, *sample.branches[:2]) for p in part] == [
        p.text for p in flat
    ]
    assert {piece.weight for piece in sample.branches[0]} == {0.0, 0.5}
    assert {piece.weight for piece in sample.branches[1]} == {0.0, 0.25}
    assert sample.branches[2] == (SamplePart("more", 0.5), SamplePart(None, 0.5))
    mixed = {"messages": [ASK], "branches": [{"messages": [ASK]}]}
    begins = [[p[0].text for p in parse_record({"text": "x", "branches": [mixed]}).branches]]
    begins.append(
        [
            p[0].text
            for p in parse_record(
                {**mixed, "branches": [{"text": "x", "branches": [mixed]}]}
            ).branches
        ]
    )
    assert begins == [["<|user|>\n", "\n<|user|>\n"], ["x", "<|user|>\n", "\n<|user|>\n"]]
    value: Any = "c"
    for _ in range(1500):  # deeper than Python's recursion limit
        value = {"text": "ab", "branches": [value]}
    sample = parse_record(value)
    assert made(ENDED, [sample.prefix, *sample.branches], sample.parents).branch_starts[-1] == 2999


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"text": "x", "branches": [{"text": "a", "branches": []}]},
        "`branches[0].branches` must be a non-empty list",
    ),
    (
        {"text": "x", "branches": [{"text": "a", "branches": ["b", 3]}]},
        "`branches[0].branches[1]` is a number",
    ),
    (
        {
            "text": "x",
            "branches": [{"text": "a", "weight": 1e7, "branches": [{"text": "b", "weight": 1e7}]}],
        },
        "`branches[0].branches[0].weight (times the weights of the parts above)` is 1",
    ),
    ({"rollouts": "ab"}, "`rollouts` must be a list of rollouts"),
    ({"rollouts": [{"text": "a"}, {"text": ""}]}, "`rollouts[1]`: `text` is empty"),
    ({"rollouts": ["a"]}, "`rollouts[0]`: a record must be a JSON object"),
    (
        {"rollouts": [{"text": "a", "branches": ["b"]}]},
        "`rollouts[0]`: a rollout must be one text or conversation",
    ),
    (
        {"rollouts": [{"rollouts": [{"text": "a"}] * 2}]},
        "`rollouts[0]`: a rollout must be one text or conversation",
    ),
    ({"rollouts": [{"text": "a"}], "text": "b"}, "`text` is unknown and would be lost"),
    ({"rollouts": [{"text": "a"}], "branches": ["b"]}, "`rollouts` and `branches`"),
    ({"prompt": "a", "completions": ["b"], "completion": "c"}, "`completions` and `completion`"),
    ({"prompt": "a", "completions": ["b", 3]}, "`completions[1]`: `prompt` is a string"),
    (
        {"prompt": [ASK], "completions": [[TELL], [{**TELL, "weight": -1}]]},
        "`completions[1]`: `completion[0].weight`",
    ),
    ({"prompt": "a", "completions": []}, "missing key"),
]


@pytest.mark.parametrize(("record", "named"), REFUSED)
def test_a_wrong_tree_is_refused_by_name(record: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError, match=re.escape(named)):
        parse_record(record, TREES)


@pytest.mark.parametrize("rules", [RecordRules(), FOR_PROMPTS])
def test_rollouts_need_their_flag_and_other_keys_of_the_name_do_not(rules: RecordRules) -> None:
    for record in ({"rollouts": [{"text": "a"}]}, {"prompt": "a", "completions": ["b"]}):
        with pytest.raises(RecordError, match="--prefix-tree"):
            parse_record(record, rules)
    assert parse_record({"completions": "x"}, RecordRules("completions")).prefix[0].text == "x"
    both = {"prompt": "a", "completion": "b", "completions": ["c"]}
    assert parse_record(both, RecordRules(ignore_keys=("completions",))) == parse_record(
        {**both, "completions": None}
    )


def test_a_branch_of_a_branch_is_not_asked() -> None:
    with pytest.raises(
        RecordError,
        match=re.escape("`branches[0].branches[0]`: prompts cannot have nested branches"),
    ):
        parse_record({"text": "a", "branches": [{"text": "b", "branches": ["c"]}]}, FOR_PROMPTS)


# ---- builds

COMPLETIONS = {
    "prompt": "2 + 2 = ",
    "completions": ["4.", "4, of course", "5", "4."],
    "weight": 0.5,
    "url": "u",
}
ROLLOUTS = {
    "rollouts": [
        {"messages": [ASK, TELL, ASK, {**TELL, "weight": 2}]},
        {
            "prompt": [ASK, TELL, ASK],
            "completion": [{**TELL, "content": "Another"}],
            "weight": 0.25,
        },
        {"text": "<|user|>\nA text"},
    ]
}


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def packs(directory: Path) -> list[Pack]:
    assert verify(directory) == []
    dataset = PackedDataset(directory)
    return [dataset.pack(i) for i in range(len(dataset))]


def test_a_build_with_prefix_tree_teaches_what_its_rollouts_teach_apart(tmp_path: Path) -> None:
    deep = {
        "text": "What? ",
        "branches": [{"text": "A", "branches": ["B", {"text": "Bc", "branches": ["x"]}]}, "b"],
    }
    source = written(tmp_path / "a.jsonl", COMPLETIONS, ROLLOUTS, deep)
    flags = ["--tokenizer", "byte", "--seq-length", "128", "--workers", "1"]
    together = str(tmp_path / "together")
    assert (
        main(["build", "--input", str(source), "--output", together, *flags, "--prefix-tree"]) == 0
    )
    with pytest.raises(
        ValueError,
        match=re.escape(f"{source}:1: `completions` contains rollouts; build with --prefix-tree"),
    ):
        run([source], tmp_path / "no")
    with pytest.raises(ValueError, match="prefix_tree: true before, false now"):
        run([source], tmp_path / "together", unit_bytes=0)
    prompt = {key: value for key, value in COMPLETIONS.items() if key != "completions"}
    apart = [{**prompt, "completion": each} for each in COMPLETIONS["completions"]]
    run([written(tmp_path / "b.jsonl", *apart, *ROLLOUTS["rollouts"], deep)], tmp_path / "apart")
    found = packs(tmp_path / "together")
    assert learned(found) == learned(packs(tmp_path / "apart"))
    assert sum(len(pack.segments) for pack in found) == 3
    counted = sum(int((collate([pack]).loss_weights > 0).sum()) for pack in found)
    assert statistics(tmp_path / "together")["learned_tokens"] == counted
    shown = describe_pack(PackedDataset(tmp_path / "together"), 0, load_tokenizer("byte"))
    assert "      branch 1: " in shown and "        branch 2 of 1: " in shown


def test_rollouts_without_a_common_beginning_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", {"rollouts": [{"text": "one"}, {"text": "two"}]})
    with pytest.raises(ValueError, match=":1: the rollouts begin with different tokens"):
        run([source], tmp_path / "d", prefix_tree=True)


def test_images_of_a_prompt_are_stored_once_and_others_where_they_stand(tmp_path: Path) -> None:
    pytest.importorskip("av")
    files = {"a.png": encoded(noise(20, 10)), "b.mp4": video(12)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    said = [
        {**ASK, "content": [{"type": "text", "text": "see "}, {"type": "image", "path": "a.png"}]}
    ]
    asked = [{**ASK, "content": [{"type": "video", "path": "b.mp4"}]}, TELL]
    answers = [
        [TELL, *asked, *asked],
        [TELL, *asked, ASK, TELL],
        [{**TELL, "content": "B"}, *asked],
    ]
    source = written(tmp_path / "a.jsonl", {"prompt": said, "completions": answers})
    changes: dict[str, Any] = {"image_rules": TINY, "image_root": str(tmp_path), "seq_length": 1024}
    run([source], tmp_path / "d", prefix_tree=True, **changes)
    apart = [{"prompt": said, "completion": answer} for answer in answers]
    run([written(tmp_path / "b.jsonl", *apart)], tmp_path / "apart", **changes)
    (pack,) = packs(tmp_path / "d")
    assert learned([pack]) == learned(packs(tmp_path / "apart")) and pack.images is not None
    items, frames = pack.images.units["item"].tolist(), pack.images.units["frame"].tolist()
    begins = [i for i, frame in enumerate(frames) if frame <= 0]
    assert items == [
        begins.index(max(begin for begin in begins if begin <= i)) for i in range(len(items))
    ]
    assert [pack.images.read(item) for item in range(4)] == [files["a.png"], *[files["b.mp4"]] * 3]
    assert len(PackedDataset(tmp_path / "d").shard(0).image_checksums) == 4
    assert pack.images.units["branch"][begins].tolist() == [0, 1, 2, 4]
    loaded = collate([pack], loading=ImageLoading(RulesDecoder(TINY))).vision
    assert loaded is not None and len(loaded.patches) == int(pack.images.units["image_stop"][-1])
