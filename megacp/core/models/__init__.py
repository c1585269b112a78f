"""Models: a decoder written once against a backend, cut into the chunks of a pipeline stage."""
