# Types of the names that __init__.py imports when they are first used.
from megacp.plan.answer import Answer as Answer
from megacp.plan.hardware import Hardware as Hardware
from megacp.plan.hardware import hardware as hardware
from megacp.plan.search import search as search
from megacp.plan.times import step_time as step_time
