"""Made-up rows: random packs, random images, and a mixture like that of a vision-language model."""
