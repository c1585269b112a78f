# Types of the names that __init__.py imports when they are first used.
from megacp.attention.context_parallel.attention import (
    context_parallel_attention as context_parallel_attention,
)
from megacp.attention.context_parallel.attention import select_transport as select_transport
from megacp.attention.context_parallel.layout import LAYOUTS as LAYOUTS
from megacp.attention.context_parallel.plan import AttentionPlan as AttentionPlan
from megacp.attention.context_parallel.transports import TRANSPORTS as TRANSPORTS
from megacp.attention.ops.mask import Metadata as Metadata
from megacp.attention.ops.mask import Reach as Reach
from megacp.attention.ops.mask import allowed as allowed
