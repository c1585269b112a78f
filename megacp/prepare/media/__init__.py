"""Images and videos of records: rules from model folders, stored bytes, and image tokens."""
