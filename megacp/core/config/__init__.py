"""The configuration of a run: frozen dataclasses of builtin types, flags, YAML files and cross-checks."""
