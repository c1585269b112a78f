# Types of the names that __init__.py imports when they are first used.
from megacp.finetuning.script import finetune as finetune

__version__: str
