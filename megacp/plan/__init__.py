"""Search for the fastest layout of a model on a number of GPUs.

`search` tries all valid layouts, and an `Answer` describes the best of them. No other package
imports this one.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "Answer": "answer",
        "Hardware": "hardware",
        "hardware": "hardware",
        "search": "search",
        "step_time": "times",
    },
)
