"""What a run reports about itself: lines and files, wall timers, FLOPs utilisation, peak memory."""
