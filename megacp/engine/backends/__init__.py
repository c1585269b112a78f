"""Layer factories: native layers, or layers of Transformer Engine."""
