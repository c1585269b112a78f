# Types of the names that __init__.py imports when they are first used.
from megacp.dry_run.memory import stage_memory as stage_memory
from megacp.dry_run.messages import step_messages as step_messages
from megacp.dry_run.packs import sample_packs as sample_packs
from megacp.dry_run.report import describe as describe
