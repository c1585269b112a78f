"""Settings of all tests: properties try the same examples every time, and no slow moment of the machine fails one."""

from hypothesis import settings

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")
