# Types of the names that __init__.py imports when they are first used.
from megacp.huggingface.convert.export import Request as Request
from megacp.huggingface.convert.export import convert as convert
from megacp.huggingface.generate_command import open_session as open_session
