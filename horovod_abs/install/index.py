"""Says which further package index pip is to be told of; what `make setup` asks before anything is installed.

    python -m horovod_abs.install.index https://download.pytorch.org/whl/cpu

pip asks every index for every package, and five times over where one does not answer: minutes of waiting and warnings
for something that only makes a package smaller. So an index that does not answer is left out, with a note.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request

_PATIENCE_SECONDS = 10.0


def why_silent(url: str, patience: float = _PATIENCE_SECONDS) -> str:
    """Why an index does not answer, or "" if it does, whatever it says.

    Certificates are not looked at: which are trusted is pip's configuration to say.
    """
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/torch/", timeout=patience, context=trusting):
            return ""
    except urllib.error.HTTPError:
        return ""
    except OSError as error:
        return str(error)


def main(urls: list[str]) -> None:
    """Print pip's options for the indexes that answer."""
    for url in urls:
        if reason := why_silent(url):
            print(f"{url} does not answer ({reason}); packages come from pip's other sources", file=sys.stderr)
        else:
            print("--extra-index-url", url)


if __name__ == "__main__":
    main(sys.argv[1:])
