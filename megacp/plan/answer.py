"""What a plan says of the best layouts, once for all forms: a text, JSON, a figure and a page
(picture.py).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import yaml

from megacp.dry_run.memory import PHASES
from megacp.dry_run.packs import PackSample
from megacp.dry_run.report import step_work, table
from megacp.engine.checks import check
from megacp.engine.config.run import RunConfig, flag, with_values
from megacp.engine.layers.table import rows_per_rank
from megacp.engine.models import costs
from megacp.plan.hardware import GPUS, Hardware, hardware
from megacp.plan.search import (
    BEST,
    EQUALLY_FAST,
    Candidate,
    fields_chosen,
    fits,
    layouts,
    no_problems,
    search,
)
from megacp.storage.wording import human_count

_BAR = 50
"""Characters of a whole bar."""


@dataclass(frozen=True)
class Shown:
    """A layout among the best."""

    layout: Candidate
    name: str
    tokens: float
    """Tokens/s of one GPU."""
    utilisation: float
    verdict: str
    behind: str
    """What keeps it from being the first."""

    @property
    def phase(self) -> str:
        """The phase of a step in which its fullest rank holds most."""
        peaks = self.layout.memory.peaks
        return max(peaks, key=lambda name: peaks[name])

    @property
    def gib(self) -> dict[str, float]:
        """What that rank holds then."""
        return {name: getattr(self.layout.memory, name) / 2**30 for name in PHASES[self.phase]}


@dataclass(frozen=True)
class Answer:
    """All that was found for a question: a configuration with the fields that were `given`, on so
    many GPUs.
    """

    config: RunConfig
    world_size: int
    given: Set[str]
    hardware: Hardware
    sample: PackSample
    problems: Callable[[RunConfig], list[str]] = no_problems
    """Reasons of the machine that runs the layout, if it is at hand."""
    keeps_dtype: bool = False
    """Whether the dtype of the flags stays although no flag says it."""
    kept: Candidate | None = None
    """The layout of a resumed run, if it stays."""
    note: str = ""
    """A sentence about the layout of a resumed run."""

    @functools.cached_property
    def found(self) -> list[Candidate]:
        """Layouts in the order of `search`."""
        return [self.kept] if self.kept is not None else self._search(self.given)

    def _fixed(self, given: Set[str]) -> Set[str]:
        """Return the fields that a search leaves as they are, if these were given."""
        return given | {"dtype"} if self.keeps_dtype else given

    def _search(self, given: Set[str]) -> list[Candidate]:
        fixed = self._fixed(given)
        return search(
            self.config, self.world_size, fixed, self.hardware, self.sample, self.problems
        )

    def refusal(self) -> str:
        """Return why no layout takes the flags, and what would: fewer ranks, or a flag left out."""
        head = f"no layout of {self.world_size} ranks takes these flags"
        for ranks in range(self.world_size - 1, 0, -1):
            found = layouts(self.config, ranks, self._fixed(self.given))
            if any(not check(one, ranks) and not self.problems(one) for one, _ in found):
                head += f", one of {ranks} does"
                break
        for name, _ in self.freed():
            head += f"; without {flag(name)} one does"
        return "\n  - ".join(
            [head, *check(self.config, self.world_size), *self.problems(self.config)]
        )

    @functools.cached_property
    def best(self) -> list[Shown]:
        """The first of them."""
        tokens = (
            self.config.training.global_batch_size * self.config.data.seq_length / self.world_size
        )  # of a GPU
        return [
            Shown(
                layout,
                words(layout.config, self.world_size),
                tokens / layout.time.total,
                self._utilisation(layout),
                layout.verdict(self.hardware),
                behind(layout, self.found[0], self.hardware),
            )
            for layout in self.found[:BEST]
        ]

    def _utilisation(self, layout: Candidate) -> float:
        """Return the FLOPs of the model over those that the GPUs could do in the time of a step."""
        work = sum(step_work(layout.config, self.sample))
        return work / layout.time.total / self.world_size / self.hardware.peak

    def heading(self) -> list[str]:
        """What was asked, and what the times are made from."""
        size = human_count(costs.run_parameters(self.config))
        dtype = self.found[0].config.training.dtype
        wrong = f"; they are of {self.hardware.dtype}, not {dtype}" * (dtype != self.hardware.dtype)
        lines = [
            f"{size} parameters on {self.world_size:,} GPUs of {self.hardware.memory:.4g} GiB, "
            "rows of "
            f"{self.config.data.seq_length:,} tokens with {self.sample.area:.2f} of the attention "
            "of a causal document",
            f"{self.hardware.source}{wrong}",
        ]
        if self.note:
            lines.append(self.note)
        return lines

    def rows(self) -> list[list[str]]:
        """The table of the best, its head first."""
        body = [
            [
                str(place),
                one.name,
                f"{one.layout.time.total:.3g}",
                f"{one.tokens:,.0f}",
                f"{one.utilisation:.0%}",
                f"{one.layout.gib:.1f}",
                one.verdict,
                one.layout.time.binds,
                one.behind,
            ]
            for place, one in enumerate(self.best, 1)
        ]
        return [
            ["", "layout", "s/step", "tokens/s/GPU", "MFU", "GiB", "fits", "lost to", "behind 1"],
            *body,
        ]

    def changes(self) -> list[str]:
        """What would make a layout fit, where none does."""
        freed = [
            f"without {flag(name)}: {words(one.config, self.world_size)}"
            for name, one in self.freed()
        ]
        return freed + larger(self.found, self.world_size, self.hardware)

    def freed(self) -> list[tuple[str, Candidate]]:
        """Flags without which, each alone, a layout fits; and that layout."""
        found = []
        for name in sorted(fields_chosen(self.config) & self.given):
            other = self._search(self.given - {name})
            if other and other[0].gib <= self.hardware.memory:
                found.append((name, other[0]))
        return found

    def longest(self) -> str:
        """How long rows may be under the first."""
        tokens = longest_row(self.found[0], self.world_size, self.hardware)
        if tokens >= most_tried(self.config):
            return f"Rows of {tokens:,} tokens fit under 1, longer ones were not tried"
        return (
            f"Rows of about {tokens:,} tokens fit under 1, longer ones do not"
            if tokens
            else "No row fits under 1"
        )


def behind(layout: Candidate, best: Candidate, hardware: Hardware) -> str:
    """What keeps a layout from being the first: memory, or the term that grows most; "" for the
    first.
    """
    if layout is best:
        return ""
    held, fits = layout.gib - best.gib, layout.gib <= hardware.memory
    as_fast = layout.time.total <= EQUALLY_FAST * best.time.total
    if not fits or layout.verdict(hardware) != best.verdict(hardware) or (as_fast and held > 0):
        return f"{held:+.1f} GiB"
    if (
        as_fast
        and layout.config.training.activation_offload > best.config.training.activation_offload
    ):
        return "more on the host"
    first = vars(best.time)
    more = {term: seconds - first[term] for term, seconds in vars(layout.time).items()}
    term = max(more, key=lambda name: more[name])
    return f"{term} {more[term]:+.2g} s"


def words(config: RunConfig, world_size: int) -> str:
    """A layout in a line."""
    p, t = config.parallel, config.training
    axes = {
        name: getattr(config.grid_shape(world_size), name)
        for name in ("dp", "tp", "pp", "cp", "ep")
    }
    found = [f"{name} {size}" for name, size in axes.items() if size > 1] or ["one rank"]
    chunks, copies = p.num_virtual_stages_per_pipeline_rank, p.num_distributed_optimizer_instances
    found += [f"{chunks} chunks"] * (chunks > 1)
    if p.defers_weight_gradients:
        found.append(p.pipeline_schedule.replace("_", " "))
    if p.context_parallel_size > 1:
        sizes = p.hierarchical_context_parallel_sizes
        found.append(
            f"{p.cp_comm_type}{f' {sizes[0]} x {sizes[1]}' if sizes else ''} {p.cp_layout}"
        )
    if p.sharding.parameters:
        found.append("all sharded")
    found += [f"{copies} copies of the optimizer"] * (copies > 1)
    found.append(
        "no recompute" if t.recompute_mode.keeps_all else f"{t.recompute_granularity} recompute"
    )
    found += [f"offload {t.activation_offload:g}"] * (t.activation_offload > 0)
    found += [f"MLP in {t.mlp_chunk_tokens}"] * (t.mlp_chunk_tokens > 0)
    found += [f"micro batch {t.micro_batch_size}"] * (t.micro_batch_size > 1)
    return ", ".join(found)


def large(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts that are a hundredth of all."""
    return {name: value for name, value in parts.items() if value >= sum(parts.values()) / 100}


