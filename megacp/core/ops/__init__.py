"""Mathematics of a layer on one device: mask, attention kernels, norms, rotary, activations. No communication."""
