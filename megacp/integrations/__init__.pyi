# Types of the names that __init__.py imports when they are first used.
from megacp.integrations.accelerate import shard_sequences as shard_sequences
from megacp.integrations.context import context_parallel as context_parallel
from megacp.integrations.multimodal import cut_multimodal as cut_multimodal
from megacp.integrations.transformers import (
    register_with_transformers as register_with_transformers,
)
