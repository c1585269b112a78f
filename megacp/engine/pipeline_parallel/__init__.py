"""Pipeline schedules as data, and the loop that runs them."""
