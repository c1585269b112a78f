"""Other trainers on the same work: their processes, the table of what each can do, and the
comparison.
"""
