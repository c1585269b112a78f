"""Training on long packed sequences over DP x TP x PP x CP ranks."""

from megacp.public import exports

__version__ = "0.1.0"

# The file __init__.pyi tells type checkers and editors the types of these names.
__getattr__ = exports(__name__, {"finetune": "finetuning.script"})
