"""``python -m autockpt``."""

from autockpt.cli import app

app(prog_name="python -m autockpt")
