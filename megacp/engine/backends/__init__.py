"""Layer factories: native layers or Transformer Engine's."""
