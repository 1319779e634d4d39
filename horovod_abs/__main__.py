"""Makes ``python -m horovod_abs`` the same as the command ``horovod-abs``."""

from horovod_abs.cli import app

app()
