"""Pipeline parallelism: layers cut into stages, a schedule written as data, one loop that executes any schedule."""
