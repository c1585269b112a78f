"""Fine-tuning in one command: from a model and a file to a folder that transformers opens.

`megacp finetune` builds packs, chooses the parallel layout for the GPUs or CPU ranks of this
machine and the numbers for the size of the data, trains, exports and verifies. It runs three other
commands and prints them, so a user can continue by hand. It imports every package of megacp;
nothing imports it.
"""
