"""`--cp-comm-type auto` and `--cp-layout auto`: calibrate the machine, count the work, predict, choose."""
