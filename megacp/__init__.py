"""Training on long packed sequences over DP x TP x PP x CP ranks."""

from megacp.public import exports

__version__ = "0.1.0"

# For type checkers and editors, __init__.pyi declares the types of these names.
__getattr__ = exports(__name__, {"finetune": "finetuning.script"})
