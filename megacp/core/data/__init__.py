"""Data room: from raw records to packed batches; numpy only, the data-parallel place is told as integers."""
