"""Configuration: dataclasses whose fields are the flags, the command line and YAML files."""
