# Types of the names that __init__.py imports when they are first used.
from megacp.training.checkpoint.commit import load_checkpoint as load_checkpoint
from megacp.training.data.collate import collate as collate
from megacp.training.data.loader import PackedLoader as PackedLoader
from megacp.training.data.loader import step_batches as step_batches
from megacp.training.data.reader import PackedDataset as PackedDataset
from megacp.training.loop.trainer import Trainer as Trainer
