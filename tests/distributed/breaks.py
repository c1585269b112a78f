"""Breaks that the tests of this folder notice; see tests/mutants.py."""

BREAKS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("megacp/training/start/launch.py", "tests/distributed/test_large_blocks.py"): [
        (
            "    torch.set_flush_denormal(True)\n",
            "",
            "states that have decayed take ten times as long",
        ),
    ],
    (
        "megacp/distributed/grid.py",
        "tests/distributed/test_grid.py tests/distributed/test_collectives.py "
        "tests/engine/pipeline_parallel/test_runtime.py",
    ): [
        (
            "[axis.rank % inner :: inner]",
            "[axis.rank // inner :: inner]",
            "outer groups of other ranks",
        ),
        ("axis.rank // inner * inner", "axis.rank % inner * inner", "inner groups of other ranks"),
        ("self.channels[direction,", 'self.channels["forward",', "both directions share a channel"),
        (
            "(stages[0], stages[-1])",
            "stages[:2]",
            "the embedding's copies are those of the first stages",
        ),
    ],
    (
        "megacp/distributed/shape.py",
        "tests/distributed/test_grid.py tests/distributed/test_collectives.py",
    ): [
        ('AXES = ("tp", "cp", "dp", "pp")', 'AXES = ("cp", "tp", "dp", "pp")', "cp varies fastest"),
    ],
    ("megacp/distributed/same_host.py", "tests/distributed/test_same_host.py"): [
        (
            "except ProcessLookupError as error:",
            "except ZeroDivisionError as error:",
            "a rank that ended is not named",
        ),
        (
            '        except OSError as error:\n            why = f"the memory',
            '        except ZeroDivisionError as error:\n            why = f"the memory',
            "the owner of a memory that may not be read is not named",
        ),
        (
            "if _has_ended(process):\n",
            "if False:\n",
            "a rank that ended before it called is waited for",
        ),
    ],
    (
        "megacp/training/start/launch.py",
        "tests/distributed/test_grid.py tests/distributed/test_collectives.py",
    ): [
        (
            "cause = cause.__cause__",
            "cause = None",
            "a rank that is lost while it saves is not named",
        ),
        (
            'store.set(f"joins/{rendezvous.rank}", "")',
            "pass",
            "ranks that join are named instead of the one missing",
        ),
    ],
    (
        "megacp/distributed/differentiable.py",
        "tests/distributed/test_grid.py tests/distributed/test_collectives.py",
    ): [
        (
            "(x, axis, _identity, collectives.all_reduce)",
            "(x, axis, _identity, _identity)",
            "copy_to sums nothing",
        ),
        ("all_reduce, _identity", "all_reduce, collectives.all_reduce", "reduce_from sums twice"),
        (
            "over, out_splits, in_splits",
            "over, in_splits, out_splits",
            "an exchange's gradient takes the way there",
        ),
    ],
    ("megacp/training/start/launch.py", "tests/distributed/test_interrupts.py"): [
        (
            "socket.create_server((_LOOPBACK, 0))",
            'socket.create_server(("", 0))',
            "other machines reach the store",
        ),
    ],
    (
        "megacp/distributed/collectives.py",
        "tests/distributed/test_grid.py tests/distributed/test_collectives.py "
        "tests/attention/context_parallel/test_attention.py "
        "tests/attention/context_parallel/test_layout.py",
    ): [
        ("for step in (by, -by))", "for step in (-by, by))", "shifts go to the rank before"),
        (
            "own if in_place else",
            "torch.empty_like(own) if in_place else",
            "a sum stands beside what it is the sum of",
        ),
        (
            "own if in_place else torch.empty_like(own)",
            "own",
            "a sum is written over an input that is still needed",
        ),
    ],
}
