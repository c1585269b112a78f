"""Generation: a prompt from a record or from flags, and the model's answer to it, token by
token.
"""
