"""Records of the input: read from files, checked, turned into rows of token ids."""
