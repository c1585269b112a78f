"""Context parallelism inside transformers' Trainer, TRL and Accelerate.

`shard_sequences(trainer, cp_size=4)` adds it to a Trainer; `context_parallel` adds it to your own
training loop.
"""

from megacp.public import exports

__getattr__ = exports(
    __name__,
    {
        "context_parallel": "context",
        "cut_multimodal": "multimodal",
        "register_with_transformers": "transformers",
        "shard_sequences": "accelerate",
    },
)
