"""Settings of all tests: properties try the same examples every time, and no slow moment of the machine fails one."""

import random

import pytest
from hypothesis import settings

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which random moments the tests of faults take, and how often."""
    parser.addoption("--fault-seed", type=int, default=0, help="first seed of the random moments in tests/faults")
    parser.addoption("--fault-repeat", type=int, default=1, help="seeds tried by each test that has random moments")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`moments` is random.Random(seed), with the seed in the test's name; one test for each of --fault-repeat seeds."""
    if "moments" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(f"--fault-{name}") for name in ("seed", "repeat"))
        seeds = range(first, first + count)
        metafunc.parametrize("moments", [random.Random(s) for s in seeds], ids=[f"seed{s}" for s in seeds])
