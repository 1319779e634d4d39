"""The rules of delayed and synchronous training, free of I/O, frameworks and MPI.

Everything here is a pure function or a small state machine, so that the simulator runs the very code that runs in
production.
"""