def bar(parts: Mapping[str, float], whole: float, unit: str) -> list[str]:
    """A line for each large part; one that is the whole fills it."""
    return [
        f"  {name:<12}{'#' * min(_BAR, round(_BAR * value / whole)):<{_BAR}} {value:.3g} {unit}"
        for name, value in large(parts).items()
    ]


LONGEST_ROW = 2**22
"""Tokens of a row from which on no longer one is tried."""
LONGEST_DOUBLE_ROW = 2**16
"""The same in float64, whose kernel has each block of scores in turn, so that a measurement takes
long.
"""


def most_tried(config: RunConfig) -> int:
    """Return the tokens of a row from which on no longer one is tried."""
    return LONGEST_DOUBLE_ROW if config.training.dtype == "float64" else LONGEST_ROW


def longest_row(layout: Candidate, world_size: int, hardware: Hardware) -> int:
    """Tokens of the longest row that fits under this layout, to an eighth, and up to `most_tried`;
    0 if none does.
    """
    most = most_tried(layout.config)

    def holds(tokens: int) -> bool:
        return fits(with_values(layout.config, {"seq_length": tokens}), world_size, hardware)

    tokens, grows = layout.config.data.seq_length, layout.gib <= hardware.memory
    while grows == holds(tokens):
        if grows and tokens >= most:
            return tokens
        tokens = tokens * 2 if grows else tokens // 2
        if rows_per_rank(with_values(layout.config, {"seq_length": tokens})) <= 1:
            return 0
    shorter = tokens // 2 if grows else tokens
    return max(
        (shorter * part // 8 for part in range(9, 16) if holds(shorter * part // 8)),
        default=shorter,
    )


def larger(found: Sequence[Candidate], world_size: int, here: Hardware) -> list[str]:
    """GPUs with more memory, more of these by more data-parallel ranks, and shorter rows, that hold
    a layout.
    """
    least = found[0].gib
    said = [f"{name} GPUs" for name in GPUS if least <= hardware(name, "infiniband").memory]
    smallest = {
        one.config.parallel.data_parallel_sharding_strategy: one.config for one in reversed(found)
    }
    grown = [
        (
            world_size * factor,
            with_values(one, {"global_batch_size": one.training.global_batch_size * factor}),
        )
        for factor in (2, 4, 8, 16)
        for one in smallest.values()
    ]
    fitting = (
        f"{ranks:,} GPUs with --global-batch-size {one.training.global_batch_size}: "
        f"{words(one, ranks)}"
        for ranks, one in grown
        if fits(one, ranks, here)
    )
    rows = (
        [f"rows of {tokens:,} tokens"]
        if (tokens := longest_row(found[0], world_size, here))
        else []
    )
    return [*said[:1], *itertools.islice(fitting, 1), *rows]


def flags(layout: Candidate) -> str:
    """What was chosen, as YAML that `--config` takes."""
    defaults = vars(RunConfig().parallel) | vars(RunConfig().training)
    chosen = {name: value for name, value in layout.chosen.items() if value != defaults[name]}
    return yaml.safe_dump(chosen, sort_keys=False) if chosen else "{}\n"


def as_json(answer: Answer) -> str:
    """The first layouts as JSON: flags, seconds and bytes by term."""
    shown = [
        {
            "flags": dict(one.layout.chosen),
            "seconds": vars(one.layout.time) | {"total": one.layout.time.total},
            "bytes": vars(one.layout.memory) | {"total": one.layout.memory.total},
            "fits": one.verdict,
            "behind": one.behind,
            "tokens_per_second_per_gpu": one.tokens,
            "utilisation": one.utilisation,
        }
        for one in answer.best
    ]
    return json.dumps(shown, indent=2) + "\n"


def plan_text(answer: Answer) -> str:
    """The plan in a screen."""
    first, memory = answer.best[0], answer.hardware.memory
    total = first.layout.time.total
    lines = [*answer.heading(), "", table(answer.rows(), left=2), ""]
    if first.verdict == "OOM":
        lines += [
            "None fits: the first needs least. What would do:",
            *(f"  {one}" for one in answer.changes()),
            "",
        ]
    lines += [f"Memory of the fullest rank under 1, in {first.phase}, of {memory:.4g} GiB:"]
    lines += [*bar(first.gib, memory, "GiB"), "", f"A step under 1, of {total:.3g} s:"]
    lines += [
        *bar(vars(first.layout.time), total, "s"),
        "",
        answer.longest(),
        "",
        flags(first.layout).rstrip(),
    ]
    return "\n".join(lines) + "\n"
