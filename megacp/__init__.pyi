from megacp.finetuning.script import finetune as finetune

__version__: str
