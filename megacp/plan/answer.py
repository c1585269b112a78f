"""The planner's answer: the best layouts, why others are slower, and what would make one fit.

The same answer is printed as text or JSON, or drawn as an HTML page (picture.py).
"""

from __future__ import annotations

import functools
import json
import textwrap
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
    Candidate,
    fields_chosen,
    fits,
    layouts,
    no_problems,
    search,
)
from megacp.storage.wording import human_count

# Numbers of characters in a full bar and in a line; a terminal has 80 columns by default.
_BAR = 50
_LINE = 79
# A space at which textwrap does not break a line.
_JOINED = "\u00a0"
# Layouts count as faster than the first one from this difference.
_FASTER = 0.0005


@dataclass(frozen=True)
class Shown:
    """One of the best layouts, with the figures to print."""

    layout: Candidate
    name: str
    tokens: float
    """Tokens per second per GPU."""
    utilisation: float
    """Model FLOPs of a step, as a fraction of the GPUs' peak FLOPs in that time."""
    verdict: str
    behind: str
    """Why the layout is not the first; empty for the first one."""

    @property
    def phase(self) -> str:
        """The phase of a step in which the fullest rank needs the most memory."""
        peaks = self.layout.memory.peaks
        return max(peaks, key=lambda name: peaks[name])

    @property
    def gib(self) -> dict[str, float]:
        """GiB of the fullest rank in this phase, by kind of memory."""
        return {name: getattr(self.layout.memory, name) / 2**30 for name in PHASES[self.phase]}


