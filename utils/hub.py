"""The Hugging Face Hub, whose client waits half a minute if there is no network."""

import socket
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.utils import logging

from utils.waiting import call_with_timeout

PATIENCE = 4.0  # seconds to connect; answers may take longer
_OFFLINE = constants.HF_HUB_OFFLINE


def use_hub() -> None:
    """From now on, use the Hub, or only its local cache if nothing accepts connections."""
    logging.set_verbosity_error()  # it would print a line for each attempt
    constants.HF_HUB_OFFLINE = _OFFLINE or not _connects()


def _connects() -> bool:
    """Whether the Hub accepts connections; True behind a proxy, without a test."""
    url = urlsplit(constants.ENDPOINT)
    place = url.hostname, url.port or (80 if url.scheme == "http" else 443)
    if getproxies().keys() - {"no"}:
        return True
    with suppress(OSError, RuntimeError):  # looking up the name may take long, too
        call_with_timeout(lambda: socket.create_connection(place).close(), PATIENCE)
        return True
    return False
