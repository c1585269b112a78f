# Types of the names that __init__.py imports when they are first used.
from megacp.storage.place import Place as Place
from megacp.storage.place import open_stream as open_stream
from megacp.storage.place import place_of as place_of
from megacp.storage.place import read_content as read_content
from megacp.storage.place import write_content as write_content
from megacp.storage.url import Url as Url
from megacp.storage.url import is_url as is_url
