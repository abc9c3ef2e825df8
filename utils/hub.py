"""The Hugging Face Hub, whose client waits half a minute if there is no network."""

import socket
from contextlib import suppress
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.utils import logging

PATIENCE = 4.0  # seconds to connect; answers may take longer
_OFFLINE = constants.HF_HUB_OFFLINE


def use_hub() -> None:
    """From now on, use the Hub, or only its local cache if nothing accepts connections."""
    logging.set_verbosity_error()  # it would print a line for each attempt
    constants.HF_HUB_OFFLINE = _OFFLINE or not _connects()


def _connects() -> bool:
    """Whether the Hub accepts connections; True behind a proxy, without a test."""
    url = urlsplit(constants.ENDPOINT)
    found = [*getproxies()]

    def connect():
        port = url.port or (80 if url.scheme == "http" else 443)
        with suppress(OSError):
            socket.create_connection((url.hostname, port)).close()
            found.append("Hub")

    # a thread, because the name of the host is looked up without a limit of time
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(found)
