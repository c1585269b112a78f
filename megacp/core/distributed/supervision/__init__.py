"""What ranks know of each other without a collective: who is there, who hangs, who failed first."""
