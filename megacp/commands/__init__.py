"""The commands of a user besides training, each a parser and one call; `tools/` holds a thin file for each."""
