"""What all ranks were doing when one gave up, in words: calls that some rank has not made, and the stacks.

Key property: a pure function of the ranks' answers. Equal stacks and equal calls are told once, so the report of a
thousand ranks that wait for one stays a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megacp.core.distributed.restart_store import named

_SHOWN = 12
"""Calls that are told; those with a rank missing come first."""
Answer = Mapping[str, Any]


def report(answers: Mapping[int, Answer], silent: Sequence[int]) -> str:
    """The report on the ranks that answered, by rank, and on those that did not."""
    calls = [*_calls(answers)[:_SHOWN], *_behind(answers)[:_SHOWN]]
    lines = ["calls under way:", *(f"  {line}" for line in calls or ["none"]), "stacks:"]
    stacks: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        text = "\n".join(
            f'    File "{file}", line {line}, in {name}' + (f"\n      {source}" if source else "")
            for file, line, name, source in answer["stack"]
        )
        stacks.setdefault(text, []).append(rank)
    lines += [f"  {named(ranks)}:\n{text}" for text, ranks in stacks.items()]
    if silent:
        lines.append(f"  no answer from {named(list(silent))}: stopped, dead, or cut off from the store")
    return "\n".join(lines)


def _behind(answers: Mapping[int, Answer]) -> list[str]:
    """One line for each group whose ranks have made different numbers of collectives: on a GPU a call is through for
    the host long before it is for the device, so nothing is under way there.
    """
    lines = []
    groups = dict.fromkeys(group for answer in answers.values() for group in answer["calls"])
    for group in groups:
        of_rank = {rank: answer["calls"][group] for rank, answer in answers.items() if group in answer["calls"]}
        numbers = {rank: state["number"] for rank, state in of_rank.items()}
        waited_for = any(call[3] is None for state in of_rank.values() for call in state["under_way"])
        if len(set(numbers.values())) > 1 and not waited_for:
            counts = sorted(set(numbers.values()))
            told = "; ".join(f"{count} by {named([r for r in numbers if numbers[r] == count])}" for count in counts)
            lines.append(f"collectives made on {next(iter(of_rank.values()))['axis']}: {told}")
    return lines


def _calls(answers: Mapping[int, Answer]) -> list[str]:
    """One line for each call that somebody waits for, first those that somebody else has not made, the longest wait
    first.
    """
    waiting: dict[tuple[str, str, int], list[tuple[int, int, float]]] = {}
    lines: list[tuple[bool, float, str]] = []
    for rank, answer in answers.items():
        for group, state in answer["calls"].items():
            for name, number, size, peer, seconds in state["under_way"]:
                if peer is None:
                    waiting.setdefault((group, name, number), []).append((rank, size, seconds))
                else:
                    lines.append(_message(rank, state["axis"], (name, number, size, peer, seconds), group, answers))
    lines += [_collective(key, waiters, answers) for key, waiters in waiting.items()]
    return [text for _, _, text in sorted(lines, key=lambda line: (not line[0], -line[1], line[2]))]


def _collective(
    key: tuple[str, str, int], waiters: list[tuple[int, int, float]], answers: Mapping[int, Answer]
) -> tuple[bool, float, str]:
    group, name, number = key
    ranks = sorted(rank for rank, _, _ in waiters)
    state = answers[ranks[0]]["calls"][group]
    late = [r for r in state["ranks"] if r in answers and answers[r]["calls"][group]["number"] < number]
    unknown = [rank for rank in state["ranks"] if rank not in answers]
    sizes = sorted({size for _, size, _ in waiters})
    longest = max(seconds for _, _, seconds in waiters)
    amount = f"{' or '.join(f'{size:,}' for size in sizes)} bytes, " if sizes[-1] else ""
    text = (
        f"{name}, call {number} on {state['axis']} ({named(state['ranks'])}): {amount}{longest:.1f} s in {named(ranks)}"
    )
    if late:
        text += f"; not called by {named(late)}"
    if unknown:
        text += f"; not known of {named(unknown)}"
    return bool(late or unknown), longest, text


def _message(
    rank: int, axis: str, call: tuple[str, int, int, int, float], group: str, answers: Mapping[int, Answer]
) -> tuple[bool, float, str]:
    name, number, size, peer, seconds = call
    direction, counterpart = ("from", "send") if name == "receive" else ("to", "receive")
    text = f"{name} {direction} rank {peer}, message {number} on {axis}: {size:,} bytes, {seconds:.1f} s in rank {rank}"
    if peer not in answers:
        return True, seconds, f"{text}; not known of rank {peer}"
    counts = {(what, other): count for what, other, count in answers[peer]["calls"].get(group, {}).get("messages", ())}
    done = counts.get((counterpart, rank), 0)
    return done < number, seconds, text + (f"; rank {peer} has made {done}" if done < number else "")