@dataclass(frozen=True)
class Answer:
    """Layouts found for a configuration on `world_size` GPUs; `given` fields are not changed."""

    config: RunConfig
    world_size: int
    given: Set[str]
    hardware: Hardware
    sample: PackSample
    problems: Callable[[RunConfig], list[str]] = no_problems
    """Function that returns why this machine cannot run a layout; for another machine, the list is
    empty.
    """
    keeps_dtype: bool = False
    """Whether to keep the dtype although no flag sets it."""
    kept: Candidate | None = None
    """The checkpoint's layout, if a resumed run keeps it."""
    note: str = ""
    """A sentence about the layout of a resumed run, or ""."""

    @functools.cached_property
    def found(self) -> list[Candidate]:
        """Layouts as sorted by `search`, or only the kept layout."""
        if self.kept is not None:
            return [self.kept]
        return self._search(self.given)

    def _fixed(self, given: Set[str]) -> Set[str]:
        """Return the fields that a search must not change: `given`, and the dtype if it is kept."""
        return given | {"dtype"} if self.keeps_dtype else given

    def _search(self, given: Set[str]) -> list[Candidate]:
        fixed = self._fixed(given)
        return search(
            self.config, self.world_size, fixed, self.hardware, self.sample, self.problems
        )

    def refusal(self) -> str:
        """Explain why no layout is valid, and suggest fewer ranks or a flag to remove."""
        head = f"no parallel layout of {self.world_size} ranks allows these flags"
        # Find the next smaller number of ranks with a valid layout.
        for ranks in range(self.world_size - 1, 0, -1):
            found = layouts(self.config, ranks, self._fixed(self.given))
            if any(not check(one, ranks) and not self.problems(one) for one, _ in found):
                head += f"; one of {ranks} ranks does"
                break
        for name, _ in self.freed():
            head += f"; without {flag(name)} one does"
        reasons = [*check(self.config, self.world_size), *self.problems(self.config)]
        return "\n  - ".join([head, *reasons])

    @functools.cached_property
    def best(self) -> list[Shown]:
        """The first `BEST` layouts, with the figures to print."""
        # All layouts train the same global batch, so only the time differs.
        tokens = self.config.training.global_batch_size * self.config.data.seq_length
        tokens_per_gpu = tokens / self.world_size
        shown = []
        for layout in self.found[:BEST]:
            one = Shown(
                layout,
                words(layout.config, self.world_size),
                tokens_per_gpu / layout.time.total,
                self._utilisation(layout),
                layout.verdict(self.hardware),
                behind(layout, self.found[0], self.hardware),
            )
            shown.append(one)
        return shown

    def _utilisation(self, layout: Candidate) -> float:
        """Return the FLOPs of a step, as a fraction of the GPUs' peak FLOPs in its time."""
        work = sum(step_work(layout.config, self.sample))
        return work / layout.time.total / self.world_size / self.hardware.peak

    def heading(self) -> list[str]:
        """Return lines that state the question, the source of the times, and the note, if any."""
        size = human_count(costs.run_parameters(self.config))
        question = (
            f"{size} parameters on {self.world_size:,} GPUs with {self.hardware.memory:.4g} GiB, "
            f"rows of {self.config.data.seq_length:,} tokens with {self.sample.area:.2f} times the "
            "attention of one causal document"
        )
        source = self.hardware.source
        # Rates were measured in one dtype. Add a warning if the run uses another.
        dtype = self.found[0].config.training.dtype
        if dtype != self.hardware.dtype:
            source += f"; they hold for {self.hardware.dtype}, not {dtype}"
        lines = [question, source]
        if self.note:
            lines.append(self.note)
        return lines

    def rows(self) -> list[list[str]]:
        """Return the table of the best layouts; the first row is the header."""
        header = "|layout|s/step|tokens/s/GPU|MFU|GiB|fits|lost to|compared with 1"
        rows = [header.split("|")]
        for place, one in enumerate(self.best, 1):
            row = [
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
            rows.append(row)
        return rows

    def changes(self) -> list[str]:
        """Return changes that would make a layout fit, for a plan in which none fits."""
        freed = []
        for name, layout in self.freed():
            freed.append(f"without {flag(name)}: {words(layout.config, self.world_size)}")
        return freed + larger(self.found, self.world_size, self.hardware)

    def freed(self) -> list[tuple[str, Candidate]]:
        """Return the flags whose removal makes a layout fit, each with that layout."""
        found = []
        # Search again without each flag that fixes a field of the layout.
        for name in sorted(fields_chosen(self.config) & self.given):
            other = self._search(self.given - {name})
            if other and other[0].gib <= self.hardware.memory:
                found.append((name, other[0]))
        return found

    def longest(self) -> str:
        """Return a sentence about the longest rows that fit with the first layout."""
        tokens = longest_row(self.found[0], self.world_size, self.hardware)
        if tokens >= most_tried(self.config):
            return f"Rows of {tokens:,} tokens fit with layout 1; longer rows were not tried"
        if tokens == 0:
            return "No row fits with layout 1"
        return f"Rows of about {tokens:,} tokens fit with layout 1; longer rows do not"


def behind(layout: Candidate, best: Candidate, hardware: Hardware) -> str:
    """Return why a layout is not the first: its extra memory, or the time that grows the most.

    A layout that is faster than the first one starts with that. Return "" for the first layout.
    """
    if layout is best:
        return ""
    gain = best.time.total / layout.time.total - 1
    despite = ""
    if gain >= _FASTER:
        despite = f"{100 * gain:.1f} % faster, but "
    does_fit = layout.gib <= hardware.memory
    # The first difference between the sorting keys decides.
    verdict, speed, offloaded, gib = layout.order(hardware)
    best_verdict, best_speed, best_offloaded, best_gib = best.order(hardware)
    if verdict != best_verdict:
        verb = "fills" if does_fit else "needs"
        return f"{despite}{verb} {100 * gib / hardware.memory:.0f} % of the memory"
    if speed > best_speed:
        # Name the term of its step time that grows the most.
        first = vars(best.time)
        more = {term: seconds - first[term] for term, seconds in vars(layout.time).items()}
        term = max(more, key=lambda name: more[name])
        return f"slower: {term} {more[term]:+.2g} s"
    # Both are equally fast, or neither fits: then only the memory counts.
    if does_fit and not despite:
        despite = "as fast, but "
    if offloaded > best_offloaded:
        return f"{despite}offloads more to the host"
    if gib > best_gib:
        return f"{despite}needs {gib - best_gib:.3g} GiB more"
    return "needs as much memory"


def words(config: RunConfig, world_size: int) -> str:
    """Describe a layout in one line, without sizes of 1 and disabled options."""
    p = config.parallel
    t = config.training
    shape = config.grid_shape(world_size)
    # The grid, then the schedule, the transport, sharding, and memory savings.
    found = []
    for name in ("dp", "tp", "pp", "cp", "ep"):
        size = getattr(shape, name)
        if size > 1:
            found.append(f"{name} {size}")
    if not found:
        found.append("one rank")
    if p.num_virtual_stages_per_pipeline_rank > 1:
        found.append(f"{p.num_virtual_stages_per_pipeline_rank} chunks")
    if p.defers_weight_gradients:
        found.append(p.pipeline_schedule.replace("_", " "))
    if p.context_parallel_size > 1:
        transport: str = p.cp_comm_type
        sizes = p.hierarchical_context_parallel_sizes
        if sizes:
            transport += f" {sizes[0]} x {sizes[1]}"
        found.append(f"{transport} {p.cp_layout}")
    if p.sharding.parameters:
        found.append("all sharded")
    if p.num_distributed_optimizer_instances > 1:
        found.append(f"{p.num_distributed_optimizer_instances} copies of the optimizer")
    recomputed = "no" if t.recompute_mode.keeps_all else t.recompute_granularity
    found.append(f"{recomputed} recompute")
    if t.activation_offload > 0:
        found.append(f"offload {t.activation_offload:g}")
    if t.mlp_chunk_tokens > 0:
        found.append(f"MLP in {t.mlp_chunk_tokens}")
    if t.micro_batch_size > 1:
        found.append(f"micro batch {t.micro_batch_size}")
    return ", ".join(found)


def large(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts that make up at least 1 % of the sum."""
    least = sum(parts.values()) / 100
    return {name: value for name, value in parts.items() if value >= least}


def bar(parts: Mapping[str, float], whole: float, unit: str) -> list[str]:
    """Return a line with a bar for each large part; `whole` is the value of a full bar."""
    lines = []
    shown = large(parts)
    width = max(map(len, shown))
    for name, value in shown.items():
        length = min(_BAR, round(_BAR * value / whole))
        lines.append(f"  {name:<{width}} {'#' * length:<{_BAR}} {value:.3g} {unit}")
    return lines


# Number of tokens in the longest row to try.
LONGEST_ROW = 2**22
# The same for float64: its attention kernel computes one block after another, which is slow.
LONGEST_DOUBLE_ROW = 2**16


def most_tried(config: RunConfig) -> int:
    """Return the number of tokens in the longest row to try for a configuration."""
    return LONGEST_DOUBLE_ROW if config.training.dtype == "float64" else LONGEST_ROW


def longest_row(layout: Candidate, world_size: int, hardware: Hardware) -> int:
    """Return the number of tokens in the longest row that fits with a layout; 0 if none fits.

    The result is accurate to one eighth, and at most `most_tried`.
    """
    most = most_tried(layout.config)

    def holds(tokens: int) -> bool:
        return fits(with_values(layout.config, {"seq_length": tokens}), world_size, hardware)

    # Double the row while it fits, or halve it until it fits.
    tokens = layout.config.data.seq_length
    grows = layout.gib <= hardware.memory
    while grows == holds(tokens):
        if grows and tokens >= most:
            return tokens
        tokens = tokens * 2 if grows else tokens // 2
        if rows_per_rank(with_values(layout.config, {"seq_length": tokens})) <= 1:
            return 0
    # After doubling, `tokens` does not fit; after halving, it does.
    shorter = tokens // 2 if grows else tokens
    # The longest row is between `shorter` and twice that. Try lengths in steps of an eighth.
    longest = shorter
    for part in range(9, 16):
        longer = shorter * part // 8
        if holds(longer):
            longest = longer
    return longest


def larger(found: Sequence[Candidate], world_size: int, here: Hardware) -> list[str]:
    """Return changes that make a layout fit: GPUs with more memory, more GPUs, or shorter rows.

    More GPUs mean more data-parallel ranks, with a proportionally larger global batch.
    """
    least = found[0].gib
    suggestions = []
    # The first GPU type in hardware.yaml with enough memory for the first layout
    for name in GPUS:
        if least <= hardware(name, "infiniband").memory:
            suggestions.append(f"{name} GPUs")
            break

    # For each sharding strategy, the layout that needs the least memory: `found` is sorted by
    # memory, and in reversed order, smaller layouts overwrite larger ones.
    smallest = {}
    for layout in reversed(found):
        smallest[layout.config.parallel.data_parallel_sharding_strategy] = layout.config
    more_ranks = _on_more_ranks(list(smallest.values()), world_size, here)
    if more_ranks:
        suggestions.append(more_ranks)

    tokens = longest_row(found[0], world_size, here)
    if tokens:
        suggestions.append(f"rows of {tokens:,} tokens")
    return suggestions


def _on_more_ranks(configs: Sequence[RunConfig], world_size: int, here: Hardware) -> str:
    """Return a sentence about the smallest multiple of the ranks with which a layout fits.

    Return "" if none of the multiples up to 16 is enough.
    """
    for factor in (2, 4, 8, 16):
        for config in configs:
            # A larger batch keeps the number of microbatches per rank.
            ranks = world_size * factor
            batch = config.training.global_batch_size * factor
            grown = with_values(config, {"global_batch_size": batch})
            if fits(grown, ranks, here):
                return f"{ranks:,} GPUs with --global-batch-size {batch}: {words(grown, ranks)}"
    return ""


def flags(layout: Candidate) -> str:
    """Return the chosen fields that differ from their defaults, as YAML for `--config`."""
    defaults = vars(RunConfig().parallel) | vars(RunConfig().training)
    chosen = {name: value for name, value in layout.chosen.items() if value != defaults[name]}
    return yaml.safe_dump(chosen, sort_keys=False) if chosen else "{}\n"


def as_json(answer: Answer) -> str:
    """Return the best layouts as JSON: their flags, and seconds and bytes by term."""
    shown = []
    for one in answer.best:
        time = one.layout.time
        memory = one.layout.memory
        entry = {
            "flags": dict(one.layout.chosen),
            "seconds": vars(time) | {"total": time.total},
            "bytes": vars(memory) | {"total": memory.total},
            "fits": one.verdict,
            "behind": one.behind,
            "tokens_per_second_per_gpu": one.tokens,
            "utilisation": one.utilisation,
        }
        shown.append(entry)
    return json.dumps(shown, indent=2) + "\n"


def _wrapped(start: str, text: str) -> str:
    """Return `start` and the text in lines of a terminal; further lines are indented as far.

    Paths and flags are not broken.
    """
    indent = " " * len(start)
    lines = textwrap.wrap(
        text,
        _LINE,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_JOINED, " ")


def _options(name: str) -> str:
    """Return a layout's name so that `_wrapped` only breaks it between options."""
    return name.replace(" ", _JOINED).replace(f",{_JOINED}", ", ")


def plan_text(answer: Answer) -> str:
    """Return the plan as text that fits on a screen."""
    first = answer.best[0]
    memory = answer.hardware.memory
    time = first.layout.time
    lines = [_wrapped("", line) for line in answer.heading()]
    # Names and reasons are too long for a column of a terminal, so they follow the numbers.
    (_, _, *header, _), *rows = answer.rows()
    numbers = [["", *header]]
    names = []
    for place, name, *figures, reason in rows:
        numbers.append([place, *figures])
        names.append(_wrapped(f"  {place}  ", _options(name)))
        if reason:
            names.append(_wrapped("     ", reason))
    lines += ["", table(numbers), "", *names, ""]
    # Layouts that fit come first, so if the first does not fit, none does.
    if first.verdict == "OOM":
        lines.append("None fits; layout 1 needs the least memory. Changes that would help:")
        lines += [_wrapped("  - ", change) for change in answer.changes()]
        lines.append("")
    lines.append(
        f"Layout 1: memory of the fullest rank in phase `{first.phase}`, of {memory:.4g} GiB:"
    )
    lines += [*bar(first.gib, memory, "GiB"), ""]
    lines.append(f"Layout 1: a step of {time.total:.3g} s:")
    lines += [*bar(vars(time), time.total, "s"), ""]
    lines += [answer.longest(), "", flags(first.layout).rstrip()]
    return "\n".join(lines) + "\n"
