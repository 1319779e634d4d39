#!/usr/bin/python3
"""What the containers of compose.yml run.

entrypoint keys            make the cluster's keys, once
entrypoint worker …        let the head in through ssh; further options are sshd's
entrypoint lab             JupyterLab
entrypoint healthy PORT    whether the one of the two that listens there answers
entrypoint COMMAND …       anything else
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HEAD = Path("/keys/head")
WORKER = Path("/keys/worker")
RUNS = Path("/runs")
OF_A_SESSION = {"HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_"}


def keys() -> None:
    """Two pairs: one opens all workers, with the other all workers show who they are."""
    done = WORKER / "authorized_keys"
    if done.exists():
        return
    for private in (HEAD / "cluster", WORKER / "host"):
        private.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(private)], check=True)
    (HEAD / "known_hosts").write_text(f"* {(WORKER / 'host.pub').read_text()}")
    done.write_text((HEAD / "cluster.pub").read_text())
    print("The cluster has got its keys")


def set_env(variables: Mapping[str, str]) -> str:
    """The container's environment, as sshd's option takes it: a session would start without it."""
    kept = {k: v for k, v in sorted(variables.items()) if k not in OF_A_SESSION and "\n" not in v}
    escaped = (f"{name}={value}".replace("\\", "\\\\").replace('"', '\\"') for name, value in kept.items())
    return " ".join(["SetEnv", *(f'"{text}"' for text in escaped)])


def replace_by(program: str, *arguments: str) -> None:
    """Go on as another program."""
    os.execvp(program, [program, *arguments])


def healthy(port: int) -> None:
    """Raises `OSError` or `SystemExit` if nobody answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
        connection.sendall(b"SSH-2.0-healthy\r\n" if port == 2222 else b"GET /api HTTP/1.0\r\n\r\n")
        if not connection.recv(64).startswith((b"SSH-2.0", b"HTTP/1.1 200")):
            raise SystemExit(f"port {port} answers something else")


def main(command: str, arguments: Sequence[str]) -> None:
    """Do what the command line says."""
    if command == "keys":
        keys()
    elif command == "worker":
        config = ["-f", "/etc/cluster/sshd_config", "-o", set_env(os.environ)]
        replace_by("/usr/sbin/sshd", "-D", "-e", *config, *arguments)
    elif command == "lab":
        if not os.access(RUNS, os.W_OK):
            print(
                f"uid {os.getuid()} cannot write to the folder of results: see CLUSTER_UID in docker/.env", flush=True
            )
        replace_by("jupyter-lab", "--no-browser", "--ip=0.0.0.0", "--ServerApp.root_dir=/work")
    elif command == "healthy":
        healthy(int(arguments[0]))
    else:
        replace_by(command, *arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
