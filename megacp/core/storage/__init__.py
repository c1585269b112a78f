"""Where bytes lie: a path of this machine, or an object that a URL names."""
