"""Search for a model's fastest parallel layout on a given number of GPUs.

`search` tries all valid parallel layouts, and an `Answer` describes the best of them. No other
package imports this one.
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
