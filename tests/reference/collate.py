"""Collation one token at a time, directly from the format's specification: slow and obvious.

A document here is (tokens, weights, padded_length, branch_starts).
"""

from __future__ import annotations

Document = tuple[list[int], list[float], int, tuple[int, ...]]


def collate(packs: list[list[Document]], attention_mask: str) -> dict[str, list[float]]:
    """Return the fields of a PackedBatch as lists."""
    names = ("tokens", "labels", "loss_weights", "position_ids", "leave")
    rows: dict[str, list[float]] = {name: [] for name in names}
    end_of_pack = 0
    for pack in packs:
        in_pack = 0
        end_of_pack += sum(padded_length for _, _, padded_length, _ in pack)
        following = [
            (tokens, weights, i) for tokens, weights, *_ in pack for i in range(len(tokens))
        ]
        for tokens, weights, padded_length, starts in pack:
            begin = len(rows["tokens"])
            for i, token in enumerate(tokens):
                branch = sum(start <= i for start in starts)
                if attention_mask == "causal":
                    after = following[in_pack + 1] if in_pack + 1 < len(following) else None
                    place = (in_pack, end_of_pack)
                else:
                    ends = i + 1 == len(tokens) or i + 1 in starts
                    if (
                        starts
                        and i + 1 == starts[0]
                        and len({tokens[start] for start in starts}) == 1
                    ):
                        ends = False  # all branches continue after the same token
                    after = None if ends else (tokens, weights, i + 1)
                    position = i if branch == 0 else starts[0] + i - starts[branch - 1]
                    place = (position, begin + [len(tokens), *starts[1:], len(tokens)][branch])
                in_pack += 1
                label, weight = (after[0][after[2]], after[1][after[2]]) if after else (0, 0.0)
                for name, value in zip(names, (token, label, weight, *place), strict=True):
                    rows[name].append(value)
            for j in range(padded_length - len(tokens)):
                for name, value in zip(names, (0, 0, 0.0, j, 0), strict=True):
                    rows[name].append(value)
    return rows
