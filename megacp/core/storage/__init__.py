"""Files and object stores."""
