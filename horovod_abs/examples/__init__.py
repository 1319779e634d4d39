"""Scripts for horovodrun, each runnable with ``python -m``."""
