"""Where the time of one step goes, by phase and by class of operators, beside what its products need alone."""
