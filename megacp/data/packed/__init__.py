"""The packed dataset on disk: its files, written and read."""
