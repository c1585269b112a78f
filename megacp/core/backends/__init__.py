"""Layer factories: native or Transformer Engine."""
